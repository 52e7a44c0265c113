"""State of wrapped models by the names of the plain model, in FSDP1's types; full parameters for a
while.

The functions of ``shardkit.state`` work on FSDP2's DTensors, which ``as_dtensors`` registers for
them.
"""

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
from shardkit._fsdp.fsdp1 import gathered_sharded_tensor, is_sharded_tensor
from shardkit._fsdp.plain import as_dtensors
from shardkit._torch import local_tensor
from shardkit._torch.dispatch import state_dict_metadata, with_state_dict_metadata
from shardkit.fsdp1.dropin.record import (
    WRAPPED,
    inner_of,
    is_wrapper,
    record_of,
    wrappers_of,
    wrappers_or_refuse,
)
from shardkit.shards import as_sharded, device_of, local_part
from shardkit.state.model import (
    clean_name,
    full_state_dict,
    is_extra,
    live_tensors,
    sharded_state_dict,
    wants_live,
)
from shardkit.state.unsharded import full_params

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
    """Set what ``state_dict()`` of the wrappers at and below ``module`` returns, and optimizers'
    state.

    Returns the settings before; None where there is no wrapper. Local.
    """
    config, optim_config = _CONFIGS[state_dict_type]
    settings = StateDictSettings(
        state_dict_type, state_dict_config or config(), optim_state_dict_config or optim_config()
    )
    before = get_state_dict_type(module)
    for wrapper in wrappers_of(module):
        record_of(wrapper).state_dict_settings = replace(settings)
    return before


def get_state_dict_type(module: nn.Module) -> StateDictSettings | None:
    """Return what was set for the first wrapper at or below ``module``; None without one. Local."""
    wrappers = wrappers_or_refuse(module, "state_dict_type")
    return record_of(wrappers[0]).state_dict_settings if wrappers else None


@contextmanager
def state_dict_type(
    module: nn.Module,
    state_dict_type: StateDictType,
    state_dict_config: StateDictConfig | None = None,
    optim_state_dict_config: OptimStateDictConfig | None = None,
) -> Iterator[None]:
    """Call ``set_state_dict_type`` for this context.

    An error restores too, unlike in FSDP1. Local.
    """
    records = [record_of(wrapper) for wrapper in wrappers_of(module)]
    before = [record.state_dict_settings for record in records]
    set_state_dict_type(module, state_dict_type, state_dict_config, optim_state_dict_config)
    try:
        yield
    finally:
        for record, settings in zip(records, before, strict=True):
            record.state_dict_settings = settings


# ---- state_dict() ------------------------------------------------------------------------------


def state_dict(wrapper: nn.Module, destination: Any, prefix: str, keep_vars: bool) -> Any:
    """Return the state of a wrapped model by its settings, in ``destination`` if given."""
    if wants_live():
        return nn.Module.state_dict(
            wrapper, destination=destination, prefix=prefix, keep_vars=keep_vars
        )
    with as_dtensors(wrapper):
        state = _by_settings(wrapper)

    # Buffers have the dtypes that they had before they were cast for mixed precision.
    for fqn, module in wrapper.named_modules():
        if is_wrapper(module):
            for name, dtype in record_of(module).buffer_dtypes.items():
                clean = clean_name(f"{fqn}.{name}".lstrip("."))
                if clean in state:
                    state[clean] = state[clean].to(dtype)

    if destination is None:
        destination = OrderedDict()
    metadata = dict(state_dict_metadata(destination))
    for name, value in state_dict_metadata(state).items():
        metadata[f"{prefix}{name}".rstrip(".")] = value
    for name, value in state.items():
        destination[prefix + name] = value
    return with_state_dict_metadata(destination, metadata)


def _by_settings(wrapper: nn.Module) -> dict[str, Any]:
    """Return the state of a model that shows DTensors, by the plain model's names."""
    record = record_of(wrapper)
    config = record.state_dict_settings.state_dict_config
    kind = record.state_dict_settings.state_dict_type
    if record.strategy is ShardingStrategy.NO_SHARD:
        kind = StateDictType.FULL_STATE_DICT  # always, as in FSDP1

    # Summoned parameters are full already, perhaps on this rank alone.
    if kind is StateDictType.FULL_STATE_DICT and not record.summoned:
        device = torch.device("cpu") if config.offload_to_cpu else device_of(record.mesh)
        rank0_only = getattr(config, "rank0_only", False)
        state = full_state_dict(wrapper, rank0_only=rank0_only, device=device)
        seen = set()
        for name, value in state.items():
            if id(value) in seen and isinstance(value, Tensor):
                state[name] = value.clone()  # as FSDP1 gave tied tensors, and safetensors asks for
            seen.add(id(value))
        return state

    state = sharded_state_dict(wrapper)
    if kind is StateDictType.LOCAL_STATE_DICT and not record.summoned:
        return state
    for name, value in state.items():
        if isinstance(value, Tensor) and not is_extra(name):
            state[name] = copied(value, torch.device("cpu") if config.offload_to_cpu else None)
    return state


def copied(value: Tensor, device: torch.device | None) -> Tensor:
    """Return a copy of a tensor, sharded or not, on the device, or where it is. Local."""
    local = (local_tensor(value) if isinstance(value, DTensor) else value).detach()
    local = local.to(device or local.device, copy=True)
    return as_sharded(local, value) if isinstance(value, DTensor) else local


# ---- load_state_dict() -------------------------------------------------------------------------


def attach(wrapper: nn.Module) -> None:
    """Put hooks on a new wrapper, by which it and modules around it load state with clean names."""
    wrapper.register_load_state_dict_pre_hook(_before_load)  # type: ignore[no-untyped-call]
    wrapper.register_load_state_dict_post_hook(_after_load)  # type: ignore[no-untyped-call]


@torch.no_grad()
def _before_load(
    wrapper: nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    metadata: dict[str, Any],
    strict: bool,
    missing: list[str],
    unexpected: list[str],
    errors: list[str],
) -> None:
    """Rename state as ``nn.Module`` looks for it, and give each value the shape of this rank's
    part.

    Values may be full, DTensors, or ShardedTensors of FSDP1, whatever ``state_dict_type`` was set
    to. Collective if values are sharded otherwise than the model; every rank then loads the same
    names.
    """
    given = {}
    for name in state_dict:
        if name.startswith(f"{prefix}{WRAPPED}."):
            return  # an outer wrapper did
        if name.startswith(prefix):
            given[clean_name(name.removeprefix(prefix))] = name
    with as_dtensors(wrapper) as shards, live_tensors():
        flat = {id(shard.sharded_param): shard.flat for shard in shards.values()}
        live = nn.Module.state_dict(wrapper, keep_vars=True)
        for own_name, tensor in live.items():  # in the model's order, the same on all ranks
            clean = clean_name(own_name)
            if clean not in given:
                continue
            name = given[clean]
            value = part_of(state_dict.pop(name), tensor)
            if id(tensor) in flat and isinstance(value, Tensor):
                if value.shape != tensor.shape:
                    shape, own_shape = tuple(value.shape), tuple(tensor.shape)
                    errors.append(f"size mismatch for {name}: {shape}, not {own_shape}.")
                    value = tensor
                value = flat[id(tensor)](local_tensor(value))
                if metadata.get("assign_to_params_buffers", False):
                    value = value.detach().clone()  # as a view it would keep the full tensor alive
            state_dict[prefix + own_name] = value


def _after_load(wrapper: nn.Module, keys: Any) -> None:
    for names in (keys.missing_keys, keys.unexpected_keys):
        names[:] = [clean_name(name) for name in names]


def part_of(value: Any, like: Any) -> Any:
    """Return a full or sharded value with the layout of ``like``; one of another shape as it is.

    Local where the value is full or sharded alike, and then perhaps a view; otherwise collective.
    """
    is_old = is_sharded_tensor(value)  # its ``shape`` warns
    shape = torch.Size(value.metadata().size) if is_old else getattr(value, "shape", None)
    if not isinstance(like, Tensor) or shape != like.shape:
        return value
    if not isinstance(like, DTensor):
        return whole_of(value)
    if isinstance(value, DTensor) and value.placements == like.placements:
        # A mesh that was read from a file has no groups, so meshes are compared by their ranks.
        if torch.equal(value.device_mesh.mesh, like.device_mesh.mesh):
            return as_sharded(local_tensor(value), like)
    local = local_part(whole_of(value), like)
    return as_sharded(local.to(local_tensor(like).device), like)


def whole_of(value: Any) -> Any:
    """Return the full tensor. Collective if the value is sharded."""
    if isinstance(value, DTensor):
        return value.full_tensor()
    return gathered_sharded_tensor(value) if is_sharded_tensor(value) else value


# ---- summon_full_params ------------------------------------------------------------------------


@contextmanager
def summon_full_params(
    module: nn.Module,
    recurse: bool = True,
    writeback: bool = True,
    rank0_only: bool = False,
    offload_to_cpu: bool = False,
    with_grads: bool = False,
) -> Iterator[None]:
    """Make the parameters at and below ``module`` full in this context, in their own dtype.

    ``shardkit.full_params`` by FSDP1's rules. Modules and methods such as ``generate`` run on full
    parameters, on each rank by itself, and afterwards the same sharded parameters are in place.
    Inside another such context it does nothing. Collective.

    Args:
        recurse: False is for ``module`` alone, and does nothing where that is not a wrapper.
        writeback: keep what was written; under NO_SHARD it is kept in any case, as in FSDP1.
        rank0_only: full on the lowest rank only; others see DTensors.
        offload_to_cpu: on the CPU.
        with_grads: with gradients.
    """
    wrappers = wrappers_or_refuse(module, "summon_full_params")
    if not recurse:
        wrappers = [wrapper for wrapper in wrappers if wrapper is module]
    records = [record for record in map(record_of, wrappers) if not record.summoned]
    if not records:
        yield
        return
    if not rank0_only and {record.strategy for record in records} == {ShardingStrategy.NO_SHARD}:
        writeback = True
    inner: Any = inner_of(wrappers[0])
    if not recurse and isinstance(inner, FSDPModule):
        _fsdp.initialize(inner)  # as a root: units inside it are then unsharded as parts of it
    for record in records:
        record.summoned = True
    try:
        with (
            as_dtensors(module),
            full_params(
                module if recurse else inner,
                writeback=writeback,
                rank0_only=rank0_only,
                offload_to_cpu=offload_to_cpu,
                with_grads=with_grads,
                recurse=recurse,
            ),
        ):
            yield
    finally:
        for record in records:
            record.summoned = False
