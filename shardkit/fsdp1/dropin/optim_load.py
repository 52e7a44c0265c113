"""An optimizer's state by name, converted to what the optimizer's ``load_state_dict`` takes: by number, sharded."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shardkit import _torch
from shardkit.errors import listing, message
from shardkit.fsdp1.dropin import optimizers
from shardkit.fsdp1.dropin.errors import DropinKeyError, DropinTypeError, DropinValueError
from shardkit.fsdp1.dropin.record import record_of, wrappers_of
from shardkit.ranks import groups_of, together
from shardkit.state.names import clean_name, parameter_names
from shardkit.state.optimizer import OptimizerState, group_names, tensor_leaves, with_leaves
from shardkit.state.optimizer_load import distributed, mismatches, options_by_name, room_for, with_rooms
from shardkit.state.plan import Spec, is_spec
from shardkit.state.routes import routes_of
from shardkit.state.transfer import is_sharded

OptimInput: TypeAlias = Iterable[Any] | None  # what an optimizer was given: parameters, or dicts of groups
Key: TypeAlias = int | str
_SUBJECT = "optim_state_dict"


@dataclass(frozen=True)
class Keys:
    """The keys by which an optimizer's state dict names its parameters."""

    names: Mapping[Key, str]  # the clean FQN of each parameter by its key, a number or, for a named optimizer, a name
    groups: list[list[str]] | None  # the FQNs of each of its groups; None where only the order of parameters is known

    @functools.cached_property
    def by_name(self) -> dict[str, Key]:
        """Return the key of each FQN."""
        return {name: key for key, name in self.names.items()}


def load(
    model: nn.Module,
    optim: Optimizer | None,
    optim_input: OptimInput,
    given: Mapping[str, Any] | None,
    *,
    from_rank0: bool = False,
    named: bool = False,
) -> dict[str, Any]:
    """Return what the optimizer's ``load_state_dict`` takes, with as many groups as the dict has.

    State is by name, full or sharded; ``from_rank0`` reads that of rank 0 alone, which must be full. ``named`` is for
    optimizers that keep state by name. Collective, but for full state that every rank has, as in FSDP1: programs load
    that one rank after another, to save memory.
    """
    is_shared = from_rank0 or any(map(is_sharded, tensor_leaves(given).values()))
    groups = groups_of(model) if is_shared else []
    with together(groups, DropinValueError, call="optim_state_dict_to_load"):
        if optim is not None:
            optimizers.settle(optim)
        params = {fqn: param for param, fqn in parameter_names(model).items()}
        keys = keys_of(optim, optim_input, model, named=named)
        routes = routes_of(params.values())
        found = _by_name(given, params) if routes.is_root or not from_rank0 else {}
        sharded = [path for path, leaf in tensor_leaves(found).items() if is_sharded(leaf)] if from_rank0 else []
        if sharded:
            fix = "Load it on every rank, under StateDictType.SHARDED_STATE_DICT"
            problem = f"{listing(sharded, 3)} is sharded"
            raise DropinValueError(message(_SUBJECT, problem, "State that rank 0 sends to the others is full", fix))

    def place(described: OptimizerState) -> OptimizerState:
        _check_units(model, described)
        by_key = _groups(described["param_groups"], keys)
        own = {key: entry for key, entry in described["state"].items() if key in params}
        _check_shapes(own, params)
        present = {fqn: optim.state[params[fqn]] for fqn in own if params[fqn] in optim.state} if optim else {}
        state = with_rooms(own, present, lambda fqn, *leaf: room_for(params[fqn], *leaf))
        others = {key: entry for key, entry in described["state"].items() if key not in params}
        others = with_leaves(others, lambda _, spec: torch.empty(spec.shape, dtype=spec.dtype), is_spec)
        return {"state": state | others, "param_groups": by_key}

    made = distributed(found, place, routes, "rank0" if from_rank0 else "all", groups, DropinValueError)
    # Names that the optimizer lacks become tuples, as in FSDP1.
    renamed = {fqn: keys.by_name.get(fqn, (fqn,)) for fqn in params}
    state = {renamed.get(key, key): entry for key, entry in made["state"].items()}
    return {"state": state} | ({} if made["param_groups"] is None else {"param_groups": made["param_groups"]})


def _by_name(given: Mapping[str, Any] | None, params: Mapping[str, nn.Parameter]) -> OptimizerState:
    """Return the dict by clean names of parameters, and the user's own keys; ``param_groups`` may be None."""
    check_is_optimizer_state(given)
    assert given is not None, "checked"
    groups, state = given.get("param_groups"), given["state"]
    present = [*state, *(key for group in groups or () for key in group["params"])]
    if numbers := [str(key) for key in dict.fromkeys(present) if isinstance(key, int)]:
        rule = "State is by name: numbers depend on the order in which an optimizer was given its parameters"
        fix = "Use rekey_optim_state_dict(state, OptimStateKeyType.PARAM_NAME, model, optim=optim) where it was made"
        raise DropinKeyError(message(_SUBJECT, f"is by number ({listing(numbers, 3)})", rule, fix))

    def cleaned(key: Any) -> Any:
        return clean_name(key) if isinstance(key, str) and clean_name(key) in params else key

    clean = None if groups is None else [{**group, "params": [*map(clean_name, group["params"])]} for group in groups]
    return {"state": {cleaned(key): entry for key, entry in state.items()}, "param_groups": clean}


def _check_units(model: nn.Module, described: OptimizerState) -> None:
    """Raise where FSDP1's flat parameters could not take the state: the dict knows only some of a unit's parameters."""
    if described["param_groups"] is None:
        return
    known = {*described["state"], *options_by_name(described)}
    fqns = parameter_names(model)
    seen: set[nn.Parameter] = set()
    unknown: list[str] = []
    for wrapper in reversed(list(wrappers_of(model))):  # inner ones first
        own = [p for p in wrapper.parameters() if isinstance(p, DTensor) and p not in seen]
        seen.update(own)
        names = [fqns[param] for param in own]
        if not record_of(wrapper).given.use_orig_params and any(name in described["state"] for name in names):
            unknown += [name for name in names if name not in known]
    if unknown:
        # FSDP1's words, which programs may look for.
        subject = (
            "All unflattened parameters comprising a single flat parameter must have scalar state with the same value "
            "and dtype"
        )
        problem = f"{listing(unknown)} is not in the dict, although other parameters of the same FSDP module are"
        fix = "Pass use_orig_params=True, or add them to the dict"
        raise DropinValueError(message(subject, problem, "FSDP1 requires this with use_orig_params=False", fix))


def _groups(groups: list[dict[str, Any]] | None, keys: Keys) -> list[dict[str, Any]] | None:
    """Return the groups by key, in the optimizer's order whatever the dict's is."""
    if groups is None:
        return None
    by_name, found = keys.by_name, {"state": {}, "param_groups": groups}
    saved = options_by_name(found)
    if unexpected := [fqn for fqn in saved if fqn not in by_name]:
        rule = "The optimizer must hold all parameters that the dict has"
        fix = "Build it from the same parameters, or remove them from the dict"
        raise DropinKeyError(message(_SUBJECT, f"{listing(unexpected)} is not in the optimizer", rule, fix))
    if differ := mismatches(keys.groups or (), found)["with different options"]:
        rule = "The parameters of one group have one set of options"
        fix = "Build the optimizer with the groups of the dict"
        raise DropinValueError(message(_SUBJECT, "; ".join(differ), rule, fix))

    def with_keys(group: Mapping[str, Any], fqns: list[str]) -> dict[str, Any]:
        own = sorted({by_name[fqn] for fqn in fqns})
        return {key: own if key == "params" else copy.deepcopy(value) for key, value in group.items()}

    if keys.groups is None:
        return [with_keys(group, group["params"]) for group in groups]
    empty = [group for group in groups if not group["params"]]
    made = []
    for fqns in keys.groups:
        there = [fqn for fqn in fqns if fqn in saved]
        if there or (empty and not fqns):  # else the dict has no such group, which load_state_dict will say
            made.append(with_keys(saved[there[0]] if there else empty.pop(0), there))
    return made + [with_keys(group, []) for group in empty]


def _check_shapes(state: Mapping[str, Any], params: Mapping[str, nn.Parameter]) -> None:
    def fits(spec: Spec, param: nn.Parameter) -> bool:
        """Whether it has the parameter's shape, or that of a mean of it, or another number of dims."""
        pairs = zip(spec.shape, param.shape, strict=False)
        return len(spec.shape) != param.ndim or all(size in (1, full) for size, full in pairs)

    misfits = [
        f"{fqn}{path} of shape {tuple(spec.shape)} for a parameter of {tuple(params[fqn].shape)}"
        for fqn, entry in state.items()
        for path, spec in tensor_leaves(entry, is_spec).items()
        if not fits(spec, params[fqn])
    ]
    if misfits:
        rule, fix = (
            "Tensor optimizer state has the shape of its parameter",
            "Load it into the model that it was saved from",
        )
        raise DropinValueError(message(_SUBJECT, listing(misfits), rule, fix))


# ---- keys -----------------------------------------------------------------------------------------------------


def keys_of(optimizer: Optimizer | None, given: OptimInput, model: nn.Module, *, named: bool = False) -> Keys:
    """Return the keys by the optimizer's input if given, else the optimizer, else the model, as FSDP1. Local, pure.

    ``named`` is for optimizers that keep state by name, as torch's ``_NamedOptimizer``.
    """
    names = parameter_names(model)
    if given is not None:
        found = _groups_of_input(given, names)
        return Keys(dict(enumerate(chain.from_iterable(found))), found if len(found) > 1 else None)
    if optimizer is None:
        return Keys(dict(enumerate(names.values())), None)
    found = group_names(optimizer, names)
    fqns = list(chain.from_iterable(found))
    return Keys(_named(optimizer, model, fqns) if named else dict(enumerate(fqns)), found)


def check_is_optimizer_state(state_dict: object, subject: str = "optim_state_dict") -> None:
    """Raise a ValueError unless it is the state of an optimizer."""
    if not isinstance(state_dict, Mapping) or "state" not in state_dict:
        problem = f"is a {type(state_dict).__name__} without the key 'state'"
        rule = '`optim_state_dict` must have the keys "state"to be a valid optimizer state dict'  # FSDP1's words
        fix = "Pass the result of optim_state_dict; with rank0_only=True only rank 0 needs it"
        raise DropinValueError(message(subject, problem, rule, fix))


def labels_of(state_dict: Mapping[str, Any]) -> list[Any]:
    """Return the keys of the parameters in an optimizer's state dict: of its groups, or without groups of its state."""
    return [key for group in state_dict.get("param_groups") or () for key in group["params"]] or [*state_dict["state"]]


def _named(optimizer: Optimizer, model: nn.Module, fqns: list[str]) -> dict[Key, str]:
    """Return FQNs by the names that a named optimizer was made with: its own, or ``model.named_parameters()``'s."""
    labels = labels_of(optimizer.state_dict())
    if not all(isinstance(label, str) for label in labels):  # the optimizer inside a named one
        clean = parameter_names(model)
        raw = {clean[param]: name for name, param in _torch.named_sharded_parameters(model)}
        labels = [raw[fqn] for fqn in fqns]
    return {label: clean_name(label) for label in labels if clean_name(label) in set(fqns)}


def _groups_of_input(given: Iterable[Any], names: Mapping[nn.Parameter, str]) -> list[list[str]]:
    """Return the FQNs of an optimizer's input, one list for each group, or one for all."""
    rule = "It must be what the optimizer was built from, an iterable of parameters or of groups"
    fix = "Leave it out and pass optim"
    try:
        found = list(given)
    except TypeError as error:
        problem = f"Optimizer input should be an iterable of Tensors or dicts, but got {type(given).__name__}"
        raise DropinTypeError(message("optim_input", problem, rule, fix)) from error
    if not found:
        problem = "Optimizer input should not be empty"
        raise DropinValueError(message("optim_input", problem, rule, f"{fix}. An iterator can be read only once"))
    if all(isinstance(each, Tensor) for each in found):
        groups = [found]
    elif all(isinstance(each, dict) and "params" in each for each in found):
        groups = [list(each["params"]) for each in found]
    else:
        problem = "Optimizer input should be an iterable of Tensors or dicts"
        raise DropinTypeError(message("optim_input", problem, rule, fix))
    unexpected = [f"of shape {tuple(param.shape)}" for group in groups for param in group if param not in names]
    if unexpected:
        problem = f"{len(unexpected)} of its parameters are not in the model, the first {unexpected[0]}"
        raise DropinValueError(message("optim_input", problem, rule, fix))
    return [[names[param] for param in group] for group in groups]
