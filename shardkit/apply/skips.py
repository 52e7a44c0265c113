"""From the plan's units with ``may_skip=True`` to what makes up for their skipped calls."""

from __future__ import annotations

from torch import nn

from shardkit.plan import ShardingPlan
from shardkit.plan.skipping import callers, calls, skippable
from shardkit.ranks import Groups, gather_by_rank
from shardkit.sharded.skippable import SkippableUnit, watch_calls


def watch_skipped_calls(model: nn.Module, plan: ShardingPlan, groups: Groups) -> None:
    """Let ranks skip the units that ``plan`` says; ``model`` is sharded by it. Local, in place."""
    inner, inside = calls(plan), skippable(plan)
    made = {
        unit: SkippableUnit(
            unit.name,
            model.get_submodule(unit.modules[0]),  # type: ignore[arg-type]  # fully_shard has changed its class
            unit.may_skip,
            unit.checkpoint_activations,
            [],
            lambda value: gather_by_rank(value, groups),
        )
        for unit in plan.units
    }
    for unit in callers(plan):
        made[unit].calls.extend(made[each] for each in inner[unit])
    watch_calls([made[unit] for unit in callers(plan)], {made[unit] for unit in inside})
