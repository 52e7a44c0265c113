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
from shardkit.errors import PlanError, TranslationError, listing, message
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
    parse_strategy,
    place_of,
)
from shardkit.plan.types import ancestors
from shardkit.planning.build import plan_from_units
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
    return translate(model, Arguments.of(locals()))


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


def translate(model: nn.Module, given: Arguments, apart: Collection[str] = ()) -> Translation:
    """``translate_fsdp1`` for a model of which the drop-in has wrapped the modules ``apart``."""
    try:
        return _translate(model, given, tuple(apart))
    except PlanError as error:
        raise TranslationError(str(error)) from error


def _translate(model: nn.Module, given: Arguments, apart: tuple[str, ...]) -> Translation:
    tree = ModelTree(model)
    mesh = given.device_mesh if isinstance(given.device_mesh, DeviceMesh) else None
    check_unwrapped(model)
    check_unsharded(tree, mesh, apart)
    check_precision(given.mixed_precision)

    strategy = parse_strategy(given.sharding_strategy)
    place = place_of(
        strategy,
        given.process_group,
        given.device_mesh,
        given.ranks_per_node,
        given.world_size,
    )
    modules, params = ignored_by(given.ignored_modules, given.ignored_states)
    wrapped = wrapped_by(
        model,
        given.auto_wrap_policy,
        given.mixed_precision,
        modules,
        params,
        given.for_policies(),
    )
    for fqn, own in wrapped.items():
        _check_own(fqn, own, strategy)
    classes = full_precision_classes(given.mixed_precision)
    in_float32 = {fqn for fqn in wrapped if isinstance(model.get_submodule(fqn), classes)}
    precisions = {"": given.mixed_precision}
    for fqn, own in wrapped.items():
        precisions[fqn] = own.get("mixed_precision", given.mixed_precision)
        if fqn in in_float32:
            precisions[fqn] = None
    left_alone = [
        fqn
        for fqn, param in tree.params.items()
        if param in params or fqn.startswith(tuple(f"{module}." for module in apart))
    ]
    units = {}
    for fqn, own in [*wrapped.items(), ("", {})]:
        units[fqn] = _settings(fqn, own, given, precisions)
    for fqn in in_float32:
        around = precisions[innermost(fqn.rpartition(".")[0], precisions)]
        units[fqn]["mp_policy"] = _full_precision(around)
    plan = plan_from_units(
        tree, units, place.spec, ignored=left_alone, prefetch=int(given.forward_prefetch)
    )
    notes = notes_on(model, given, strategy, wrapped, plan)
    if given.sync_module_states:
        plan = replace(plan, notes=(*plan.notes, _SYNC))
    return Translation(
        plan=plan,
        notes=notes,
        device_mesh=place.device_mesh,
        process_groups=place.groups,
        device=device_of(given.device_id),
        param_init_fn=given.param_init_fn,
        sync_module_states=given.sync_module_states,
        buffer_dtypes=_buffer_dtypes(model, modules, precisions),
        ignored_modules=tuple(fqn for fqn, each in model.named_modules() if each in modules),
        wrapped=wrapped,
        apart=apart,
    )


# --- Settings of units ---------------------------------------------------------------------------

# What a CustomPolicy may set for one module: settings of a unit, and some that FSDP2 does not have.
_OF_A_UNIT = ("sharding_strategy", "mixed_precision", "cpu_offload")
_FSDP2S_OWN = ("backward_prefetch", "forward_prefetch", "limit_all_gathers", "use_orig_params")
_SYNC = (
    "the first rank's parameters and buffers are broadcast before sharding, which a plan does not "
    "do: apply the translation or its to_python(), or pass sync_module_states=True"
)


def _check_own(fqn: str, own: Mapping[str, Any], strategy: fsdp.ShardingStrategy) -> None:
    """Raise TranslationError for what a CustomPolicy cannot set for one module alone."""
    rule = "Only reshard_after_forward and the policies can differ between units of a plan"
    others = [name for name in own if name not in (*_OF_A_UNIT, *_FSDP2S_OWN)]
    if others:
        problem = f"sets {listing(others)} for {fqn} alone"
        fix = "Pass it for the whole model"
        raise TranslationError(message("auto_wrap_policy", problem, rule, fix))
    other = parse_strategy(own.get("sharding_strategy", strategy))
    same_mesh = (other.name in HYBRID) == (strategy.name in HYBRID)
    if not same_mesh or (other.name == "NO_SHARD") != (strategy.name == "NO_SHARD"):
        problem = f"sets {other.name} for {fqn} in {strategy.name}"
        fix = "Use strategies of one mesh, or shard these modules by fully_shard on their own mesh"
        raise TranslationError(message("auto_wrap_policy", problem, rule, fix))


def _settings(
    fqn: str,
    own: Mapping[str, Any],
    given: Arguments,
    precisions: Mapping[str, fsdp.MixedPrecision | None],
) -> Overrides:
    """Return the settings of the unit of a wrapped module, or of the root, ``""``."""
    strategy = parse_strategy(own.get("sharding_strategy", given.sharding_strategy))
    return Overrides(
        # FSDP1 never reshards its root after forward, since backward needs it at once.
        reshard_after_forward=fqn != "" and strategy.name in RESHARDING,
        mp_policy=mp_policy_of(precisions[fqn], is_root=not fqn),
        offload_policy=_offload_policy(own.get("cpu_offload", given.cpu_offload), given.device_id),
    )


def innermost(fqn: str, units: Collection[str]) -> str:
    """Return the innermost of ``units`` at or around the module ``fqn``; the root is one."""
    return next(name for name in (fqn, *ancestors(fqn)) if name in units)


def mp_policy_of(
    precision: fsdp.MixedPrecision | None, *, is_root: bool
) -> fsdp.MixedPrecisionPolicy:
    """FSDP1 reduces in ``param_dtype`` if ``reduce_dtype`` is None; FSDP2 not since torch 2.15."""
    if precision is None:
        return fsdp.MixedPrecisionPolicy()
    if precision.param_dtype is None:
        return fsdp.MixedPrecisionPolicy(reduce_dtype=precision.reduce_dtype)
    return fsdp.MixedPrecisionPolicy(
        param_dtype=precision.param_dtype,
        reduce_dtype=precision.reduce_dtype or precision.param_dtype,
        cast_forward_inputs=casts_inputs(precision, is_root),
    )


def casts_inputs(precision: fsdp.MixedPrecision, is_root: bool) -> bool:
    """Return whether FSDP1 casts inputs: those of the root only, unless told otherwise."""
    return precision.cast_forward_inputs or (is_root and precision.cast_root_forward_inputs)


def _full_precision(around: fsdp.MixedPrecision | None) -> fsdp.MixedPrecisionPolicy:
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
    ignored: Collection[nn.Module],
    precisions: Mapping[str, fsdp.MixedPrecision | None],
) -> dict[str, torch.dtype]:
    """Return what FSDP1 casts each buffer to at the first forward: as the unit around it says."""
    found: dict[str, torch.dtype] = {}
    for name, buffer in model.named_buffers():
        fqn = name.rpartition(".")[0]
        precision = precisions[innermost(fqn, precisions)]
        dtype = precision.buffer_dtype if precision is not None else None
        if dtype is None or not buffer.is_floating_point():
            continue
        if model.get_submodule(fqn) not in ignored:
            found[name] = dtype
    return found
