"""Choose a plan for a memory budget: the first that fits, in a fixed order of what costs least."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from shardkit.errors import PlanError, listing, message
from shardkit.memory.estimate import Measured, base_plan, changed, offload, resharded, with_checkpoints
from shardkit.memory.timeline import OptimizerBytes, Point, Prediction, timeline
from shardkit.memory.trace import Loss
from shardkit.plan import MeshSpec, ShardingPlan
from shardkit.plan.table import aligned
from shardkit.plan.types import nbytes

TILES = (2, 4, 8, 16)  # of MLPs
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


@dataclass(frozen=True)
class BudgetPlan(Prediction):
    """The plan that was chosen, and all that were weighed; prints as a table.

    Attributes:
        weighed: in the order in which they were tried; the last one is the choice.
        budget: bytes of each rank's GPU.
        reserved: those of them that the plan may not use.
    """

    weighed: tuple[Prediction, ...]
    budget: int
    reserved: int

    def __str__(self) -> str:
        peak, limit = self.peak.total, self.budget - self.reserved
        answer = f"fits {_less(self.budget, self.reserved)}: {self.name}, peak {nbytes(peak)}, "
        answer += f"{nbytes(limit - peak)} free"
        rows = [["plan", "peak", ""]]
        for each in self.weighed:
            verdict = "chosen" if each is self.weighed[-1] else "" if each.peak.total <= limit else "does not fit"
            rows.append([each.name, nbytes(each.peak.total), verdict])
        footer = "Not counted, so memory is reserved for it: fragmentation, NCCL, CUDA's context."
        return "\n".join([answer, "", *aligned(rows, left={0, 2}), "", footer])


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
    ranks_per_node: int = 8,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008  frozen
) -> BudgetPlan:
    """Return the plan that costs least among those whose peak fits on every rank. Local, deterministic.

    In this order: everything sharded; the fewest blocks checkpointed; MLPs, by the name of their class, in 2 to 16
    tiles of tokens, with the fewest blocks checkpointed; the same with everything offloaded to the CPU. What is left of
    the budget saves all-gathers: as many units as fit stay gathered between forward and backward, the last ones first;
    then as many as fit reshard within a node. A note says which modules are in tiles. Units, dtypes and mesh stay those
    of the plan.

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
        ranks_per_node: to reshard within a node.
        mp_policy: used where no plan is given.

    Raises:
        PlanError: nothing fits; the error says how much is missing.
    """
    size = parse_bytes(budget)
    reserved = parse_bytes(reserve, "reserve", of=size)
    if batch is None:
        rule, fix = "Activations depend on it", "Pass one rank's micro-batch as the model takes it"
        raise PlanError(message("batch", "must be given, got None", rule, fix))
    measured = Measured(model, base_plan(model, plan, world_size, mesh, mp_policy), batch, loss)
    return Search(measured, OptimizerBytes.of(optimizer), size, reserved, ranks_per_node).choose()


def parse_bytes(size: int | str, name: str = "budget", of: int = 0) -> int:
    """Return the bytes that a number, or a string such as ``"70GiB"`` or ``"80 GB"``, stands for.

    With ``of``, also a percentage of it, or 0, but less than ``of``.

    Raises:
        PlanError: it is none of these.
    """
    units = {**_UNITS, "%": of / 100} if of else _UNITS
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z%]*)\s*", str(size))
    value = int(float(match[1]) * units[match[2].upper()]) if match and match[2].upper() in units else -1
    if not (value >= 1 or (of and value == 0)) or (of and value >= of):
        problem = f'must be bytes, or a string such as "6GiB" or "80 GB", got {size!r}'
        problem = problem.replace(", got", ', or "10%" of the budget, and less than that, got') if of else problem
        raise PlanError(message(name, problem, "", 'Pass, for example, "10%"' if of else 'Pass, for example, "70GiB"'))
    return value


def _less(budget: int, reserved: int) -> str:
    return f"{nbytes(budget)} less {nbytes(reserved)} reserved" if reserved else nbytes(budget)


class Search:
    """Weighs plans; each is one arithmetic pass over traces that are measured once.

    Plans may differ from the measured one in their mesh and tiles, and in how units reshard, offload and checkpoint.
    """

    def __init__(
        self, measured: Measured, optimizer: OptimizerBytes, budget: int, reserved: int = 0, ranks_per_node: int = 8
    ) -> None:
        self.measured, self.limit = measured, budget - reserved
        self._optimizer, self._budget, self._reserved, self._node = optimizer, budget, reserved, ranks_per_node

    def choose(self) -> BudgetPlan:
        """Return the first candidate that fits and saves what it can; raise a PlanError if none does."""
        weighed = self.weighed(self.measured.plan)
        if weighed[-1].peak.total > self.limit:
            raise PlanError(self._nothing_fits(min(weighed, key=lambda candidate: candidate.peak.total)))
        last = weighed[-1]
        return BudgetPlan(last.name, last.plan, last.timeline, tuple(weighed), self._budget, self._reserved)

    def weighed(self, base: ShardingPlan) -> list[Prediction]:
        """Return candidates in the order of what they cost, up to the first that fits and what that leaves to spend."""
        sharded = resharded(base)
        found = [self.weigh((), sharded)]
        if self.fits(sharded):
            return found + list(self._spend((), sharded))
        for labels, start in (((), sharded), (("on the CPU",), offload(sharded))):
            others = max(point.total - point.activations for point in self._timeline(start))
            for number in (1, *TILES) if self.measured.mlps and others <= self.limit else (1,):
                tiled = start if number == 1 else self._in_tiles(start, number)
                named = labels if number == 1 else (*labels, f"MLPs in {number} tiles")
                try:
                    found += self._checkpoint(named, tiled)
                except PlanError:  # the name of a class promises nothing: an MLP may return a tuple
                    if number == 1:
                        raise
                    break
                if found[-1].peak.total <= self.limit:
                    return found
        return found

    def weigh(self, labels: Sequence[str], plan: ShardingPlan) -> Prediction:
        """Return a candidate with its timeline."""
        return Prediction(", ".join(labels) or "everything sharded", plan, self._timeline(plan))

    def fits(self, plan: ShardingPlan) -> bool:
        """Return whether the plan's peak is within the limit."""
        return max(point.total for point in self._timeline(plan)) <= self.limit

    def _timeline(self, plan: ShardingPlan) -> tuple[Point, ...]:
        return timeline(plan, self.measured.trace_of(plan), self._optimizer, self.measured.buffers)

    def _in_tiles(self, plan: ShardingPlan, number: int) -> ShardingPlan:
        names = listing((fqn or "(root)" for fqn in self.measured.mlps), 2)
        note = f"{names}: in {number} tiles, as MLPs by their class, which the first forward tests"
        tiles = (*plan.tiles, *((fqn, number) for fqn in self.measured.mlps))
        return replace(plan, tiles=tiles, notes=(*plan.notes, note))

    def _checkpoint(self, labels: tuple[str, ...], plan: ShardingPlan) -> Iterator[Prediction]:
        """Checkpoint the fewest blocks that are enough, or all of them; spend what is left."""
        blocks, already = self.measured.blocks, self.measured.already

        def first(number: int) -> ShardingPlan:
            return with_checkpoints(plan, already.union(blocks[:number]))

        number = len(blocks) - _most(len(blocks), lambda spared: self.fits(first(len(blocks) - spared)))
        if number:
            labels = (*labels, f"{number} of {len(blocks)} blocks checkpointed")
        yield self.weigh(labels, first(number))
        if self.fits(first(number)):
            yield from self._spend(labels, first(number))

    def _spend(self, labels: tuple[str, ...], plan: ShardingPlan) -> Iterator[Prediction]:
        """Spend the memory that is left on saving all-gathers."""
        names = [unit.name for unit in plan.execution_order() if unit.reshard_after_forward is not False]
        size = plan.mesh.shard_size
        if size == 1 and not any(unit.offloads for unit in plan.units):
            return  # nothing is gathered

        def keep_last(number: int) -> ShardingPlan:
            return changed(plan, names[len(names) - number :], reshard_after_forward=False)

        kept = _most(len(names), lambda number: self.fits(keep_last(number)))
        gathered = keep_last(kept)
        if kept:
            labels = (*labels, f"{kept} of {len(names)} units kept gathered")
            yield self.weigh(labels, gathered)
        on_dims = {unit.name for unit in plan.units if unit.shard_dims}  # torch reshards these fully or not at all
        others = [name for name in names[: len(names) - kept] if name not in on_dims]
        if not 1 < self._node < size or size % self._node:
            return

        def keep_in_node(number: int) -> ShardingPlan:
            return changed(gathered, others[len(others) - number :], reshard_after_forward=self._node)

        near = _most(len(others), lambda number: self.fits(keep_in_node(number)))
        if near:
            yield self.weigh((*labels, f"{near} of {len(names)} resharded within the node"), keep_in_node(near))

    def _nothing_fits(self, least: Prediction) -> str:
        peak, missing = nbytes(least.peak.total), nbytes(least.peak.total - self.limit)
        problem = f"of {_less(self._budget, self._reserved)} is too little: {least.name} still peaks at {peak}, "
        problem += f"{missing} over it, {least.peak.where}"
        return message("budget", problem, "", "Use a smaller batch, or smaller units")


def _most(highest: int, fits: Callable[[int], bool]) -> int:
    """Return the largest number up to ``highest`` that fits, where 0 fits and all numbers above a misfit do not fit.

    Keeping more units never needs less memory, so that holds. If it did not, the result would still fit.
    """
    low, high = 0, highest
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low
