"""translate_fsdp1: every argument of FSDP1's constructor, as a plan and a note for each."""

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

from shardkit.apply.fit import check_unsharded
from shardkit.errors import PlanError, TranslationError
from shardkit.fsdp1.translate.arguments import Arguments, check_arguments, check_unwrapped, device_of
from shardkit.fsdp1.translate.ignored import ignored_fqns, ignored_of
from shardkit.fsdp1.translate.notes import Decided, notes_on
from shardkit.fsdp1.translate.place import place_of
from shardkit.fsdp1.translate.policy import wrapped_by
from shardkit.fsdp1.translate.precision import buffer_dtypes
from shardkit.fsdp1.translate.settings import unit_settings
from shardkit.fsdp1.translate.strategy import parse_strategy
from shardkit.fsdp1.translate.types import ParamInitFn, Translation
from shardkit.fsdp1.translate.units import select_wrapped
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
    """What ``FullyShardedDataParallel(model, ...)`` would do, as a plan for FSDP2 and a note for each argument.

    Pure and local: nothing of the model changes, and it may be on the meta device. Without a process group it
    translates for ``world_size`` ranks, as on a laptop for a cluster.

    Args:
        model: the whole model, not wrapped yet.
        process_group, sharding_strategy, cpu_offload, auto_wrap_policy, backward_prefetch, mixed_precision,
            ignored_modules, param_init_fn, device_id, sync_module_states, forward_prefetch, limit_all_gathers,
            use_orig_params, ignored_states, device_mesh: as for FSDP1, with its defaults. A strategy may also be a
            name in any case or accelerate's number, and a policy may be a set of module classes.
        ranks_per_node: ranks that shard together in a hybrid strategy; None is torchrun's ``LOCAL_WORLD_SIZE``.
        world_size: ranks to plan for; None is those of the process group, or torchrun's ``WORLD_SIZE``, or 1.

    Raises:
        TranslationError: an argument is none that FSDP1 takes, or FSDP2 cannot do what it says.

    Example:
        >>> model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
        >>> translation = translate_fsdp1(model, sharding_strategy="NO_SHARD", world_size=4)
        >>> str(translation.plan.mesh)
        'dp_replicate=4 x dp_shard=1'
    """
    given = Arguments(
        process_group=process_group,
        sharding_strategy=sharding_strategy,
        cpu_offload=cpu_offload,
        auto_wrap_policy=auto_wrap_policy,
        backward_prefetch=backward_prefetch,
        mixed_precision=mixed_precision,
        ignored_modules=ignored_modules,
        param_init_fn=param_init_fn,
        device_id=device_id,
        sync_module_states=sync_module_states,
        forward_prefetch=forward_prefetch,
        limit_all_gathers=limit_all_gathers,
        use_orig_params=use_orig_params,
        ignored_states=ignored_states,
        device_mesh=device_mesh,
        ranks_per_node=ranks_per_node,
        world_size=world_size,
    )
    return translate(model, given)


def translate(model: nn.Module, given: Arguments, apart: Collection[str] = ()) -> Translation:
    """``translate_fsdp1`` of arguments taken together.

    Args:
        model: the model; parts of it may be wrapped already, by the drop-in.
        given: FSDP1's arguments.
        apart: FQNs of those parts, outermost first.
    """
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
    wrapped = wrapped_by(tree, given.auto_wrap_policy, given.mixed_precision, ignored, given.told())
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
    return frozenset(tree.names[id(param)] for entry in below for param in tree.owned[entry])


# Every unit has settings of its own.
_UNSET = Settings(None, MixedPrecisionPolicy(), OffloadPolicy(), checkpoint_activations=False, compile=False)
