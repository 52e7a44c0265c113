"""Every combination of what changes a step: checkpointing, compile, precision, offload, HSDP,
accumulation.

``python tests/helpers/matrix.py --write`` trains NET in all of them on 4 ranks, 3 minutes, and
writes the table into docs/the-plan.md. ``[--pairs] name ...`` takes "float8" or models of the zoo.
CI takes ``pairs()``, where any two meet.
"""

from __future__ import annotations

import functools
import itertools
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from plain_and_sharded import assert_trains_like_plain
from torch import Tensor, nn
from torch._dynamo.utils import counters
from zoo_entry import Entry, floats

from shardkit import CPUOffloadPolicy, MixedPrecisionPolicy, ShardkitError
from shardkit.testing import RankPool

PAGE = Path(__file__).parents[2] / "docs" / "the-plan.md"
BEGIN, END = "<!-- written by python tests/helpers/matrix.py --write -->\n\n", "\n<!-- end -->"
CHECKPOINTING = {"False": False, "True": True, '"selective"': "selective"}
COMPILE = {"False": False, "True": True}
PRECISION = {"float32": {}, "bf16": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}}
MESH = {"FSDP": (4,), "HSDP": (2, 2)}
OFFLOAD = {"no": {}, "yes": {"offload_policy": CPUOffloadPolicy(pin_memory=False)}}
MICRO_BATCHES = {"1": 1, "2": 2}
FACTORS: list[dict[str, Any]] = [CHECKPOINTING, COMPILE, PRECISION, MESH, OFFLOAD, MICRO_BATCHES]
Cell = tuple[str, ...]
CELLS: list[Cell] = list(itertools.product(*FACTORS))
TOGETHER = len(OFFLOAD) * len(MICRO_BATCHES)  # cells that the table shows in one place


class Block(nn.Module):
    """Attention and an MLP, perhaps with a buffer that stays and two that forward changes.

    With buffers the compiled block is checkpointed, without them the compiler traces the
    checkpointing.
    """

    def __init__(self, has_buffers: bool) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(8, 8)
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        self.has_buffers = has_buffers
        if has_buffers:
            self.register_buffer("scale", torch.linspace(0.5, 1, 8))
            self.register_buffer("average", torch.zeros(8))
            self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        if self.has_buffers:
            with torch.no_grad():
                self.average.lerp_(x.float().mean((0, 1)), 0.1)
                self.calls += 1
            x = x * self.scale.to(x.dtype)
        q, k, v = self.qkv(self.norm(x)).view(2, 5, 3, 2, 4).permute(2, 0, 3, 1, 4)
        x = x + self.out(
            F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        )
        return x + self.mlp(x)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList([Block(False), Block(True)]), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x).clone()


def float8_net() -> nn.Module:
    """Net with torchao's float8 linear layers in its blocks, whose weights are
    gathered in float8.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config, net = Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True), Net()
    return convert_to_float8_training(
        net, config=config, module_filter_fn=lambda _, fqn: fqn != "head"
    )


NET = Entry(Net, lambda seed: {"x": floats(seed, 2, 5, 8)})
FLOAT8 = Entry(float8_net, NET.batch)


def pairs() -> list[Cell]:
    """A few cells in which every two settings meet; in this order few are compiled, which takes
    long.
    """
    chosen: list[Cell] = []
    order = sorted(CELLS, key=lambda cell: cell[::-1])
    missing = {pair for cell in CELLS for pair in itertools.combinations(enumerate(cell), 2)}
    while missing:
        chosen.append(
            max(
                order, key=lambda cell: len(missing & {*itertools.combinations(enumerate(cell), 2)})
            )
        )
        missing -= {*itertools.combinations(enumerate(chosen[-1]), 2)}
    return chosen


def seen(cells: list[Cell], name: str = "NET") -> dict[Cell, str]:
    """Train a model in each cell as the plain one is trained, and say what differs. On each of 4
    ranks.
    """
    entry = {"NET": NET, "float8": FLOAT8}.get(name, name)
    return {cell: _seen(cell, entry) for cell in cells}


def _seen(cell: Cell, entry: str | Entry) -> str:
    picked = [values[value] for values, value in zip(FACTORS, cell, strict=True)]
    checkpointing, compiles, precision, mesh, offload, micro_batches = picked
    options = {"checkpoint_activations": checkpointing, "compile": compiles, **precision, **offload}
    torch.compiler.reset()
    counters.clear()
    # it is tracing that counts, not the kernels
    eager = functools.partial(torch.compile, backend="aot_eager")
    try:
        with mock.patch.object(torch, "compile", eager):
            assert_trains_like_plain(entry, mesh, "sgd", 2, micro_batches, **options)
    except ShardkitError as error:
        return f"refused: {error}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "exact" if bool(counters["stats"]["unique_graphs"]) == compiles else "not compiled"


def table(outcomes: dict[Cell, str]) -> str:
    """A row for each checkpointing and compile; where offload and micro-batches make no difference,
    one word.
    """
    heads = [
        "`checkpoint_activations`",
        "`compile`",
        *map(", ".join, itertools.product(PRECISION, MESH)),
    ]
    lines, found = [heads, ["---"] * len(heads)], [outcomes[cell] for cell in CELLS]
    for row in itertools.product(CHECKPOINTING, COMPILE):
        line = [f"`{value}`" for value in row]
        for _ in heads[2:]:
            group, found = found[:TOGETHER], found[TOGETHER:]
            line.append(group[0] if len({*group}) == 1 else " / ".join(group))
        lines.append(line)
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def on_page() -> dict[Cell, str]:
    """What the table in the docs says of each cell."""
    lines = PAGE.read_text().partition(BEGIN)[2].partition(END)[0].splitlines()
    groups = [text.split(" / ") for line in lines[2:] for text in line.strip("| ").split(" | ")[2:]]
    return dict(
        zip(
            CELLS,
            [each for group in groups for each in group * (TOGETHER // len(group))],
            strict=True,
        )
    )


def main(names: list[str], write: bool, few: bool) -> None:
    for name in names or ["NET"]:
        with RankPool(4, timeout=3600) as pool:
            outcomes = pool.run(seen, pairs() if few else CELLS, name)[0]
        print(
            name,
            {each: list(outcomes.values()).count(each) for each in outcomes.values()},
            flush=True,
        )
    if write and END in PAGE.read_text():
        before, _, after = PAGE.read_text().partition(BEGIN)
        PAGE.write_text(before + BEGIN + table(outcomes) + END + after.partition(END)[2])


if __name__ == "__main__":
    main(
        [each for each in sys.argv[1:] if each[0] != "-"],
        "--write" in sys.argv,
        "--pairs" in sys.argv,
    )
