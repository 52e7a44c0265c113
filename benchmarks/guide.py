"""The tables of docs/choosing.md: what to use for Llamas of three sizes on 1, 8 and 64 ranks of 80
GiB.

Run: ``python -m benchmarks.guide``; ``--write`` puts them into the page, and
``test_benchmark_guide.py`` holds that they are what the code says. Each answer is what
``plan_for_budget`` chooses for sharding over all ranks.

Only models of few blocks are traced: all blocks between the first and the last do the same, so a
trace of four blocks gives that of eighty. ``test_benchmark_guide.py`` compares one with a whole
trace.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from copy import copy
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import torch

from benchmarks.models import SHAPES, Llama, Shape, tokens
from shardkit import MeshSpec, MixedPrecisionPolicy, ShardingPlan, plan_model
from shardkit.memory.allocations import OptimizerBytes
from shardkit.memory.budget import limit_of, weigh
from shardkit.memory.strategies import Step, estimates
from shardkit.memory.tracing import AFTER_FORWARD, FORWARD, START, Trace, trace
from shardkit.plan.types import nbytes

PAGE = Path(__file__).parent.parent / "docs" / "choosing.md"
BEGIN, END = "<!-- guide: python -m benchmarks.guide --write -->", "<!-- end of guide -->"
SIZES = ("1B", "8B", "70B")
RANKS = (1, 8, 64)
BUDGET = "72GiB"  # of 80, which leaves a tenth to what is not counted
TOKENS = (1, 4096)
NODE = 8
TRACED = 4  # blocks
REPEATED = 1  # the number of the one that stands for those that are not traced
BLOCKS = "layers."
ADAMW = OptimizerBytes.of("adamw")
STRATEGIES = {
    "replicated (DDP)": "DDP",
    "kept unsharded (ZeRO-2)": "ZeRO-2",
    "sharded (ZeRO-3)": "ZeRO-3",
    "sharded in a node (HSDP)": "HSDP",
    "ZeRO-3, blocks checkpointed": "ZeRO-3, checkpointed",
    "ZeRO-3, checkpointed and offloaded": "ZeRO-3, checkpointed, offload",
}
ANSWER_TITLES = ["Llama", "ranks", "use", "with", "peak of a rank", "its CPU memory"]
PEAKS = "The peak of each strategy, in bold where it fits:"
POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def strategy(plan: ShardingPlan) -> str:
    """A plan by the name that people choose by."""
    gathered = all(unit.reshard_after_forward is False for unit in plan.units)
    name = "one rank" if plan.mesh.size == 1 else "ZeRO-2" if gathered else "ZeRO-3"
    return name + (", offload" if any(unit.offloads for unit in plan.units) else "")


class Stretched(Step):
    """The traces of a Llama, made from those of one with ``TRACED`` blocks."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        super().__init__(*planned(shape), batch=tokens(*TOKENS))

    def measure(self, plan: ShardingPlan) -> Trace:
        """The trace in which the blocks are checkpointed as the plan says."""
        return stretched(
            self.shape, {unit.name: unit.checkpoint_activations for unit in plan.units}
        )


def planned(shape: Shape) -> tuple[Llama, ShardingPlan]:
    """The model on the meta device, and its plan on one node."""
    with torch.device("meta"):
        model = Llama(shape)
    return model, plan_model(model, mesh=MeshSpec.sharded(NODE), mp_policy=POLICY)


def with_checkpoints(plan: ShardingPlan, policies: Mapping[str, bool | str]) -> ShardingPlan:
    """The plan with these policies of checkpointing, by the names of units."""
    units = [
        replace(unit, checkpoint_activations=policies.get(unit.name, unit.checkpoint_activations))
        for unit in plan.units
    ]
    return replace(plan, units=tuple(units))


def stretched(shape: Shape, policies: Mapping[str, bool | str]) -> Trace:
    """The trace of one step of the whole model: each block between the first and the last one does
    what they all do.
    """
    model, plan = planned(replace(shape, layers=TRACED))
    names = {f"{BLOCKS}{number}": number for number in range(TRACED)}
    short = trace(model, with_checkpoints(plan, policies), tokens(*TOKENS))
    added = shape.layers - TRACED
    places = {name: [number + added * (number > REPEATED)] for name, number in names.items()}
    places[f"{BLOCKS}{REPEATED}"] = list(range(REPEATED, REPEATED + added + 1))
    forward = True
    intervals = []
    for unit, group in groupby(short.intervals, key=lambda interval: interval.unit):
        same = list(group)
        forward &= same[0].moment in (START, FORWARD, AFTER_FORWARD)
        numbers = places.get(unit, [None])
        for number in numbers if forward else reversed(numbers):
            name = unit if number is None else f"{BLOCKS}{number}"
            intervals += [replace(interval, unit=name) for interval in same]
    grads = {name: size for name, size in short.grad_bytes.items() if name not in names}
    grads |= {
        f"{BLOCKS}{number}": short.grad_bytes[name] for name in names for number in places[name]
    }
    return replace(short, intervals=tuple(intervals), grad_bytes=grads)


def on_ranks(measured: Step, ranks: int) -> Step:
    """The same step on that many ranks, with the same traces."""
    step = copy(measured)
    step.plan = replace(measured.plan, mesh=MeshSpec.sharded(ranks))
    return step


def answers(size: str, measured: Step) -> Iterator[list[str]]:
    """What to use on each number of ranks."""
    for ranks in RANKS:
        best = weigh(on_ranks(measured, ranks), ADAMW, limit_of(BUDGET, reserve=0))[-1]
        yield [
            size,
            str(ranks),
            strategy(best.plan),
            best.name,
            nbytes(best.peak.total),
            nbytes(best.host),
        ]


def peaks(size: str, measured: Step) -> Iterator[list[str]]:
    """The peak of each strategy on each number of ranks, in bold where it fits."""
    for ranks in RANKS:
        rows = estimates(on_ranks(measured, ranks), ADAMW, NODE)
        found = {row.name: row.peak.total for row in rows}
        cells = [_peak(found[name]) if name in found else "-" for name in STRATEGIES]
        yield [size, str(ranks), *cells]


def _peak(peak: int) -> str:
    return f"**{nbytes(peak)}**" if peak <= limit_of(BUDGET, reserve=0) else nbytes(peak)


def guide() -> str:
    """Both tables in Markdown."""
    measured = {size: Stretched(SHAPES[size]) for size in SIZES}
    best = [row for size, each in measured.items() for row in answers(size, each)]
    every = [row for size, each in measured.items() for row in peaks(size, each)]
    return "\n\n".join(
        [
            _markdown(ANSWER_TITLES, best),
            PEAKS,
            _markdown(["Llama", "ranks", *STRATEGIES.values()], every),
        ]
    )


def _markdown(titles: list[str], rows: list[list[str]]) -> str:
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def in_page(page: str) -> str:
    """The guide that a page has."""
    return page.split(BEGIN)[1].split(END)[0].strip()


def main() -> None:
    """Print the guide, and write it where asked."""
    found = guide()
    print(found)
    if "--write" not in sys.argv[1:]:
        return
    text = PAGE.read_text()
    before, rest = text.split(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n\n{found}\n\n{END}{rest.split(END)[1]}")


if __name__ == "__main__":
    main()
