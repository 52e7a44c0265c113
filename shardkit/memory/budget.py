"""Choose a plan for a memory budget: the first that fits, in a fixed order of what costs least."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy

from shardkit.errors import PlanError
from shardkit.memory.allocations import OptimizerBytes, Prediction
from shardkit.memory.strategies import Step, changed, resharded
from shardkit.memory.tracing import Loss
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
        for candidate in self.weighed:
            size = candidate.peak.total
            verdict = "" if size <= self.limit else "does not fit"
            if candidate is self.weighed[-1]:
                verdict = "chosen"
            rows.append([candidate.name, nbytes(size), verdict])
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
        micro_batches: of a step with ``shardkit.accumulate``, which all-gathers units that
            stay unsharded once for all.

    Raises:
        PlanError: nothing fits; the error says how much is missing.
    """
    limit = limit_of(budget, reserve)
    step = Step(model, plan, batch, loss, micro_batches)
    return choose(step, OptimizerBytes.of(optimizer), limit)


def limit_of(budget: int | str, reserve: float = 0.1) -> int:
    """Return the bytes of a budget, a number or such as ``"70GiB"`` or ``"80 GB"``, without the
    reserve.
    """
    if reserve < 0:
        raise PlanError(
            f"reserve must be at least 0, the part of the budget to leave free, got {reserve!r}."
        )
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z]*)\s*", str(budget))
    if not match or match[2].upper() not in _UNITS or not float(match[1]):
        raise PlanError(
            f'budget must be bytes, or a string such as "70GiB" or "80 GB", got {budget!r}. '
            'Pass, for example, budget="70GiB".'
        )
    return int(float(match[1]) * _UNITS[match[2].upper()] * (1 - reserve))


def choose(step: Step, optimizer: OptimizerBytes, limit: int) -> BudgetPlan:
    """Return the candidate that costs least among those that fit; PlanError if none does."""
    weighed = weigh(step, optimizer, limit)
    last = weighed[-1]
    if last.peak.total <= limit:
        return BudgetPlan(last.name, last.plan, last.timeline, last.host, tuple(weighed), limit)
    least = min(weighed, key=lambda candidate: candidate.peak.total)
    peak, missing = nbytes(least.peak.total), nbytes(least.peak.total - limit)
    raise PlanError(
        f"budget of {nbytes(limit)} without the reserve is too little: {least.name} still peaks at "
        f"{peak}, {missing} too much, {least.peak.where}. Use a smaller batch, smaller units, or "
        'tiles, such as tiles={"**.mlp": 4}.'
    )


Fits: TypeAlias = Callable[[ShardingPlan], bool]


def weigh(step: Step, optimizer: OptimizerBytes, limit: int) -> list[Prediction]:
    """Predict candidates, those that cost least first, until one fits, which is the last one.

    Each takes one pass of arithmetic over traces that are measured once.
    """

    def fits(plan: ShardingPlan) -> bool:
        return step.predict("", plan, optimizer).peak.total <= limit

    weighed = []
    for changes, plan in _candidates(step, fits):
        name = ", ".join(changes) or "everything sharded"
        weighed.append(step.predict(name, plan, optimizer))
        if weighed[-1].peak.total <= limit:
            # What is left of the budget saves all-gathers.
            kept, plan = _keep_unsharded(plan, fits)
            if kept:
                weighed.append(step.predict(", ".join([*changes, kept]), plan, optimizer))
            break
    return weighed


def _candidates(step: Step, fits: Fits) -> Iterator[tuple[list[str], ShardingPlan]]:
    """Yield what each plan changes, and the plan. Of each policy of checkpointing there is one:
    with the fewest blocks that fit, or with all.
    """
    blocks = step.blocks
    sharded = resharded(step.plan)
    offloaded = changed(sharded, offload_policy=CPUOffloadPolicy())
    starts: list[tuple[list[str], ShardingPlan]] = [([], sharded)]
    starts.append((["offloaded to the CPU"], offloaded))
    for changes, plan in starts:
        yield changes, plan
        if not blocks:
            continue
        policies: list[tuple[str | bool, str]] = [(True, "in full")]
        selects = _can_select(step)
        if selects:
            policies.insert(0, ("selective", "selectively"))
        for policy, how in policies:
            count = _fewest_blocks(plan, blocks, policy, fits)
            plan = changed(plan, blocks[:count], checkpoint_activations=policy)
            change = f"{count} of {len(blocks)} blocks checkpointed {how}"
            if policy is True and selects and count < len(blocks):
                change += ", the others selectively"
            yield [*changes, change], plan


def _can_select(step: Step) -> bool:
    """Whether the blocks can be checkpointed selectively."""
    if any(unit_inside(step.plan, unit) for unit in step.plan.units if unit.blocks):
        return False
    try:
        step.trace_of(changed(step.plan, step.blocks, checkpoint_activations="selective"))
    except PlanError:
        return False  # such as a ReLU in place, which changes what would be kept
    return True


def _fewest_blocks(plan: ShardingPlan, blocks: list[str], policy: str | bool, fits: Fits) -> int:
    """Return how many blocks, the first ones, must be checkpointed for the plan to fit, or all."""

    def fits_with(count: int) -> bool:
        return fits(changed(plan, blocks[:count], checkpoint_activations=policy))

    # the first count for which it is True; all, if for none
    return 1 + bisect_left(range(1, len(blocks)), True, key=fits_with)


def _keep_unsharded(plan: ShardingPlan, fits: Fits) -> tuple[str, ShardingPlan]:
    """Keep as many units unsharded after forward as fit, the last ones; say how many."""
    if plan.mesh.shard_size == 1 and not any(unit.offloads for unit in plan.units):
        return "", plan  # nothing is sharded
    names = []
    for unit in plan.execution_order():
        if unit.reshard_after_forward is not False:
            names.append(unit.name)

    def with_kept(count: int) -> ShardingPlan:
        return changed(plan, names[len(names) - count :], reshard_after_forward=False)

    def exceeds(count: int) -> bool:
        return not fits(with_kept(count))

    # the first count for which it is True is one more than may stay
    count = bisect_left(range(1, len(names) + 1), True, key=exceeds)
    what = f"{count} of {len(names)} units kept unsharded" if count else ""
    return what, with_kept(count)
