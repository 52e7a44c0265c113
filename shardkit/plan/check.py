"""Check a plan by itself, without a model or a process group; one generator per rule."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

import torch

from shardkit.errors import listing, message
from shardkit.plan import skipping
from shardkit.plan.data import PlanData
from shardkit.plan.types import ancestors, is_world_size


def problems(plan: PlanData) -> Iterator[str]:
    """Yield one error message for each thing wrong with ``plan``; none if it can be applied."""
    return (problem for rule in _RULES for problem in rule(plan))


def _functions_in_policies(plan: PlanData) -> Iterator[str]:
    found = [unit.name for unit in plan.units if getattr(unit.mp_policy, "param_dtype_override_fn", None)]  # since 2.15
    if found:
        problem = f"param_dtype_override_fn is set for {listing(found, 6)}"
        rule = "A plan is plain data that ranks compare and JSON stores, and a function is not plain data"
        fix = "Give the modules that keep their dtype a unit with a policy of its own, or set ignored_params"
        yield message("mp_policy", problem, rule, fix)


def _structure(plan: PlanData) -> Iterator[str]:
    roots = [index for index, unit in enumerate(plan.units) if "" in unit.modules]
    if roots != [len(plan.units) - 1] or plan.units[-1].modules != ("",):
        problem = (
            f"the root is unit {listing(map(str, roots))} of {len(plan.units)}" if roots else "the root is not a unit"
        )
        fix = 'Make ShardUnit(modules=("",), ...) the last unit'
        yield message("units", problem, "The root is sharded last, once and alone", fix)
    if isinstance(plan.prefetch, bool) or not isinstance(plan.prefetch, int) or plan.prefetch < 0:
        yield message("prefetch", f"{plan.prefetch!r}", "It must be a number of units, 0 or more", "Use prefetch=1")


def _children_first(plan: PlanData) -> Iterator[str]:
    rule = "fully_shard is called once per module, children before parents"
    fix = "Put each module in one unit, and inner units before outer ones"
    seen: set[str] = set()
    for unit in plan.units:
        for fqn in unit.modules:
            outer = next((name for name in (*ancestors(fqn), fqn) if name in seen), None)
            if outer is not None:
                problem = "appears in two units" if outer == fqn else f"comes after {outer or '(root)'}, its parent"
                yield message(fqn or "(root)", problem, rule, fix)
        seen.update(unit.modules)


def _disjoint_modules(plan: PlanData) -> Iterator[str]:
    for unit in plan.units:
        for fqn in unit.modules if len(unit.modules) > 1 else ():
            outer = next((name or "(root)" for name in ancestors(fqn) if name in unit.modules), None)
            if outer is not None:
                rule = "No module of a unit may be inside another module of the same unit"
                yield message(unit.name, f"{fqn} is inside {outer}", rule, f"Leave {fqn} out of the unit")


def _every_param_once(plan: PlanData) -> Iterator[str]:
    placed = list(chain(plan.ignored, plan.replicated, *(unit.params for unit in plan.units)))
    if len(placed) == len(plan.specs) and set(placed) == plan.specs.keys():
        return
    rule = "Every parameter of the model belongs to exactly one unit, or is ignored or replicated"
    for fqn in dict.fromkeys((*plan.specs, *placed)):
        where = [unit.name for unit in plan.units if fqn in unit.params]
        where += ["ignored"] * (fqn in plan.ignored) + ["replicated"] * (fqn in plan.replicated)
        if len(where) != 1 or fqn not in plan.specs:
            yield message(fqn, f"is in {listing(where) or 'no unit'}", rule, "Make the plan with plan_model")


def _one_trainable_dtype(plan: PlanData) -> Iterator[str]:
    if len({spec.dtype for spec in plan.params}) < 2:
        return
    for unit in plan.units:
        by_dtype: dict[torch.dtype, list[str]] = {}
        for spec in plan.specs_of(unit):
            if spec.trainable:
                by_dtype.setdefault(spec.dtype, []).append(spec.fqn)
        if len(by_dtype) > 1:
            found = "; ".join(f"{str(dtype)[6:]}: {listing(fqns, 5)}" for dtype, fqns in by_dtype.items())
            problem = f"trains parameters of {len(by_dtype)} dtypes ({found})"
            rule = "The trainable parameters of a unit have one dtype, since their gradients are reduced together"
            fix = "Cast them to one dtype, or give the modules of one dtype a unit of their own"
            yield message(unit.name, problem, rule, fix)


def _something_to_shard(plan: PlanData) -> Iterator[str]:
    rule = "FSDP2 shards parameters over dim 0, so they need at least one dim and one element"
    for unit in plan.units:
        for spec in plan.specs_of(unit):
            if not spec.shards:
                what = "is empty" if spec.shape else "is a scalar"
                fix = "Make the plan with plan_model, which lists it in replicated"
                yield message(spec.fqn, f"{what}, shape {spec.shape}, in {unit.name}", rule, fix)
    if plan.replicated and not any(unit.params for unit in plan.units):
        problem = f"none of its parameters can be sharded: {listing(plan.replicated, 6)}"
        yield message("model", problem, rule, "Train it with DistributedDataParallel")


def _replicated(plan: PlanData) -> Iterator[str]:
    for spec in (plan.specs[fqn] for fqn in plan.replicated if fqn in plan.specs):
        around = (unit for outer in ancestors(spec.fqn) for unit in plan.units if outer in unit.modules)
        computes = next((unit.mp_policy.param_dtype for unit in around), None)
        if spec.tensor_parallel:
            rule = "A tensor-parallel parameter is sharded by FSDP2 too"
            fix = f"Leave it out of the tensor-parallel plan, or pass ignored_params=[{spec.fqn!r}]"
            yield message(spec.fqn, f"is a DTensor of shape {spec.shape}, which cannot be sharded", rule, fix)
        elif not spec.numel and computes not in (None, spec.dtype):
            problem = f"is empty, shape {spec.shape}, and has dtype {spec.dtype} where forward computes in {computes}"
            rule = "Only sharded parameters are cast, and torch does not promote empty tensors as it does scalars"
            yield message(spec.fqn, problem, rule, f"Cast it, which loses nothing, with .to({computes})")


def _world_size_to_reshard_to(plan: PlanData) -> Iterator[str]:
    for unit in plan.units:
        mesh = plan.mesh_of(unit)
        size = mesh.shard_size
        fits = [n for n in range(1, size + 1) if size % n == 0]
        value = unit.reshard_after_forward
        given = f"reshard_after_forward={value!r}"
        if not isinstance(value, int):
            yield message(unit.name, given, "It must be True, False or a number of ranks", "Use True")
        elif is_world_size(value) and value not in fits:
            problem = f"{given} does not divide the {size} ranks of axis {mesh.axis_names[-1]}"
            rule = "As an int it is the number of ranks to reshard to, a divisor of the shard axis"
            yield message(unit.name, problem, rule, f"Use {listing(map(str, fits))}, True or False")
        elif is_world_size(value) and any(spec.tensor_parallel for spec in plan.specs_of(unit)):
            rule = "torch cannot reshard DTensor parameters to a smaller world"
            yield message(unit.name, f"{given} with tensor-parallel parameters", rule, "Use True or False")


def _shard_dims(plan: PlanData) -> Iterator[str]:
    for unit in plan.units:
        size, axis = plan.mesh_of(unit).shard_size, plan.mesh_of(unit).axis_names[-1]
        for fqn, dim in unit.shard_dims:
            spec = plan.specs.get(fqn) if fqn in unit.params else None
            shape = spec.shape if spec else ()
            problem, rule = "", "FSDP2 shards on dims other than 0 in equal parts only"
            fix = f"Use one of its other dims, or {fqn!r} on dim 0, which may be uneven"
            if spec is None:
                problem = f"sharded on dim {dim!r} in {unit.name}, which does not own it"
                rule, fix = "shard_dims names parameters of the unit", f"Remove it from shard_dims of {unit.name}"
            elif type(dim) is not int or not 0 <= dim < len(shape):
                problem, rule = f"sharded on dim {dim!r}, shape {shape}", "A dim counts from 0"
            elif shape[dim] % size:
                problem = (
                    f"sharded on dim {dim}, whose size {shape[dim]} is not a multiple of the {size} ranks of {axis}"
                )
            elif is_world_size(unit.reshard_after_forward):
                problem = f"sharded on dim {dim}, with reshard_after_forward={unit.reshard_after_forward}"
                rule = "torch reshards to fewer ranks on dim 0 only"
                fix = f"Use True or False, or dim 0, for {unit.name}"
            if problem:
                yield message(fqn, problem, rule, fix)


def tile_problems(plan: PlanData) -> dict[str, str]:
    """Return an error for each module, by FQN, that cannot compute in tiles as the plan says."""
    found: dict[str, str] = {}
    units = {fqn: unit for unit in plan.units for fqn in unit.modules} if plan.tiles else {}
    inner = {outer: name for name in (*units, *dict(plan.tiles)) for outer in ancestors(name)}
    for fqn, number in plan.tiles:
        compiled = next((name for name in (fqn, *ancestors(fqn)) if name in units and units[name].compile), None)
        problem = rule = ""
        if type(number) is not int or number < 2:
            problem, rule, fix = f"tiles={number!r}", "It must be a number of tiles, at least 2", "Use tiles=4"
        elif fqn in inner:
            problem = f"has tiles={number}, and {inner[fqn]} inside, a unit or in tiles too"
            rule, fix = "A unit inside would be gathered for each tile", "Select the innermost of them with tiles="
        elif compiled is not None:
            problem = f"has tiles={number}, and {compiled or '(root)'} is compiled"
            rule, fix = "Tiles are computed eagerly", "Pass compile=False for that unit, or leave out tiles="
        if problem:
            found[fqn] = message(fqn or "(root)", problem, rule, fix)
    return found


_RULES = (
    _functions_in_policies,
    _structure,
    _children_first,
    _disjoint_modules,
    _every_param_once,
    _one_trainable_dtype,
    _something_to_shard,
    _replicated,
    _world_size_to_reshard_to,
    _shard_dims,
    skipping.problems,
    lambda plan: iter(tile_problems(plan).values()),
)
