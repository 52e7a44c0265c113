"""Whether a plan, a model and a mesh fit each other: everything that can be refused before anything is changed."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.modules.lazy import LazyModuleMixin

from shardkit._torch import SHARDS_INTEGERS, has_own_dispatch
from shardkit.apply.carry import cannot_carry
from shardkit.errors import PlanError, listing, message, refuse
from shardkit.plan import ShardingPlan
from shardkit.planning.build import method_problems
from shardkit.planning.ownership import assign, split_problem
from shardkit.planning.rules import has_forward
from shardkit.planning.tree import ModelTree


def check_is_plan(plan: object) -> None:
    """Raises PlanError when ``plan`` is something else; local."""
    if not isinstance(plan, ShardingPlan):
        raise PlanError(
            message(
                "plan",
                f"a {type(plan).__name__}",
                "It is a ShardingPlan",
                "Make it with plan_model, or read it with ShardingPlan.from_dict",
            )
        )


def check_unsharded(tree: ModelTree, mesh: DeviceMesh | None, apart: Collection[str] = ()) -> None:
    """Raises PlanError when the model has no parameters, or is sharded already; local.

    Args:
        tree: the model.
        mesh: the data-parallel mesh; parameters that are DTensors on its other axes are tensor-parallel.
        apart: FQNs of modules whose parts are sharded on purpose, as FSDP1 nested its wrappers.
    """
    inside = {below for fqn in apart for below in tree.subtree(tree.places[fqn])}
    problems = [*_no_params(tree), *_uninitialised(tree), *_sharded_modules(tree, inside)]
    problems += _sharded_params(tree, mesh, inside)
    refuse(problems)


def check_made_for(tree: ModelTree, plan: ShardingPlan) -> None:
    """Raises one PlanError that lists why ``plan`` does not hold, or is of another model; local.

    A plan that was decided from ``tree`` needs no such check.
    """
    plan.check()
    refuse([*_other_params(tree, plan), *_other_modules(tree, plan)])
    refuse([*_other_owners(tree, plan), *method_problems(tree, plan)])


def check_fit(tree: ModelTree, plan: ShardingPlan, device: str) -> None:
    """Raises one PlanError that lists why ``plan``, made for the model, cannot be applied on ``device``; local."""
    refuse([*(problem for rule in _FITS for problem in rule(tree, plan)), *_devices(tree, plan, device)])


def _no_params(tree: ModelTree) -> Iterator[str]:
    if not tree.params:
        name = type(tree.modules[0]).__name__
        yield message("model", f"{name} has no parameters", "There must be something to shard", "Pass the whole model")


def _uninitialised(tree: ModelTree) -> Iterator[str]:
    kinds: set[type] = {kind for kind in set(map(type, tree.modules)) if issubclass(kind, LazyModuleMixin)}
    places: Iterable[tuple[str, Any]] = zip(tree.fqns, tree.modules, strict=True) if kinds else ()
    lazy = [fqn or "(root)" for fqn, module in places if type(module) in kinds and module.has_uninitialized_params()]
    if lazy:
        problem = "a lazy module that is not initialized"
        rule = "A parameter's shape must be known to shard it"
        fix = "Run one forward of the model first, on every rank with the same seed"
        yield message(listing(lazy, 6), problem, rule, fix)


def _containers(tree: ModelTree, plan: ShardingPlan) -> Iterator[str]:
    units = {fqn: tree.modules[tree.places[fqn]] for unit in plan.units for fqn in unit.modules}
    found = {fqn: m for fqn, m in units.items() if isinstance(m, (nn.ModuleList, nn.ModuleDict)) and not has_forward(m)}
    if found:
        problem = f"a {type(next(iter(found.values()))).__name__}, which has no forward"
        rule = "A unit is gathered when its module is called, and this one never is"
        fix = "Shard each of its modules by itself, or give it a class with a forward"
        yield message(listing(fqn or "(root)" for fqn in found), problem, rule, fix)


def _sharded_modules(tree: ModelTree, apart: Collection[int]) -> Iterator[str]:
    # Kinds first: a model has many modules and few classes.
    kinds: set[type] = {kind for kind in set(map(type, tree.modules)) if issubclass(kind, FSDPModule)}
    if kinds:
        places = enumerate(zip(tree.fqns, tree.modules, strict=True))
        sharded = [fqn or "(root)" for at, (fqn, module) in places if type(module) in kinds and at not in apart]
        if sharded:
            problem = "sharded already"
            rule = "A model is sharded once, by one plan"
            fix = "Shard it in one place only; to change the plan, build the model again"
            yield message(listing(sharded, 6), problem, rule, fix)


def _sharded_params(tree: ModelTree, mesh: DeviceMesh | None, apart: Collection[int]) -> Iterator[str]:
    names = set(mesh.mesh_dim_names or ()) if mesh is not None else set()
    skipped = {id(param) for entry in apart for param in tree.owned[entry]}
    found = [
        fqn
        for fqn, param in tree.params.items()
        if isinstance(param, DTensor)
        and id(param) not in skipped
        and (not names or names & set(param.device_mesh.mesh_dim_names or ()))
    ]
    if found:
        problem = "a DTensor already"
        rule = "Parameters may be DTensors only on other axes of the mesh, as tensor parallelism leaves them"
        fix = 'Pass the data-parallel sub-mesh of the mesh they are on, as in mesh=world_mesh["dp"]'
        yield message(listing(found, 6), problem, rule, fix)


def _other_params(tree: ModelTree, plan: ShardingPlan) -> Iterator[str]:
    mine = {spec.fqn: spec for spec in tree.specs()}
    rule, fix = "A plan is for one model", "Make the plan from this model with plan_model"
    for title, fqns in (
        ("the plan has no", mine.keys() - plan.specs.keys()),
        ("the model has no", plan.specs.keys() - mine.keys()),
    ):
        if fqns:
            yield message("plan", f"{title} parameter {listing(sorted(fqns))}", rule, fix)
    for fqn in tree.params:
        if fqn in plan.specs and plan.specs[fqn] != mine[fqn]:
            was = ", ".join(f"{name} {value}" for name, value in _changed(plan.specs[fqn], mine[fqn]))
            now = ", ".join(f"{name} {value}" for name, value in _changed(mine[fqn], plan.specs[fqn]))
            yield message(fqn, f"{now} in the model and {was} in the plan", rule, fix)


def _changed(spec: object, other: object) -> list[tuple[str, object]]:
    mine, theirs = spec._asdict(), other._asdict()  # type: ignore[attr-defined]
    return [(name, value) for name, value in mine.items() if theirs[name] != value]


def _other_modules(tree: ModelTree, plan: ShardingPlan) -> Iterator[str]:
    missing = [fqn for unit in plan.units for fqn in unit.modules if fqn not in tree.places]
    if missing:
        problem = f"the model has no module {listing(missing)}"
        rule = "A plan is for one model"
        fix = "Make it from this model"
        yield message("plan", problem, rule, fix)
    named: dict[int, str] = {}
    for fqn in (fqn for unit in plan.units for fqn in unit.modules if fqn in tree.places):
        first = named.setdefault(id(tree.modules[tree.places[fqn]]), fqn)
        if first != fqn:
            yield message(fqn, f"is the module {first} by another name", "A module is in one unit", "Leave it out")


def _other_owners(tree: ModelTree, plan: ShardingPlan) -> Iterator[str]:
    units = [[tree.places[fqn] for fqn in unit.modules] for unit in plan.units]
    ownership = assign(tree, units, plan.unsharded)
    yield from (split_problem(tree, fqn) for fqn in ownership.split)
    for unit, params in zip(plan.units, ownership.params, strict=True):
        if not ownership.split and set(params) != set(unit.params):
            problem = f"would own {listing(params, 6) or 'nothing'}, not {listing(unit.params, 6) or 'nothing'}"
            rule = "Each parameter belongs to the innermost unit around it"
            fix = "Make the plan with plan_model"
            yield message(unit.name, problem, rule, fix)


def _devices(tree: ModelTree, plan: ShardingPlan, device: str) -> Iterator[str]:
    elsewhere = [
        fqn
        for fqn, param in tree.params.items()
        if param.device.type not in ("cpu", "meta", device) and fqn not in plan.ignored
    ]
    if elsewhere:
        problem = f"on {tree.params[elsewhere[0]].device}, and the mesh is on {device}"
        rule = "Parameters are on the mesh's device, on the CPU or on meta"
        fix = "Move the model, or pass a mesh on its device"
        yield message(listing(elsewhere, 6), problem, rule, fix)
    pinned = [
        unit.name
        for unit in plan.units
        if isinstance(unit.offload_policy, CPUOffloadPolicy) and unit.offload_policy.pin_memory
    ]
    if pinned and not torch.accelerator.is_available():
        problem = f"CPUOffloadPolicy(pin_memory=True) for {listing(pinned, 6)}, and there is no accelerator"
        rule = "Memory is pinned for copies to an accelerator"
        fix = "Use CPUOffloadPolicy(pin_memory=False)"
        yield message("offload_policy", problem, rule, fix)


def _overlaps(tree: ModelTree, plan: ShardingPlan) -> Iterator[str]:
    """Two parameters over the same memory train as one; sharding copies each, so they would part."""
    by_storage: dict[int, list[tuple[int, int, str]]] = {}
    # Tensor subclasses, as DTensors and quantized weights are, have no memory of their own to look at.
    plain = [fqn for fqn, param in tree.params.items() if type(param) is nn.Parameter and fqn not in plan.ignored]
    storages = [tree.params[fqn].untyped_storage() for fqn in plain]  # kept, so that an id is of one storage only
    for fqn, storage in zip(plain, storages, strict=True):
        by_storage.setdefault(id(storage), []).append((*_extent(tree.params[fqn]), fqn))
    for extents in by_storage.values():
        for (_, end, first), (start, _, second) in itertools.pairwise(sorted(extents)):
            if start < end:
                problem = f"is in the same memory as {first}, but is another Parameter"
                rule = "Sharding gives each parameter memory of its own, so the two would train apart"
                fix = "Tie them by assigning one Parameter to both modules"
                yield message(second, problem, rule, fix)


def _extent(param: torch.Tensor) -> tuple[int, int]:
    """The first byte of a tensor in its storage, and the one past its last."""
    first = int(param.storage_offset())
    last = first + sum((size - 1) * stride for size, stride in zip(param.shape, param.stride(), strict=True))
    return first * param.itemsize, (last + 1) * param.itemsize


def _integers(tree: ModelTree, plan: ShardingPlan) -> Iterator[str]:
    """Quantized weights."""
    owned = (spec for unit in plan.units for spec in plan.specs_of(unit))
    found = [spec.fqn for spec in owned if not (spec.dtype.is_floating_point or spec.dtype.is_complex)]
    if found and not SHARDS_INTEGERS:
        problem = f"of {plan.specs[found[0]].dtype}"
        rule = f"torch {torch.__version__} shards floating-point parameters only"
        fix = f"Upgrade to torch 2.13, or pass ignored_params={found[:6]}"
        yield message(listing(found, 6), problem, rule, fix)


def _unsplittable(tree: ModelTree, plan: ShardingPlan) -> Iterator[str]:
    """Tensor classes of quantization libraries lack operators; tried here as torch's FSDPParam uses them."""
    owned = {fqn: tree.params[fqn] for unit in plan.units for fqn in unit.params}
    special = {fqn: p for fqn, p in owned.items() if has_own_dispatch(type(p)) and not isinstance(p, DTensor)}
    reasons = {(type(p), p.shape, p.dtype): _why_not_split(p, plan.mesh.shard_size) for p in special.values()}
    for kind in dict.fromkeys(key[0] for key, reason in reasons.items() if reason):
        found = [fqn for fqn, p in special.items() if type(p) is kind and reasons[type(p), p.shape, p.dtype]]
        first = special[found[0]]
        problem = f"a {kind.__name__} cannot be split: {reasons[kind, first.shape, first.dtype]}"
        rule = "FSDP2 gives each rank a slice of a parameter"
        fix = "Pass these as ignored_params to keep them whole on every rank, if they are frozen"
        yield message(listing(found, 6), problem, rule, fix)


def _why_not_split(param: nn.Parameter, ranks: int) -> str | None:
    try:
        with torch.no_grad():
            chunks = torch.chunk(param, ranks, dim=0)
            padded = param.new_zeros(chunks[0].size())
            for chunk in (chunks[0], chunks[-1]):
                padded.narrow(0, 0, chunk.size(0)).copy_(chunk)
            padded.view(-1)
    except Exception as error:  # whatever the class raises, sharding would
        return f"{type(error).__name__}: {error}".partition("\n")[0]
    return None


_FITS = (_containers, _overlaps, cannot_carry, _integers, _unsplittable)
