"""Optimizer state by FQN into optimizers, fresh ones too, of models in any layout."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shardkit.errors import ShardkitError, message
from shardkit.ranks import groups_of, together
from shardkit.shards import replicated
from shardkit.state.load import Source, check_src, raise_listed, transfer, world_groups
from shardkit.state.names import clean_name, parameter_names
from shardkit.state.optimizer import OptimizerState, group_names, optimizers_of, tensor_leaves, with_leaves
from shardkit.state.place import unwritten
from shardkit.state.routes import find_lead, local_of
from shardkit.state.scatter import Move, share


def load_full_optimizer_state_dict(
    model: nn.Module,
    optimizer: Optimizer | Iterable[Optimizer],
    state_dict: Mapping[str, Any],
    *,
    src: Source = "rank0",
) -> None:
    """Load what :func:`full_optimizer_state_dict` gives, or torch's ``get_optimizer_state_dict`` of full tensors.

    The optimizer has exactly the dict's state afterwards, whatever it had before: a fresh one is restored without a
    step being taken, and a parameter without an entry has no state. Options of groups are matched by FQN, so groups may
    stand in another order; those that the dict lacks stay, and tensors among them (``lr``) are written in place.
    It ends in ``optimizer.load_state_dict``, whose hooks run and which converts state to the parameters' dtypes. LR
    schedulers keep working, also those made before. The dict is left as it was.

    State of a parameter's shape is sharded as the parameter is, of another shape replicated on its mesh, and scalars
    are plain; where the optimizer has state already, as that is.

    **Collective**: every rank calls it; tensors travel as in :func:`load_full_state_dict`.

    Args:
        model: the model whose parameters are optimized.
        optimizer: one, or several of different parameters.
        state_dict: read on the lowest rank that holds a part of the model, with ``src="rank0"``, and ignored on others.
        src: ``"rank0"``, or ``"all"`` where every rank has the same dict.

    Raises:
        ShardkitError: on every rank, with nothing changed: parameters that only one side has, and groups of the
            optimizer whose parameters have different options in the dict, all listed; what is no such dict.
    """
    groups = groups_of(model) or world_groups(src)
    with together(groups, call="load_full_optimizer_state_dict"):
        check_src(src)
        optimizers, names = optimizers_of(optimizer), parameter_names(model)
        lead = find_lead(names)
        given = _checked(state_dict) if src == "all" or lead.is_here else {"state": {}, "param_groups": []}
        described = described_state(given)
        packed = pickle.dumps(described) if src == "rank0" else b""
    if src == "rank0":
        described = pickle.loads(share(packed, lead))
    with together(groups):
        targets = unwritten_optimizer_state(model, optimizers, described)
    sources, leaves = tensor_leaves(given["state"]), tensor_leaves(targets["state"])
    specs = tensor_leaves(described["state"])
    transfer((Move(t, specs[path].dtype, sources.get(path)) for path, t in leaves.items()), lead, src)
    _install(optimizers, names, targets)


def load_sharded_optimizer_state_dict(
    model: nn.Module, optimizer: Optimizer | Iterable[Optimizer], state_dict: Mapping[str, Any]
) -> None:
    """Load what :func:`sharded_optimizer_state_dict` gives on the same layout; nothing is copied.

    As :func:`load_full_optimizer_state_dict`, but each rank passes its own part, and its tensors become the
    optimizer's. Ranks exchange only whether all are content.

    Raises:
        ShardkitError: on every rank, with nothing changed, as :func:`load_full_optimizer_state_dict`.
    """
    with together(groups_of(model)):
        given = _checked(state_dict)
        optimizers, names = optimizers_of(optimizer), parameter_names(model)
        _check_names(optimizers, names, given)
    _install(optimizers, names, given)


def described_state(state: OptimizerState) -> OptimizerState:
    """The same, with meta tensors for state: all that others need to know to receive it."""
    return {**state, "state": with_leaves(state["state"], lambda _, tensor: tensor.to("meta"))}


def unwritten_optimizer_state(
    model: nn.Module, optimizer: Optimizer | Iterable[Optimizer], described: OptimizerState
) -> OptimizerState:
    """The same, with new, unwritten memory for state, placed as the optimizer wants it. Local; changes nothing.

    What is then written into it, by ``torch.distributed.checkpoint.load`` for one, is given to the optimizer by
    :func:`load_sharded_optimizer_state_dict`.

    Args:
        model: the model whose parameters are optimized.
        optimizer: one, or several of different parameters.
        described: full shapes and dtypes, as of :func:`described_state`.

    Raises:
        ShardkitError: names do not fit, as :func:`load_full_optimizer_state_dict`.
    """
    optimizers, names = optimizers_of(optimizer), parameter_names(model)
    _check_names(optimizers, names, described)
    params = {name: param for param, name in names.items()}
    present = {n: tensor_leaves(each.state[p]) for each in optimizers for n, p in params.items() if p in each.state}

    def placed(fqn: str, entry: object) -> object:
        return with_leaves(entry, lambda path, spec: room_for(params[fqn], path, spec, present.get(fqn, {}).get(path)))

    return {**described, "state": {fqn: placed(fqn, entry) for fqn, entry in described["state"].items()}}


def room_for(param: nn.Parameter, path: str, spec: Tensor, present: Tensor | None) -> Tensor:
    """New memory for one tensor of a parameter's state, placed as :func:`load_full_optimizer_state_dict` says. Local.

    Args:
        param: the parameter.
        path: of the tensor in its state, such as ``"/step"``.
        spec: of the full tensor's shape and dtype.
        present: what the optimizer has there, if anything.
    """
    home = local_of(param).device
    if isinstance(present, DTensor) and present.shape == spec.shape:
        return unwritten(present, spec.dtype, local_of(present).device)
    scalar = not spec.ndim and (param.ndim > 0 or path == "/step")
    if scalar or not isinstance(param, DTensor):
        return torch.empty(spec.shape, dtype=spec.dtype, device="cpu" if scalar else home)
    if spec.shape == param.shape:
        return unwritten(param, spec.dtype, home)
    # Computed from a DTensor, and so one too, such as the row and column means of Adafactor.
    whole = torch.empty(spec.shape, dtype=spec.dtype, device=home)
    return replicated(whole, param.device_mesh)


def _checked(state_dict: Mapping[str, Any]) -> OptimizerState:
    """The dict by clean names."""
    if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= state_dict.keys():
        problem = f"has no 'state' and 'param_groups', but is {type(state_dict).__name__}"
        rule = "It is {'state': {fqn: ...}, 'param_groups': [{'params': [fqn, ...], ...}]}"
        raise ShardkitError(message("state_dict", problem, rule, "Pass what full_optimizer_state_dict gives"))
    names = [name for group in state_dict["param_groups"] for name in group["params"]]
    if any(not isinstance(name, str) for name in (*names, *state_dict["state"])):
        rule = "State is kept by FQN: numbers depend on the order in which an optimizer was given its parameters"
        fix = "Save full_optimizer_state_dict(model, optimizer) instead of optimizer.state_dict()"
        raise ShardkitError(message("state_dict", "keeps state by number", rule, fix))
    groups = [{**group, "params": [clean_name(n) for n in group["params"]]} for group in state_dict["param_groups"]]
    return {"state": {clean_name(n): entry for n, entry in state_dict["state"].items()}, "param_groups": groups}


def _check_names(optimizers: list[Optimizer], names: Mapping[nn.Parameter, str], found: OptimizerState) -> None:
    own = [fqns for each in optimizers for fqns in group_names(each, names)]
    wanted = set(chain.from_iterable(own))
    options = {fqn: group for group in found["param_groups"] for fqn in group["params"]}
    mixed = [
        f"group of {fqns[0]}: {differing_options([options[fqn] for fqn in fqns if fqn in options])}"
        for fqns in own
        if len(groups := [options[fqn] for fqn in fqns if fqn in options]) > 1 and differing_options(groups)
    ]
    problems = {
        "missing": [fqn for fqn in chain.from_iterable(own) if fqn not in options],
        "unexpected": [fqn for fqn in dict.fromkeys((*options, *found["state"])) if fqn not in wanted],
        "with different options": mixed,
    }
    raise_listed("state_dict", problems, "Make the optimizer of the same parameters, in the same groups")


def differing_options(groups: list[dict[str, Any]]) -> str:
    """Options that are not the same in all of the groups."""
    first, *others = {id(group): group for group in groups}.values()
    keys = [k for k in first if k not in ("params", "param_names")]
    return ", ".join(f"{key} differs" for key in keys if any(not _equal(first[key], o.get(key)) for o in others))


def _equal(one: object, other: object) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    return bool(one == other)


def _install(optimizers: list[Optimizer], names: Mapping[nn.Parameter, str], state: OptimizerState) -> None:
    by_fqn = {fqn: group for group in state["param_groups"] for fqn in group["params"]}
    empty = iter([group for group in state["param_groups"] if not group["params"]])
    for optimizer in optimizers:
        own = [dict(group) for group in optimizer.param_groups]
        fqns = group_names(optimizer, names)
        saved = [by_fqn[group[0]] if group else next(empty, {}) for group in fqns]
        numbers = {fqn: number for number, fqn in enumerate(chain.from_iterable(fqns))}
        found = zip(own, saved, fqns, strict=True)
        groups = [_merged(options, new, [numbers[fqn] for fqn in group]) for options, new, group in found]
        entries = {numbers[fqn]: entry for fqn, entry in state["state"].items() if fqn in numbers}
        optimizer.load_state_dict({"state": entries, "param_groups": groups})
        _keep_tensors(own, optimizer.param_groups)


def _merged(own: Mapping[str, Any], saved: Mapping[str, Any], numbers: list[int]) -> dict[str, Any]:
    """A group's options: the saved ones over those that it has, except the order of its parameters."""
    options = {key: value for key, value in saved.items() if key not in ("params", "param_names")}
    return {**own, **options, "params": numbers}


def _keep_tensors(before: list[dict[str, Any]], groups: list[dict[str, Any]]) -> None:
    """Write tensor options, such as ``lr``, into the tensors that were there, which compiled code holds on to."""
    for old, new in zip(before, groups, strict=True):
        for key, tensor in old.items():
            if isinstance(tensor, Tensor):
                tensor.fill_(new[key]) if not tensor.ndim else tensor.copy_(torch.as_tensor(new[key]))
                new[key] = tensor
