"""FSDP1's functions for the state of optimizers: full or sharded, by name, and back to what an optimizer loads."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable, Mapping
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
from shardkit._torch.dispatch import tree_map
from shardkit.errors import TranslationError, message
from shardkit.fsdp1.dropin import optimizers
from shardkit.fsdp1.dropin.record import Unavailable, record_of, wrapped_in
from shardkit.fsdp1.dropin.state import copied, get_state_dict_type, part_of, whole_of
from shardkit.ranks import groups_of, together
from shardkit.shards import device_of, replicated
from shardkit.state.model import parameter_names
from shardkit.state.optimizer import full_optimizer_state_dict, sharded_optimizer_state_dict
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

    ``{"state": {fqn: {...}}, "param_groups": [{"params": [fqn, ...], ...}]}``. FULL gives full tensors, with
    ``rank0_only`` on the lowest rank alone (``{}`` on others); SHARDED and LOCAL give DTensors; each on the CPU
    unless ``offload_to_cpu=False``. Parameters without state have no entry. **Collective** if FULL.

    Args:
        model: the model, or a module around it.
        optim: its optimizer, also one that was built before wrapping.
        optim_state_dict: what ``optim.state_dict()`` gave; None calls it.
        group: ignored; the model's parameters say which ranks hold it.

    Raises:
        TranslationError: no part of the model is wrapped.
        ShardkitError: the optimizer holds tensors that are not in the model.
    """
    return _save(model, optim, _config_of(model), optim_state_dict)


def full_optim_state_dict(
    model: nn.Module,
    optim: Optimizer,
    optim_input: list[dict[str, Any]] | Iterable[nn.Parameter] | None = None,
    rank0_only: bool = True,
    group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """:func:`optim_state_dict` in full tensors on the CPU, whatever ``state_dict_type`` says. **Collective**."""
    _warn("full_optim_state_dict", "optim_state_dict", optim_input)
    return _save(model, optim, FullOptimStateDictConfig(rank0_only=rank0_only))


def sharded_optim_state_dict(
    model: nn.Module, optim: Optimizer, group: dist.ProcessGroup | None = None
) -> dict[str, Any]:
    """:func:`optim_state_dict` in DTensors on the CPU, whatever ``state_dict_type`` says. Local."""
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
    """Return the same state as ``optim.load_state_dict`` takes it: by number, and sharded.

    Local if every rank passes full tensors, as in FSDP1: programs load one rank after another, to save memory.
    **Collective** with ``rank0_only=True``, where rank 0 has the dict and others pass ``{}`` or None, and for tensors
    that are sharded otherwise than the model. The dict is left unchanged, and shares no memory with the result.

    Args:
        model: the model, or a module around it.
        optim: its optimizer, also one that was built before wrapping.
        optim_state_dict: what :func:`optim_state_dict` gave: full tensors, DTensors of any layout, or ShardedTensors.
        is_named_optimizer: not supported.
        load_directly: call ``optim.load_state_dict`` too.
        group: ignored.

    Raises:
        TranslationError: no part of the model is wrapped, or an optimizer with named state.
        ShardkitError: the dict does not fit the optimizer; all names that only one side has.
    """
    if is_named_optimizer:
        fix = "Pass the torch.optim.Optimizer that it wraps, or use load_full_optimizer_state_dict"
        raise Unavailable(message("is_named_optimizer=True", "is not supported", "State is loaded by number", fix))
    from_rank0 = getattr(_config_of(model), "rank0_only", False)
    result = _to_load(model, optim, optim_state_dict, from_rank0=from_rank0)
    if load_directly:
        optim.load_state_dict(result)
    return result


def shard_full_optim_state_dict(
    full_optim_state_dict: dict[str, Any],
    model: nn.Module,
    optim_input: list[dict[str, Any]] | Iterable[nn.Parameter] | None = None,
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
    optim_input: list[dict[str, Any]] | Iterable[nn.Parameter] | None = None,
    optim: Optimizer | None = None,
    group: Any | None = None,
) -> dict[str, Any]:
    """:func:`optim_state_dict_to_load` of a dict that rank 0 has; it is ignored on others. **Collective**.

    Without ``optim`` the optimizer is taken to have ``model.parameters()`` in one group.
    """
    _warn("scatter_full_optim_state_dict", "optim_state_dict_to_load", optim_input)
    return _to_load(model, optim, full_optim_state_dict, from_rank0=True)


def flatten_sharded_optim_state_dict(
    sharded_optim_state_dict: dict[str, Any], model: nn.Module, optim: Optimizer
) -> dict[str, Any]:
    """:func:`optim_state_dict_to_load` of what :func:`sharded_optim_state_dict` gave."""
    _warn("flatten_sharded_optim_state_dict", "optim_state_dict_to_load")
    return _to_load(model, optim, sharded_optim_state_dict)


def rekey_optim_state_dict(*args: Any, **kwargs: Any) -> None:
    """Raise Unavailable."""
    rule = "optim_state_dict gives state by name, and optim_state_dict_to_load by number"
    raise Unavailable(message("rekey_optim_state_dict", "is not supported", rule, ""))


def _warn(name: str, replacement: str, optim_input: object = None) -> None:
    text = f"{_FSDP}.{name} is deprecated. Use {_FSDP}.{replacement}."
    warnings.warn(text, FutureWarning, stacklevel=3)
    if optim_input is not None:
        rule = "The optimizer itself says which parameters it holds"
        raise Unavailable(message("optim_input", "is not supported", rule, "Leave it out, and pass optim"))


def _config_of(model: nn.Module) -> OptimStateDictConfig:
    found = get_state_dict_type(model)
    if found is None:
        fix = "Wrap it by FullyShardedDataParallel, or use shardkit.full_optimizer_state_dict"
        raise TranslationError(message("model", "has no part that is wrapped", "", fix))
    return found.optim_state_dict_config


class _StandIn(Optimizer):
    """What the functions of ``shardkit.state`` read of an optimizer; it records what they load."""

    def __init__(self, model: nn.Module, optim: Optimizer | None, packed: Mapping[str, Any] | None = None) -> None:
        numbered = list(model.parameters())
        groups: Any = optim.param_groups if optim is not None else [{"params": numbered}]
        self.param_groups, self.state = groups, optim.state if optim is not None else {}  # type: ignore[assignment]
        empty = {"state": {}, "param_groups": [{"params": list(range(len(numbered)))}]}
        self.packed = packed or (optim.state_dict() if optim is not None else empty)

    def state_dict(self) -> dict[str, Any]:
        return dict(self.packed)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.packed = state_dict


def _save(
    model: nn.Module,
    optim: Optimizer,
    config: OptimStateDictConfig,
    given: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    optimizers.settle(optim)
    source = optim if given is None else _StandIn(model, optim, given)
    device = torch.device("cpu") if config.offload_to_cpu else device_of(record_of(wrapped_in(model)[0]).mesh)
    if isinstance(config, FullOptimStateDictConfig):
        with together(groups_of(model), call="optim_state_dict") as poll:
            state = sharded_optimizer_state_dict(model, source)["state"]
            poll.same = {"which parameters have state": sorted(state)}
        return full_optimizer_state_dict(model, source, rank0_only=config.rank0_only, device=device)

    def copy_of(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return copy.copy(value)
        return copied(value, device if value.ndim else None)  # a step is on the CPU wherever its parameter is

    made: dict[str, Any] = tree_map(copy_of, sharded_optimizer_state_dict(model, source))
    return made


def _to_load(
    model: nn.Module,
    optim: Optimizer | None,
    given: Mapping[str, Any] | None,
    *,
    from_rank0: bool = False,
) -> dict[str, Any]:
    if optim is not None:
        optimizers.settle(optim)
    stand_in = _StandIn(model, optim)
    if from_rank0:
        load_full_optimizer_state_dict(model, stand_in, given or {}, src="rank0")
        return stand_in.packed  # type: ignore[return-value]
    names = parameter_names(model)
    params = {fqn: param for param, fqn in names.items()}
    found = by_name(given or {})
    check_names([stand_in], names, found)
    state = {
        fqn: {key: _placed(value, params[fqn]) for key, value in entry.items()} for fqn, entry in found["state"].items()
    }
    install([stand_in], names, {"state": state, "param_groups": copy.deepcopy(found["param_groups"])})
    return stand_in.packed  # type: ignore[return-value]


def _placed(value: Any, param: nn.Parameter) -> Any:
    """Return a value of a parameter's state, full or sharded, as the optimizer holds it, in new memory."""
    if not (isinstance(value, Tensor) or is_sharded_tensor(value)):
        return copy.deepcopy(value)
    if not isinstance(param, DTensor):
        return whole_of(value).clone()
    found = part_of(value, param)
    if isinstance(found, DTensor):
        return copied(found, param.to_local().device)
    # Of another shape, such as the row and column means of Adafactor: a DTensor, since it was computed from one.
    return replicated(found.to(param.to_local().device, copy=True), param.device_mesh) if found.ndim else found.clone()
