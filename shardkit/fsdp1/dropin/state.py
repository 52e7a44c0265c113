"""state_dict() of wrapped models: full tensors or sharded ones, by the names of the plain model, as FSDP1's."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import (
    FullStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictConfig,
    StateDictType,
)
from torch.distributed.tensor import DTensor

from shardkit import _torch
from shardkit._fsdp import fsdp1 as _fsdp1
from shardkit.fsdp1.dropin import settings
from shardkit.fsdp1.dropin.record import WRAPPED, record_of, without_wrappers, wrappers_of
from shardkit.fsdp1.translate.strategy import HYBRID
from shardkit.state.full_params import full_params_from
from shardkit.state.names import is_extra, live_tensors, wants_live
from shardkit.state.routes import local_of, routes_of
from shardkit.state.transfer import Want

_Names: TypeAlias = tuple[dict[str, nn.Parameter], dict[str, torch.dtype]]


@dataclass(frozen=True)
class Asked:
    """The arguments of ``nn.Module.state_dict``, which may be positional."""

    destination: Any
    prefix: str
    keep_vars: bool


def arguments(args: tuple[Any, ...], destination: Any, prefix: str, keep_vars: bool) -> Asked:
    """What ``nn.Module.state_dict`` makes of its arguments."""
    given = dict(zip(("destination", "prefix", "keep_vars"), args, strict=False))
    return Asked(
        given.get("destination") if destination is None else destination,
        given.get("prefix", "") if prefix == "" else prefix,
        given.get("keep_vars", False) if keep_vars is False else keep_vars,
    )


def state_dict(wrapper: nn.Module, asked: Asked) -> Any:
    """The state of a wrapped model by its settings, in ``asked.destination`` if there is one. Collective if FULL."""
    if wants_live():
        return nn.Module.state_dict(
            wrapper, destination=asked.destination, prefix=asked.prefix, keep_vars=asked.keep_vars
        )
    found, into = _found(wrapper, asked), asked.destination
    if into is None:
        return found
    into.update(found)
    if hasattr(into, "_metadata"):
        metadata = {**_torch.state_dict_metadata(into), **_torch.state_dict_metadata(found)}
        _torch.with_state_dict_metadata(into, metadata)
    return into


def clean(wrapper: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: object) -> None:
    """A hook on ``state_dict()``: the names of a wrapper's inner module become those of the plain model, in place."""
    below = f"{prefix}{WRAPPED}."
    for name in [name for name in state_dict if name.startswith(below)]:
        state_dict[prefix + name.removeprefix(below)] = state_dict.pop(name)
    metadata = getattr(state_dict, "_metadata", None)
    if metadata is not None:
        for name in [name for name in metadata if f"{name}.".startswith(below)]:
            metadata[(prefix + f"{name}.".removeprefix(below))[:-1]] = metadata.pop(name)


def fqn_modifiers(wrapper: nn.Module) -> dict[str, str]:
    """What ``torch.distributed.checkpoint`` asks: behind which attribute each name of the wrapped module is found."""
    inner = wrapper._modules[WRAPPED]
    assert inner is not None, "set by the constructor"
    return dict.fromkeys((*inner._modules, *inner._parameters, *inner._buffers), WRAPPED)


def kind_of(wrapper: nn.Module) -> tuple[StateDictType, StateDictConfig]:
    """What kind of state a wrapper gives now. Local.

    ``torch.distributed.checkpoint.state_dict`` gets sharded state, whatever was set, as it does from FSDP1. For
    NO_SHARD it is full in any case, as in FSDP1.
    """
    if _fsdp1.asked_by_checkpoint():
        return StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig()
    settings.note_dtensors(wrapper)
    found = settings.get_state_dict_type(wrapper)
    assert found is not None, "it is a wrapper"
    full = found.state_dict_type is StateDictType.FULL_STATE_DICT
    if record_of(wrapper).strategy is ShardingStrategy.NO_SHARD and not full:
        problem = "When using ``NO_SHARD`` for ``ShardingStrategy``, full_state_dict will be returned."
        warnings.warn(problem, stacklevel=4)
        return StateDictType.FULL_STATE_DICT, FullStateDictConfig(found.state_dict_config.offload_to_cpu)
    return found.state_dict_type, found.state_dict_config


def _found(wrapper: nn.Module, asked: Asked) -> Any:
    kind, config = kind_of(wrapper)
    summoned, names = record_of(wrapper).summoned, _names(wrapper, asked.prefix)
    if summoned or kind is StateDictType.SHARDED_STATE_DICT:  # summoned: perhaps on this rank alone
        return _finished(_collected(wrapper, asked), names, config, copy=summoned)
    if kind is StateDictType.LOCAL_STATE_DICT:
        raise settings.no_local_state("state_dict")
    assert isinstance(config, FullStateDictConfig), "set_state_dict_type checks it"
    rank = first_rank(wrapper)
    want = Want(not config.rank0_only, torch.device("cpu") if config.offload_to_cpu else None)
    with full_params_from(wrapper, rank, want):
        if config.rank0_only and dist.get_rank() != rank:
            return _torch.with_state_dict_metadata(OrderedDict(), {})
        found = _collected(wrapper, asked)
    return _finished(found, names, config)


def first_rank(wrapper: nn.Module) -> int:
    """The rank that ``rank0_only`` leaves: rank 0 of the group that shards, so one on each node of a hybrid."""
    record = record_of(wrapper)
    sharded = [param for param in wrapper.parameters() if isinstance(param, DTensor)]
    if record.strategy.name in HYBRID or not sharded:
        return dist.get_global_rank(record.process_group, 0)
    return routes_of(sharded).root  # on a mesh with more axes, of all of it


def _names(wrapper: nn.Module, prefix: str) -> _Names:
    """By names of the state: parameters that are sharded or summoned, and dtypes that buffers had before a cast."""
    summoned = record_of(wrapper).summoned
    parameters = {
        prefix + state_name(name): param
        for name, param in wrapper.named_parameters(remove_duplicate=False)
        if summoned or isinstance(param, DTensor)
    }
    cast = {place: dtype for each in wrappers_of(wrapper) for place, dtype in record_of(each).buffer_dtypes.items()}
    dtypes = {
        prefix + state_name(f"{fqn}.{name}".lstrip(".")): cast[module, name]
        for fqn, module in (wrapper.named_modules(remove_duplicate=False) if cast else ())
        for name in module._buffers
        if (module, name) in cast
    }
    return parameters, dtypes


def state_name(fqn: str) -> str:
    """The name in a state dict: ``checkpoint_wrapper`` leaves no trace there, ``torch.compile`` does, as in FSDP1."""
    return without_wrappers(".".join(part for part in fqn.split(".") if part != "_checkpoint_wrapped_module"))


def _collected(wrapper: nn.Module, asked: Asked) -> dict[str, Any]:
    """What the modules have now, from their own ``state_dict``, with their hooks."""
    with live_tensors():
        return nn.Module.state_dict(wrapper, prefix=asked.prefix, keep_vars=asked.keep_vars)


def _finished(found: dict[str, Any], names: _Names, config: StateDictConfig, copy: bool = False) -> dict[str, Any]:
    """The state with parameters in memory of their own, each, and all else as FSDP1 left it: the model's own."""
    device, (parameters, dtypes) = torch.device("cpu") if config.offload_to_cpu else None, names
    seen: set[int] = set()
    for name, value in found.items():
        if isinstance(value, DTensor):
            local = local_of(value)
            found[name] = _torch.with_local(value, local.to(device or local.device, copy=True))
        elif name in parameters:
            param = parameters[name]
            value = value.detach().to(device or value.device)
            found[name] = value.clone() if copy or id(param) in seen else value
            seen.add(id(param))
        elif isinstance(value, Tensor) and not is_extra(name):
            found[name] = value.to(device or value.device, dtypes.get(name, value.dtype))
    return found
