"""Whether a plan, a model and a mesh fit each other, before the model is changed."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from shardkit._torch import DataParallelMeshDims
from shardkit.apply.param_attrs import cannot_carry
from shardkit.errors import listing, refuse
from shardkit.plan import ShardingPlan
from shardkit.planning.build import method_problems
from shardkit.planning.tree import ModelTree, assign, tie_problem


def check_plan(
    model: nn.Module,
    plan: ShardingPlan,
    mesh: DeviceMesh | None,
    already_sharded: Collection[str] = (),
) -> None:
    """Raise one PlanError that lists why ``plan`` cannot be applied to ``model``; local.

    ``already_sharded`` are FQNs of modules that are sharded on purpose, as FSDP1 nested its
    wrappers, and whose parameters the plan ignores.
    """
    tree = ModelTree(model)
    check_unsharded(tree, mesh, already_sharded)
    plan.check()
    refuse(_of_another_model(tree, plan))
    refuse([*_wrong_owners(tree, plan), *method_problems(tree, plan)])
    refuse([*_split_wrongly(tree, plan), *cannot_carry(tree, plan)])


def check_unsharded(
    tree: ModelTree, mesh: DeviceMesh | None, already_sharded: Collection[str] = ()
) -> None:
    """Raise PlanError if the model has no parameters, or is sharded already; local.

    With a ``mesh`` parameters may be DTensors on other axes of the mesh that it is a part of.
    """
    problems = []
    if not tree.params:
        problems.append(
            f"model has no parameters to shard, a {type(tree.root.module).__name__}. Pass the "
            "whole model."
        )
    inside_allowed = tuple(f"{fqn}." for fqn in already_sharded)
    sharded = []
    for node in tree.nodes:
        if isinstance(node.module, FSDPModule):
            if not f"{node.fqn}.".startswith(inside_allowed):
                sharded.append(node.name)
    if sharded:
        problems.append(
            f"{listing(sharded, 6)} is sharded already. A model is sharded once, by one plan. To "
            "share it between models, shard their other parts by themselves. For another plan, "
            "build it again."
        )
    split = []
    for fqn in tree.ordered(tree.unsplit) if mesh is None else ():
        if isinstance(tree.params[fqn], DTensor) and not fqn.startswith(inside_allowed):
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
    missing = listing(sorted(plan.specs.keys() - tree.specs.keys()))
    if missing:
        yield f"plan is for another model: the model has no parameter {missing}. {rule}"
    added = listing(sorted(tree.specs.keys() - plan.specs.keys()))
    if added:
        yield f"plan is for another model: the plan has no parameter {added}. {rule}"
    for fqn, now in tree.specs.items():
        planned = plan.specs.get(fqn, now)
        # a plan made before the model was split
        now = now._replace(tensor_parallel=planned.tensor_parallel, part=planned.part)
        if now != planned:
            yield f"{fqn} is {now} in the model, and {planned} in the plan. {rule}"
    fqns = [fqn for unit in plan.units for fqn in unit.modules]
    absent = [fqn for fqn in (*fqns, *dict(plan.tiles)) if tree.find(fqn) is None]
    if absent:
        yield f"plan is for another model: the model has no module {listing(absent)}. {rule}"


def _wrong_owners(tree: ModelTree, plan: ShardingPlan) -> Iterator[str]:
    units = []
    for unit in plan.units:
        units.append([tree.node(fqn) for fqn in unit.modules])
    owned, in_several = assign(tree, units, set(plan.not_in_units))
    if in_several:
        yield from (tie_problem(tree, fqn) for fqn in in_several)
        return
    for unit, params in zip(plan.units, owned, strict=True):
        if set(params) != set(unit.params):
            yield (
                f"{unit.name} would own [{listing(params, 6)}], not [{listing(unit.params, 6)}]. "
                "Each parameter belongs to the innermost unit around it. Make the plan with "
                "plan_model."
            )


def _split_wrongly(tree: ModelTree, plan: ShardingPlan) -> Iterator[str]:
    """A parameter must be split over the axes that its unit leaves out, as experts,
    and no others.

    It may lie on the others too, as on the mesh of all ranks, if all of its unit are whole there.
    """
    for unit in plan.units:
        splits = plan.mesh.splits(unit.mesh)
        wanted = {axis for axis, size in splits.items() if size > 1}
        others = set(plan.mesh.axis_names) - splits.keys()
        whole, already, replicated = [], [], []
        for fqn in unit.params:
            axes = axes_of(tree.params[fqn])
            split = axes_of(tree.params[fqn], only_sharded=True)
            if not wanted <= split:
                whole.append(fqn)
            if others & axes:
                already.append(fqn)
            if others <= axes - split:
                replicated.append(fqn)
        if whole:
            yield (
                f"{listing(whole, 6)} is not split over {listing(sorted(wanted))}, in the unit "
                f"{unit.name} on {plan.mesh_of(unit)}. Gradients are not reduced over the axes "
                "that a unit leaves out, so each rank must hold another part. Split it first, as "
                f"by distribute_tensor(param, mesh[{min(wanted)!r}], [Shard(0)]), or leave it to a "
                "unit without mesh=."
            )
        if already and (replicated != list(unit.params) or DataParallelMeshDims is None):
            names = listing(sorted(others & axes_of(tree.params[already[0]])))
            module = already[0].rpartition(".")[0]
            yield (
                f"{listing(already, 6)} is a DTensor over {names} already. Parameters may be "
                "DTensors only on axes that their unit is not sharded on, or since torch 2.12 all "
                'of a unit on all axes, replicated on its own. Pass mesh=world_mesh["dp"], without '
                "the axis of tensor parallelism, or shard it on the axis before, as by "
                f'by_name("{module}", mesh="efsdp").'
            )


def axes_of(param: nn.Parameter, only_sharded: bool = False) -> set[str]:
    """The names of the axes that a DTensor lies on, or is split over; none of a plain parameter."""
    axes = set()
    if isinstance(param, DTensor):
        names = param.device_mesh.mesh_dim_names or ()
        for axis, placement in zip(names, param.placements, strict=False):
            if placement.is_shard() or not only_sharded:
                axes.add(axis)
    return axes
