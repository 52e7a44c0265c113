"""Applying a plan: the only module that calls ``fully_shard``. Nothing is decided here.

:func:`apply_decided` is the whole way in order: agree, compare, build the mesh, broadcast, shard, prepare to run.
"""

from __future__ import annotations

import functools
import os
import re
import warnings
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import Shard

from shardkit._fsdp import fsdp_units
from shardkit._torch import real_tensors, with_timeout_of_world
from shardkit.apply.init_sync import broadcast_from_first, check_same_start, facts_of, states_of
from shardkit.apply.mesh import build_mesh, check_mesh, ensure_process_group, unit_meshes
from shardkit.apply.param_attrs import ParamAttrs
from shardkit.apply.validate import check_fit, check_made_for, check_unsharded
from shardkit.errors import PlanError, message
from shardkit.plan import ShardingPlan, ShardUnit
from shardkit.plan.data import callers, skippable
from shardkit.planning.tree import ModelTree
from shardkit.ranks import Groups, gather_by_rank, together, warn_once
from shardkit.runtime.hooks import install_hooks
from shardkit.runtime.stepping import replacing


def apply_plan(
    model: nn.Module, plan: ShardingPlan, mesh: DeviceMesh | None = None, *, sync_module_states: bool = False
) -> nn.Module:
    """Shard ``model`` as ``plan`` says, in place, and return it.

    Collective: every rank of the mesh must call. Before anything is changed, the ranks compare their plans and a sample
    of their values, in two all-reduces of 16 bytes. Parameters on the meta device stay there, for ``materialize``.

    Args:
        model: the model that the plan was made for; its parameters become DTensors, its classes FSDPModules.
        plan: what ``plan_model`` returned, perhaps edited with ``dataclasses.replace``.
        mesh: the mesh to shard on, of the plan's shape; None builds one over all ranks.
        sync_module_states: broadcast the first rank's parameters and buffers, as for ``shard_model``.

    Raises:
        PlanError: the plan is not consistent, does not fit the model or the mesh, or differs between ranks, or ranks
            start from different values. Raised on every rank, with the model unchanged.
    """
    return apply_decided(model, lambda: given_plan(model, plan, mesh), mesh, sync_module_states)


def given_plan(
    model: nn.Module, plan: ShardingPlan, mesh: DeviceMesh | None, apart: Collection[str] = ()
) -> tuple[ShardingPlan, ModelTree]:
    """Return a plan that was not just made from ``model``, and the model's tree; raise PlanError if they do not fit.

    ``apart`` are FQNs of modules that are sharded already on purpose, and whose parameters the plan ignores.
    """
    tree = ModelTree(model)
    check_unsharded(tree, mesh if isinstance(mesh, DeviceMesh) else None, apart)
    check_made_for(tree, plan)
    return plan, tree


def apply_decided(
    model: nn.Module,
    decide: Callable[[], tuple[ShardingPlan, ModelTree]],
    mesh: DeviceMesh | None = None,
    sync_module_states: bool = False,
) -> nn.Module:
    """Apply the plan that ``decide`` returns, with the tree it was made from; an error on one rank is raised by all."""
    ensure_process_group()
    groups = mesh.get_all_groups() if isinstance(mesh, DeviceMesh) else [None]

    with real_tensors():  # ranks exchange real tensors, also where the model is made of fake ones
        with together(groups, PlanError) as poll:
            plan, tree = decide()
            check_mesh(mesh, plan.mesh)
            check_fit(tree, plan)
            poll.same = {**facts_of(model, sync_module_states), **facts_of_plan(plan)}
            del tree  # or it would keep parameters that sharding replaces
        check_same_start(model, plan.ignored, groups, sync_module_states)
        mesh = mesh or build_mesh(plan.mesh)
        if sync_module_states:
            states = states_of(model, plan.ignored).values()
            broadcast_from_first(states, mesh.get_all_groups(), mesh.device_type)
    with replacing(model):
        carry_out(model, plan, mesh)
    install_hooks(model, plan.forward_methods)
    _warn_and_refuse(model, plan)
    if setting := os.environ.get("SHARDKIT_WATCH"):
        from shardkit.watching.watch import watch_script  # on request only

        watch_script(model, setting)
    return model


def facts_of_plan(plan: ShardingPlan) -> dict[str, Any]:
    """Return what must be equal on all ranks, with a key for each unit and parameter: an error shows those that differ.

    Local, pure; JSON can write it but for dtypes.
    """
    data = replace(plan, params=(), notes=()).to_dict()  # notes may differ
    params = {f"parameter {each.fqn}": each for each in plan.params}
    units = {f"unit {each.name}": value for each, value in zip(plan.units, data.pop("units"), strict=True)}
    return {"torch": str(torch.__version__), "plan": {**params, **units, **data}}


def carry_out(
    model: nn.Module,
    plan: ShardingPlan,
    mesh: DeviceMesh,
    before: Callable[[ShardUnit], object] | None = None,
    after: Callable[[ShardUnit, dict[str, nn.Parameter]], object] | None = None,
) -> None:
    """Shard ``model`` as ``plan`` says, which is checked and the same on all ranks. Collective; in place.

    ``before`` is called with each unit right before it is sharded; it is collective, and may replace its parameters.
    ``after`` is called right after, with the parameters by FQN that were sharded; it is local.
    Raises PlanError on every rank where torch could not shard the model on one of them. It has to be built again.
    """
    meshes = unit_meshes(mesh, plan)
    attributes = ParamAttrs(model, plan)
    owners = dict(model.named_modules())
    # Ranks must not wait in a collective of ``before`` for one that failed.
    batches = [plan.units] if before is None else [(unit,) for unit in plan.units]
    for units in batches:
        if before is not None:
            before(units[0])
        with together(mesh.get_all_groups(), PlanError):
            if units[0] is plan.units[0]:
                _begin(model, plan)
            ignored = {model.get_parameter(fqn) for fqn in plan.unsharded}
            for unit in units:
                originals = {fqn: model.get_parameter(fqn) for fqn in unit.params} if after is not None else {}
                _shard_unit(model, owners, unit, meshes[unit.mesh], ignored)
                if after is not None:
                    after(unit, originals)
                del originals  # or they would keep the full parameters
                if plan.mesh.parts(unit.mesh) > 1:
                    from shardkit.runtime.means import divide_further

                    divide_further(model.get_submodule(unit.modules[0]), plan.mesh.parts(unit.mesh))
            if units[-1] is plan.units[-1]:
                attributes.carry_over(model)
                _finish(model, plan, meshes[None])


def _begin(model: nn.Module, plan: ShardingPlan) -> None:
    """Change the forwards that the plan asks for inside of checkpointing and compiling."""
    if any(unit.may_skip for unit in plan.units):
        from shardkit.runtime.skippable import in_order

        for caller in callers(plan):
            module = model.get_submodule(caller.modules[0])
            module.forward = in_order(module)
    for fqn, dtype in plan.replicated_modules().items():
        from shardkit.runtime.replicated import compute_in

        compute_in(model.get_submodule(fqn), dtype)
    for fqn, number in plan.tiles:
        from shardkit.tiles import tiled

        module = model.get_submodule(fqn)
        module.forward = tiled(module, fqn or "(root)", number)


def _shard_unit(
    model: nn.Module, owners: dict[str, nn.Module], unit: ShardUnit, mesh: DeviceMesh, ignored: set[nn.Parameter]
) -> None:
    params = {fqn: getattr(owners[fqn.rpartition(".")[0]], fqn.rpartition(".")[2]) for fqn in unit.params}
    modules = [model.get_submodule(fqn) for fqn in unit.modules]
    placements = {params[fqn]: Shard(dim) for fqn, dim in unit.shard_dims}
    try:
        for param in params.values():
            if not param.is_contiguous():  # torch refuses to shard it, such as a channels_last weight
                param.data = param.data.contiguous()
        for fqn in unit.blocks or unit.modules:
            _replace_forward(model.get_submodule(fqn), fqn, unit)
        fully_shard(
            modules if len(modules) > 1 else modules[0],
            mesh=mesh,
            reshard_after_forward=unit.reshard_after_forward,
            mp_policy=unit.mp_policy,
            offload_policy=unit.offload_policy,
            ignored_params=ignored or None,
            shard_placement_fn=placements.get if placements else None,
        )
    except Exception as error:
        # torch replaces the parameters of a unit one after the other: the first that is still there failed.
        failed = next((fqn for fqn, param in params.items() if model.get_parameter(fqn) is param), unit.name)
        problem = f"could not be sharded by torch, {type(error).__name__}: {error}"
        rule = "The model is sharded in part now and cannot be used; build it again"
        raise PlanError(message(failed, problem, rule, "See the cause, or pass it in ignored_params")) from error


def _replace_forward(module: nn.Module, fqn: str, unit: ShardUnit) -> None:
    """Checkpoint, then compile, and then shard; a module with buffers is compiled first.

    The ``forward`` is replaced, so that every FQN stays and the hooks of ``fully_shard`` stay outside: a recomputed
    forward does not gather again, and compiled code has no graph breaks, as it has by ``module.compile()``.
    """
    # torch's compiler takes checkpointing into its graph, and then advances buffers twice (torch 2.13).
    first = unit.compile and unit.checkpoint_activations and any(True for _ in module.buffers())
    if first:
        module.forward = torch.compile(module.forward)
    if unit.checkpoint_activations:
        from shardkit.activations import checkpointed

        module.forward = checkpointed(module, fqn, unit.checkpoint_activations, unit.compile and not first)
    if unit.compile and not first:
        module.forward = torch.compile(module.forward)


def _finish(model: nn.Module, plan: ShardingPlan, mesh: DeviceMesh) -> None:
    if plan.replicated:
        from shardkit.runtime.replicated import replicate

        replicate(model, plan.replicated, mesh)
    if any(unit.may_skip for unit in plan.units):
        _let_ranks_skip(model, plan, mesh.get_all_groups())
    if plan.prefetch:
        _prefetch(model, plan)
    for made in fsdp_units(model):
        if made.post_forward_mesh_info not in (None, made.mesh_info):
            with_timeout_of_world(made.post_forward_mesh_info.mesh)  # made by fully_shard for an int
    for unit in plan.units:
        if unit.reshard_after_forward is False and "" not in unit.modules:
            # torch warns that in-place changes would remove the hook that gathers for backward; this unit needs none.
            classes = ", ".join(type(model.get_submodule(fqn)).__name__ for fqn in unit.modules)
            text = re.escape(f"FSDP2-wrapped module ({classes}) returned a view")
            warnings.filterwarnings("ignore", text, UserWarning)


def _let_ranks_skip(model: nn.Module, plan: ShardingPlan, groups: Groups) -> None:
    from shardkit.runtime.skippable import SkippableUnit, watch_calls

    inside = skippable(plan)
    exchange = functools.partial(gather_by_rank, groups=groups)
    made = {}
    for unit in plan.units:
        module: Any = model.get_submodule(unit.modules[0])
        facts = (unit.may_skip, unit in inside, bool(unit.checkpoint_activations))
        made[unit] = SkippableUnit(unit.name, module, *facts, exchange)
    for caller, called in callers(plan).items():
        made[caller].calls.extend(made[each] for each in called)
    watch_calls([made[caller] for caller in callers(plan)])


def _warn_and_refuse(model: nn.Module, plan: ShardingPlan) -> None:
    """Warn of ignored parameters that train, and refuse merges of adapters; most models have neither."""
    if plan.ignored:
        from shardkit.runtime.replicated import unreduced_problem

        if problem := unreduced_problem(model):
            warn_once(problem)
    if any(hasattr(type(module), "unmerge") for module in model.modules()):
        from shardkit.integrations.huggingface import refuse_merges

        refuse_merges(model)


def _prefetch(model: nn.Module, plan: ShardingPlan) -> None:
    units = [model.get_submodule(unit.modules[0]) for unit in plan.execution_order() if unit.modules != ("",)]
    sharded: list[FSDPModule] = [module for module in units if isinstance(module, FSDPModule)]
    for index, module in enumerate(sharded):
        module.set_modules_to_forward_prefetch(sharded[index + 1 : index + 1 + plan.prefetch])
        module.set_modules_to_backward_prefetch(sharded[max(0, index - plan.prefetch) : index][::-1])
