"""FSDP1's functions for the state of optimizers: full or sharded, by name, and back to what an optimizer loads."""

from __future__ import annotations

import copy
import hashlib
import json
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import StateDictType
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shardkit._torch import named_sharded_parameters, with_local
from shardkit.errors import TranslationError, listing, message
from shardkit.fsdp1.dropin import optim_load, optimizers, settings
from shardkit.fsdp1.dropin.optim_keys import (
    MissingState,
    OptimInput,
    OptimStateError,
    UnknownKeys,
    check_is_optimizer_state,
    keys_of,
    labels_of,
)
from shardkit.fsdp1.dropin.state import state_name
from shardkit.ranks import Groups, all_gather_bytes, groups_of, together
from shardkit.state.gather import Want, gathered
from shardkit.state.names import parameter_names
from shardkit.state.optimizer import tensor_leaves, with_leaves
from shardkit.state.routes import find_lead, local_of


@dataclass(frozen=True)
class Settings:
    """What ``state_dict_type`` says of optimizers.

    Attributes:
        full: full tensors, else DTensors.
        rank0_only: on the first rank alone.
        offload: tensors on the CPU.
    """

    full: bool = True
    rank0_only: bool = False
    offload: bool = True


def optim_state_dict(
    model: nn.Module,
    optim: Optimizer,
    optim_state_dict: dict[str, Any] | None = None,
    group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """The optimizer's state by name, full or sharded as ``state_dict_type`` says. **Collective**.

    ``{"state": {fqn: {...}}, "param_groups": [{"params": [fqn, ...], ...}]}``, in copies. FULL gives full tensors, on
    rank 0 alone (``{}`` on others) with ``rank0_only``; SHARDED gives DTensors, where FSDP1 without a ``device_mesh``
    gave ShardedTensors; each on the CPU unless ``offload_to_cpu=False``. Scalars such as ``step`` are 0-d tensors.
    Parameters without state have no entry; those that are not sharded have this rank's own. Names are in the model's
    order on every rank, whatever the optimizer's. Keys that are no parameter's, and values that are no tensors, stay.

    Args:
        model: the model, or a module around it.
        optim: its optimizer, also one that was built before wrapping.
        optim_state_dict: what ``optim.state_dict()`` gave; None calls it.
        group: as for FSDP1; not needed, since the model's parameters say which ranks hold it.

    Raises:
        TranslationError: LOCAL_STATE_DICT, or a model that nothing of is wrapped.
        RuntimeError: some ranks lack state of a sharded parameter that others have; on every rank, with all names.
        KeyError: groups have numbers that the optimizer has no parameter for.
    """
    return _save(model, optim, optim_state_dict, None, _settings(model))


def full_optim_state_dict(
    model: nn.Module,
    optim: Optimizer,
    optim_input: list[dict[str, Any]] | Iterable[nn.Parameter] | None = None,
    rank0_only: bool = True,
    group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """:func:`optim_state_dict` in full tensors on the CPU, whatever ``state_dict_type`` says. **Collective**."""
    _warn_of_legacy("full_optim_state_dict", "optim_state_dict")
    _warn_of_input(optim_input)
    return _save(model, optim, None, optim_input, Settings(rank0_only=rank0_only))


def sharded_optim_state_dict(
    model: nn.Module, optim: Optimizer, group: dist.ProcessGroup | None = None
) -> dict[str, Any]:
    """:func:`optim_state_dict` in DTensors on the CPU, whatever ``state_dict_type`` says. **Collective**."""
    _warn_of_legacy("sharded_optim_state_dict", "optim_state_dict")
    return _save(model, optim, None, None, Settings(full=False))


def optim_state_dict_to_load(
    model: nn.Module,
    optim: Optimizer,
    optim_state_dict: dict[str, Any],
    is_named_optimizer: bool = False,
    load_directly: bool = False,
    group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """What ``optim.load_state_dict`` takes: the same state by the optimizer's numbers, sharded. **Collective**.

    Full tensors, DTensors of any layout and ShardedTensors are taken alike, whoever wrote them. With
    ``rank0_only=True`` rank 0 has the dict, and others pass ``{}`` or None. The dict is left as it was, and shares no
    memory with the result.

    Args:
        model: the model, or a module around it.
        optim: its optimizer, also one that was built before wrapping.
        optim_state_dict: what :func:`optim_state_dict` gave, with ``param_groups`` or without.
        is_named_optimizer: whether ``optim`` keeps state by name, not by number.
        load_directly: call ``optim.load_state_dict`` too.
        group: as for FSDP1; not needed.

    Raises:
        TranslationError: LOCAL_STATE_DICT, or a model that nothing of is wrapped.
        ValueError: no state of an optimizer, or one that does not fit.
        KeyError: parameters that the optimizer does not have. All on every rank, with all names.
    """
    from_rank0 = _settings(model).rank0_only
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
    """:func:`optim_state_dict_to_load` of a dict that every rank has. Ranks exchange only whether all are content.

    Without ``optim`` and ``optim_input`` the optimizer is taken to have ``model.parameters()``.
    """
    _warn_of_legacy("shard_full_optim_state_dict", "optim_state_dict_to_load")
    _warn_of_input(optim_input)
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
    _warn_of_legacy("scatter_full_optim_state_dict", "optim_state_dict_to_load")
    _warn_of_input(optim_input)
    return optim_load.load(model, optim, optim_input, full_optim_state_dict, from_rank0=True)


def flatten_sharded_optim_state_dict(
    sharded_optim_state_dict: dict[str, Any], model: nn.Module, optim: Optimizer
) -> dict[str, Any]:
    """:func:`optim_state_dict_to_load` of what :func:`sharded_optim_state_dict` gave. **Collective**."""
    _warn_of_legacy("flatten_sharded_optim_state_dict", "optim_state_dict_to_load")
    return optim_load.load(model, optim, None, sharded_optim_state_dict)


def _warn_of_legacy(name: str, instead: str) -> None:
    text = f"FullyShardedDataParallel.{name} is deprecated. Use FullyShardedDataParallel.{instead}."
    warnings.warn(text, FutureWarning, stacklevel=3)


def _warn_of_input(given: OptimInput) -> None:
    if given is not None:
        text = "The `optim_input` argument is deprecated. Leave it out, and pass optim."
        warnings.warn(text, FutureWarning, stacklevel=3)


def _settings(model: nn.Module) -> Settings:
    """What the wrappers were told.

    Raises:
        TranslationError: LOCAL_STATE_DICT, or there is no wrapper.
        AssertionError: the wrappers were told different things.
    """
    found = settings.get_state_dict_type(model)
    if found is None:
        rule = "state_dict_type is kept by the wrappers"
        fix = "Wrap it by FullyShardedDataParallel, or use shardkit.full_optimizer_state_dict"
        raise TranslationError(message("model", "no part of it is wrapped", rule, fix))
    if found.state_dict_type is StateDictType.LOCAL_STATE_DICT:
        raise settings.no_local_state("optim_state_dict")
    config = found.optim_state_dict_config
    full = found.state_dict_type is StateDictType.FULL_STATE_DICT
    return Settings(full, full and getattr(config, "rank0_only", False), config.offload_to_cpu)


@dataclass(frozen=True)
class _Packed:
    """An optimizer's state as it lies on this rank.

    Attributes:
        state: by clean FQN, in the model's order, then by keys of the user's own.
        groups: with FQNs; None where the dict had none.
        sharded: names of the DTensors that parameters with state are, and paths in ``state`` of all DTensors.
    """

    state: dict[Any, Any]
    groups: list[dict[str, Any]] | None
    sharded: list[str]


def _save(
    model: nn.Module, optim: Optimizer, given: Mapping[str, Any] | None, optim_input: OptimInput, wanted: Settings
) -> dict[str, Any]:
    groups = groups_of(model)
    with together(groups, OptimStateError, call="optim_state_dict"):
        optimizers.settle(optim)
        packed = _pack(model, optim, optim.state_dict() if given is None else given, optim_input)
    _check_same_on_all_ranks(packed.sharded, groups)
    device = torch.device("cpu") if wanted.offload else None
    leaves = tensor_leaves(packed.state)
    split = {path: leaf for path, leaf in sorted(leaves.items()) if wanted.full and isinstance(leaf, DTensor)}
    lead = find_lead([*parameter_names(model), *split.values()])
    fulls = dict(gathered(split.items(), lead, Want(not wanted.rank0_only, device)))
    if wanted.rank0_only and not lead.is_here:
        return {}
    state = with_leaves(packed.state, lambda path, leaf: fulls[path] if path in fulls else _copied(leaf, device))
    return {"state": state} | ({} if packed.groups is None else {"param_groups": packed.groups})


def _copied(tensor: Tensor, device: torch.device | None) -> Tensor:
    local = local_of(tensor)
    new = local.to(device or local.device, copy=True)
    return with_local(tensor, new) if isinstance(tensor, DTensor) else new


def _pack(model: nn.Module, optim: Optimizer, given: Mapping[str, Any], optim_input: OptimInput) -> _Packed:
    check_is_optimizer_state(given)
    named = isinstance(next(iter(labels_of(given)), None), str)
    names = keys_of(optim, optim_input, model, named=named).names
    groups = given.get("param_groups")
    _check_known([key for group in groups or () for key in group["params"] if key not in names])
    by_name = {names[key]: entry for key, entry in given["state"].items() if key in names}
    params = {fqn: param for param, fqn in parameter_names(model).items() if fqn in by_name}
    shown = _shown_names(model)
    others = {key: entry for key, entry in given["state"].items() if key not in names}
    state = {shown[fqn]: by_name[fqn] for fqn in params} | others
    named_groups = [_with_names(group, [shown[names[key]] for key in group["params"]]) for group in groups or ()]
    paths = [f"/state{path}" for path, leaf in tensor_leaves(state).items() if isinstance(leaf, DTensor)]
    managed = (fqn for fqn, param in params.items() if isinstance(param, DTensor))
    return _Packed(state, None if groups is None else named_groups, [*managed, *paths])


def _check_known(unknown: list[Any]) -> None:
    if unknown:
        rule = "Groups hold the parameters that the optimizer has, by their numbers"
        fix = "Pass what this optimizer's state_dict() gave"
        raise UnknownKeys(message("optim_state_dict", f"param_groups hold {listing(map(str, unknown))}", rule, fix))


def _shown_names(model: nn.Module) -> dict[str, str]:
    """The names that ``state_dict()`` has, by clean FQN."""
    clean = parameter_names(model)
    return {clean[param]: state_name(name) for name, param in named_sharded_parameters(model)}


def _with_names(group: Mapping[str, Any], fqns: list[str]) -> dict[str, Any]:
    return {key: fqns if key == "params" else copy.deepcopy(value) for key, value in group.items()}


def _check_same_on_all_ranks(names: list[str], groups: Groups) -> None:
    """Collective over ``groups``: 32 bytes a rank where all have the same.

    Raises:
        MissingState: on every rank, where some rank has not what another one has.
    """
    mine = hashlib.sha256(json.dumps(sorted(names)).encode()).digest()
    seen = {mine}
    for group in groups:
        seen |= {b[i : i + 32] for b in all_gather_bytes(b"".join(sorted(seen)), group) for i in range(0, len(b), 32)}
    if len(seen) > 1:
        raise _missing(names, groups)


def _missing(names: list[str], groups: Groups) -> MissingState:
    known = {dist.get_rank(): names}
    for group in groups:
        reports = all_gather_bytes(json.dumps(list(known.items())).encode(), group)
        known = {rank: found for report in reports for rank, found in json.loads(report)}
    everything = dict.fromkeys(name for found in known.values() for name in found)
    lacking = {rank: [name for name in everything if name not in set(found)] for rank, found in sorted(known.items())}
    # A parameter without an entry says it for all that would be in the entry.
    whole = {name for names in lacking.values() for name in names if not name.startswith("/state/")}
    lines = [
        f"- rank {rank}: {name}"
        for rank, names in lacking.items()
        for name in names
        if name in whole or not any(name.startswith(f"/state/{fqn}/") for fqn in whole)
    ]
    # FSDP1's words, which programs may look for.
    rule = (
        "FSDP currently requires each rank to have at least the optimizer states needed by rank 0's optimizer "
        "but some ranks are missing some of those states"
    )
    text = message("optim", f"{len(lines)} missing", rule, "Give the optimizers of all ranks the same parameters")
    return MissingState("\n".join([text, *lines]))
