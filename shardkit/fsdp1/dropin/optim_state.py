"""FSDP1's functions for the state of optimizers: full or sharded, by name, and back to what an optimizer loads."""

from __future__ import annotations

import copy
import hashlib
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
    StateDictType,
)
from torch.distributed.fsdp.fully_sharded_data_parallel import OptimStateKeyType
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shardkit._torch import named_sharded_parameters, with_local
from shardkit.errors import TranslationError, listing, message
from shardkit.fsdp1.dropin import optim_load, optimizers
from shardkit.fsdp1.dropin.errors import DropinKeyError, DropinRuntimeError, DropinValueError
from shardkit.fsdp1.dropin.optim_load import OptimInput, check_is_optimizer_state, keys_of, labels_of
from shardkit.fsdp1.dropin.state import get_state_dict_type, no_local_state, state_name
from shardkit.ranks import Groups, gather_by_rank, groups_of, together
from shardkit.state.names import parameter_names
from shardkit.state.optimizer import as_values, full_leaves, has_quantized, renamed_state, tensor_leaves, with_leaves
from shardkit.state.routes import local_of, routes_of
from shardkit.state.transfer import Want


def optim_state_dict(
    model: nn.Module,
    optim: Optimizer,
    optim_state_dict: dict[str, Any] | None = None,
    group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """Return a copy of the optimizer's state by name, full or sharded as ``state_dict_type`` says. **Collective**.

    ``{"state": {fqn: {...}}, "param_groups": [{"params": [fqn, ...], ...}]}``. FULL gives full tensors, with
    ``rank0_only`` on rank 0 alone (``{}`` on others); SHARDED gives DTensors, where FSDP1 without a ``device_mesh``
    gave ShardedTensors; each on the CPU unless ``offload_to_cpu=False``. Scalars such as ``step`` are 0-d tensors.
    Parameters without state have no entry; those that are not sharded have this rank's own. Names are in the model's
    order on every rank. Keys that do not belong to a parameter, and values that are not tensors, stay.

    Args:
        model: the model, or a module around it.
        optim: its optimizer, also one that was built before wrapping.
        optim_state_dict: what ``optim.state_dict()`` gave; None calls it.
        group: ignored; the model's parameters say which ranks hold it.

    Raises:
        TranslationError: LOCAL_STATE_DICT, or no part of the model is wrapped.
        RuntimeError: some ranks lack state of a sharded parameter that others have; on every rank, with all names.
        KeyError: groups have numbers that the optimizer has no parameter for.
    """
    return _save(model, optim, optim_state_dict, None, _config(model))


def full_optim_state_dict(
    model: nn.Module,
    optim: Optimizer,
    optim_input: list[dict[str, Any]] | Iterable[nn.Parameter] | None = None,
    rank0_only: bool = True,
    group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """:func:`optim_state_dict` in full tensors on the CPU, whatever ``state_dict_type`` says. **Collective**."""
    _warn("full_optim_state_dict", "optim_state_dict", optim_input)
    return _save(model, optim, None, optim_input, FullOptimStateDictConfig(rank0_only=rank0_only))


def sharded_optim_state_dict(
    model: nn.Module, optim: Optimizer, group: dist.ProcessGroup | None = None
) -> dict[str, Any]:
    """:func:`optim_state_dict` in DTensors on the CPU, whatever ``state_dict_type`` says. **Collective**."""
    _warn("sharded_optim_state_dict", "optim_state_dict")
    return _save(model, optim, None, None, ShardedOptimStateDictConfig())


def optim_state_dict_to_load(
    model: nn.Module,
    optim: Optimizer,
    optim_state_dict: dict[str, Any],
    is_named_optimizer: bool = False,
    load_directly: bool = False,
    group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """Return the same state as ``optim.load_state_dict`` takes it: by number, and sharded.

    **Collective**, unless the dict holds full tensors and ``rank0_only`` is False, as in FSDP1. Takes full tensors,
    DTensors of any layout and ShardedTensors. With ``rank0_only=True`` rank 0 has the dict, and others pass ``{}`` or
    None. The dict is left unchanged, and shares no memory with the result.

    Args:
        model: the model, or a module around it.
        optim: its optimizer, also one that was built before wrapping.
        optim_state_dict: what :func:`optim_state_dict` gave, with ``param_groups`` or without.
        is_named_optimizer: whether ``optim`` keeps state by name, not by number.
        load_directly: call ``optim.load_state_dict`` too.
        group: ignored.

    Raises:
        TranslationError: LOCAL_STATE_DICT, or no part of the model is wrapped.
        ValueError: not the state of an optimizer, or one that does not fit.
        KeyError: parameters that the optimizer does not have. With all names; where collective, on every rank.
    """
    from_rank0 = getattr(_config(model), "rank0_only", False)
    result = optim_load.load(model, optim, None, optim_state_dict, from_rank0=from_rank0, named=is_named_optimizer)
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

    Without ``optim`` and ``optim_input`` the optimizer is taken to have ``model.parameters()``.
    """
    _warn("shard_full_optim_state_dict", "optim_state_dict_to_load", optim_input)
    return optim_load.load(model, optim, optim_input, full_optim_state_dict)


def scatter_full_optim_state_dict(
    full_optim_state_dict: dict[str, Any] | None,
    model: nn.Module,
    optim_input: list[dict[str, Any]] | Iterable[nn.Parameter] | None = None,
    optim: Optimizer | None = None,
    group: Any | None = None,
) -> dict[str, Any]:
    """:func:`optim_state_dict_to_load` of a dict that rank 0 has; it is ignored on others. **Collective**.

    Without ``optim`` and ``optim_input`` the optimizer is taken to have ``model.parameters()``.
    """
    _warn("scatter_full_optim_state_dict", "optim_state_dict_to_load", optim_input)
    return optim_load.load(model, optim, optim_input, full_optim_state_dict, from_rank0=True)


def flatten_sharded_optim_state_dict(
    sharded_optim_state_dict: dict[str, Any], model: nn.Module, optim: Optimizer
) -> dict[str, Any]:
    """:func:`optim_state_dict_to_load` of what :func:`sharded_optim_state_dict` gave. **Collective**."""
    _warn("flatten_sharded_optim_state_dict", "optim_state_dict_to_load")
    return optim_load.load(model, optim, None, sharded_optim_state_dict)


def rekey_optim_state_dict(
    optim_state_dict: dict[str, Any],
    optim_state_key_type: OptimStateKeyType,
    model: nn.Module,
    optim_input: list[dict[str, Any]] | Iterable[nn.Parameter] | None = None,
    optim: Optimizer | None = None,
) -> dict[str, Any]:
    """Return the same state by parameter number, as plain optimizers have it, or by name, as FSDP has it. Local.

    The tensors are those of the dict. A dict that is of the wanted kind already is returned itself.

    Args:
        optim_state_dict: ``{"state": ..., "param_groups": ...}``.
        optim_state_key_type: PARAM_ID or PARAM_NAME.
        model: sharded or not.
        optim_input: what the optimizer was made from; deprecated.
        optim: whose numbers are meant; without, and without ``optim_input``, those of ``model.parameters()``.

    Raises:
        ValueError: not the state of an optimizer, or numbers and names in one.
        KeyError: parameters that the optimizer or the model does not have, all listed.
    """
    _warn("", "", optim_input)
    to_names = optim_state_key_type is OptimStateKeyType.PARAM_NAME
    if not to_names and optim_state_key_type is not OptimStateKeyType.PARAM_ID:
        rule, fix = "It must be a member of OptimStateKeyType", "Pass OptimStateKeyType.PARAM_NAME"
        raise DropinValueError(message("optim_state_key_type", f"is {optim_state_key_type!r}", rule, fix))
    check_is_optimizer_state(optim_state_dict)
    kinds = {type(key) for key in optim_state_dict["state"]}
    if len(kinds) > 1 and kinds & {int, str}:
        problem = f"Invalid parameter keys: {listing(map(str, optim_state_dict['state']))}"
        fix = "Remove keys that do not belong to a parameter, and add them back afterwards"
        raise DropinValueError(message("optim_state_dict", problem, "Keys must be all numbers or all names", fix))
    groups = optim_state_dict.get("param_groups")
    present = [*optim_state_dict["state"], *(key for group in groups or () for key in group["params"])]
    if all(isinstance(key, str if to_names else int) for key in present):
        return optim_state_dict
    keys = keys_of(optim, optim_input, model)
    new: dict[Any, Any] = dict(keys.names) if to_names else dict(keys.by_name)
    if unknown := [str(key) for key in dict.fromkeys(present) if key not in new]:
        rule = "Keys are the parameters that the optimizer was given"
        fix = "Pass the optim that the state belongs to"
        raise DropinKeyError(message("optim_state_dict", f"{listing(unknown)} is not a parameter", rule, fix))
    state = {new[key]: entry for key, entry in optim_state_dict["state"].items()}
    if groups is None:
        return {"state": state}
    rekeyed = [{**copy.deepcopy(group), "params": sorted(new[key] for key in group["params"])} for group in groups]
    return {"state": state, "param_groups": rekeyed}


def _warn(name: str, instead: str, optim_input: OptimInput = None) -> None:
    texts = [f"FullyShardedDataParallel.{name} is deprecated. Use FullyShardedDataParallel.{instead}."] if name else []
    if optim_input is not None:
        texts.append("The `optim_input` argument is deprecated. Leave it out, and pass optim.")
    for text in texts:
        warnings.warn(text, FutureWarning, stacklevel=3)


def _config(model: nn.Module) -> OptimStateDictConfig:
    found = get_state_dict_type(model)
    if found is None:
        rule = "state_dict_type is kept by the wrappers"
        fix = "Wrap it by FullyShardedDataParallel, or use shardkit.full_optimizer_state_dict"
        raise TranslationError(message("model", "no part of it is wrapped", rule, fix))
    if found.state_dict_type is StateDictType.LOCAL_STATE_DICT:
        raise no_local_state("optim_state_dict", "an optimizer's state has no such form")
    return found.optim_state_dict_config


def _save(
    model: nn.Module,
    optim: Optimizer,
    given: Mapping[str, Any] | None,
    optim_input: OptimInput,
    config: OptimStateDictConfig,
) -> dict[str, Any]:
    groups = groups_of(model)
    with together(groups, DropinValueError, call="optim_state_dict") as poll:
        optimizers.settle(optim)
        packed = _pack(model, optim, optim.state_dict() if given is None else given, optim_input)
        leaves = tensor_leaves(packed["state"])
        routes = routes_of([*parameter_names(model), *leaves.values()])
        poll.own = has_quantized(leaves)
    _check_same_on_all_ranks([path for path, leaf in leaves.items() if isinstance(leaf, DTensor)], groups)
    device = torch.device("cpu") if config.offload_to_cpu else None

    def copied(_: str, tensor: Tensor) -> Tensor:
        local = local_of(tensor)
        new = local.to(device or local.device, copy=True)
        return with_local(tensor, new) if isinstance(tensor, DTensor) else new

    rank0_only = getattr(config, "rank0_only", False)
    if isinstance(config, FullOptimStateDictConfig):
        values = as_values(packed["state"], groups) if poll.any else packed["state"]
        state = full_leaves(values, routes, Want(not rank0_only, device))
    else:
        state = with_leaves(packed["state"], copied)
    return {} if rank0_only and not routes.is_root else packed | {"state": state}


def _pack(model: nn.Module, optim: Optimizer, given: Mapping[str, Any], optim_input: OptimInput) -> dict[str, Any]:
    """Return the state by name, in the model's order, then the user's own keys; and the groups, if there are any."""
    check_is_optimizer_state(given)
    named = isinstance(next(iter(labels_of(given)), None), str)
    names = keys_of(optim, optim_input, model, named=named).names
    groups = given.get("param_groups")
    if unknown := [str(key) for group in groups or () for key in group["params"] if key not in names]:
        rule = "Groups hold the parameters that the optimizer has, by their numbers"
        fix = "Pass the result of this optimizer's state_dict()"
        raise DropinKeyError(message("optim_state_dict", f"param_groups hold {listing(unknown)}", rule, fix))
    clean = parameter_names(model)
    shown = {clean[param]: state_name(name) for name, param in named_sharded_parameters(model)}  # in the model's order
    named_state = renamed_state(
        {"state": given["state"], "param_groups": groups or []}, lambda key: shown[names[key]] if key in names else key
    )
    entries = named_state["state"]
    state = {"state": {name: entries[name] for name in (*shown.values(), *entries) if name in entries}}
    return state if groups is None else state | {"param_groups": copy.deepcopy(named_state["param_groups"])}


def _check_same_on_all_ranks(paths: list[str], groups: Groups) -> None:
    """Raise RuntimeError on every rank where some rank lacks what another has. Collective: exchanges digests."""
    digest = hashlib.sha256("\n".join(sorted(paths)).encode()).hexdigest()
    if len(set(gather_by_rank(digest, groups).values())) == 1:
        return
    known: dict[int, list[str]] = gather_by_rank(paths, groups)
    everything = dict.fromkeys(path for found in known.values() for path in found)
    lines = [f"- rank {rank}: {path[1:]}" for rank, found in known.items() for path in everything if path not in found]
    # FSDP1's words, which programs may look for.
    rule = (
        "FSDP currently requires each rank to have at least the optimizer states needed by rank 0's optimizer "
        "but some ranks are missing some of those states"
    )
    text = message("optim", f"{len(lines)} missing", rule, "Give the optimizers of all ranks the same parameters")
    raise DropinRuntimeError("\n".join([text, *lines]))
