"""Whether a plan, a model and a device fit each other: everything that can be refused before the model is changed."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator
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
from shardkit.planning.rules import has_forward
from shardkit.planning.tree import ModelTree, assign, split_problem


def check_is_plan(plan: object) -> None:
    """Raise PlanError unless ``plan`` is a ShardingPlan; local."""
    if not isinstance(plan, ShardingPlan):
        fix = "Make one with plan_model, or read one with ShardingPlan.from_dict"
        raise PlanError(message("plan", f"is a {type(plan).__name__}", "It must be a ShardingPlan", fix))


def check_unsharded(tree: ModelTree, mesh: DeviceMesh | None, apart: Collection[str] = ()) -> None:
    """Raise PlanError if the model has no parameters, or is sharded already; local.

    Args:
        tree: the model.
        mesh: the data-parallel mesh; parameters that are DTensors on its other axes are tensor-parallel.
        apart: FQNs of modules that are sharded already on purpose, as FSDP1 nested its wrappers.
    """
    inside = {below for fqn in apart for below in tree.subtree(tree.places[fqn])}
    refuse([*_no_params(tree), *_sharded_modules(tree, inside), *_sharded_params(tree, mesh, inside)])


def check_made_for(tree: ModelTree, plan: ShardingPlan) -> None:
    """Raise one PlanError that lists why ``plan`` is not consistent, or was made for another model; local.

    A plan that was made from ``tree`` needs no such check.
    """
    plan.check()
    refuse(_split(tree, plan))
    refuse([*_other_params(tree, plan), *_other_modules(tree, plan)])
    refuse([*_other_owners(tree, plan), *method_problems(tree, plan)])


def check_fit(tree: ModelTree, plan: ShardingPlan, device: str) -> None:
    """Raise one PlanError that lists why ``plan``, made for the model, cannot be applied on ``device``; local."""
    refuse([*(problem for rule in _FITS for problem in rule(tree, plan)), *_devices(tree, plan, device)])


def _no_params(tree: ModelTree) -> Iterator[str]:
    if not tree.params:
        problem = f"{type(tree.modules[0]).__name__} has no parameters"
        yield message("model", problem, "The model must have parameters to shard", "Pass the whole model")
    lazy = [
        fqn or "(root)"
        for fqn, module in _of_class(tree, LazyModuleMixin)
        if module.has_uninitialized_params()  # type: ignore[operator]
    ]
    if lazy:
        problem = "is a lazy module that is not initialized"
        rule = "A parameter's shape must be known to shard it"
        fix = "Run one forward of the model first, on every rank with the same seed"
        yield message(listing(lazy, 6), problem, rule, fix)


def _of_class(tree: ModelTree, base: type) -> Iterator[tuple[str, nn.Module]]:
    """The modules of a class by FQN. Classes are checked first: a model has many modules and few classes."""
    kinds: set[type] = {kind for kind in set(map(type, tree.modules)) if issubclass(kind, base)}
    if kinds:
        yield from (pair for pair in zip(tree.fqns, tree.modules, strict=True) if type(pair[1]) in kinds)


def _containers(tree: ModelTree, plan: ShardingPlan) -> Iterator[str]:
    units = {fqn: tree.modules[tree.places[fqn]] for unit in plan.units for fqn in unit.modules}
    found = {fqn: m for fqn, m in units.items() if isinstance(m, (nn.ModuleList, nn.ModuleDict)) and not has_forward(m)}
    if found:
        problem = f"is a {type(next(iter(found.values()))).__name__}, which has no forward"
        rule = "A unit is gathered when its module is called, and this module is never called"
        fix = "Shard each of its modules by itself, or give it a class with a forward"
        yield message(listing(fqn or "(root)" for fqn in found), problem, rule, fix)


def _sharded_modules(tree: ModelTree, apart: Collection[int]) -> Iterator[str]:
    sharded = [fqn or "(root)" for fqn, _ in _of_class(tree, FSDPModule) if tree.places[fqn] not in apart]
    if sharded:
        rule = "A model is sharded once, by one plan"
        fix = "Shard it in one place only; to change the plan, build the model again"
        yield message(listing(sharded, 6), "is sharded already", rule, fix)


def _sharded_params(tree: ModelTree, mesh: DeviceMesh | None, apart: Collection[int]) -> Iterator[str]:
    # DTensors over later axes of the mesh may be experts, which is known once there is a plan.
    first = (mesh.mesh_dim_names or ())[:1] if mesh is not None else ()
    skipped = {fqn for entry in apart for fqn in tree.owned[entry]}
    found = [
        fqn
        for fqn, param in tree.params.items()
        if isinstance(param, DTensor) and fqn not in skipped and (not first or first[0] in _axes(param))
    ]
    if found:
        problem = "is a DTensor already"
        rule = "Parameters may be DTensors only on other axes of the mesh, as after tensor parallelism"
        fix = 'Pass the data-parallel sub-mesh of the mesh they are on, as in mesh=world_mesh["dp"], with the axis of '
        fix += "experts if a rule shards them"
        yield message(listing(found, 6), problem, rule, fix)


_OTHER_MODEL = ("A plan is for one model", "Make the plan from this model with plan_model")


def _other_params(tree: ModelTree, plan: ShardingPlan) -> Iterator[str]:
    mine = {spec.fqn: spec for spec in tree.specs()}
    for owner, fqns in (("plan", mine.keys() - plan.specs.keys()), ("model", plan.specs.keys() - mine.keys())):
        if fqns:
            yield message("plan", f"the {owner} has no parameter {listing(sorted(fqns))}", *_OTHER_MODEL)
    for fqn in tree.params:
        now, was = mine[fqn]._asdict(), plan.specs.get(fqn, mine[fqn])._asdict()
        changed = [name for name in now if now[name] != was[name]]
        if changed:
            texts = [", ".join(f"{name} {spec[name]}" for name in changed) for spec in (now, was)]
            yield message(fqn, f"{texts[0]} in the model and {texts[1]} in the plan", *_OTHER_MODEL)


def _other_modules(tree: ModelTree, plan: ShardingPlan) -> Iterator[str]:
    missing = [fqn for unit in plan.units for fqn in unit.modules if fqn not in tree.places]
    missing += [fqn for fqn, _ in plan.tiles if fqn not in tree.places]
    if missing:
        yield message("plan", f"the model has no module {listing(missing)}", *_OTHER_MODEL)
    named: dict[int, str] = {}
    for fqn in (fqn for unit in plan.units for fqn in unit.modules if fqn in tree.places):
        first = named.setdefault(id(tree.modules[tree.places[fqn]]), fqn)
        if first != fqn:
            problem = f"is another name of the module {first}"
            yield message(fqn, problem, "A module belongs to one unit", f"Leave {fqn} out of the plan")


def _other_owners(tree: ModelTree, plan: ShardingPlan) -> Iterator[str]:
    units = [[tree.places[fqn] for fqn in unit.modules] for unit in plan.units]
    ownership = assign(tree, units, plan.unsharded)
    yield from (split_problem(tree, fqn) for fqn in ownership.split)
    for unit, params in zip(plan.units, ownership.params, strict=True):
        if not ownership.split and set(params) != set(unit.params):
            problem = f"would own {listing(params, 6) or 'nothing'}, not {listing(unit.params, 6) or 'nothing'}"
            rule = "Each parameter belongs to the innermost unit around it"
            yield message(unit.name, problem, rule, "Make the plan with plan_model")


def _devices(tree: ModelTree, plan: ShardingPlan, device: str) -> Iterator[str]:
    allowed = ("cpu", "meta", device)
    elsewhere = [fqn for fqn, p in tree.params.items() if p.device.type not in allowed and fqn not in plan.ignored]
    if elsewhere:
        problem = f"on {tree.params[elsewhere[0]].device}, and the mesh is on {device}"
        rule = "Parameters must be on the mesh's device, on the CPU or on meta"
        yield message(listing(elsewhere, 6), problem, rule, "Move the model, or pass a mesh on its device")
    policies = {unit.name: unit.offload_policy for unit in plan.units}
    pinned = [name for name, each in policies.items() if isinstance(each, CPUOffloadPolicy) and each.pin_memory]
    if pinned and not torch.accelerator.is_available():
        problem = f"CPUOffloadPolicy(pin_memory=True) for {listing(pinned, 6)}, and there is no accelerator"
        rule = "Memory is pinned for copies to an accelerator"
        yield message("offload_policy", problem, rule, "Use CPUOffloadPolicy(pin_memory=False)")


def _overlaps(tree: ModelTree, plan: ShardingPlan) -> Iterator[str]:
    """Two parameters in the same memory train as one; sharding copies each, so their values would diverge."""
    # Tensor subclasses, such as DTensors and quantized weights, have no memory of their own to look at.
    plain = [fqn for fqn, param in tree.params.items() if type(param) is nn.Parameter and fqn not in plan.ignored]
    storages = [tree.params[fqn].untyped_storage() for fqn in plain]  # kept alive, so that an id is of one storage only
    by_storage: dict[int, list[tuple[int, int, str]]] = {}
    for fqn, storage in zip(plain, storages, strict=True):
        param = tree.params[fqn]
        last = sum((size - 1) * stride for size, stride in zip(param.shape, param.stride(), strict=True))
        start = int(param.storage_offset()) * param.itemsize
        by_storage.setdefault(id(storage), []).append((start, start + (last + 1) * param.itemsize, fqn))
    for extents in by_storage.values():
        for (_, end, first), (start, _, second) in itertools.pairwise(sorted(extents)):
            if start < end:
                problem = f"is in the same memory as {first}, but is another Parameter"
                rule = "Sharding gives each parameter memory of its own, so their values would diverge"
                yield message(second, problem, rule, "Tie them by assigning one Parameter to both modules")


def _integers(tree: ModelTree, plan: ShardingPlan) -> Iterator[str]:
    owned = (spec for unit in plan.units for spec in plan.specs_of(unit))
    found = [spec.fqn for spec in owned if not (spec.dtype.is_floating_point or spec.dtype.is_complex)]
    if found and not SHARDS_INTEGERS:
        problem = f"has the dtype {plan.specs[found[0]].dtype}"  # as a quantized weight
        rule = f"torch {torch.__version__} shards floating-point parameters only"
        fix = f"Upgrade to torch 2.13, or pass ignored_params={found[:6]}"
        yield message(listing(found, 6), problem, rule, fix)


def _unsplittable(tree: ModelTree, plan: ShardingPlan) -> Iterator[str]:
    """Tensor classes of quantization libraries lack operators; tried here as torch's FSDPParam uses them."""
    by_kind: dict[type, list[str]] = {}
    reasons: dict[Any, str | None] = {}
    dims = {fqn: dim for unit in plan.units for fqn, dim in unit.shard_dims}
    for fqn, param in ((fqn, tree.params[fqn]) for unit in plan.units for fqn in unit.params):
        if has_own_dispatch(type(param)) and not isinstance(param, DTensor):
            key = (type(param), param.shape, param.dtype, dims.get(fqn, 0))
            if key not in reasons:
                reasons[key] = _why_not_split(param, plan.mesh.shard_size, dims.get(fqn, 0))
            if reasons[key]:
                by_kind.setdefault(type(param), []).append(fqn)
    for kind, fqns in by_kind.items():
        first = tree.params[fqns[0]]
        why = reasons[kind, first.shape, first.dtype, dims.get(fqns[0], 0)]
        problem = f"a {kind.__name__} cannot be split: {why}"
        rule = "FSDP2 gives each rank a slice of a parameter"
        fix = "Pass these as ignored_params to keep them whole on every rank, if they are frozen"
        yield message(listing(fqns, 6), problem, rule, fix)


def _why_not_split(param: nn.Parameter, ranks: int, dim: int) -> str | None:
    try:
        with torch.no_grad():
            chunks = torch.chunk(param, ranks, dim=dim)
            padded = param.new_zeros(chunks[0].size())
            for chunk in (chunks[0], chunks[-1]):
                padded.narrow(dim, 0, chunk.size(dim)).copy_(chunk)
            padded.view(-1)
    except Exception as error:  # whatever the class raises, sharding would
        return f"{type(error).__name__}: {error}".partition("\n")[0]
    return None


def _local_dims(tree: ModelTree, plan: ShardingPlan) -> Iterator[str]:
    """The plan knows the full shape of a tensor-parallel parameter; FSDP2 splits the local one."""
    pairs = ((plan.mesh_of(unit).shard_size, *pair) for unit in plan.units for pair in unit.shard_dims)
    for ranks, fqn, dim in pairs:
        param = tree.params[fqn]
        if isinstance(param, DTensor) and (size := param.to_local().shape[dim]) % ranks:
            problem = f"sharded on dim {dim}, of size {size} on this rank after tensor parallelism, over {ranks} ranks"
            rule = "FSDP2 shards on dims other than 0 in equal parts only"
            yield message(fqn, problem, rule, "Use another of its dims, or dim 0")


def _split(tree: ModelTree, plan: ShardingPlan) -> Iterator[str]:
    """A parameter must be a DTensor over the axes of the mesh that its unit leaves out, and over no other of them."""
    if not any(spec.tensor_parallel for spec in plan.params) and not any(map(_axes, tree.params.values())):
        return
    for unit in plan.units:
        splits = plan.mesh.splits(unit.mesh)
        params = {fqn: tree.params[fqn] for fqn in unit.params if fqn in tree.params}
        wanted = {axis for axis, size in splits.items() if size > 1}
        if whole := [fqn for fqn, param in params.items() if not wanted <= _axes(param, sharded=True)]:
            problem = f"not split over {listing(sorted(wanted))}, in the unit {unit.name} on {plan.mesh_of(unit)}"
            rule = "Gradients are not reduced over the axes that a unit leaves out, so each rank must hold another part"
            fix = f"Split it first, as by distribute_tensor(param, mesh[{min(wanted)!r}], [Shard(0)]), or leave it to "
            yield message(listing(whole, 6), problem, rule, fix + "a unit without mesh=")
        others = set(plan.mesh.axis_names) - splits.keys()
        if already := [fqn for fqn, param in params.items() if others & _axes(param)]:
            axes = listing(sorted(others & _axes(params[already[0]])))
            rule = "Parameters may be DTensors only on axes that their unit is not sharded on"
            fix = f"Shard experts that are split over {axes} on the axis before it, as by "
            fix += f'by_name("{already[0].rpartition(".")[0]}", mesh="efsdp"), or pass a sub-mesh without {axes}'
            yield message(listing(already, 6), f"is a DTensor over {axes} already", rule, fix)


def _axes(param: nn.Parameter, sharded: bool = False) -> set[str]:
    """Return the names of the axes that a DTensor lies on, or is split over; none of a plain parameter."""
    if not isinstance(param, DTensor):
        return set()
    pairs = zip(param.device_mesh.mesh_dim_names or (), param.placements, strict=False)
    return {axis for axis, placement in pairs if placement.is_shard() or not sharded}


_FITS = (_split, _containers, _overlaps, cannot_carry, _integers, _unsplittable, _local_dims)
