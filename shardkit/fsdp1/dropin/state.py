"""State of wrapped models by the names of the plain model, in FSDP1's types; and full parameters for a while."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import (
    FSDPModule,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    OptimStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)
from torch.distributed.tensor import DTensor

from shardkit import _fsdp
from shardkit._fsdp.fsdp1 import asked_by_checkpoint, gathered_sharded_tensor, is_sharded_tensor
from shardkit._torch import local_tensor, state_dict_metadata, with_state_dict_metadata
from shardkit.fsdp1.dropin.record import is_wrapped, record_of, wrapped_in, wrapped_or_refuse
from shardkit.runtime.hooks import reshard
from shardkit.shards import as_sharded, device_of, local_part
from shardkit.state.full_params import full_params
from shardkit.state.model import (
    clean_name,
    full_state_dict,
    is_extra,
    live_tensors,
    sharded_state_dict,
    wants_live,
)

# Of models and of optimizers.
_CONFIGS: dict[StateDictType, tuple[type[StateDictConfig], type[OptimStateDictConfig]]] = {
    StateDictType.FULL_STATE_DICT: (FullStateDictConfig, FullOptimStateDictConfig),
    StateDictType.SHARDED_STATE_DICT: (ShardedStateDictConfig, ShardedOptimStateDictConfig),
    StateDictType.LOCAL_STATE_DICT: (LocalStateDictConfig, LocalOptimStateDictConfig),
}


def set_state_dict_type(
    module: nn.Module,
    state_dict_type: StateDictType,
    state_dict_config: StateDictConfig | None = None,
    optim_state_dict_config: OptimStateDictConfig | None = None,
) -> StateDictSettings | None:
    """Set what ``state_dict()`` of all wrappers at and below ``module`` returns, and optimizers' state. Local.

    Args:
        module: a wrapper, or a module around some.
        state_dict_type: FULL_STATE_DICT, the default, SHARDED_STATE_DICT, or LOCAL_STATE_DICT for models only.
        state_dict_config, optim_state_dict_config: of that type, for models and optimizers; None is torch's default.

    Returns:
        The settings before; None where there is no wrapper.

    Raises:
        TranslationError: the model is sharded, but not wrapped.
    """
    config, optim_config = _CONFIGS[state_dict_type]
    settings = StateDictSettings(
        state_dict_type, state_dict_config or config(), optim_state_dict_config or optim_config()
    )
    before = get_state_dict_type(module)
    for wrapper in wrapped_in(module):
        record_of(wrapper).state_dict_settings = replace(settings)
    return before


def get_state_dict_type(module: nn.Module) -> StateDictSettings | None:
    """Return what ``set_state_dict_type`` set for the first wrapper at or below ``module``; None without one. Local.

    Raises:
        TranslationError: the model is sharded, but not wrapped.
    """
    found = wrapped_or_refuse(module, "state_dict_type")
    return record_of(found[0]).state_dict_settings if found else None


@contextmanager
def state_dict_type(
    module: nn.Module,
    state_dict_type: StateDictType,
    state_dict_config: StateDictConfig | None = None,
    optim_state_dict_config: OptimStateDictConfig | None = None,
) -> Iterator[None]:
    """Call ``set_state_dict_type`` for this context; an error restores the settings too, unlike in FSDP1. Local.

    Examples:
        >>> with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, FullStateDictConfig(True, True)):
        ...     state = model.state_dict()
    """
    records = [record_of(wrapper) for wrapper in wrapped_in(module)]
    before = [record.state_dict_settings for record in records]
    set_state_dict_type(module, state_dict_type, state_dict_config, optim_state_dict_config)
    try:
        yield
    finally:
        for record, settings in zip(records, before, strict=True):
            record.state_dict_settings = settings


# ---- state_dict() -----------------------------------------------------------------------------------------------


def state_dict(wrapper: nn.Module, destination: Any, prefix: str, keep_vars: bool) -> Any:
    """Return the state of a wrapped model by its settings, in ``destination`` if given. Collective if FULL."""
    if wants_live():
        return nn.Module.state_dict(wrapper, destination=destination, prefix=prefix, keep_vars=keep_vars)
    found = _by_settings(wrapper)
    metadata = {f"{prefix}{name}".rstrip("."): each for name, each in state_dict_metadata(found).items()}
    destination = OrderedDict() if destination is None else destination
    destination.update((prefix + name, value) for name, value in found.items())
    return with_state_dict_metadata(destination, {**state_dict_metadata(destination), **metadata})


def _by_settings(wrapper: nn.Module) -> dict[str, Any]:
    """Return the state by the plain model's names, and buffers in the dtypes that they had before they were cast.

    ``torch.distributed.checkpoint.state_dict`` gets sharded state whatever was set, as it does from FSDP1. NO_SHARD
    always gives full state, as in FSDP1.
    """
    record, settings = record_of(wrapper), get_state_dict_type(wrapper)
    assert settings is not None, "it is a wrapper"
    config, full = (
        settings.state_dict_config,
        settings.state_dict_type is StateDictType.FULL_STATE_DICT,
    )
    if asked_by_checkpoint():
        config, full = ShardedStateDictConfig(), False
    full = full or record.strategy is ShardingStrategy.NO_SHARD
    device = torch.device("cpu") if config.offload_to_cpu else device_of(record.mesh)
    if full and not record.summoned:  # summoned: the parameters are plain, perhaps on this rank alone
        found = full_state_dict(wrapper, rank0_only=getattr(config, "rank0_only", False), device=device)
        seen: set[int] = set()
        for (
            name,
            value,
        ) in found.items():  # as in FSDP1, tied tensors have memory of their own: safetensors asks for it
            found[name] = value.clone() if id(value) in seen and isinstance(value, Tensor) else value
            seen.add(id(value))
    else:
        found = sharded_state_dict(wrapper)
        is_live = settings.state_dict_type is StateDictType.LOCAL_STATE_DICT and not record.summoned
        for name, value in found.items():
            if isinstance(value, Tensor) and not (is_live or is_extra(name)):
                found[name] = copied(value, torch.device("cpu") if config.offload_to_cpu else None)
    for fqn, module in wrapper.named_modules():
        for name, dtype in record_of(module).buffer_dtypes.items() if is_wrapped(module) else ():
            clean = clean_name(f"{fqn}.{name}".lstrip("."))
            if clean in found:
                found[clean] = found[clean].to(dtype)
    return found


def copied(value: Tensor, device: torch.device | None) -> Tensor:
    """Return a copy of a tensor, sharded or not, on the device, or where it is. Local."""
    local = local_tensor(value) if isinstance(value, DTensor) else value.detach()
    local = local.detach().to(device or local.device, copy=True)
    return as_sharded(local, value) if isinstance(value, DTensor) else local


# ---- load_state_dict() ------------------------------------------------------------------------------------------


def attach(wrapper: nn.Module) -> None:
    """Put hooks on a new wrapper, by which it and modules around it load state with clean names. Local."""
    wrapper.register_load_state_dict_pre_hook(_before_load)  # type: ignore[no-untyped-call]
    wrapper.register_load_state_dict_post_hook(_after_load)  # type: ignore[no-untyped-call]


@torch.no_grad()
def _before_load(
    wrapper: nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    metadata: dict[str, Any],
    *others: object,
) -> None:
    """Rename state as ``nn.Module`` looks for it, and give each value the layout of the tensor that it is for.

    Values may be full, DTensors, or ShardedTensors of FSDP1, whatever ``state_dict_type`` was set to. Collective if
    values are sharded otherwise than the model; every rank then loads the same names.
    """
    if not record_of(wrapper).summoned:
        reshard(wrapper)  # values would go into full parameters, which resharding throws away
    with live_tensors():
        live = nn.Module.state_dict(wrapper, keep_vars=True)
    offered = {clean_name(name.removeprefix(prefix)): name for name in state_dict if name.startswith(prefix)}
    for found, tensor in live.items():  # in the model's order, which is the same on all ranks
        if (name := offered.get(clean_name(found))) is None:
            continue
        value = part_of(state_dict.pop(name), tensor)
        if metadata.get("assign_to_params_buffers", False) and isinstance(value, DTensor):
            value = copied(value, None)  # as a view of the full tensor it would keep that alive
        # checkpoint_wrapper adds its part of a name by a hook of its own; torch.compile does not.
        by_hook = name.replace("_checkpoint_wrapped_module.", "") == prefix + found
        state_dict[name if by_hook else prefix + found] = value


def _after_load(wrapper: nn.Module, keys: Any) -> None:
    for names in (keys.missing_keys, keys.unexpected_keys):
        names[:] = [clean_name(name) for name in names]


def part_of(value: Any, like: Any) -> Any:
    """Return a full or sharded value with the layout of ``like``; others, and those of another shape, as they are.

    Local where the value is full or sharded alike, and then perhaps a view; otherwise collective.
    """
    is_old = is_sharded_tensor(value)  # its ``shape`` warns
    shape = torch.Size(value.metadata().size) if is_old else getattr(value, "shape", None)
    if not isinstance(like, Tensor) or shape != like.shape:
        return value
    if not isinstance(like, DTensor):
        return whole_of(value)
    # A mesh that was read from a file has no groups, so meshes are compared by their ranks.
    alike = isinstance(value, DTensor) and value.placements == like.placements
    if alike and torch.equal(value.device_mesh.mesh, like.device_mesh.mesh):
        return as_sharded(local_tensor(value), like)
    return as_sharded(local_part(whole_of(value), like).to(local_tensor(like).device), like)


def whole_of(value: Any) -> Any:
    """Return the full tensor. Collective if the value is sharded."""
    if isinstance(value, DTensor):
        return value.full_tensor()
    return gathered_sharded_tensor(value) if is_sharded_tensor(value) else value


# ---- summon_full_params and apply ---------------------------------------------------------------------------------


@contextmanager
def summon_full_params(
    module: nn.Module,
    recurse: bool = True,
    writeback: bool = True,
    rank0_only: bool = False,
    offload_to_cpu: bool = False,
    with_grads: bool = False,
) -> Iterator[None]:
    """Make the parameters at and below ``module`` full in this context, in their own dtype. Collective.

    ``shardkit.full_params`` by FSDP1's rules: modules and methods such as ``generate`` run on them, on each rank by
    itself, and afterwards the same sharded parameters are in place. Inside another such context it does nothing.

    Args:
        module: a wrapper, or a module around some.
        recurse: False is for ``module`` alone, and does nothing where that is not a wrapper.
        writeback: keep what was written; under NO_SHARD it is kept in any case, since the parameters themselves are
            shown.
        rank0_only: full on the lowest rank only.
        offload_to_cpu: on the CPU.
        with_grads: with gradients.

    Raises:
        ShardkitError: inside a forward or a backward.
        TranslationError: the model is sharded, but not wrapped.
    """
    found = wrapped_or_refuse(module, "summon_full_params")
    wrappers = [each for each in found if recurse or each is module]
    records = [record for record in map(record_of, wrappers) if not record.summoned]  # others are full already
    if not records:
        yield
        return
    shown = all(record.strategy is ShardingStrategy.NO_SHARD for record in records) and not rank0_only
    if not recurse and isinstance(module, FSDPModule):
        _fsdp.initialize(module)  # as a root: units inside it then gather themselves as parts of it
    for record in records:
        record.summoned = True
    try:
        with full_params(
            module,
            writeback=writeback or shown,
            rank0_only=rank0_only,
            offload_to_cpu=offload_to_cpu,
            with_grads=with_grads,
            recurse=recurse,
        ):
            yield
    finally:
        for record in records:
            record.summoned = False
