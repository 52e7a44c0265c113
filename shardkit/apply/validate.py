"""Whether a plan, a model and a device fit each other: what can be refused before the model is changed."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from shardkit._torch import SHARDS_INTEGERS
from shardkit.apply.param_attrs import cannot_carry
from shardkit.errors import PlanError, listing, message, refuse
from shardkit.plan import ParamSpec, ShardingPlan
from shardkit.planning.build import method_problems
from shardkit.planning.tree import ModelTree, assign, split_problem


def check_unsharded(tree: ModelTree, mesh: DeviceMesh | None, apart: Collection[str] = ()) -> None:
    """Raise PlanError if the model has no parameters, or is sharded already; local.

    Parameters may be DTensors on other axes than those of ``mesh``. ``apart`` are FQNs of modules that are sharded
    already on purpose, as FSDP1 nested its wrappers.
    """
    problems = []
    if not tree.params:
        problem = f"has no parameters to shard, a {type(tree.modules[0]).__name__}"
        problems.append(message("model", problem, "", "Pass the whole model"))
    inside = {below for fqn in apart for below in tree.subtree(tree.places[fqn])}
    if sharded := [tree.fqns[entry] or "(root)" for entry in tree.instances(FSDPModule) if entry not in inside]:
        fix = "To share it between models, shard their other parts by themselves. For another plan, build it again"
        problems.append(message(listing(sharded, 6), "is sharded already", "A model is sharded once, by one plan", fix))
    # DTensors over later axes of the mesh may be experts, which is known once there is a plan.
    first = set((mesh.mesh_dim_names or ())[:1]) if mesh is not None else set()
    params = {fqn: param for fqn, param in tree.params.items() if fqn in tree.unsplit}
    parallel = {fqn: _axes(param) for fqn, param in params.items() if isinstance(param, DTensor)}
    skipped = {fqn for entry in inside for fqn in tree.owned[entry]}
    if found := [fqn for fqn, axes in parallel.items() if fqn not in skipped and first <= axes]:
        rule = "Parameters may be DTensors only on other axes of the mesh, as after tensor parallelism"
        fix = 'Pass the data-parallel sub-mesh of the mesh they are on, as in mesh=world_mesh["dp"], with the axis of '
        problems.append(message(listing(found, 6), "is a DTensor already", rule, fix + "experts if a rule shards them"))
    refuse(problems)


def check_made_for(tree: ModelTree, plan: ShardingPlan) -> None:
    """Raise one PlanError that lists why ``plan`` is not consistent, or was made for another model; local.

    A plan that was made from ``tree`` needs no such check.
    """
    if not isinstance(plan, ShardingPlan):
        fix = "Make one with plan_model, or read one with ShardingPlan.from_dict"
        raise PlanError(message("plan", f"must be a ShardingPlan, got {type(plan).__name__}", "", fix))
    plan.check()
    refuse(_split(tree, plan))
    refuse(_of_another(tree, plan))
    refuse([*_other_owners(tree, plan), *method_problems(tree, plan)])


def check_fit(tree: ModelTree, plan: ShardingPlan) -> None:
    """Raise one PlanError that lists why ``plan``, made for the model, cannot be applied to it; local."""
    problems = [*_split(tree, plan), *_same_memory(tree, plan)]
    refuse([*problems, *cannot_carry(tree, plan), *_pinned(plan), *_integers(tree, plan)])


_OTHER_MODEL = ("A plan is for one model", "Make the plan from this model with plan_model")


def _of_another(tree: ModelTree, plan: ShardingPlan) -> Iterator[str]:
    mine = tree.specs
    for owner, fqns in (("plan", mine.keys() - plan.specs.keys()), ("model", plan.specs.keys() - mine.keys())):
        if fqns:
            problem = f"is for another model: the {owner} has no parameter {listing(sorted(fqns))}"
            yield message("plan", problem, *_OTHER_MODEL)
    for fqn in tree.params:
        now, was = mine[fqn], plan.specs.get(fqn, mine[fqn])
        if changed := [name for name in ParamSpec.__annotations__ if getattr(now, name) != getattr(was, name)]:
            texts = [", ".join(f"{name} {getattr(spec, name)}" for name in changed) for spec in (now, was)]
            yield message(fqn, f"has {texts[0]} in the model and {texts[1]} in the plan", *_OTHER_MODEL)
    named = [*(fqn for unit in plan.units for fqn in unit.modules), *dict(plan.tiles)]
    if missing := [fqn for fqn in named if fqn not in tree.places]:
        yield message("plan", f"is for another model: the model has no module {listing(missing)}", *_OTHER_MODEL)


def _other_owners(tree: ModelTree, plan: ShardingPlan) -> Iterator[str]:
    units = [[tree.places[fqn] for fqn in unit.modules] for unit in plan.units]
    owned, torn = assign(tree, units, set(plan.unsharded))
    yield from (split_problem(tree, fqn) for fqn in torn)
    for unit, params in zip(plan.units, owned, strict=True):
        if not torn and set(params) != set(unit.params):
            problem = f"would own {listing(params, 6) or 'nothing'}, not {listing(unit.params, 6) or 'nothing'}"
            rule = "Each parameter belongs to the innermost unit around it"
            yield message(unit.name, problem, rule, "Make the plan with plan_model")


def _pinned(plan: ShardingPlan) -> Iterator[str]:
    pinned = [unit.name for unit in plan.units if unit.offloads and getattr(unit.offload_policy, "pin_memory", False)]
    if pinned and not torch.accelerator.is_available():
        problem = f"is CPUOffloadPolicy(pin_memory=True) for {listing(pinned, 6)}, and there is no accelerator"
        yield message("offload_policy", problem, "", "Use CPUOffloadPolicy(pin_memory=False)")


def _integers(tree: ModelTree, plan: ShardingPlan) -> Iterator[str]:
    owned = (fqn for unit in plan.units for fqn in unit.params if fqn in tree.params)
    found = [fqn for fqn in owned if not (tree.params[fqn].is_floating_point() or tree.params[fqn].is_complex())]
    if found and not SHARDS_INTEGERS:
        problem = f"is of {tree.params[found[0]].dtype}, which torch {torch.__version__} cannot shard"
        yield message(listing(found, 6), problem, "", "Upgrade to torch 2.13, or pass it in ignored_params")


def _same_memory(tree: ModelTree, plan: ShardingPlan) -> Iterator[str]:
    """Two parameters in the same memory train as one; sharding copies each, so their values would diverge."""
    starts, ignored = dict[int, str](), set(plan.ignored)
    for fqn, param in tree.params.items():
        # Tensor subclasses, such as DTensors and quantized weights, have no memory of their own to look at.
        has_memory = type(param) is nn.Parameter and param.numel() and not param.is_meta and fqn not in ignored
        first = starts.setdefault(param.data_ptr(), fqn) if has_memory else fqn
        if first != fqn:
            problem = f"is in the same memory as {first}, but is another Parameter"
            rule = "Sharding gives each parameter memory of its own, so their values would diverge"
            yield message(fqn, problem, rule, "Tie them by assigning one Parameter to both modules")


def _split(tree: ModelTree, plan: ShardingPlan) -> Iterator[str]:
    """A parameter must be split over the axes of the mesh that its unit leaves out, as experts are, and no others."""
    for unit in plan.units:
        splits = plan.mesh.splits(unit.mesh)
        params = {fqn: tree.params[fqn] for fqn in unit.params if fqn in tree.params}
        wanted = {axis for axis, size in splits.items() if size > 1}
        if whole := [fqn for fqn, param in params.items() if not wanted <= _axes(param, sharded=True)]:
            problem = f"is not split over {listing(sorted(wanted))}, in the unit {unit.name} on {plan.mesh_of(unit)}"
            rule = "Gradients are not reduced over the axes that a unit leaves out, so each rank must hold another part"
            fix = f"Split it first, as by distribute_tensor(param, mesh[{min(wanted)!r}], [Shard(0)]), or leave it to "
            yield message(listing(whole, 6), problem, rule, fix + "a unit without mesh=")
        others = set(plan.mesh.axis_names) - splits.keys()
        if already := [fqn for fqn, param in params.items() if others & _axes(param)]:
            axes = listing(sorted(others & _axes(tree.params[already[0]])))
            rule = "Parameters may be DTensors only on axes that their unit is not sharded on"
            fix = f'Shard it on the axis before, as by by_name("{already[0].rpartition(".")[0]}", mesh="efsdp")'
            yield message(listing(already, 6), f"is a DTensor over {axes} already", rule, fix)


def _axes(param: nn.Parameter, sharded: bool = False) -> set[str]:
    """Return the names of the axes that a DTensor lies on, or is split over; none of a plain parameter."""
    if not isinstance(param, DTensor):
        return set()
    pairs = zip(param.device_mesh.mesh_dim_names or (), param.placements, strict=False)
    return {axis for axis, placement in pairs if placement.is_shard() or not sharded}
