"""translate_fsdp1 and shard_like_fsdp1: FSDP1's arguments as a plan, with a note for each, and as a sharded model."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardingStrategy,
)

from shardkit.apply.validate import check_unsharded
from shardkit.errors import PlanError, TranslationError
from shardkit.fsdp1.translate.arguments import Arguments, check_arguments, check_unwrapped, device_of
from shardkit.fsdp1.translate.notes import Decided, notes_on
from shardkit.fsdp1.translate.policy import ignored_fqns, ignored_of, wrapped_by
from shardkit.fsdp1.translate.shard import ParamInitFn, Translation, cast_buffers, shard_translated
from shardkit.fsdp1.translate.strategy import groups_to_agree, parse_strategy, place_of
from shardkit.fsdp1.translate.units import buffer_dtypes, select_wrapped, unit_settings
from shardkit.planning.build import Settings, plan_of
from shardkit.planning.tree import ModelTree


def translate_fsdp1(
    model: nn.Module,
    *,
    process_group: dist.ProcessGroup | tuple[dist.ProcessGroup, dist.ProcessGroup] | None = None,
    sharding_strategy: ShardingStrategy | str | int | None = None,
    cpu_offload: CPUOffload | None = None,
    auto_wrap_policy: Any = None,
    backward_prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE,
    mixed_precision: MixedPrecision | None = None,
    ignored_modules: Iterable[nn.Module] | None = None,
    param_init_fn: ParamInitFn | None = None,
    device_id: int | torch.device | None = None,
    sync_module_states: bool = False,
    forward_prefetch: bool = False,
    limit_all_gathers: bool = True,
    use_orig_params: bool = False,
    ignored_states: Iterable[nn.Parameter] | Iterable[nn.Module] | None = None,
    device_mesh: DeviceMesh | None = None,
    ranks_per_node: int | None = None,
    world_size: int | None = None,
) -> Translation:
    """Translate ``FullyShardedDataParallel(model, ...)`` to a plan for FSDP2 and a note for each argument.

    Pure and local: the model does not change, and may be on the meta device. Without a process group, pass
    ``world_size`` to plan for a cluster on a laptop. Arguments that are not below are FSDP1's, with its defaults; a
    strategy may also be a name in any case or accelerate's number, and a policy may be a set of module classes.

    Args:
        model: the whole model, not wrapped yet.
        ranks_per_node: ranks that shard together in a hybrid strategy; None is torchrun's ``LOCAL_WORLD_SIZE``.
        world_size: ranks to plan for; None is those of the process group, or torchrun's ``WORLD_SIZE``, or 1.

    Raises:
        TranslationError: FSDP1 would not take an argument either, or FSDP2 does not support it.

    Example:
        >>> model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
        >>> translation = translate_fsdp1(model, sharding_strategy="NO_SHARD", world_size=4)
        >>> str(translation.plan.mesh)
        'dp_replicate=4 x dp_shard=1'
    """
    return translate(model, Arguments.of(locals()))


def shard_like_fsdp1(model: nn.Module, **arguments: Any) -> nn.Module:
    """Shard ``model`` in place with FSDP2 as ``FullyShardedDataParallel(model, **arguments)`` would, and return it.

    The same as ``translate_fsdp1(model, **arguments).apply(model)``, with errors of one rank raised on all. Collective:
    every rank must call it with the same arguments. Build the optimizer afterwards, since sharding replaces the
    parameters. A model on the meta device is initialized as in FSDP1: each unit by ``param_init_fn``, or by
    ``reset_parameters``, right before it is sharded. A model that every rank built under ``init_on_meta`` is
    materialized from its recording instead.

    Args:
        model: the whole model, not wrapped.
        arguments: those of ``translate_fsdp1``: FSDP1's own, ``ranks_per_node`` and ``world_size``.

    Raises:
        TranslationError: with the model unchanged: FSDP1 would not take an argument either, or FSDP2 does not support
            it. Also if ``param_init_fn`` fails, which leaves the model partly sharded.
        PlanError: on every rank, with the model unchanged: ranks disagree, or the plan does not fit one of them; on
            the other ranks where one rank alone raises a TranslationError.
    """
    groups = groups_to_agree(arguments.get("process_group"), arguments.get("device_mesh"))
    translation, _ = shard_translated(model, lambda: translate_fsdp1(model, **arguments), groups)
    cast_buffers(model, translation)
    return model


def translate(model: nn.Module, given: Arguments, apart: Collection[str] = ()) -> Translation:
    """``translate_fsdp1`` for a model of which the drop-in has wrapped ``apart``, FQNs, outermost first."""
    try:
        return _translate(model, given, tuple(apart))
    except PlanError as error:
        raise TranslationError(str(error)) from error


def _translate(model: nn.Module, given: Arguments, apart: tuple[str, ...]) -> Translation:
    tree = ModelTree(model)
    check_unwrapped(tree)
    check_unsharded(tree, given.device_mesh if isinstance(given.device_mesh, DeviceMesh) else None, apart)
    check_arguments(given)
    strategy = parse_strategy(given.sharding_strategy)
    place = place_of(strategy, given.process_group, given.device_mesh, given.ranks_per_node, given.world_size)
    ignored = ignored_of(tree, given.ignored_modules, given.ignored_states)
    wrapped = wrapped_by(tree, given.auto_wrap_policy, given.mixed_precision, ignored, given.for_policies())
    left_alone = ignored_fqns(tree, ignored) | _params_of(tree, apart)
    settings = unit_settings(tree, wrapped, given, strategy)
    selections, repairs = select_wrapped(tree, wrapped, settings, left_alone)
    plan = plan_of(tree, place.spec, selections, _UNSET, left_alone, int(given.forward_prefetch), repairs)
    return Translation(
        plan=plan,
        notes=notes_on(Decided(tree, given, strategy, wrapped, ignored, plan)),
        device_mesh=place.device_mesh,
        process_groups=place.groups,
        device=device_of(given.device_id),
        param_init_fn=given.param_init_fn,
        sync_module_states=given.sync_module_states,
        buffer_dtypes=buffer_dtypes(tree, wrapped, given.mixed_precision, ignored),
        ignored_modules=tuple(
            fqn for fqn, module in zip(tree.fqns, tree.modules, strict=True) if module in ignored.modules
        ),
        wrapped={tree.fqns[each.entry]: each.arguments for each in wrapped},
        apart=apart,
    )


def _params_of(tree: ModelTree, apart: Collection[str]) -> frozenset[str]:
    below = (entry for fqn in apart for entry in tree.subtree(tree.places[fqn]))
    return frozenset(fqn for entry in below for fqn in tree.owned[entry])


# Every unit has settings of its own.
_UNSET = Settings(None, MixedPrecisionPolicy(), OffloadPolicy(), checkpoint_activations=False, compile=False)
