"""translate_fsdp1 and shard_like_fsdp1: FSDP1's arguments as a plan, with a note for each, and as a
sharded model.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh

from shardkit._fsdp.fsdp1 import full_precision_classes
from shardkit.apply.validate import check_unsharded
from shardkit.errors import PlanError, TranslationError, listing
from shardkit.fsdp1.translate.arguments import (
    Arguments,
    check_precision,
    check_unwrapped,
    device_of,
)
from shardkit.fsdp1.translate.notes import notes_on
from shardkit.fsdp1.translate.policy import ignored_by, wrapped_by
from shardkit.fsdp1.translate.shard import ParamInitFn, Translation, cast_buffers, shard_translated
from shardkit.fsdp1.translate.strategy import (
    HYBRID,
    RESHARDING,
    groups_to_agree,
    mesh_of_arguments,
    parse_strategy,
)
from shardkit.fsdp1.translate.units import plan_from_units
from shardkit.plan.types import ancestors
from shardkit.planning.selection import Overrides
from shardkit.planning.tree import ModelTree


def translate_fsdp1(
    model: nn.Module,
    *,
    process_group: dist.ProcessGroup | tuple[dist.ProcessGroup, dist.ProcessGroup] | None = None,
    sharding_strategy: fsdp.ShardingStrategy | str | int | None = None,
    cpu_offload: fsdp.CPUOffload | None = None,
    auto_wrap_policy: Any = None,
    backward_prefetch: fsdp.BackwardPrefetch | None = fsdp.BackwardPrefetch.BACKWARD_PRE,
    mixed_precision: fsdp.MixedPrecision | None = None,
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
    """Translate ``FullyShardedDataParallel(model, ...)`` to a plan for FSDP2 and a note for each
    argument.

    Pure and local: the model does not change, and may be on the meta device. Without a process
    group, pass ``world_size`` to plan for a cluster on a laptop. Arguments that are not below are
    FSDP1's, with its defaults; a strategy may also be a name in any case or accelerate's number,
    and a policy may be a set of module classes.

    Args:
        model: the whole model, not wrapped yet.
        ranks_per_node: ranks that shard together in a hybrid strategy; None is torchrun's
            ``LOCAL_WORLD_SIZE``.
        world_size: ranks to plan for; None is those of the process group, or torchrun's
            ``WORLD_SIZE``, or 1.

    Raises:
        TranslationError: FSDP1 would not take an argument either, or FSDP2 does not support it.

    Examples:
        >>> model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
        >>> translation = translate_fsdp1(model, sharding_strategy="NO_SHARD", world_size=4)
        >>> str(translation.plan.mesh)
        'dp_replicate=4 x dp_shard=1'
    """
    return make_translation(model, Arguments.of(locals()))


def shard_like_fsdp1(model: nn.Module, **arguments: Any) -> nn.Module:
    """Shard ``model`` in place with FSDP2 as ``FullyShardedDataParallel(model, **arguments)``
    would, and return it.

    The same as ``translate_fsdp1(model, **arguments).apply(model)``, with errors of one rank raised
    on all. Collective: every rank must call it with the same arguments. Build the optimizer
    afterwards, since sharding replaces the parameters. A model on the meta device is initialized as
    in FSDP1: each unit by ``param_init_fn``, or by ``reset_parameters``, right before it is
    sharded. A model that every rank built under ``init_on_meta`` is materialized from its recording
    instead.

    Args:
        model: the whole model, not wrapped.
        arguments: those of ``translate_fsdp1``: FSDP1's own, ``ranks_per_node`` and ``world_size``.

    Raises:
        TranslationError: with the model unchanged: FSDP1 would not take an argument either, or
            FSDP2 does not support it. Also if ``param_init_fn`` fails, which leaves the model
            partly sharded.
        PlanError: on every rank, with the model unchanged: ranks disagree, or the plan does not fit
            one of them; on the other ranks where one rank alone raises a TranslationError.
    """
    groups = groups_to_agree(arguments.get("process_group"), arguments.get("device_mesh"))
    translation, _ = shard_translated(model, lambda: translate_fsdp1(model, **arguments), groups)
    cast_buffers(model, translation)
    return model


# What a CustomPolicy may set for one module: settings of a unit, and some that FSDP2 does not have.
_OF_A_UNIT = ("sharding_strategy", "mixed_precision", "cpu_offload")
_NOT_IN_FSDP2 = ("backward_prefetch", "forward_prefetch", "limit_all_gathers", "use_orig_params")
_SYNC_NOTE = (
    "the first rank's parameters and buffers are broadcast before sharding, which a plan does not "
    "do: apply the translation or its to_python(), or pass sync_module_states=True"
)


def make_translation(
    model: nn.Module, given: Arguments, wrapped_before: Collection[str] = ()
) -> Translation:
    """``translate_fsdp1`` for a model of which the drop-in may have wrapped modules before."""
    try:
        return _make_translation(model, given, tuple(wrapped_before))
    except PlanError as error:
        raise TranslationError(str(error)) from error


def _make_translation(
    model: nn.Module, given: Arguments, wrapped_before: tuple[str, ...]
) -> Translation:
    tree = ModelTree(model)
    check_unwrapped(model)
    mesh = given.device_mesh if isinstance(given.device_mesh, DeviceMesh) else None
    check_unsharded(tree, mesh, wrapped_before)
    check_precision(given.mixed_precision)

    strategy = parse_strategy(given.sharding_strategy)
    spec, device_mesh, process_groups = mesh_of_arguments(
        strategy, given.process_group, given.device_mesh, given.ranks_per_node, given.world_size
    )

    # The modules that FSDP1 would wrap, each with the arguments that a CustomPolicy gave for it.
    ignored_modules, ignored_params = ignored_by(given.ignored_modules, given.ignored_states)
    wrapped = wrapped_by(
        model,
        given.auto_wrap_policy,
        given.mixed_precision,
        ignored_modules,
        ignored_params,
        given.for_policies(),
    )
    for fqn, own_arguments in wrapped.items():
        _check_own_arguments(fqn, own_arguments, strategy)

    # Their precision; BatchNorm stays in float32.
    batch_norms = full_precision_classes(given.mixed_precision)
    in_float32 = []
    precisions = {"": given.mixed_precision}
    for fqn, own_arguments in wrapped.items():
        precisions[fqn] = own_arguments.get("mixed_precision", given.mixed_precision)
        if isinstance(model.get_submodule(fqn), batch_norms):
            precisions[fqn] = None
            in_float32.append(fqn)

    # Each is a unit, and so is the root.
    units = {}
    for fqn, own_arguments in [*wrapped.items(), ("", {})]:
        own_strategy = parse_strategy(own_arguments.get("sharding_strategy", strategy))
        cpu_offload = own_arguments.get("cpu_offload", given.cpu_offload)
        units[fqn] = Overrides(
            # FSDP1 never reshards its root after forward, since backward needs it at once.
            reshard_after_forward=fqn != "" and own_strategy.name in RESHARDING,
            mp_policy=_mp_policy(precisions[fqn], is_root=not fqn),
            offload_policy=_offload_policy(cpu_offload, given.device_id),
        )
    for fqn in in_float32:
        around = precisions[_unit_around(fqn.rpartition(".")[0], precisions)]
        units[fqn]["mp_policy"] = _in_float32(around)

    ignored = []
    below = tuple(f"{fqn}." for fqn in wrapped_before)
    for fqn, param in tree.params.items():
        if param in ignored_params or fqn.startswith(below):
            ignored.append(fqn)
    plan = plan_from_units(tree, units, spec, ignored=ignored, prefetch=int(given.forward_prefetch))
    notes = notes_on(model, given, strategy, wrapped, plan)
    if given.sync_module_states:
        plan = replace(plan, notes=(*plan.notes, _SYNC_NOTE))
    return Translation(
        plan=plan,
        notes=notes,
        device_mesh=device_mesh,
        process_groups=process_groups,
        device=device_of(given.device_id),
        param_init_fn=given.param_init_fn,
        sync_module_states=given.sync_module_states,
        buffer_dtypes=_buffer_dtypes(model, ignored_modules, precisions),
        ignored_modules=tuple(fqn for fqn, m in model.named_modules() if m in ignored_modules),
        wrapped=wrapped,
        wrapped_before=wrapped_before,
    )


def _check_own_arguments(
    fqn: str, own_arguments: Mapping[str, Any], strategy: fsdp.ShardingStrategy
) -> None:
    """Raise TranslationError for what a CustomPolicy cannot set for one module alone."""
    allowed = (*_OF_A_UNIT, *_NOT_IN_FSDP2)
    others = [name for name in own_arguments if name not in allowed]
    if others:
        raise TranslationError(
            f"auto_wrap_policy sets {listing(others)} for {fqn} alone, and only "
            "reshard_after_forward and the policies can differ between units of a plan. Pass it "
            "for the whole model."
        )
    other = parse_strategy(own_arguments.get("sharding_strategy", strategy))
    same_axes = (other.name in HYBRID) == (strategy.name in HYBRID)
    if not same_axes or (other.name == "NO_SHARD") != (strategy.name == "NO_SHARD"):
        raise TranslationError(
            f"auto_wrap_policy sets {other.name} for {fqn} in {strategy.name}, and a plan has one "
            "mesh. Use strategies of one mesh, or shard these modules by fully_shard on their own."
        )


def _unit_around(fqn: str, units: Collection[str]) -> str:
    """Return the innermost of ``units`` at or around the module ``fqn``; the root is one."""
    return next(name for name in (fqn, *ancestors(fqn)) if name in units)


def _mp_policy(
    precision: fsdp.MixedPrecision | None, *, is_root: bool
) -> fsdp.MixedPrecisionPolicy:
    if precision is None:
        return fsdp.MixedPrecisionPolicy()
    if precision.param_dtype is None:
        return fsdp.MixedPrecisionPolicy(reduce_dtype=precision.reduce_dtype)
    return fsdp.MixedPrecisionPolicy(
        param_dtype=precision.param_dtype,
        # FSDP1 reduces in param_dtype if it is None; FSDP2 not since torch 2.15.
        reduce_dtype=precision.reduce_dtype or precision.param_dtype,
        cast_forward_inputs=casts_inputs(precision, is_root),
    )


def casts_inputs(precision: fsdp.MixedPrecision, is_root: bool) -> bool:
    """Return whether FSDP1 casts inputs: those of the root only, unless told otherwise."""
    return precision.cast_forward_inputs or (is_root and precision.cast_root_forward_inputs)


def _in_float32(around: fsdp.MixedPrecision | None) -> fsdp.MixedPrecisionPolicy:
    """For BatchNorm: cast inputs to float32 and outputs back, as hooks of FSDP1 did."""
    if around is None or around.param_dtype in (None, torch.float32):
        return fsdp.MixedPrecisionPolicy()
    return fsdp.MixedPrecisionPolicy(torch.float32, torch.float32, output_dtype=around.param_dtype)


def _offload_policy(cpu_offload: fsdp.CPUOffload | None, device_id: Any) -> fsdp.OffloadPolicy:
    if cpu_offload is None or not cpu_offload.offload_params:
        return fsdp.OffloadPolicy()
    device = device_of(device_id)
    on_cpu = device is not None and device.type == "cpu"
    # Without an accelerator pinning raises.
    return fsdp.CPUOffloadPolicy(pin_memory=torch.accelerator.is_available() and not on_cpu)


def _buffer_dtypes(
    model: nn.Module,
    ignored_modules: Collection[nn.Module],
    precisions: Mapping[str, fsdp.MixedPrecision | None],
) -> dict[str, torch.dtype]:
    """Return what FSDP1 casts each buffer to at the first forward: as the unit around it says."""
    dtypes: dict[str, torch.dtype] = {}
    for name, buffer in model.named_buffers():
        fqn = name.rpartition(".")[0]
        precision = precisions[_unit_around(fqn, precisions)]
        dtype = precision.buffer_dtype if precision is not None else None
        if dtype is None or not buffer.is_floating_point():
            continue
        if model.get_submodule(fqn) not in ignored_modules:
            dtypes[name] = dtype
    return dtypes
