"""Plans with ``may_skip=True``: the only ones that import this file."""

from __future__ import annotations

import functools

from torch import nn

from shardkit.plan import ShardingPlan
from shardkit.plan.data import callers, skippable
from shardkit.ranks import Groups, gather_by_rank
from shardkit.runtime.skippable import SkippableUnit, in_order, watch_calls


def wrap_callers(model: nn.Module, plan: ShardingPlan) -> None:
    """Wrap the forwards of units that call units with ``may_skip``, before they are checkpointed or compiled. Local."""
    for module in [model.get_submodule(unit.modules[0]) for unit in callers(plan)]:
        module.forward = in_order(module)


def let_ranks_skip(model: nn.Module, plan: ShardingPlan, groups: Groups) -> None:
    """Let ranks join the collectives of units that they do not call. Local, in place, after sharding."""
    inner, inside = callers(plan), skippable(plan)
    exchange = functools.partial(gather_by_rank, groups=groups)
    made = {
        unit: SkippableUnit(
            unit.name,
            model.get_submodule(unit.modules[0]),  # type: ignore[arg-type]  # fully_shard has changed its class
            unit.may_skip,
            unit in inside,
            unit.checkpoint_activations,
            exchange,
        )
        for unit in plan.units
    }
    for unit, called in inner.items():
        made[unit].calls.extend(made[each] for each in called)
    watch_calls([made[unit] for unit in inner])
