"""FSDP1's functions for the state of optimizers: full or sharded, by name, and back to what one
loads.

An optimizer steps this rank's parts. The functions of ``shardkit.state``, and torch's own, work on
DTensors: they get a stand-in for the optimizer, whose parameters and state are DTensors.
"""

from __future__ import annotations

import copy
import warnings
from collections import defaultdict
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    OptimStateDictConfig,
    ShardedOptimStateDictConfig,
)
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shardkit._fsdp.fsdp1 import is_sharded_tensor
from shardkit._fsdp.plain import PlainShard, as_dtensors
from shardkit._torch import local_tensor
from shardkit.errors import ShardkitError, TranslationError
from shardkit.fsdp1.dropin.record import Unavailable, record_of, without_wrappers, wrappers_of
from shardkit.fsdp1.dropin.state import copied, get_state_dict_type, part_of, whole_of
from shardkit.shards import as_sharded, device_of
from shardkit.state.model import parameter_names
from shardkit.state.optimizer import (
    full_optimizer_state_dict,
    sharded_optimizer_state_dict,
    with_leaves,
)
from shardkit.state.optimizer_load import (
    by_name,
    check_names,
    install,
    load_full_optimizer_state_dict,
)

_FSDP = "FullyShardedDataParallel"


def optim_state_dict(
    model: nn.Module,
    optim: Optimizer,
    optim_state_dict: dict[str, Any] | None = None,
    group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """Return a copy of the optimizer's state by name, full or sharded as ``state_dict_type`` says.

    ``{"state": {fqn: {...}}, "param_groups": [{"params": [fqn, ...], ...}]}``. FULL gives full
    tensors, with ``rank0_only`` on the lowest rank alone (``{}`` on others); SHARDED and LOCAL give
    DTensors; each on the CPU unless ``offload_to_cpu=False``. Collective if FULL.

    Args:
        optim_state_dict: what ``optim.state_dict()`` gave; None calls it.
        group: ignored; the model's parameters say which ranks hold it.
    """
    return _save(model, optim, _config_of(model), optim_state_dict)


def full_optim_state_dict(
    model: nn.Module,
    optim: Optimizer,
    optim_input: Any = None,
    rank0_only: bool = True,
    group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """:func:`optim_state_dict` in full tensors, whatever ``state_dict_type`` says. Collective."""
    _warn("full_optim_state_dict", "optim_state_dict", optim_input)
    return _save(model, optim, FullOptimStateDictConfig(rank0_only=rank0_only))


def sharded_optim_state_dict(
    model: nn.Module, optim: Optimizer, group: dist.ProcessGroup | None = None
) -> dict[str, Any]:
    """:func:`optim_state_dict` in DTensors, whatever ``state_dict_type`` says. Local."""
    _warn("sharded_optim_state_dict", "optim_state_dict")
    return _save(model, optim, ShardedOptimStateDictConfig())


def optim_state_dict_to_load(
    model: nn.Module,
    optim: Optimizer,
    optim_state_dict: dict[str, Any],
    is_named_optimizer: bool = False,
    load_directly: bool = False,
    group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """Return the same state as ``optim.load_state_dict`` takes it: by number, this rank's parts.

    Local if every rank passes full tensors, as in FSDP1: programs load one rank after another, to
    save memory. Collective with ``rank0_only=True``, where rank 0 has the dict and others pass
    ``{}`` or None, and for tensors that are sharded otherwise than the model. The dict is left
    unchanged.

    Args:
        optim_state_dict: full tensors, DTensors of any layout, or ShardedTensors.
        is_named_optimizer: not supported.
        load_directly: call ``optim.load_state_dict`` too.
        group: ignored.
    """
    if is_named_optimizer:
        raise Unavailable(
            "is_named_optimizer=True is not supported. Pass the optimizer that it wraps."
        )
    from_rank0 = getattr(_config_of(model), "rank0_only", False)
    by_number = _to_load(model, optim, optim_state_dict, from_rank0=from_rank0)
    if load_directly:
        optim.load_state_dict(by_number)
    return by_number


def shard_full_optim_state_dict(
    full_optim_state_dict: dict[str, Any],
    model: nn.Module,
    optim_input: Any = None,
    optim: Optimizer | None = None,
) -> dict[str, Any]:
    """:func:`optim_state_dict_to_load` of a dict that every rank has. Local.

    Without ``optim`` the optimizer is taken to have ``model.parameters()`` in one group.
    """
    _warn("shard_full_optim_state_dict", "optim_state_dict_to_load", optim_input)
    return _to_load(model, optim, full_optim_state_dict)


def scatter_full_optim_state_dict(
    full_optim_state_dict: dict[str, Any] | None,
    model: nn.Module,
    optim_input: Any = None,
    optim: Optimizer | None = None,
    group: Any | None = None,
) -> dict[str, Any]:
    """:func:`optim_state_dict_to_load` of a dict that rank 0 has; ignored on others. Collective."""
    _warn("scatter_full_optim_state_dict", "optim_state_dict_to_load", optim_input)
    return _to_load(model, optim, full_optim_state_dict, from_rank0=True)


def flatten_sharded_optim_state_dict(
    sharded_optim_state_dict: dict[str, Any], model: nn.Module, optim: Optimizer
) -> dict[str, Any]:
    """:func:`optim_state_dict_to_load` of what :func:`sharded_optim_state_dict` gave."""
    _warn("flatten_sharded_optim_state_dict", "optim_state_dict_to_load")
    return _to_load(model, optim, sharded_optim_state_dict)


def rekey_optim_state_dict(*args: Any, **kwargs: Any) -> None:
    """Raise: state is by name here, and ``optim_state_dict_to_load`` gives it by number."""
    raise Unavailable(
        "rekey_optim_state_dict is not supported: optim_state_dict gives state by name. Use "
        "optim_state_dict_to_load, which gives it by number."
    )


def _warn(name: str, replacement: str, optim_input: object = None) -> None:
    text = f"{_FSDP}.{name} is deprecated. Use {_FSDP}.{replacement}."
    warnings.warn(text, FutureWarning, stacklevel=3)
    if optim_input is not None:
        raise Unavailable("optim_input is not supported: pass optim, which holds the parameters.")


def _config_of(model: nn.Module) -> OptimStateDictConfig:
    settings = get_state_dict_type(model)
    if settings is None:
        raise TranslationError(
            "No part of the model is wrapped by FullyShardedDataParallel. Use "
            "shardkit.full_optimizer_state_dict."
        )
    return settings.optim_state_dict_config


def as_optimizer_of_dtensors(optim: Optimizer, shards: Mapping[Tensor, PlainShard]) -> Optimizer:
    """Return an optimizer like ``optim`` whose parameters are DTensors. Local."""
    stand_in: Any = object.__new__(type(optim))
    vars(stand_in).update(vars(optim))
    vars(stand_in).pop("step", None)  # that of an LR scheduler is bound to the optimizer itself
    stand_in.__setstate__({})
    stand_in.param_groups = []
    for group in optim.param_groups:
        params = [shards[p].sharded_param if p in shards else p for p in group["params"]]
        stand_in.param_groups.append({**group, "params": params})
    stand_in.state = defaultdict(dict)
    for param, state in optim.state.items():
        if param in shards:
            shard = shards[param]
            stand_in.state[shard.sharded_param] = with_leaves(state, partial(_as_dtensor, shard))
        else:
            stand_in.state[param] = state
    return stand_in  # type: ignore[no-any-return]


def _as_dtensor(shard: PlainShard, path: str, value: Tensor) -> Tensor:
    if not value.ndim:
        return value
    if value.shape != shard.plain.shape:
        raise ShardkitError(
            f"The state {path[1:]} of {shard.fqn} has the shape {tuple(value.shape)}, but this "
            f"rank's part of it has {tuple(shard.plain.shape)}: it is of this part only, and "
            "cannot be saved by name. Save optimizer.state_dict() of each rank."
        )
    return as_sharded(value.view(shard.sharded_size), shard.sharded_param)


def _save(
    model: nn.Module,
    optim: Optimizer,
    config: OptimStateDictConfig,
    given: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the state of an optimizer by name, in the form of ``config``: of DTensors, by a
    stand-in. Collective if full.
    """
    if given is not None:  # what optim.state_dict() gave, for a copy of the optimizer
        optim = as_optimizer_of_dtensors(optim, {})
        optim.load_state_dict(given)
    home = device_of(record_of(wrappers_of(model)[0]).mesh)
    device = torch.device("cpu") if config.offload_to_cpu else home

    def copy_of(path: str, value: Tensor) -> Tensor:
        return copied(value, device if value.ndim else None)  # a step is on the CPU everywhere

    with as_dtensors(model) as shards:
        optim = as_optimizer_of_dtensors(optim, shards)
        if not isinstance(config, FullOptimStateDictConfig):
            state = sharded_optimizer_state_dict(model, optim)
            copied_state: dict[str, Any] = with_leaves(state, copy_of)
            return copied_state
        rank0_only = config.rank0_only
        return full_optimizer_state_dict(model, optim, rank0_only=rank0_only, device=device)


def _to_load(
    model: nn.Module,
    optim: Optimizer | None,
    given: dict[str, Any] | None,
    *,
    from_rank0: bool = False,
) -> dict[str, Any]:
    """Return state by name as ``optim.load_state_dict`` takes it.

    A stand-in with DTensors loads it, from rank 0 or from what this rank was given; its state, made
    flat again, is the result. ``optim`` does not change.
    """
    with as_dtensors(model) as shards:
        optim = optim or torch.optim.SGD(model.parameters(), lr=0.0)
        stand_in = as_optimizer_of_dtensors(optim, shards)
        if from_rank0:
            load_full_optimizer_state_dict(model, stand_in, given or {}, src="rank0")
        else:
            names = parameter_names(model)
            params = {fqn: param for param, fqn in names.items()}
            named = by_name(given or {})
            check_names([stand_in], names, named)
            state: dict[str, dict[str, Any]] = {}
            for fqn, values in named["state"].items():
                state[fqn] = {key: _placed(value, params[fqn]) for key, value in values.items()}
            groups = copy.deepcopy(named["param_groups"])
            install([stand_in], names, {"state": state, "param_groups": groups})
        for shard in shards.values():
            values = stand_in.state.get(shard.sharded_param, {})
            for key, value in values.items():
                shape = shard.sharded_param.shape
                if isinstance(value, Tensor) and value.numel() > 1 and value.shape != shape:
                    raise ShardkitError(
                        f"The state {key} of {without_wrappers(shard.fqn)} has the shape "
                        f"{tuple(value.shape)}, and the parameter {tuple(shape)}. Load the state "
                        "of an optimizer of the same model."
                    )
                if isinstance(value, DTensor):
                    values[key] = shard.flat(local_tensor(value))
        return stand_in.state_dict()


def _placed(value: Any, param: nn.Parameter) -> Any:
    """Return a value of a parameter's state, full or sharded, in new memory."""
    if not (isinstance(value, Tensor) or is_sharded_tensor(value)):
        return copy.deepcopy(value)
    part = part_of(value, param)
    if isinstance(part, DTensor):
        local = local_tensor(param) if isinstance(param, DTensor) else param
        return copied(part, local.device)
    return whole_of(part).clone()
