"""The cheapest plan that fits a budget of memory, cheapest in the step time that the model of it predicts."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from shardkit.errors import PlanError, message
from shardkit.memory.estimate import (
    base_plan,
    blocks,
    buffer_bytes,
    keep_gathered,
    keep_on,
    offload,
    recompute,
    recomputed,
    resharded,
)
from shardkit.memory.speed import HARDWARE, Hardware, StepTime, step_time
from shardkit.memory.timeline import OptimizerBytes, Point, timeline
from shardkit.memory.trace import Loss, mixed, trace
from shardkit.plan import MeshSpec, ShardingPlan
from shardkit.plan.table import aligned, nbytes

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


@dataclass(frozen=True)
class Candidate:
    """One plan that was weighed."""

    what: str  # how it differs from the plan that shards everything
    plan: ShardingPlan
    timeline: tuple[Point, ...]  # every stretch of a step
    time: StepTime  # of a step, by the model

    @cached_property
    def peak(self) -> Point:
        """The stretch in which most is alive."""
        return max(self.timeline, key=lambda point: point.total)


@dataclass(frozen=True)
class BudgetPlan:
    """The choice, and what it was chosen from; prints as a table.

    Attributes:
        chosen: the fastest candidate that fits; its ``plan``, ``timeline`` and ``peak`` are the choice's too.
        weighed: all candidates, in the order in which they were made.
        budget: bytes on each rank.
    """

    chosen: Candidate
    weighed: tuple[Candidate, ...]
    budget: int

    @property
    def plan(self) -> ShardingPlan:
        """The plan to shard by."""
        return self.chosen.plan

    @property
    def timeline(self) -> tuple[Point, ...]:
        """Every stretch of a step of the plan."""
        return self.chosen.timeline

    @property
    def peak(self) -> Point:
        """The stretch in which most is alive."""
        return self.chosen.peak

    def __str__(self) -> str:
        used = self.chosen.peak.total / self.budget
        answer = f"fits {nbytes(self.budget)}: {self.chosen.what}, peak {nbytes(self.chosen.peak.total)} ({used:.1%})"
        titles = ["plan", "peak", "step", "exposed", ""]
        rows = [self._row(candidate) for candidate in self.weighed]
        footer = "Times are model estimates for ranking plans, not measurements."
        return "\n".join([answer, "", *aligned([titles, *rows], left={0, 4}), "", footer])

    def _row(self, candidate: Candidate) -> list[str]:
        fits = candidate.peak.total <= self.budget
        verdict = "chosen" if candidate is self.chosen else "" if fits else "does not fit"
        time = candidate.time
        return [candidate.what, nbytes(candidate.peak.total), f"{time.total:.3g} s", f"{time.exposed:.3g} s", verdict]


def plan_for_budget(
    model: nn.Module,
    budget: int | str,
    *,
    batch: Any,
    world_size: int | None = None,
    mesh: MeshSpec | None = None,
    plan: ShardingPlan | None = None,
    loss: Loss | None = None,
    optimizer: str | float = "adamw",
    hardware: Hardware | str = "h100",
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008  frozen
) -> BudgetPlan:
    """The fastest plan whose peak is within ``budget`` on every rank, by a model of time. Local, pure, deterministic.

    Weighed are: as many units as fit kept gathered between forward and backward, the last ones first, which saves an
    all-gather each; then as many as fit kept on the ranks of a node only; else as few blocks as needed recomputed;
    else everything on the CPU, with as few blocks as needed recomputed. Units, dtypes and mesh stay those of the plan.

    Args:
        model: on any device, meta too.
        budget: bytes on each rank, or such as ``"70GiB"``. Leave room for what is not counted: the allocator's
            fragmentation, NCCL's workspace, CUDA's context.
        batch: one rank's micro-batch, as for :func:`shardkit.memory.estimate`.
        world_size: ranks in all; or ``mesh``, or neither for that of the plan.
        mesh: instead of ``world_size``.
        plan: what to start from; None is the default rule with ``mp_policy``.
        loss: as for :func:`shardkit.memory.estimate`.
        optimizer: as for :func:`shardkit.memory.estimate`.
        hardware: rates to rank plans by: a name in ``shardkit.memory.HARDWARE``, or your own.
        mp_policy: where no plan is given.

    Raises:
        PlanError: nothing fits; it says how much is missing, and how many ranks would do.
    """
    limit = parse_bytes(budget)
    if batch is None:
        fix = "Pass one rank's micro-batch as the model takes it"
        raise PlanError(message("batch", "is None", "Activations depend on the batch", fix))
    base = base_plan(model, plan, world_size, mesh, mp_policy)
    search = Search(model, base, batch, loss, OptimizerBytes.of(optimizer), _hardware(hardware), limit)
    weighed = list(search.candidates(base))
    fitting = [candidate for candidate in weighed if candidate.peak.total <= limit]
    if not fitting:
        raise PlanError(_nothing_fits(search, weighed))
    return BudgetPlan(min(fitting, key=lambda candidate: candidate.time.total), tuple(weighed), limit)


def parse_bytes(size: int | str) -> int:
    """Bytes from a number or from such as ``"70GiB"`` or ``"80 GB"``. Pure.

    Raises:
        PlanError: it is neither, or not positive.
    """
    if isinstance(size, str):
        match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z]*)\s*", size)
        value = float(match[1]) * _UNITS.get(match[2].upper(), 0) if match else 0
    else:
        value = size if isinstance(size, int) else 0
    if value < 1:
        rule = "A budget is a positive number of bytes, or a number with B, kB, MB, GB, TB, KiB, MiB, GiB or TiB"
        raise PlanError(message("budget", f"is {size!r}", rule, 'Pass such as "70GiB"'))
    return int(value)


def _hardware(hardware: Hardware | str) -> Hardware:
    if isinstance(hardware, Hardware):
        return hardware
    if hardware not in HARDWARE:
        fix = "Or pass a shardkit.memory.Hardware with your own rates"
        raise PlanError(message("hardware", f"is {hardware!r}", f"Known are {', '.join(HARDWARE)}", fix))
    return HARDWARE[hardware]


class Search:
    """Makes candidates; each is one arithmetic pass over a trace that is measured once.

    They may differ from the plan that was traced in their mesh and in how units reshard, offload and recompute.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: ShardingPlan,
        batch: Any,
        loss: Loss | None,
        optimizer: OptimizerBytes,
        hardware: Hardware,
        limit: int,
    ) -> None:
        self.base, self.limit = plan, limit
        self.already = recomputed(plan)
        self.blocks = [unit.name for unit in blocks(plan) if unit.name not in self.already]
        self._kept = trace(model, plan, batch, loss=loss, checkpointed=self.already)
        self._recomputed = trace(model, plan, batch, loss=loss, checkpointed=self.already | set(self.blocks))
        self._buffers = buffer_bytes(model)
        self._optimizer, self._hardware = optimizer, hardware

    def weigh(self, what: str, plan: ShardingPlan) -> Candidate:
        """A candidate with its peak and time."""
        step = mixed(self._kept, self._recomputed, recomputed(plan) - self.already)
        points = timeline(plan, step, self._optimizer, self._buffers)
        return Candidate(what, plan, tuple(points), step_time(plan, step, self._hardware, self._optimizer))

    def fits(self, plan: ShardingPlan) -> bool:
        """Whether its peak is within the limit."""
        return self.weigh("", plan).peak.total <= self.limit

    def candidates(self, base: ShardingPlan) -> Iterator[Candidate]:
        """The ladder from fast to frugal, as far down as the first rung that fits."""
        sharded = resharded(base)
        yield self.weigh("everything sharded", sharded)
        if self.fits(sharded):
            yield from self._spend(sharded, "")
            return
        saved = list(self._save(sharded, ""))
        yield from saved
        if saved[0].peak.total > self.limit:
            yield from self._save(offload(sharded), "on the CPU, ")

    def _spend(self, sharded: ShardingPlan, prefix: str) -> Iterator[Candidate]:
        """Memory that is left, spent on all-gathers that are not needed."""
        names = [unit.name for unit in sharded.execution_order() if unit.reshard_after_forward is not False]
        kept = _most(len(names), lambda n: self.fits(keep_gathered(sharded, _last(names, n))))
        gathered = keep_gathered(sharded, _last(names, kept))
        if kept:
            yield self.weigh(f"{prefix}{kept} of {len(names)} units kept gathered", gathered)
        ranks = self._hardware.ranks_per_node
        if not 1 < ranks < sharded.mesh.shard_size or sharded.mesh.shard_size % ranks:
            return

        def in_node(number: int) -> ShardingPlan:
            return keep_on(gathered, _last(names[: len(names) - kept], number), ranks)

        near = _most(len(names) - kept, lambda n: self.fits(in_node(n)))
        if near:
            prefix += f"{kept} units kept gathered, " if kept else ""
            yield self.weigh(f"{prefix}{near} of {len(names)} resharded within the node", in_node(near))

    def _save(self, sharded: ShardingPlan, prefix: str) -> Iterator[Candidate]:
        """As few blocks as needed recomputed; all of them where that is not enough."""
        total = len(self.blocks)

        def with_blocks(number: int) -> ShardingPlan:
            return recompute(sharded, self.already | set(self.blocks[:number]))

        number = total - _most(total, lambda spared: self.fits(with_blocks(total - spared)))
        what = f"{number} of {total} blocks recomputed" if number else "no block recomputed"
        found = self.weigh(prefix + what, with_blocks(number))
        yield found
        if found.peak.total <= self.limit:
            yield from self._spend(found.plan, f"{prefix}{what}, ")


def _most(highest: int, fits: Callable[[int], bool]) -> int:
    """The largest number up to ``highest`` for which ``fits``, if it holds for 0 and, once it fails, fails on.

    More kept is more alive, so it does. Were it not so, the number would be smaller than it might be, and still fit.
    """
    low, high = 0, highest
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def _last(names: Sequence[str], number: int) -> set[str]:
    return set(names[len(names) - number :])


def _nothing_fits(search: Search, weighed: Sequence[Candidate]) -> str:
    least = min(weighed, key=lambda candidate: candidate.peak.total)
    limit, peak = search.limit, least.peak.total
    problem = f"{nbytes(limit)} is too little: {least.what} still peaks at {nbytes(peak)}, {nbytes(peak - limit)} more"
    # The first doubling of the ranks that fits without the CPU's help.
    here = recompute(resharded(least.plan), search.already | set(search.blocks))
    sizes = [least.plan.mesh.size * 2**power for power in range(1, 15)]
    ranks = next((ranks for ranks in sizes if search.fits(replace(here, mesh=MeshSpec.sharded(ranks)))), None)
    enough = f"{ranks} ranks would do" if ranks else "No number of ranks would do: use a smaller batch"
    rule = "A step's peak is within the budget on every rank"
    return message("budget", f"{problem}, {least.peak.where}", rule, enough)
