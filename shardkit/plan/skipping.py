"""Which units a plan lets ranks skip, and which units call those."""

from __future__ import annotations

from collections.abc import Iterator

from shardkit.errors import message
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


def problems(plan: PlanData) -> Iterator[str]:
    """Yield an error for each unit that cannot be skipped, or cannot call one that can."""
    for unit in (unit for unit in plan.units if unit.may_skip):
        if len(unit.modules) > 1 or unit.modules == ("",):
            rule = "A rank skips one module, which another unit calls"
            yield message(
                unit.name, "has may_skip=True", rule, "Make the skipped module a unit: by_name(..., may_skip=True)"
            )
    for unit in callers(plan):
        given = "is compiled" if unit.compile else f"is a unit of {len(unit.modules)} modules"
        if unit.compile or len(unit.modules) > 1:
            problem = f"{given}, and calls a unit with may_skip=True, or is inside of one and calls units"
            rule = "Skipped calls are replaced in the forward of a module that is not compiled and alone in its unit"
            fix = "Pass compile=False for this unit" if unit.compile else "Leave it out of group()"
            yield message(unit.name, problem, rule, fix)
