"""An optimizer's state by name, made what the optimizer's ``load_state_dict`` takes: by number, and sharded."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shardkit._fsdp.fsdp1 import gathered_sharded_tensor, is_sharded_tensor
from shardkit.errors import listing, message
from shardkit.fsdp1.dropin import optimizers
from shardkit.fsdp1.dropin.optim_keys import (
    Keys,
    OptimInput,
    OptimStateError,
    UnknownKeys,
    check_is_optimizer_state,
    keys_of,
)
from shardkit.fsdp1.dropin.record import record_of, wrappers_of
from shardkit.ranks import groups_of, together
from shardkit.state.names import clean_name, parameter_names
from shardkit.state.optimizer import tensor_leaves, with_leaves
from shardkit.state.optimizer_load import differing_options, room_for
from shardkit.state.routes import Lead, find_lead, local_of
from shardkit.state.scatter import Move, cut, scatter, share

_SUBJECT = "optim_state_dict"


@dataclass(frozen=True)
class _ByName:
    """A dict to load.

    Attributes:
        state: by clean FQN.
        others: entries whose keys are no names of parameters.
        groups: with clean FQNs; None where the dict has none.
    """

    state: dict[str, Any]
    others: dict[Any, Any]
    groups: list[dict[str, Any]] | None


def load(
    model: nn.Module,
    optim: Optimizer | None,
    optim_input: OptimInput,
    given: Mapping[str, Any] | None,
    *,
    from_rank0: bool = False,
    named: bool = False,
) -> dict[str, Any]:
    """What the optimizer's ``load_state_dict`` takes, with as many groups as the dict has. Collective.

    Args:
        model: the model.
        optim: the optimizer, or None.
        optim_input: what the optimizer was made from, or None.
        given: full or sharded state by name; with ``from_rank0`` it is read on rank 0 alone, and full.
        from_rank0: others get it from rank 0.
        named: whether the optimizer keeps state by name.
    """
    groups = groups_of(model)
    with together(groups, OptimStateError, call="optim_state_dict_to_load"):
        if optim is not None:
            optimizers.settle(optim)
        params = {fqn: param for param, fqn in parameter_names(model).items()}
        keys = keys_of(optim, optim_input, model, named=named)
        lead = find_lead(params.values())
        reads = not from_rank0 or lead.is_here
        found = _by_name(given, params) if reads else _ByName({}, {}, None)
        if from_rank0:
            _check_full(found)
        described = _described(found)
        packed = pickle.dumps(described) if from_rank0 and reads else b""
    if from_rank0:
        described = pickle.loads(share(packed, lead))
    with together(groups, OptimStateError):
        _check_units(model, described)
        by_key = _groups(described.groups, keys)
        targets = _rooms(described, params, optim)
    _fill(targets, found, lead, from_rank0)
    by_name = keys.by_name
    state = {by_name.get(fqn, (fqn,)): entry for fqn, entry in targets.state.items()}  # FSDP1 too has it as a tuple
    return {"state": state | targets.others} | ({} if by_key is None else {"param_groups": by_key})


def _by_name(given: Mapping[str, Any] | None, params: Mapping[str, nn.Parameter]) -> _ByName:
    check_is_optimizer_state(given)
    assert given is not None, "checked"
    groups, state = given.get("param_groups"), given["state"]
    numbers = [key for key in state if isinstance(key, int)]
    numbers += [key for group in groups or () for key in group["params"] if isinstance(key, int)]
    if numbers:
        rule = "State is by name: numbers depend on the order in which an optimizer was given its parameters"
        fix = "Use rekey_optim_state_dict(state, OptimStateKeyType.PARAM_NAME, model, optim=optim) where it was made"
        raise UnknownKeys(
            message(_SUBJECT, f"is by number ({listing(map(str, dict.fromkeys(numbers)), 3)})", rule, fix)
        )
    known = {key: clean_name(key) for key in state if isinstance(key, str) and clean_name(key) in params}
    by_name = {name: state[key] for key, name in known.items()}
    clean = None if groups is None else [{**group, "params": [*map(clean_name, group["params"])]} for group in groups]
    # In the model's order, which all ranks share, whoever wrote it.
    return _ByName(
        {fqn: by_name[fqn] for fqn in params if fqn in by_name},
        {k: v for k, v in state.items() if k not in known},
        clean,
    )


def _check_full(found: _ByName) -> None:
    sharded = [path for path, leaf in _leaves(found).items() if _is_sharded(leaf)]
    if sharded:
        rule = "What rank 0 sends to the others is full"
        fix = "Load it on every rank, under StateDictType.SHARDED_STATE_DICT"
        raise OptimStateError(message(_SUBJECT, f"{listing(sharded, 3)} is sharded", rule, fix))


def _described(found: _ByName) -> _ByName:
    """The same, with meta tensors of the full shapes."""

    def spec(_: str, tensor: Tensor) -> Tensor:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")

    return replace(found, state=with_leaves(found.state, spec), others=with_leaves(found.others, spec))


def _leaves(found: _ByName) -> dict[str, Tensor]:
    """All tensors, in an order that is the same on every rank."""
    return dict(sorted((tensor_leaves(found.state) | tensor_leaves({"": found.others})).items()))


def _check_units(model: nn.Module, described: _ByName) -> None:
    """Raise where FSDP1's flat parameters could not take the state: the dict knows only some of a unit's parameters.

    Raises:
        OptimStateError: with all names.
    """
    if described.groups is None:
        return
    known = {*described.state, *(fqn for group in described.groups for fqn in group["params"])}
    fqns = parameter_names(model)
    seen: set[nn.Parameter] = set()
    unknown: list[str] = []
    for wrapper in reversed(list(wrappers_of(model))):  # inner ones first
        own = [p for p in wrapper.parameters() if isinstance(p, DTensor) and p not in seen]
        seen.update(own)
        names = [fqns[param] for param in own]
        if not record_of(wrapper).given.use_orig_params and any(name in described.state for name in names):
            unknown += [name for name in names if name not in known]
    if unknown:
        # FSDP1's words, which programs may look for.
        subject = (
            "All unflattened parameters comprising a single flat parameter must have scalar state with the same value "
            "and dtype"
        )
        problem = f"{listing(unknown)} is not in the dict, although other parameters of the same FSDP module are"
        fix = "Pass use_orig_params=True, or put them into the dict"
        raise OptimStateError(message(subject, problem, "So FSDP1 has it with use_orig_params=False", fix))


def _groups(groups: list[dict[str, Any]] | None, keys: Keys) -> list[dict[str, Any]] | None:
    """The groups by key, as the optimizer has them, so that its positions fit whatever the dict's order.

    Raises:
        UnknownKeys: parameters that the optimizer has not.
        OptimStateError: parameters of one group of the optimizer have different options in the dict.
    """
    if groups is None:
        return None
    by_name = keys.by_name
    strangers = [fqn for group in groups for fqn in group["params"] if fqn not in by_name]
    if strangers:
        rule = "The optimizer must have been given all parameters that the dict has"
        fix = "Make it of the same parameters, or take them out of the dict"
        raise UnknownKeys(message(_SUBJECT, f"{listing(strangers)} is not in the optimizer", rule, fix))

    def with_keys(group: Mapping[str, Any], fqns: list[str]) -> dict[str, Any]:
        own = sorted({by_name[fqn] for fqn in fqns})
        return {key: own if key == "params" else copy.deepcopy(value) for key, value in group.items()}

    if keys.groups is None:
        return [with_keys(group, group["params"]) for group in groups]
    saved = {fqn: group for group in groups for fqn in group["params"]}
    empty = [group for group in groups if not group["params"]]
    made = []
    for fqns in keys.groups:
        there = [fqn for fqn in fqns if fqn in saved]
        if not there and (fqns or not empty):
            continue  # the dict has no such group, which load_state_dict will say
        if differ := differing_options([saved[fqn] for fqn in there]) if there else "":
            rule = "The parameters of one group have one set of options"
            fix = "Make the optimizer in the groups that the dict has"
            raise OptimStateError(message(_SUBJECT, f"group of {there[0]}: {differ}", rule, fix))
        made.append(with_keys(saved[there[0]] if there else empty.pop(0), there))
    return made + [with_keys(group, []) for group in empty]


def _rooms(described: _ByName, params: Mapping[str, nn.Parameter], optim: Optimizer | None) -> _ByName:
    """The same, with new memory for the tensors, placed as the parameters are.

    Raises:
        OptimStateError: shapes that do not fit, all listed.
    """
    misfits = [
        f"{fqn}{path} of shape {tuple(spec.shape)} for a parameter of {tuple(params[fqn].shape)}"
        for fqn, entry in described.state.items()
        for path, spec in tensor_leaves(entry).items()
        if not _fits(spec, params[fqn])
    ]
    if misfits:
        rule = "Tensor optimizer state has the shape of its parameter"
        raise OptimStateError(message(_SUBJECT, listing(misfits), rule, "Load it into the model that it was made for"))

    def rooms(fqn: str, entry: object) -> object:
        param = params[fqn]
        present = tensor_leaves(optim.state[param]) if optim is not None and param in optim.state else {}
        return with_leaves(entry, lambda path, spec: room_for(param, path, spec, present.get(path)))

    others = with_leaves(described.others, lambda _, spec: torch.empty(spec.shape, dtype=spec.dtype))
    return replace(described, state={fqn: rooms(fqn, entry) for fqn, entry in described.state.items()}, others=others)


def _fits(spec: Tensor, param: nn.Parameter) -> bool:
    """Whether it is of the parameter's shape, or of a mean of it, or of some other number of dims."""
    pairs = zip(spec.shape, param.shape, strict=False)
    return spec.ndim != param.ndim or all(size in (1, full) for size, full in pairs)


def _fill(targets: _ByName, found: _ByName, lead: Lead, from_rank0: bool) -> None:
    rooms, sources = _leaves(targets), _leaves(found)
    if from_rank0:
        moves = (Move(room, room.dtype, sources.get(path)) for path, room in rooms.items())
        scatter(moves, lead)
    else:
        cut(_whole_moves(rooms, sources))


def _whole_moves(rooms: Mapping[str, Tensor], sources: Mapping[str, Tensor]) -> Iterator[Move]:
    """What is not yet in place; one full tensor at a time is gathered from sharded ones. Collective."""
    for path, room in rooms.items():
        source = sources[path]
        if isinstance(source, DTensor) and _lies_like(source, room):
            local_of(room).copy_(local_of(source))
        elif isinstance(source, DTensor):
            yield Move(room, source.dtype, source.full_tensor())
        elif is_sharded_tensor(source):
            yield Move(room, source.dtype, gathered_sharded_tensor(source))
        else:
            yield Move(room, source.dtype, source)


def _is_sharded(tensor: Tensor) -> bool:
    return isinstance(tensor, DTensor) or is_sharded_tensor(tensor)


def _lies_like(source: DTensor, room: Tensor) -> bool:
    """Whether each rank has the part already; a mesh read from a file has no groups, and is another object."""
    if not isinstance(room, DTensor) or source.placements != room.placements or source.shape != room.shape:
        return False
    return torch.equal(source.device_mesh.mesh, room.device_mesh.mesh)
