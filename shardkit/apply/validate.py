"""Whether a plan, a model and a device fit each other: what can be refused before the model is
changed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from shardkit._torch import SHARDS_INTEGERS
from shardkit.apply.param_attrs import cannot_carry
from shardkit.errors import PlanError, listing, refuse
from shardkit.plan import ParamSpec, ShardingPlan
from shardkit.planning.build import method_problems
from shardkit.planning.tree import ModelTree, assign, tie_problem


def check_plan(
    model: nn.Module, plan: ShardingPlan, mesh: DeviceMesh | None, apart: Collection[str] = ()
) -> None:
    """Raise one PlanError that lists why ``plan`` cannot be applied to ``model``; local.

    ``apart`` are FQNs of modules that are sharded already on purpose, as FSDP1 nested its wrappers,
    and whose parameters the plan ignores.
    """
    if not isinstance(plan, ShardingPlan):
        raise PlanError(
            f"plan must be a ShardingPlan, got {type(plan).__name__}. Make one with plan_model, or "
            "read one with ShardingPlan.from_dict."
        )
    tree = ModelTree(model)
    check_unsharded(tree, mesh, apart)
    plan.check()
    refuse(_of_another_model(tree, plan))
    refuse([*_wrong_owners(tree, plan), *method_problems(tree, plan)])
    refuse(
        [
            *_split_wrongly(tree, plan),
            *_same_memory(tree, plan),
            *cannot_carry(tree, plan),
            *_pinned_without_accelerator(plan),
            *_unshardable_integers(tree, plan),
        ]
    )


def check_unsharded(tree: ModelTree, mesh: DeviceMesh | None, apart: Collection[str] = ()) -> None:
    """Raise PlanError if the model has no parameters, or is sharded already; local.

    Parameters may be DTensors on other axes than those of ``mesh``.
    """
    problems = []
    if not tree.params:
        problems.append(
            f"model has no parameters to shard, a {type(tree.root.module).__name__}. Pass the "
            "whole model."
        )
    skipped = set()
    for fqn in apart:
        node = tree.find(fqn)
        if node is not None:
            skipped.update(node.subtree())
    sharded = [node.name for node in tree.instances(FSDPModule) if node not in skipped]
    if sharded:
        problems.append(
            f"{listing(sharded, 6)} is sharded already. A model is sharded once, by one plan. To "
            "share it between models, shard their other parts by themselves. For another plan, "
            "build it again."
        )
    # DTensors over later axes of the mesh may be experts, which is known once there is a plan.
    first_axis = set((mesh.mesh_dim_names or ())[:1]) if mesh is not None else set()
    split = []
    for node in tree.nodes if tree.unsplit else []:  # DTensors are among these
        for fqn in node.params if node not in skipped else ():
            param = tree.params[fqn]
            if isinstance(param, DTensor) and first_axis <= _axes(param) and fqn not in split:
                split.append(fqn)
    if split:
        problems.append(
            f"{listing(split, 6)} is a DTensor already. Parameters may be DTensors only on other "
            "axes of the mesh, as after tensor parallelism. Pass the data-parallel sub-mesh of "
            'the mesh they are on, as in mesh=world_mesh["dp"], with the axis of experts if a '
            "rule shards them."
        )
    refuse(problems)


def _of_another_model(tree: ModelTree, plan: ShardingPlan) -> Iterator[str]:
    rule = "A plan is for one model. Make the plan from this model with plan_model."
    for owner, fqns in (
        ("plan", tree.specs.keys() - plan.specs.keys()),
        ("model", plan.specs.keys() - tree.specs.keys()),
    ):
        if fqns:
            names = listing(sorted(fqns))
            yield f"plan is for another model: the {owner} has no parameter {names}. {rule}"
    for fqn, now in tree.specs.items():
        was = plan.specs.get(fqn, now)
        now = now._replace(tensor_parallel=was.tensor_parallel)  # plans of experts say so before
        for name in ParamSpec.__annotations__:
            here, there = getattr(now, name), getattr(was, name)
            if here != there:
                yield f"{fqn} has {name} {here} in the model and {name} {there} in the plan. {rule}"
    named = [fqn for unit in plan.units for fqn in unit.modules]
    missing = [fqn for fqn in (*named, *dict(plan.tiles)) if tree.find(fqn) is None]
    if missing:
        names = listing(missing)
        yield f"plan is for another model: the model has no module {names}. {rule}"


def _wrong_owners(tree: ModelTree, plan: ShardingPlan) -> Iterator[str]:
    units = [[tree.node(fqn) for fqn in unit.modules] for unit in plan.units]
    owned, in_several = assign(tree, units, set(plan.unsharded))
    if in_several:
        yield from (tie_problem(tree, fqn) for fqn in in_several)
        return
    for unit, params in zip(plan.units, owned, strict=True):
        if set(params) != set(unit.params):
            mine, given = listing(params, 6) or "nothing", listing(unit.params, 6) or "nothing"
            yield (
                f"{unit.name} would own {mine}, not {given}. Each parameter belongs to the "
                "innermost unit around it. Make the plan with plan_model."
            )


def _pinned_without_accelerator(plan: ShardingPlan) -> Iterator[str]:
    if torch.accelerator.is_available():
        return
    pinned = [u.name for u in plan.units if getattr(u.offload_policy, "pin_memory", False)]
    if pinned:
        yield (
            f"offload_policy is CPUOffloadPolicy(pin_memory=True) for {listing(pinned, 6)}, and "
            "there is no accelerator. Use CPUOffloadPolicy(pin_memory=False)."
        )


def _unshardable_integers(tree: ModelTree, plan: ShardingPlan) -> Iterator[str]:
    if SHARDS_INTEGERS:
        return
    found = []
    for unit in plan.units:
        for fqn in unit.params:
            param = tree.params[fqn]
            if not param.is_floating_point() and not param.is_complex():
                found.append(fqn)
    if found:
        yield (
            f"{listing(found, 6)} is of {tree.params[found[0]].dtype}, which torch "
            f"{torch.__version__} cannot shard. Upgrade to torch 2.13, or pass it in "
            "ignored_params."
        )


def _same_memory(tree: ModelTree, plan: ShardingPlan) -> Iterator[str]:
    """Two parameters in the same memory train as one; sharding copies each: they would diverge."""
    first_at: dict[int, str] = {}
    for fqn, param in tree.params.items():
        # Tensor subclasses, such as DTensors and quantized weights, have no memory of their own.
        if type(param) is not nn.Parameter or not param.numel() or param.is_meta:
            continue
        if fqn in plan.ignored:
            continue
        first = first_at.setdefault(param.data_ptr(), fqn)
        if first != fqn:
            yield (
                f"{fqn} is in the same memory as {first}, but is another Parameter. Sharding gives "
                "each parameter memory of its own, so their values would diverge. Tie them by "
                "assigning one Parameter to both modules."
            )


def _split_wrongly(tree: ModelTree, plan: ShardingPlan) -> Iterator[str]:
    """A parameter must be split over the axes that its unit leaves out, as experts,
    and no others.
    """
    for unit in plan.units:
        splits = plan.mesh.splits(unit.mesh)
        wanted = {axis for axis, size in splits.items() if size > 1}
        others = set(plan.mesh.axis_names) - splits.keys()
        whole, already = [], []
        for fqn in unit.params:
            if not wanted <= _axes(tree.params[fqn], only_sharded=True):
                whole.append(fqn)
            if others & _axes(tree.params[fqn]):
                already.append(fqn)
        if whole:
            yield (
                f"{listing(whole, 6)} is not split over {listing(sorted(wanted))}, in the unit "
                f"{unit.name} on {plan.mesh_of(unit)}. Gradients are not reduced over the axes "
                "that a unit leaves out, so each rank must hold another part. Split it first, as "
                f"by distribute_tensor(param, mesh[{min(wanted)!r}], [Shard(0)]), or leave it to a "
                "unit without mesh=."
            )
        if already:
            axes = listing(sorted(others & _axes(tree.params[already[0]])))
            module = already[0].rpartition(".")[0]
            yield (
                f"{listing(already, 6)} is a DTensor over {axes} already. Parameters may be "
                "DTensors only on axes that their unit is not sharded on. Shard it on the axis "
                f'before, as by by_name("{module}", mesh="efsdp").'
            )


def _axes(param: nn.Parameter, only_sharded: bool = False) -> set[str]:
    """The names of the axes that a DTensor lies on, or is split over; none of a plain parameter."""
    found = set()
    if isinstance(param, DTensor):
        names = param.device_mesh.mesh_dim_names or ()
        for axis, placement in zip(names, param.placements, strict=False):
            if placement.is_shard() or not only_sharded:
                found.add(axis)
    return found
