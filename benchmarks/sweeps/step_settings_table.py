"""The table of docs/the-plan.md: what meets in a step, trained on 4 ranks like the plain model.

Three minutes: ``PYTHONPATH=.:tests/helpers python benchmarks/sweeps/step_settings_table.py`` with
``--write`` writes it into the page; ``[--pairs] name ...`` takes "float8" or models of the zoo.
"""

from __future__ import annotations

import itertools
import sys
from collections import Counter

from step_settings import (
    BEGIN,
    CELLS,
    CHECKPOINTING,
    COMPILE,
    END,
    MESH,
    PAGE,
    PRECISION,
    TOGETHER,
    Cell,
    pairs,
    seen,
)

from shardkit.testing import RankPool


def table(outcomes: dict[Cell, str]) -> str:
    """A row for each checkpointing and compile; where offload and micro-batches make no difference,
    one word.
    """
    columns = [", ".join(column) for column in itertools.product(PRECISION, MESH)]
    heads = ["`checkpoint_activations`", "`compile`", *columns]
    lines = [heads, ["---"] * len(heads)]
    words = [outcomes[cell] for cell in CELLS]
    for row in itertools.product(CHECKPOINTING, COMPILE):
        line = [f"`{value}`" for value in row]
        for _ in columns:
            group, words = words[:TOGETHER], words[TOGETHER:]
            line.append(group[0] if len({*group}) == 1 else " / ".join(group))
        lines.append(line)
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def main(names: list[str], write: bool, few: bool) -> None:
    for name in names or ["NET"]:
        with RankPool(4, timeout=3600) as pool:
            outcomes = pool.run(seen, pairs() if few else CELLS, name)[0]
        print(name, dict(Counter(outcomes.values())), flush=True)
    if write and END in PAGE.read_text():
        before, _, after = PAGE.read_text().partition(BEGIN)
        PAGE.write_text(before + BEGIN + table(outcomes) + END + after.partition(END)[2])


if __name__ == "__main__":
    models = [argument for argument in sys.argv[1:] if not argument.startswith("-")]
    main(models, "--write" in sys.argv, "--pairs" in sys.argv)
