"""The decision guide of docs/memory.md: what to use for Llamas of three sizes on 1, 8 and 64 ranks of 80 GiB.

Run: ``python -m benchmarks.guide``; ``--write`` puts the tables into the page, and ``test_memory_guide.py`` holds
that they are what the code says. Each answer is the fastest by the step-time model of what ``plan_for_budget`` chooses
on every mesh: replicated (DDP), sharded over all ranks (FSDP), and sharded within a node of 8 (HSDP).

Only models of few blocks are traced: all blocks between the first and the last do the same, so a trace of four blocks
gives that of eighty. ``test_memory_guide.py`` compares one with a whole trace.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator
from dataclasses import replace
from functools import partial
from itertools import groupby
from pathlib import Path

import torch

from benchmarks.models import SHAPES, Llama, Shape, tokens
from shardkit import MeshSpec, MixedPrecisionPolicy, ShardingPlan
from shardkit.memory import HARDWARE
from shardkit.memory.budget import Search, parse_bytes
from shardkit.memory.estimate import Measured, base_plan, strategies
from shardkit.memory.moments import AFTER_FORWARD, FORWARD, START
from shardkit.memory.timeline import OptimizerBytes, unit_bytes
from shardkit.memory.trace import Trace, trace
from shardkit.plan.types import nbytes

PAGE = Path(__file__).parent.parent / "docs" / "memory.md"
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
    "kept gathered (ZeRO-2)": "ZeRO-2",
    "sharded (ZeRO-3)": "ZeRO-3",
    "sharded in a node (HSDP)": "HSDP",
    "ZeRO-3, blocks recomputed": "ZeRO-3, recomputed",
    "ZeRO-3, recomputed and offloaded": "ZeRO-3, recomputed, offload",
}
ANSWER_TITLES = ["Llama", "ranks", "use", "with", "peak of a rank", "its CPU memory", "compute / step"]
PEAKS = "The peak of each strategy, in bold where it fits:"
POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def meshes(ranks: int) -> Iterator[MeshSpec]:
    """What the ranks can be used as."""
    yield MeshSpec.sharded(ranks)
    if ranks > 1:
        yield MeshSpec.hybrid(ranks, 1)
    if ranks > NODE:
        yield MeshSpec.hybrid(ranks // NODE, NODE)


def strategy(plan: ShardingPlan) -> str:
    """A plan by the name that people choose by."""
    if plan.mesh.size == 1:
        name = "one rank"
    elif plan.mesh.shard_size == 1:
        name = "DDP"
    elif plan.mesh.replicates:
        name = "HSDP"
    else:
        gathered = all(unit.reshard_after_forward is False for unit in plan.units)
        name = "ZeRO-2" if gathered else "ZeRO-3"
    return name + (", offload" if any(unit.offloads for unit in plan.units) else "")


def searches() -> Iterator[tuple[str, Search]]:
    """A search for a budget for each size."""
    limit = parse_bytes(BUDGET)
    for size in SIZES:
        yield size, Search(Stretched(SHAPES[size]), ADAMW, HARDWARE["h100"], limit)


class Stretched(Measured):
    """The traces of a Llama, made from those of one with ``TRACED`` blocks."""

    def __init__(self, shape: Shape, tiles: tuple[tuple[str, int], ...] = ()) -> None:
        model, plan = planned(shape)
        super().__init__(model, replace(plan, tiles=tiles), None, None)
        self._trace = partial(stretched, shape, tiles=tiles)
        self.of = lambda plan: Stretched(shape, plan.tiles)


def planned(shape: Shape) -> tuple[Llama, ShardingPlan]:
    """The model on the meta device, and its plan on one node."""
    with torch.device("meta"):
        model = Llama(shape)
    return model, base_plan(model, None, NODE, None, POLICY)


def stretched(shape: Shape, checkpointed: Collection[str], tiles: tuple[tuple[str, int], ...] = ()) -> Trace:
    """The trace of one step of the whole model: each block between the first and the last one does what they all do."""
    model, plan = planned(replace(shape, layers=TRACED))
    there = dict(model.named_modules())
    plan = replace(plan, tiles=tuple(each for each in tiles if each[0] in there))
    names = {f"{BLOCKS}{number}": number for number in range(TRACED)}
    short = trace(model, plan, tokens(*TOKENS), checkpointed=names.keys() & checkpointed)
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
    grads |= {f"{BLOCKS}{number}": short.grad_bytes[name] for name in names for number in places[name]}
    return replace(short, intervals=tuple(intervals), grad_bytes=grads)


def answers(size: str, search: Search) -> Iterator[list[str]]:
    """What to use on each number of ranks."""
    for ranks in RANKS:
        plans = [replace(search.measured.plan, mesh=mesh) for mesh in meshes(ranks)]
        weighed = [candidate for plan in plans for candidate in search.candidates(plan)]
        fitting = [candidate for candidate in weighed if candidate.peak.total <= search.limit]
        best = min(fitting, key=lambda candidate: candidate.time.total)  # something fits in each of these cases
        hidden = f"{best.time.compute / best.time.total:.0%}"
        on_cpu = nbytes(host_bytes(best.plan))
        yield [size, str(ranks), strategy(best.plan), best.what, nbytes(best.peak.total), on_cpu, hidden]


def host_bytes(plan: ShardingPlan) -> int:
    """Bytes of CPU memory that a rank's offloaded shards, gradients and optimizer state take."""
    sizes = [unit_bytes(plan, unit, ADAMW) for unit in plan.units]
    return sum(size.shard + size.grads + size.optimizer for size in sizes if size.offloaded)


def peaks(size: str, search: Search) -> Iterator[list[str]]:
    """The peak of each strategy on each number of ranks, in bold where it fits."""
    for ranks in RANKS:
        plan = replace(search.measured.plan, mesh=MeshSpec.sharded(ranks))
        found = {each.name: each.plan for each in strategies(plan, ADAMW, NODE)}
        yield [size, str(ranks), *(_peak(search, found.get(name)) for name in STRATEGIES)]


def _peak(search: Search, plan: ShardingPlan | None) -> str:
    if plan is None:
        return "-"
    peak = search.weigh("", plan).peak.total
    return f"**{nbytes(peak)}**" if peak <= search.limit else nbytes(peak)


def guide() -> str:
    """Both tables in Markdown."""
    found = list(searches())
    best = [row for size, search in found for row in answers(size, search)]
    every = [row for size, search in found for row in peaks(size, search)]
    return "\n\n".join(
        [_markdown(ANSWER_TITLES, best), PEAKS, _markdown(["Llama", "ranks", *STRATEGIES.values()], every)]
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
