"""Which units a plan lets ranks skip, and which units call those."""

from __future__ import annotations

from shardkit.plan.data import PlanData
from shardkit.plan.types import ShardUnit, ancestors


def skippable(plan: PlanData) -> set[ShardUnit]:
    """Return the units with ``may_skip=True`` and those inside them."""
    fqns = {fqn for unit in plan.units if unit.may_skip for fqn in unit.modules}
    return {unit for unit in plan.units if fqns.intersection([unit.modules[0], *ancestors(unit.modules[0])])}


def callers(plan: PlanData) -> dict[ShardUnit, list[ShardUnit]]:
    """Return the units that call those, in the order of the plan, each with all units that it calls."""
    inside, found = skippable(plan), {unit: list[ShardUnit]() for unit in plan.units}
    around = {fqn: unit for unit in plan.units for fqn in unit.modules}
    for unit in plan.execution_order() if inside else ():
        outer = next((around[fqn] for fqn in ancestors(unit.modules[0]) if fqn in around), None)
        if outer is not None:
            found[outer].append(unit)
    return {unit: called for unit, called in found.items() if inside.intersection(called)}
