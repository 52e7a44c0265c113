"""Count the collectives of a step, as a plan predicts them."""

from __future__ import annotations

from typing import Literal

from shardkit.plan.data import PlanData
from shardkit.plan.types import Collectives


def collectives(
    plan: PlanData,
    micro_batches: int = 1,
    keep_unsharded: bool | Literal["frozen"] | None = None,
    shard_gradients: bool = False,
) -> Collectives:
    """Return the collectives of a step, as ``ShardingPlan.collectives`` says.

    Source: ``FSDPState`` and ``FSDPParamGroup`` of torch 2.13, tested equal to what
    ``shardkit.testing.comm_counts`` counts.
    """
    counts = Collectives()
    in_backward = _unsharded_in_backward(plan)
    for unit in plan.units:
        if not unit.params:
            continue
        trains, mesh = plan.trains(unit), plan.mesh_of(unit)
        if mesh.shard_size > 1:
            if plan.stays(unit, keep_unsharded):
                counts.all_gathers += 1
            else:
                counts.all_gathers += micro_batches * (2 if unit.name in in_backward else 1)
            if trains:
                counts.reduce_scatters += micro_batches if shard_gradients else 1
        if mesh.replicates and trains:
            counts.all_reduces += 1
    if any(plan.specs[fqn].trainable for fqn in plan.replicated):
        counts.all_reduces += sum(size > 1 for size in plan.mesh.on(None).shape)
    return counts


def _unsharded_in_backward(plan: PlanData) -> set[str]:
    """Names of the units that are resharded after forward and unsharded again in backward.

    Backward does not reach units that come before the first trainable parameter, since what they
    return needs no gradient. Prefetching, always at least one unit ahead, still unshards the last
    of them.
    """
    order = {spec.fqn: place for place, spec in enumerate(plan.params)}
    trained = [order[spec.fqn] for spec in plan.params if spec.trainable]
    if not trained:
        return set()
    units = [unit for unit in plan.execution_order() if unit.params]
    before = [unit for unit in units if max(order[fqn] for fqn in unit.params) < trained[0]]
    skipped = {unit.name for unit in before[: -max(1, plan.prefetch)]}
    return {unit.name for unit in units if unit.reshard_after_forward is not False} - skipped
