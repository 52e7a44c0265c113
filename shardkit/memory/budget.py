"""Choose the fastest plan that fits a memory budget, by the model of step time."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from shardkit.errors import PlanError, listing, message
from shardkit.memory.estimate import Measured, base_plan, changed, fused, offload, recompute, recomputed, resharded
from shardkit.memory.speed import HARDWARE, Hardware, StepTime, step_time
from shardkit.memory.timeline import OptimizerBytes, Point, timeline
from shardkit.memory.trace import Loss
from shardkit.plan import MeshSpec, ShardingPlan
from shardkit.plan.table import aligned
from shardkit.plan.types import nbytes
from shardkit.planning.dims import on_mesh

CLEAR_GAIN = 0.8  # of the step's time: fused blocks have to save a fifth of it
TILES = (2, 4, 8, 16)  # of MLPs, as weighed
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


@dataclass(frozen=True)
class Candidate:
    """One plan that was weighed."""

    what: str  # its difference from the plan that shards everything
    plan: ShardingPlan
    timeline: tuple[Point, ...]  # every stretch of a step
    time: StepTime  # of a step, by the time model

    @cached_property
    def peak(self) -> Point:
        """The stretch with the most bytes alive."""
        return max(self.timeline, key=lambda point: point.total)


@dataclass(frozen=True)
class BudgetPlan:
    """The chosen plan and all candidates; prints as a table.

    Attributes:
        chosen: the fastest candidate that fits; ``plan``, ``timeline`` and ``peak`` are the candidate's.
        weighed: all candidates, in the order in which they were tried.
        budget: bytes of each rank's GPU.
        reserved: those of them that the plan may not use.
    """

    chosen: Candidate
    weighed: tuple[Candidate, ...]
    budget: int
    reserved: int = 0

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
        """The stretch with the most bytes alive."""
        return self.chosen.peak

    def __str__(self) -> str:
        peak, limit = self.chosen.peak.total, self.budget - self.reserved
        answer = f"fits {_less(self.budget, self.reserved)}: {self.chosen.what}, peak {nbytes(peak)}, "
        answer += f"{nbytes(limit - peak)} free"
        rows = [["plan", "peak", "step", "exposed", ""]]
        for each in self.weighed:
            verdict = "chosen" if each is self.chosen else "" if each.peak.total <= limit else "does not fit"
            seconds = [f"{each.time.total:.3g} s", f"{each.time.exposed:.3g} s"]
            rows.append([each.what, nbytes(each.peak.total), *seconds, verdict])
        footer = "Not counted, so memory is reserved for it: fragmentation, NCCL, CUDA's context.\n"
        footer += "Times are model estimates for ranking plans, not measurements."
        return "\n".join([answer, "", *aligned(rows, left={0, 4}), "", footer])


def plan_for_budget(
    model: nn.Module,
    budget: int | str,
    *,
    batch: Any,
    reserve: int | str = "10%",
    world_size: int | None = None,
    mesh: MeshSpec | None = None,
    plan: ShardingPlan | None = None,
    loss: Loss | None = None,
    optimizer: str | float = "adamw",
    hardware: Hardware | str = "h100",
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008  frozen
    keep_units: bool | None = None,
) -> BudgetPlan:
    """Return the fastest plan whose peak fits on every rank, by the time model. Local, deterministic.

    Candidates, in order: as many units as fit kept gathered between forward and backward, the last ones first, which
    saves an all-gather each; then as many as fit resharded within a node; else the fewest blocks recomputed; else MLPs,
    by the name of their class, in 2 to 16 tiles of tokens, with the fewest blocks recomputed; else everything offloaded
    to the CPU, in the same order. A note says which modules are in tiles. Dtypes and mesh stay those of the plan, and
    so do units, unless FSDP2's hooks take the CPU longer than the step takes the device. Then 2, 4 or 8 small blocks
    become one unit, if that fits and saves a fifth of the step; a note of the plan says so.

    Args:
        model: on any device, meta too.
        budget: bytes of each rank's GPU, or a string such as ``"80GiB"``.
        batch: one rank's micro-batch, as for :func:`shardkit.memory.estimate`.
        reserve: what of the budget is left for what is not counted: the allocator's fragmentation, NCCL's workspace,
            CUDA's context. Bytes, or a string such as ``"10%"`` or ``"6GiB"``; 0 lets the plan use all of it.
        world_size: the number of ranks. Pass this, or ``mesh``, or neither to use the plan's mesh.
        mesh: instead of ``world_size``.
        plan: the plan to start from; None is the default rule with ``mp_policy``.
        loss: as for :func:`shardkit.memory.estimate`.
        optimizer: as for :func:`shardkit.memory.estimate`.
        hardware: rates for ranking plans: a name in ``shardkit.memory.HARDWARE``, or your own.
        mp_policy: used where no plan is given.
        keep_units: never fuse blocks. None keeps the units of a given plan, and may fuse those of the default rule.

    Raises:
        PlanError: nothing fits; the error says how much is missing, and how many ranks would be enough.
    """
    limit = parse_bytes(budget)
    reserved = parse_reserve(reserve, limit)
    if batch is None:
        fix = "Pass one rank's micro-batch as the model takes it"
        raise PlanError(message("batch", "is None", "Activations depend on the batch", fix))
    if isinstance(hardware, str) and hardware not in HARDWARE:
        fix = "Use one of these, or pass a shardkit.memory.Hardware with your own rates"
        raise PlanError(message("hardware", f"is {hardware!r}", f"It must be one of {', '.join(HARDWARE)}", fix))
    rates = HARDWARE[hardware] if isinstance(hardware, str) else hardware
    measured = Measured(model, base_plan(model, plan, world_size, mesh, mp_policy), batch, loss)
    keep_units = plan is not None if keep_units is None else keep_units
    search = Search(measured, OptimizerBytes.of(optimizer), rates, limit - reserved, reserved)
    return search.choose(keep_units=keep_units)


def parse_bytes(size: int | str, name: str = "budget", least: int = 1) -> int:
    """Return the bytes that a number, or a string such as ``"70GiB"`` or ``"80 GB"``, stands for.

    Raises:
        PlanError: it is neither, or less than ``least``.
    """
    if isinstance(size, str):
        match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z]*)\s*", size)
        unit = _UNITS.get(match[2].upper()) if match else None
        value = float(match[1]) * unit if match and unit else -1
    else:
        value = size if isinstance(size, int) and not isinstance(size, bool) else -1
    if value < least:
        rule = f"A {name} is a positive number of bytes, or a number with B, kB, MB, GB, TB, KiB, MiB, GiB or TiB"
        rule += ', or a percentage such as "10%", or 0' if name == "reserve" else ""
        raise PlanError(message(name, f"is {size!r}", rule, 'Pass, for example, "70GiB"'))
    return int(value)


def parse_reserve(reserve: int | str, budget: int) -> int:
    """Return the bytes of a budget that a number, ``"6GiB"`` or ``"10%"`` stands for.

    Raises:
        PlanError: it is none of these, or not less than the budget.
    """
    percent = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*%\s*", str(reserve))
    size = int(budget * float(percent[1]) / 100) if percent else parse_bytes(reserve, "reserve", least=0)
    if size >= budget:
        problem = f"is {nbytes(size)} of a budget of {nbytes(budget)}"
        raise PlanError(message("reserve", problem, "The plan uses the rest of the budget", 'Pass, for example, "10%"'))
    return size


def _less(budget: int, reserved: int) -> str:
    return f"{nbytes(budget)} less {nbytes(reserved)} reserved" if reserved else nbytes(budget)


class Search:
    """Makes candidates; each is one arithmetic pass over traces that are measured once.

    Candidates may differ from the measured plan in their mesh and in how units reshard, offload and recompute.
    """

    def __init__(
        self, measured: Measured, optimizer: OptimizerBytes, hardware: Hardware, limit: int, reserved: int = 0
    ) -> None:
        """``limit`` is what a plan may use; ``reserved`` is what the GPU has beyond it, for the answer's text."""
        self.measured, self.limit, self._reserved = measured, limit, reserved
        self._optimizer, self._hardware = optimizer, hardware

    def choose(self, *, keep_units: bool) -> BudgetPlan:
        """Return the fastest candidate that fits; raise a PlanError if none does."""
        weighed = tuple(self.candidates(self.measured.plan))
        best = self._fastest(weighed)
        if best is None:
            raise PlanError(self._nothing_fits(min(weighed, key=lambda candidate: candidate.peak.total)))
        larger = () if keep_units else tuple(self._fuse(best))
        faster = self._fastest(larger) or best
        chosen = faster if faster.time.total <= CLEAR_GAIN * best.time.total else best
        return BudgetPlan(chosen, weighed + larger, self.limit + self._reserved, self._reserved)

    def _fastest(self, weighed: Iterable[Candidate]) -> Candidate | None:
        fitting = (candidate for candidate in weighed if candidate.peak.total <= self.limit)
        return min(fitting, key=lambda candidate: (candidate.time.total, candidate.time.device), default=None)

    def _fuse(self, best: Candidate) -> Iterator[Candidate]:
        """Fuse blocks if the hooks take longer than the device, and no memory has to be saved."""
        hooks, device = best.time.hooks, best.time.device
        saves = any(unit.offloads for unit in best.plan.units) or recomputed(best.plan) != self.measured.already
        saves |= best.plan.tiles != self.measured.plan.tiles
        if saves or device > CLEAR_GAIN * hooks:
            return
        number = next((number for number in (2, 4, 8) if hooks <= number * device), 8)
        called = {interval.unit for interval in self.measured.trace_of(best.plan).intervals}
        plan = fused(resharded(self.measured.plan), number, called)
        search = Search(self.measured.of(plan), self._optimizer, self._hardware, self.limit)
        if len(plan.units) < len(best.plan.units) and search.fits(plan):
            why = f"FSDP2's hooks take {hooks * 1e3:.2g} ms of CPU time in a step, and the device needs "
            why += f"{device * 1e3:.2g} ms, estimated for {self._hardware.name}"
            plan = replace(plan, notes=(*plan.notes, f"up to {number} blocks in a unit: with one block each, {why}"))
            prefix = f"{number} blocks in a unit"
            yield search.weigh(prefix, plan)
            yield from search.spend(plan, f"{prefix}, ")

    def weigh(self, what: str, plan: ShardingPlan) -> Candidate:
        """Return a candidate with its peak and time."""
        time = step_time(plan, self.measured.trace_of(plan), self._hardware, self._optimizer)
        return Candidate(what, plan, tuple(self._timeline(plan)), time)

    def fits(self, plan: ShardingPlan) -> bool:
        """Return whether the plan's peak is within the limit."""
        return max(point.total for point in self._timeline(plan)) <= self.limit

    def _timeline(self, plan: ShardingPlan) -> list[Point]:
        return timeline(plan, self.measured.trace_of(plan), self._optimizer, self.measured.buffers)

    def candidates(self, base: ShardingPlan) -> Iterator[Candidate]:
        """Yield candidates from fast to frugal, until one fits."""
        sharded = resharded(base)
        yield self.weigh("everything sharded", sharded)
        if self.fits(sharded):
            yield from self.spend(sharded, "")
            return
        for plan, prefix in ((sharded, ""), (offload(sharded), "on the CPU, ")):
            for save in (self.save, self._tile):
                saved = list(save(plan, prefix))
                yield from saved
                if self._fastest(saved) is not None:
                    return

    def spend(self, sharded: ShardingPlan, prefix: str) -> Iterator[Candidate]:
        """Spend the memory that is left on saving all-gathers."""
        names = [unit.name for unit in sharded.execution_order() if unit.reshard_after_forward is not False]

        def keep_last(number: int) -> ShardingPlan:
            return changed(sharded, names[len(names) - number :], reshard_after_forward=False)

        kept = _most(len(names), lambda number: self.fits(keep_last(number)))
        gathered, others, ranks = keep_last(kept), names[: len(names) - kept], self._hardware.ranks_per_node
        if kept:
            yield self.weigh(f"{prefix}{kept} of {len(names)} units kept gathered", gathered)
        on_dims = {unit.name for unit in sharded.units if unit.shard_dims}  # torch reshards these fully or not at all
        others = [name for name in others if name not in on_dims]
        if not 1 < ranks < sharded.mesh.shard_size or sharded.mesh.shard_size % ranks:
            return

        def keep_in_node(number: int) -> ShardingPlan:
            return changed(gathered, others[len(others) - number :], reshard_after_forward=ranks)

        near = _most(len(others), lambda number: self.fits(keep_in_node(number)))
        if near:
            prefix += f"{kept} units kept gathered, " if kept else ""
            yield self.weigh(f"{prefix}{near} of {len(names)} resharded within the node", keep_in_node(near))

    def save(self, sharded: ShardingPlan, prefix: str) -> Iterator[Candidate]:
        """Recompute the fewest blocks that are enough, or all of them."""
        blocks, already = self.measured.blocks, self.measured.already

        def recompute_first(number: int) -> ShardingPlan:
            return recompute(sharded, already.union(blocks[:number]))

        number = len(blocks) - _most(len(blocks), lambda spared: self.fits(recompute_first(len(blocks) - spared)))
        what = f"{number} of {len(blocks)} blocks recomputed" if number else "no block recomputed"
        found = self.weigh(prefix + what, recompute_first(number))
        yield found
        if found.peak.total <= self.limit:
            yield from self.spend(found.plan, f"{prefix}{what}, ")

    def _tile(self, sharded: ShardingPlan, prefix: str) -> Iterator[Candidate]:
        """Compute MLPs in the fewest tiles that are enough, with the fewest blocks recomputed; or in most tiles."""
        mlps = self.measured.mlps
        others = max(point.total - point.activations for point in self._timeline(sharded))
        for number in TILES if mlps and others <= self.limit else ():
            names = listing((fqn or "(root)" for fqn in mlps), 2)
            note = f"{names}: in {number} tiles, as MLPs by their class, which the first forward tests"
            tiles = (*sharded.tiles, *((fqn, number) for fqn in mlps))
            plan = replace(sharded, tiles=tiles, notes=(*sharded.notes, note))
            search = Search(self.measured.of(plan), self._optimizer, self._hardware, self.limit)
            try:
                found = list(search.save(plan, f"{prefix}MLPs in {number} tiles, "))
            except PlanError:  # the name of a class promises nothing: one may return a tuple
                return
            if self._fastest(found) is not None or number == TILES[-1]:
                yield from found
                return

    def _nothing_fits(self, least: Candidate) -> str:
        budget = _less(self.limit + self._reserved, self._reserved)
        peak, missing = nbytes(least.peak.total), nbytes(least.peak.total - self.limit)
        problem = f"{budget} is too little: {least.what} still peaks at {peak}, {missing} over it, {least.peak.where}"
        rule = "The peak of a step must be within the budget on every rank"
        if any(unit.mesh for unit in least.plan.units):  # experts, whose mesh is the model's
            return message("budget", problem, rule, "Use more ranks, or a smaller batch")
        # The first doubling of the ranks that fits without offloading.
        here = recompute(resharded(least.plan), self.measured.already.union(self.measured.blocks))
        sizes = [least.plan.mesh.size * 2**power for power in range(1, 15)]
        ranks = next((ranks for ranks in sizes if self.fits(on_mesh(here, MeshSpec.sharded(ranks)))), None)
        fix = f"{ranks} ranks would be enough" if ranks else "No number of ranks would be enough: use a smaller batch"
        return message("budget", problem, rule, fix)


def _most(highest: int, fits: Callable[[int], bool]) -> int:
    """Return the largest number up to ``highest`` that fits, where 0 fits and all numbers above a misfit do not fit.

    Keeping more units never needs less memory, so that holds. If it did not, the result would still fit.
    """
    low, high = 0, highest
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low
