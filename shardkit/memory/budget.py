"""Choose a plan for a memory budget: the first that fits, in a fixed order of what costs least."""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

from shardkit.errors import PlanError, message
from shardkit.memory.estimate import Step, base_plan, changed, resharded, with_checkpoints
from shardkit.memory.timeline import OptimizerBytes, Prediction
from shardkit.memory.trace import Loss
from shardkit.plan import MeshSpec, ShardingPlan
from shardkit.plan.check import with_units_inside
from shardkit.plan.text import aligned
from shardkit.plan.types import nbytes

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


@dataclass(frozen=True)
class BudgetPlan(Prediction):
    """The chosen plan; prints as a table of all that were ``weighed``, in order, whose last one is the choice."""

    weighed: tuple[Prediction, ...]
    budget: int  # bytes of each rank's GPU
    reserved: int  # those of them that the plan may not use

    def __str__(self) -> str:
        peak, limit = self.peak.total, self.budget - self.reserved
        of = f" ({_less(self.budget, self.reserved)})" if self.reserved else ""
        answer = f"fits in {nbytes(limit)}{of}: {self.name}; peak {nbytes(peak)}, {nbytes(limit - peak)} free"
        rows = [["plan", "peak", ""]]
        for each in self.weighed:
            verdict = "chosen" if each is self.weighed[-1] else "" if each.peak.total <= limit else "does not fit"
            rows.append([each.name, nbytes(each.peak.total), verdict])
        footer = "The reserve is for what is not counted: fragmentation, NCCL, the CUDA context."
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
    micro_batches: int = 1,
) -> BudgetPlan:
    """Return the plan that costs least among those whose peak fits on every rank. Local, deterministic.

    In this order: everything sharded; the fewest blocks checkpointed selectively; with all of them so, the fewest
    checkpointed in full; the same with everything offloaded to the CPU.
    What is left of the budget saves all-gathers: as many units as fit stay gathered between forward and backward, the
    last ones first; then as many as fit reshard within a node. Units, dtypes, tiles and mesh stay those of the plan.

    Args:
        model: on any device, meta too.
        budget: bytes of each rank's GPU, or a string such as ``"80GiB"``.
        batch: one rank's micro-batch, as for :func:`shardkit.memory.estimate`.
        reserve: what of the budget is left for what is not counted: the allocator's fragmentation, NCCL's workspace,
            CUDA's context. Bytes, or a string such as ``"10%"`` or ``"6GiB"``; 0 lets the plan use all of it.
        world_size, mesh: the number of ranks, or their mesh; pass neither to use the plan's mesh.
        plan: the plan to start from; None is the default rule with ``mp_policy``.
        loss, optimizer: as for :func:`shardkit.memory.estimate`.
        ranks_per_node: to reshard within a node.
        mp_policy: used where no plan is given.
        micro_batches: of a step with ``shardkit.accumulate``, which gathers units that stay gathered once for all.

    Raises:
        PlanError: nothing fits; the error says how much is missing.
    """
    size = parse_bytes(budget)
    reserved = parse_bytes(reserve, "reserve", of=size)
    if batch is None:
        rule, fix = "Activations depend on it", "Pass one rank's micro-batch as the model takes it"
        raise PlanError(message("batch", "must be given, got None", rule, fix))
    step = Step(model, base_plan(model, plan, world_size, mesh, mp_policy), batch, loss, micro_batches)
    return choose(step, OptimizerBytes.of(optimizer), size, reserved, ranks_per_node)


def parse_bytes(size: int | str, name: str = "budget", of: int = 0) -> int:
    """Return the bytes that a number, or a string such as ``"70GiB"`` or ``"80 GB"``, stands for; else PlanError.

    With ``of``, also a percentage of it, or 0, but less than ``of``.
    """
    units = {**_UNITS, "%": of / 100} if of else _UNITS
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z%]*)\s*", str(size))
    value = int(float(match[1]) * units[match[2].upper()]) if match and match[2].upper() in units else -1
    if not (0 if of else 1) <= value < (of or math.inf):
        forms = 'bytes, or a string such as "6GiB" or "80 GB"'
        forms += ', or "10%" of the budget, and less than that' if of else ""
        fix = f'Pass, for example, {name}="{"10%" if of else "70GiB"}"'
        raise PlanError(message(name, f"must be {forms}, got {size!r}", "", fix))
    return value


def choose(
    step: Step, optimizer: OptimizerBytes, budget: int, reserved: int, ranks_per_node: int
) -> BudgetPlan:
    """Return the first candidate that fits, with what is left spent; raise a PlanError if none does."""
    limit = budget - reserved
    search = Search(step, optimizer, limit, ranks_per_node)
    search.run()
    last = search.weighed[-1]
    if last.peak.total <= limit:
        weighed = tuple(search.weighed)
        return BudgetPlan(last.name, last.plan, last.timeline, last.host, weighed, budget, reserved)
    least = min(search.weighed, key=lambda candidate: candidate.peak.total)
    peak, missing = nbytes(least.peak.total), nbytes(least.peak.total - limit)
    size = f"{nbytes(budget)} less {nbytes(reserved)} reserved" if reserved else nbytes(budget)
    problem = f"of {size} is too little: {least.name} still peaks at {peak}, {missing} too much, {least.peak.where}"
    fix = 'Use a smaller batch, smaller units, or tiles, such as by_name("*.mlp", tiles=4)'
    raise PlanError(message("budget", problem, "", fix))


class Search:
    """Weighs plans of the same units; each is one arithmetic pass over traces measured once."""

    def __init__(self, step: Step, optimizer: OptimizerBytes, limit: int, ranks_per_node: int = 8) -> None:
        self.step, self.optimizer, self.limit, self.ranks_per_node = step, optimizer, limit, ranks_per_node
        self.weighed: list[Prediction] = []  # in the order of what they cost

    def run(self) -> None:
        """Weigh plans up to the first that fits, and what is left to spend there."""
        sharded = resharded(self.step.plan)
        offloaded = changed(sharded, offload_policy=CPUOffloadPolicy())
        for plan, label in ((sharded, ""), (offloaded, "offloaded to the CPU")):
            if self._weigh(label or "everything sharded", plan):
                self._keep_gathered(label, plan)
                return
            # The fewest blocks that are enough, or all.
            blocks = self.step.blocks
            for policy, how in (("selective", "selectively"), (True, "in full")):
                if not blocks or (policy == "selective" and with_units_inside(plan)):
                    continue

                def first_blocks(number: int, plan: ShardingPlan = plan, policy: Any = policy) -> ShardingPlan:
                    return with_checkpoints(plan, dict.fromkeys(self.step.blocks[:number], policy))

                number = 1
                if not self._fits(first_blocks(1)):
                    number = 1 + _most(len(blocks) - 1, lambda n: not self._fits(first_blocks(n)))
                plan = first_blocks(number)
                of_blocks = f"{number} of {len(blocks)} blocks checkpointed {how}"
                name = f"{label}, {of_blocks}" if label else of_blocks
                if self._weigh(name, plan):
                    self._keep_gathered(name, plan)
                    return

    def _weigh(self, name: str, plan: ShardingPlan) -> bool:
        """Add a candidate; return whether it fits."""
        self.weighed.append(self.step.predict(name, plan, self.optimizer))
        return self.weighed[-1].peak.total <= self.limit

    def _fits(self, plan: ShardingPlan) -> bool:
        return self.step.predict("", plan, self.optimizer).peak.total <= self.limit

    def _keep_gathered(self, name: str, plan: ShardingPlan) -> None:
        """Spend the memory that is left on saving all-gathers: the last units stay, or reshard within a node."""
        names = [unit.name for unit in plan.execution_order() if unit.reshard_after_forward is not False]
        if plan.mesh.shard_size == 1 and not any(unit.offloads for unit in plan.units):
            return  # nothing is gathered
        on_dims = {unit.name for unit in plan.units if unit.shard_dims}  # torch reshards these fully or not at all
        node = self.ranks_per_node
        ways: list[tuple[bool | int, str]] = [(False, f"of {len(names)} units kept gathered")]
        if 1 < node < plan.mesh.shard_size and plan.mesh.shard_size % node == 0:
            ways.append((node, f"of {len(names)} resharded within the node"))
        for reshard, how in ways:

            def last_units(number: int, plan: ShardingPlan = plan, reshard: bool | int = reshard) -> ShardingPlan:
                return changed(plan, names[len(names) - number :], reshard_after_forward=reshard)

            if reshard is not False:
                names = [each for each in names if each not in on_dims]
            number = _most(len(names), lambda n: self._fits(last_units(n)))
            if number:
                plan, name = last_units(number), f"{number} {how}" if name == "everything sharded" else f"{name}, {number} {how}"
                self._weigh(name, plan)
                names = names[: len(names) - number]


def _most(highest: int, holds: Callable[[int], bool]) -> int:
    """Return the largest number up to ``highest`` for which it holds, else 0; it holds for all below that."""
    return bisect_left(range(1, highest + 1), True, key=lambda number: not holds(number))
