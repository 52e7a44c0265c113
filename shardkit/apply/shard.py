"""Applying a plan: the only module that calls ``fully_shard``. Nothing is decided here."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, TypeVar

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

from shardkit._fsdp import without_init_subclass
from shardkit._torch import DataParallelMeshDims, real_tensors, sharded_parameters
from shardkit.apply.init_sync import check_same_start, state_facts, states_of
from shardkit.apply.mesh import build_mesh, check_mesh, ensure_process_group, unit_meshes
from shardkit.apply.param_attrs import attributes_and_hooks, carry_over
from shardkit.apply.validate import axes_of, check_plan
from shardkit.errors import PlanError
from shardkit.plan import ShardingPlan, ShardUnit
from shardkit.plan.types import is_world_size
from shardkit.ranks import Groups, check_equal, groups_of, raise_on_all_ranks, warn_once
from shardkit.runtime.hooks import install_hooks
from shardkit.runtime.stepping import replacing

ModelT = TypeVar("ModelT", bound=nn.Module)


def apply_plan(
    model: ModelT,
    plan: ShardingPlan,
    mesh: DeviceMesh | None = None,
    *,
    sync_module_states: bool = False,
) -> ModelT:
    """Shard ``model`` as ``plan`` says, in place, and return it.

    Collective: every rank of the mesh must call. Before anything is changed, the ranks compare
    their plans and a sample of their values, in a few small all-reduces. Parameters on the meta
    device stay there, for ``materialize``.

    Args:
        model: the model that the plan was made for; its parameters become DTensors, its classes
            FSDPModules.
        plan: what ``plan_model`` returned, perhaps edited with ``dataclasses.replace``.
        mesh: the mesh to shard on, of the plan's shape; None builds one over all ranks.
        sync_module_states: broadcast the first rank's parameters and buffers, as for
            ``shard_model``.

    Raises:
        PlanError: the plan is not consistent, does not fit the model or the mesh, or differs
            between ranks, or ranks start from different values. Raised on every rank, with the
            model unchanged. Where torch itself refuses a unit, the model is sharded in part, and
            the error says so.
    """
    return plan_and_apply(model, lambda: plan, mesh, sync_module_states)


def plan_and_apply(
    model: ModelT,
    make_plan: Callable[[], ShardingPlan],
    mesh: DeviceMesh | None,
    sync_module_states: bool,
) -> ModelT:
    """Apply the plan that ``make_plan`` returns: agree, compare, mesh, broadcast, shard."""
    ensure_process_group()
    groups: Groups = mesh.get_all_groups() if isinstance(mesh, DeviceMesh) else [None]
    # Of the meshes of parameters that are DTensors already, as after tensor parallelism.
    other_groups = groups_of(model) if isinstance(model, nn.Module) else []
    with real_tensors():  # ranks exchange real tensors, also where the model is made of fake ones
        # 1. Each rank plans and checks its own model. An error on one is raised on all.
        with raise_on_all_ranks([*groups, *other_groups], PlanError):
            plan = make_plan()
            check_mesh(mesh, plan.mesh)
            check_plan(model, plan, mesh)
            states = states_of(model, plan.ignored)
            if sync_module_states:
                from shardkit.apply.broadcast import check_can_broadcast

                check_can_broadcast(states)

        # 2. Compare plans and values. Ranks with different ones would meet in different
        # collectives, or train different models. Plans may differ along other axes.
        facts = {**plan_facts(plan), "sync_module_states": sync_module_states}
        check_equal(facts, groups, PlanError)
        described = state_facts(states, compare_meta=sync_module_states)
        check_equal(described, [*groups, *other_groups], PlanError)
        if not sync_module_states:
            check_same_start(model, plan, [*groups, *other_groups])

        # 3. Build the mesh, if there is none.
        mesh = mesh or build_mesh(plan.mesh)

        # 4. Broadcast the first rank's values, if asked.
        if sync_module_states:
            from shardkit.apply.broadcast import broadcast_from_first

            groups = [*mesh.get_all_groups(), *other_groups]
            broadcast_from_first(states.values(), groups, mesh.device_type)
        del states  # or it would keep the full parameters

    # 5. Shard, and prepare what runs in training.
    shard_for_training(model, plan, mesh)
    return model


def shard_for_training(
    model: nn.Module,
    plan: ShardingPlan,
    mesh: DeviceMesh,
    before: Callable[[ShardUnit], object] | None = None,
) -> None:
    """Call ``shard_units``, and prepare what runs in training: hooks, forward methods, warnings."""
    with replacing(model):
        shard_units(model, plan, mesh, before=before)
    install_hooks(model, plan.forward_methods)
    zero_registered = model.zero_grad

    def zero_grad(set_to_none: bool = True) -> None:
        # Between forward and backward, as in `loss = ...; model.zero_grad(); loss.backward()`, units
        # that stay unsharded register parameters without these gradients.
        nn.ParameterList(sharded_parameters(model)).zero_grad(set_to_none)
        zero_registered(set_to_none)

    def before_load(_: object, state: Any, *args: object) -> None:
        from shardkit.runtime.loading import refuse_other_ranks

        refuse_other_ranks(state)

    model.zero_grad = zero_grad  # type: ignore[method-assign]
    model.register_load_state_dict_pre_hook(before_load)  # type: ignore[no-untyped-call]
    if plan.ignored:
        from shardkit.runtime.replicated import unreduced_problem

        problem = unreduced_problem(model)
        if problem:
            warn_once(problem)
    if any(hasattr(type(module), "unmerge") for module in model.modules()):  # peft's adapters
        from shardkit.integrations.huggingface import refuse_merges

        refuse_merges(model)
    setting = os.environ.get("SHARDKIT_WATCH")
    if setting:
        from shardkit.watching.watcher import watch_script  # on request only

        watch_script(model, setting)


def plan_facts(plan: ShardingPlan) -> dict[str, Any]:
    """Return what must be equal on all ranks, by the names that an error shows. Local, pure."""
    facts: dict[str, Any] = {"torch": str(torch.__version__)}
    facts["order of units"] = [unit.name for unit in plan.units]
    facts |= {f"parameter {spec.fqn}": spec for spec in plan.params}
    data = replace(plan, params=(), notes=()).to_dict()  # notes may differ
    for unit, settings in zip(plan.units, data.pop("units"), strict=True):
        for name, setting in settings.items():
            facts[f"{name} of unit {unit.name}"] = setting
    return {**facts, **data}


def shard_units(
    model: nn.Module,
    plan: ShardingPlan,
    mesh: DeviceMesh,
    before: Callable[[ShardUnit], object] | None = None,
    after: Callable[[ShardUnit, dict[str, nn.Parameter]], object] | None = None,
) -> None:
    """Shard the units of ``plan``, checked and the same on all ranks. Collective; in place.

    ``before`` is called with each unit right before it is sharded; it is collective, and may
    replace its parameters. ``after`` is called right after, with the parameters by FQN that were
    sharded; it is local. Raises PlanError on every rank where torch could not shard the model on
    one of them. It has to be built again.
    """
    groups = mesh.get_all_groups()
    meshes = unit_meshes(mesh, plan)
    attributes = attributes_and_hooks(model)
    _replace_forwards(model, plan)

    # The ranks agree that all has worked once, after all units; after each unit where ranks wait
    # for each other inside: in ``before``, and in fully_shard where it makes process groups for an
    # int to reshard to.
    makes_groups = any(is_world_size(unit.reshard_after_forward) for unit in plan.units)
    agrees_after_each_unit = before is not None or makes_groups
    rounds = [(unit,) for unit in plan.units] if agrees_after_each_unit else [plan.units]
    for units in rounds:
        if before is not None:
            before(units[0])
        with raise_on_all_ranks(groups, PlanError):
            ignored = {model.get_parameter(fqn) for fqn in plan.not_in_units}
            for unit in units:
                params = _shard_unit(model, unit, meshes[unit.mesh], ignored)
                if after is not None:
                    after(unit, params)
                del params  # or they would keep the full parameters
                if plan.mesh.parts(unit.mesh) > 1:
                    from shardkit.runtime.means import divide_further

                    divide_further(model.get_submodule(unit.modules[0]), plan.mesh.parts(unit.mesh))

    with raise_on_all_ranks(groups, PlanError):
        carry_over(model, attributes)
        if plan.replicated:
            from shardkit.runtime.replicated import replicate

            replicate(model, plan.replicated, meshes[None])
        if any(unit.may_skip for unit in plan.units):
            from shardkit.apply.order import let_ranks_skip

            let_ranks_skip(model, plan, groups)
        if plan.prefetch:
            from shardkit.apply.order import prefetch

            prefetch(model, plan)


def _replace_forwards(model: nn.Module, plan: ShardingPlan) -> None:
    """Change the forwards that run inside of checkpointing and compiling."""
    if any(unit.may_skip for unit in plan.units):
        from shardkit.apply.order import order_forwards

        order_forwards(model, plan)
    for unit in plan.units:
        if unit.float32:
            from shardkit.runtime.float32 import cast_at_borders

            cast_at_borders(model, unit.modules)
    for fqn, dtype in plan.replicated_modules().items():
        from shardkit.runtime.replicated import compute_in

        compute_in(model.get_submodule(fqn), dtype)
    for fqn, number in plan.tiles:
        from shardkit.tiles import tiled

        module = model.get_submodule(fqn)
        module.forward = tiled(module, fqn or "(root)", number)


def _shard_unit(
    model: nn.Module, unit: ShardUnit, mesh: DeviceMesh, ignored: set[nn.Parameter]
) -> dict[str, nn.Parameter]:
    """Call ``fully_shard`` for a unit; return the parameters that it replaced, by FQN."""
    modules = [model.get_submodule(fqn) for fqn in unit.modules]
    params = {fqn: model.get_parameter(fqn) for fqn in unit.params}
    placements = {params[fqn]: Shard(dim) for fqn, dim in unit.shard_dims}
    try:
        for param in params.values():
            if not param.is_contiguous():  # torch refuses it, such as a channels_last weight
                param.data = param.data.contiguous()
        for fqn, module in zip(unit.modules, modules, strict=True):
            if unit.checkpoint_activations or unit.compile:
                from shardkit.activations import checkpoint_and_compile

                checkpoint_and_compile(module, fqn, unit.checkpoint_activations, unit.compile)
        with without_init_subclass():
            fully_shard(
                modules if len(modules) > 1 else modules[0],
                **_mesh_options(params.values(), mesh),
                reshard_after_forward=unit.reshard_after_forward,
                mp_policy=unit.mp_policy,
                offload_policy=unit.offload_policy,
                ignored_params=ignored or None,
                shard_placement_fn=placements.get if placements else None,
            )
    except Exception as error:
        # torch replaces the parameters of a unit one after the other: the first still there failed.
        failed = unit.name
        for fqn, param in reversed(params.items()):
            if model.get_parameter(fqn) is param:
                failed = fqn
        raise PlanError(
            f"{failed} could not be sharded by torch. The model is sharded in part now and cannot "
            "be used; build it again. See the cause, or pass it in ignored_params. "
            f"{type(error).__name__}: {error}"
        ) from error
    return params


def _mesh_options(params: Iterable[nn.Parameter], mesh: DeviceMesh) -> dict[str, Any]:
    """Return the mesh for torch. Of DTensors that are replicated on it, it is theirs, with the names
    of the axes to shard on.
    """
    axes = mesh.mesh_dim_names or ()
    for param in params:
        if isinstance(param, DTensor) and not axes_of(param).isdisjoint(axes):
            replicate = axes[0] if len(axes) > 1 else None
            dims = DataParallelMeshDims(shard=axes[-1], replicate=replicate)
            return {"mesh": param.device_mesh, "dp_mesh_dims": dims}
    return {"mesh": mesh}
