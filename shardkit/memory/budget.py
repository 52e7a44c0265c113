"""Choose a plan for a memory budget: the first that fits, in a fixed order of what costs least."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy

from shardkit.errors import PlanError
from shardkit.memory.estimate import Step, changed, resharded, with_checkpoints
from shardkit.memory.timeline import OptimizerBytes, Prediction
from shardkit.memory.trace import Loss
from shardkit.plan import ShardingPlan
from shardkit.plan.check import unit_inside
from shardkit.plan.text import aligned
from shardkit.plan.types import nbytes

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


@dataclass(frozen=True)
class BudgetPlan(Prediction):
    """The chosen plan; prints as a table of all that were ``weighed``, in order, whose last one is
    the choice.
    """

    weighed: tuple[Prediction, ...]
    limit: int  # bytes that the plan may use

    def __str__(self) -> str:
        peak = self.peak.total
        answer = (
            f"fits in {nbytes(self.limit)}: {self.name}; peak {nbytes(peak)}, "
            f"{nbytes(self.limit - peak)} free"
        )
        rows = [["plan", "peak", ""]]
        for each in self.weighed:
            verdict = "" if each.peak.total <= self.limit else "does not fit"
            rows.append(
                [
                    each.name,
                    nbytes(each.peak.total),
                    "chosen" if each is self.weighed[-1] else verdict,
                ]
            )
        footer = "The reserve is for what is not counted: fragmentation, NCCL, the CUDA context."
        return "\n".join([answer, "", *aligned(rows, left={0, 2}), "", footer])


def plan_for_budget(
    model: nn.Module,
    budget: int | str,
    plan: ShardingPlan,
    *,
    batch: Any,
    reserve: float = 0.1,
    loss: Loss | None = None,
    optimizer: str | float = "adamw",
    micro_batches: int = 1,
) -> BudgetPlan:
    """Return the plan that costs least among those whose peak fits on every rank. Local,
    deterministic.

    In this order: everything sharded; the fewest blocks checkpointed selectively; with all of them
    so, the fewest checkpointed in full; the same with everything offloaded to the CPU. What is left
    of the budget saves all-gathers: as many units as fit stay unsharded between forward and
    backward, the last ones first. Units, dtypes, tiles and mesh stay those of the plan.

    Args:
        model: on any device, meta too.
        budget: bytes of each rank's GPU, or a string such as ``"80GiB"``.
        plan: the plan to start from, such as ``plan_model(model, mesh=MeshSpec.sharded(64))``.
        batch: one rank's micro-batch, as for :func:`shardkit.memory.estimate`.
        reserve: the part of the budget that is left for what is not counted: the allocator's
            fragmentation, NCCL's workspace, CUDA's context. 0 lets the plan use all of it.
        loss, optimizer: as for :func:`shardkit.memory.estimate`.
        micro_batches: of a step with ``shardkit.accumulate``, which gathers units that stay
            unsharded once for all.

    Raises:
        PlanError: nothing fits; the error says how much is missing.
    """
    limit = limit_of(budget, reserve)
    if batch is None:
        raise PlanError(
            "batch must be given, got None. Activations depend on it. Pass one rank's micro-batch "
            "as the model takes it."
        )
    return choose(
        Step(model, plan, batch, loss, micro_batches), OptimizerBytes.of(optimizer), limit
    )


def limit_of(budget: int | str, reserve: float) -> int:
    """Return the bytes of a budget, a number or such as ``"70GiB"`` or ``"80 GB"``, without the
    reserve.
    """
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z]*)\s*", str(budget))
    if not match or match[2].upper() not in _UNITS or not float(match[1]):
        raise PlanError(
            f'budget must be bytes, or a string such as "70GiB" or "80 GB", got {budget!r}. '
            'Pass, for example, budget="70GiB".'
        )
    if not 0 <= reserve < 1:
        raise PlanError(
            f"reserve must be a part of the budget from 0 to 1, got {reserve!r}. "
            "Pass, for example, reserve=0.1."
        )
    return int(float(match[1]) * _UNITS[match[2].upper()] * (1 - reserve))


def choose(step: Step, optimizer: OptimizerBytes, limit: int) -> BudgetPlan:
    """Return the first candidate that fits, with what is left spent; raise a PlanError if none
    does.
    """
    search = Search(step, optimizer, limit)
    search.run()
    last = search.weighed[-1]
    if last.peak.total <= limit:
        return BudgetPlan(
            last.name, last.plan, last.timeline, last.host, tuple(search.weighed), limit
        )
    least = min(search.weighed, key=lambda candidate: candidate.peak.total)
    peak, missing = nbytes(least.peak.total), nbytes(least.peak.total - limit)
    raise PlanError(
        f"budget of {nbytes(limit)} without the reserve is too little: {least.name} still peaks at "
        f"{peak}, {missing} too much, {least.peak.where}. Use a smaller batch, smaller units, or "
        'tiles, such as tiles={"**.mlp": 4}.'
    )


class Search:
    """Weighs plans of the same units; each is one arithmetic pass over traces measured once."""

    def __init__(self, step: Step, optimizer: OptimizerBytes, limit: int) -> None:
        self.step, self.optimizer, self.limit = step, optimizer, limit
        self.weighed: list[Prediction] = []  # in the order of what they cost

    def run(self) -> None:
        """Weigh plans up to the first that fits, and what is left to spend there."""
        blocks = self.step.blocks
        sharded = resharded(self.step.plan)
        has_units_inside = any(unit_inside(sharded, unit) for unit in sharded.units if unit.blocks)
        offloaded = changed(sharded, offload_policy=CPUOffloadPolicy())
        for plan, start in ((sharded, "everything sharded"), (offloaded, "offloaded to the CPU")):
            if self._weigh(start, plan):
                self._keep_unsharded(start, plan)
                return
            # The fewest blocks that are enough, or all.
            for policy, how in (("selective", "selectively"), (True, "in full")):
                if not blocks or (policy == "selective" and has_units_inside):
                    continue

                def first_blocks(
                    number: int, plan: ShardingPlan = plan, policy: Any = policy
                ) -> ShardingPlan:
                    return with_checkpoints(plan, dict.fromkeys(blocks[:number], policy))

                number = 1 + _most(len(blocks) - 1, lambda n: not self._fits(first_blocks(n)))
                plan = first_blocks(number)
                name = f"{start}, {number} of {len(blocks)} blocks checkpointed {how}"
                if policy is True and number < len(blocks) and not has_units_inside:
                    name += ", the others selectively"
                if self._weigh(name, plan):
                    self._keep_unsharded(name, plan)
                    return

    def _weigh(self, name: str, plan: ShardingPlan) -> bool:
        """Add a candidate; return whether it fits."""
        name = name.removeprefix("everything sharded, ")  # say what differs from that
        self.weighed.append(self.step.predict(name, plan, self.optimizer))
        return self.weighed[-1].peak.total <= self.limit

    def _fits(self, plan: ShardingPlan) -> bool:
        return self.step.predict("", plan, self.optimizer).peak.total <= self.limit

    def _keep_unsharded(self, name: str, plan: ShardingPlan) -> None:
        """Spend the memory that is left on saving all-gathers: the last units stay unsharded."""
        names = [
            unit.name for unit in plan.execution_order() if unit.reshard_after_forward is not False
        ]
        if plan.mesh.shard_size == 1 and not any(unit.offloads for unit in plan.units):
            return  # nothing is gathered

        def last_units(number: int) -> ShardingPlan:
            return changed(plan, names[len(names) - number :], reshard_after_forward=False)

        number = _most(len(names), lambda n: self._fits(last_units(n)))
        if number:
            name += f", {number} of {len(names)} units kept unsharded"
            self._weigh(name, last_units(number))


def _most(highest: int, holds: Callable[[int], bool]) -> int:
    """Return the largest number up to ``highest`` for which it holds, else 0; it holds for all
    below that.
    """
    return bisect_left(range(1, highest + 1), True, key=lambda number: not holds(number))
