"""Which units a plan lets ranks skip, and which units call those."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from shardkit.errors import message
from shardkit.plan.types import ShardUnit, ancestors

if TYPE_CHECKING:
    from shardkit.plan.plan import ShardingPlan


def inside_of(plan: ShardingPlan) -> dict[ShardUnit, list[ShardUnit]]:
    """Return for each unit the next units below it, in the model's order; nothing if none may be skipped."""
    around = {fqn: unit for unit in plan.units for fqn in unit.modules}
    found: dict[ShardUnit, list[ShardUnit]] = {unit: [] for unit in plan.units}
    for unit in plan.execution_order() if any(unit.may_skip for unit in plan.units) else ():
        outer = next((around[fqn] for fqn in ancestors(unit.modules[0]) if fqn in around), None)
        if outer is not None:
            found[outer].append(unit)
    return found


def skippable(plan: ShardingPlan) -> set[ShardUnit]:
    """Return the units with ``may_skip=True`` and those inside them."""
    inner, found = inside_of(plan), set[ShardUnit]()
    left = [unit for unit in plan.units if unit.may_skip]
    while left:
        found.add(unit := left.pop())
        left += inner[unit]
    return found


def callers(plan: ShardingPlan) -> dict[ShardUnit, list[ShardUnit]]:
    """Return the units that call those, in the order of the plan, with all units that they call."""
    inside = skippable(plan)
    return {unit: inner for unit, inner in inside_of(plan).items() if inside.intersection(inner)}


def problems(plan: ShardingPlan) -> Iterator[str]:
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
            rule = "Skipped calls are made up for in the forward of one module that is not compiled"
            fix = "Pass compile=False for this unit" if unit.compile else "Leave it out of group()"
            yield message(unit.name, problem, rule, fix)
