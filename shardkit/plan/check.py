"""Check a plan by itself, without a model or a process group; one generator per rule."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import torch

from shardkit.errors import listing, message
from shardkit.plan.data import PlanData, callers
from shardkit.plan.types import ShardUnit, ancestors, is_world_size


def problems(plan: PlanData) -> Iterator[str]:
    """Yield one error message for each thing wrong with ``plan``; none if it can be applied."""
    return (problem for rule in _RULES for problem in rule(plan))


def _whole_plan(plan: PlanData) -> Iterator[str]:
    if plan.prefetch < 0:
        yield message("prefetch", f"must be a number of units, 0 or more, got {plan.prefetch!r}", "", "Use prefetch=1")
    if plan.replicated and not any(unit.params for unit in plan.units):
        names = listing(plan.replicated, 6)
        problem = f"has no parameter that can be sharded: {names} are scalars, empty or replicated by a rule"
        yield message("model", problem, "", "Train it with DistributedDataParallel")


def children_first(plan: PlanData) -> Iterator[str]:
    """Yield an error for each module that would be sharded twice, or after a module around it."""
    if not plan.units or plan.units[-1].modules != ("",):
        fix = 'Make ShardUnit(modules=("",), ...) the last unit'
        yield message("units", "must end with the root, which is sharded last and alone", "", fix)
    rule = "fully_shard is called once for each module, children before parents"
    seen: set[str] = set()
    for unit in plan.units:
        for fqn in unit.modules:
            if around := seen.intersection([fqn, *ancestors(fqn)]):
                outer = max(around, key=len)
                problem = "appears in two units" if outer == fqn else f"comes after {outer or '(root)'}, its parent"
                yield message(fqn or "(root)", problem, rule, "Put inner units before outer ones")
        seen.update(unit.modules)


def _one_trainable_dtype(plan: PlanData) -> Iterator[str]:
    if len({spec.dtype for spec in plan.params if spec.trainable}) < 2:
        return
    for unit in plan.units:
        by_dtype: dict[torch.dtype, list[str]] = defaultdict(list)
        for spec in plan.specs_of(unit):
            if spec.trainable:
                by_dtype[spec.dtype].append(spec.fqn)
        if len(by_dtype) > 1:
            found = "; ".join(f"{str(dtype)[6:]}: {listing(fqns, 5)}" for dtype, fqns in by_dtype.items())
            problem = f"trains parameters of {len(by_dtype)} dtypes ({found})"
            rule = "The trainable parameters of a unit have one dtype, since their gradients are reduced together"
            fix = "Cast them to one dtype, or give the modules of one dtype a unit of their own"
            yield message(unit.name, problem, rule, fix)


def _world_size_to_reshard_to(plan: PlanData) -> Iterator[str]:
    for unit in plan.units:
        value = unit.reshard_after_forward
        if is_world_size(value):
            ranks, axis = plan.mesh_of(unit).shard_size, plan.mesh_of(unit).axis_names[-1]
            fits = [number for number in range(1, ranks + 1) if ranks % number == 0]
            if value not in fits:
                rule = f"As an int it must divide the {ranks} ranks of axis {axis}"
                fix = f"Use {listing(map(str, fits))}, True or False"
                yield message(unit.name, f"has reshard_after_forward={value}", rule, fix)


def _shard_dims(plan: PlanData) -> Iterator[str]:
    for unit in plan.units:
        for fqn, dim in unit.shard_dims:
            ranks, axis = plan.mesh_of(unit).shard_size, plan.mesh_of(unit).axis_names[-1]
            size = plan.specs[fqn].shape[dim] if fqn in plan.specs else 0
            if size % ranks:
                problem = f"is sharded on dim {dim}, whose size {size} the {ranks} ranks of {axis} do not divide"
                rule = "FSDP2 shards on dims other than 0 in equal parts only"
            elif is_world_size(unit.reshard_after_forward):
                problem = f"is sharded on dim {dim}, with reshard_after_forward={unit.reshard_after_forward}"
                rule = "torch reshards to fewer ranks on dim 0 only"
            else:
                continue
            yield message(fqn, problem, rule, f"Use another dim, or dim 0, for {fqn}")


def _may_skip(plan: PlanData) -> Iterator[str]:
    for unit in plan.units:
        if unit.may_skip and (len(unit.modules) > 1 or unit.modules == ("",)):
            fix = "Make the skipped module a unit of its own: by_name(..., may_skip=True)"
            yield message(unit.name, "has may_skip=True, which is for one module that another unit calls", "", fix)
    for unit in callers(plan):
        if unit.compile or len(unit.modules) > 1:
            given = "is compiled" if unit.compile else f"is a unit of {len(unit.modules)} modules"
            problem = f"{given}, and calls a unit with may_skip=True, or is inside of one and calls units"
            rule = "Skipped calls are replaced in the forward of a module that is not compiled and alone in its unit"
            fix = "Pass compile=False for this unit" if unit.compile else "Leave it out of group()"
            yield message(unit.name, problem, rule, fix)


def with_units_inside(plan: PlanData) -> dict[ShardUnit, str]:
    """Return the units with another unit inside of what checkpointing applies to, and its name."""
    inner = {outer: unit.name for unit in plan.units for fqn in unit.modules for outer in ancestors(fqn)}
    reached = {unit: unit.blocks or (unit.modules if unit.checkpoint_activations else ()) for unit in plan.units}
    return {unit: inner[fqn] for unit, fqns in reached.items() for fqn in fqns if fqn in inner}


def _policies(plan: PlanData) -> Iterator[str]:
    chosen = [unit for unit in plan.units if isinstance(unit.checkpoint_activations, str)]
    inner = with_units_inside(plan) if chosen else {}
    for unit in chosen:
        if unit in inner:
            problem = f"has checkpoint_activations={unit.checkpoint_activations!r}, and {inner[unit]} inside is a unit"
            rule = "A policy would choose among the operations of its all-gather too"
            yield message(unit.name, problem, rule, "Pass checkpoint_activations=True for it")


def _tiles(plan: PlanData) -> Iterator[str]:
    units = {fqn: unit for unit in plan.units for fqn in unit.modules} if plan.tiles else {}
    inner = {outer: name for name in (*units, *dict(plan.tiles)) for outer in ancestors(name)}
    for fqn, number in plan.tiles:
        compiled = next((name for name in (fqn, *ancestors(fqn)) if name in units and units[name].compile), None)
        problem = f"has tiles={number!r}"
        if type(number) is not int or number < 2:
            rule, fix = "It must be a number of tiles, at least 2", "Use tiles=4"
        elif fqn in inner:
            problem += f", and {inner[fqn]} inside, a unit or in tiles too"
            rule, fix = "A unit inside would be gathered for each tile", "Select the innermost of them with tiles="
        elif compiled is not None:
            problem += f", and {compiled or '(root)'} is compiled"
            rule, fix = "Tiles are computed eagerly", "Pass compile=False for that unit, or leave out tiles="
        else:
            continue
        yield message(fqn or "(root)", problem, rule, fix)


_RULES = (
    _whole_plan,
    children_first,
    _one_trainable_dtype,
    _world_size_to_reshard_to,
    _shard_dims,
    _may_skip,
    _policies,
    _tiles,
)
