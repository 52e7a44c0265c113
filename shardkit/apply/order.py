"""What needs the order in which units run: explicit prefetch, and units that ranks may skip.

Imported by plans that ask for it.
"""

from __future__ import annotations

import functools
from typing import Any

import torch.nn as nn

from shardkit.plan import ShardingPlan
from shardkit.plan.data import callers, skippable
from shardkit.ranks import Groups, gather_by_rank
from shardkit.runtime.skippable import SkippableUnit, in_order, watch_calls


def prefetch(model: nn.Module, plan: ShardingPlan) -> None:
    """Tell each unit but the root which ones to all-gather ahead of it. Local, in place."""
    modules: list[Any] = []
    for unit in plan.execution_order():
        if unit.modules != ("",):
            modules.append(model.get_submodule(unit.modules[0]))
    for index, module in enumerate(modules):
        ahead = modules[index + 1 : index + 1 + plan.prefetch]
        behind = modules[max(0, index - plan.prefetch) : index]
        module.set_modules_to_forward_prefetch(ahead)
        module.set_modules_to_backward_prefetch(behind[::-1])


def order_forwards(model: nn.Module, plan: ShardingPlan) -> None:
    """Wrap the forwards of units that call units with ``may_skip=True``. Local, in place; before
    they are checkpointed, compiled and sharded.
    """
    for caller in callers(plan):
        module = model.get_submodule(caller.modules[0])
        module.forward = in_order(module)


def let_ranks_skip(model: nn.Module, plan: ShardingPlan, groups: Groups) -> None:
    """Let a rank that skips a unit join its collectives, in a sharded model. Local, in place."""
    inside = skippable(plan)
    exchange = functools.partial(gather_by_rank, groups=groups)
    made = {}
    for unit in plan.units:
        module: Any = model.get_submodule(unit.modules[0])
        is_checkpointed = bool(unit.checkpoint_activations)
        made[unit] = SkippableUnit(
            unit.name, module, unit.may_skip, unit in inside, is_checkpointed, exchange
        )
    for caller, called in callers(plan).items():
        made[caller].units.update({unit.name: made[unit] for unit in called})
    watch_calls([made[caller] for caller in callers(plan)])
