"""What the keys of an optimizer's state dict stand for: numbers and names of parameters, or keys of a user's own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeAlias

from torch import Tensor, nn
from torch.optim import Optimizer

from shardkit import _torch
from shardkit.errors import ShardkitError, message
from shardkit.state.names import clean_name, parameter_names
from shardkit.state.optimizer import group_names

OptimInput: TypeAlias = Iterable[Any] | None  # what an optimizer was given: parameters, or dicts of groups
Key: TypeAlias = int | str


class OptimStateError(ShardkitError, ValueError):
    """A ValueError too, as FSDP1's."""


class MissingState(ShardkitError, RuntimeError):
    """A RuntimeError too, as FSDP1's."""


class NotAnOptimInput(ShardkitError, TypeError):
    """A TypeError too, as FSDP1's."""


class UnknownKeys(ShardkitError, KeyError):
    """A KeyError too, as FSDP1's, whose message is shown as it is."""

    __str__ = Exception.__str__


@dataclass(frozen=True)
class Keys:
    """How an optimizer calls the parameters that it was given.

    Attributes:
        names: the clean FQN of each parameter by its key, a number or, for a named optimizer, a name.
        groups: the FQNs of each of its groups; None where only the order of its parameters is known.
    """

    names: Mapping[Key, str]
    groups: tuple[tuple[str, ...], ...] | None

    @property
    def by_name(self) -> dict[str, Key]:
        """The key of each FQN."""
        return {name: key for key, name in self.names.items()}


def keys_of(optimizer: Optimizer | None, given: OptimInput, model: nn.Module, *, named: bool = False) -> Keys:
    """The keys by what FSDP1 goes by: the optimizer's input if given, else the optimizer, else the model. Local, pure.

    Args:
        optimizer: the optimizer, or None.
        given: what it was made from, or None.
        model: the model, whose ``parameters()`` count where neither is given.
        named: whether the optimizer keeps state by name, as torch's ``_NamedOptimizer``.

    Raises:
        ShardkitError: the optimizer holds tensors that are not in the model.
        NotAnOptimInput, OptimStateError: what was given is no input of an optimizer.
    """
    names = parameter_names(model)
    if given is not None:
        found = _groups_of_input(given, names)
        return Keys(dict(enumerate(chain.from_iterable(found))), _as_groups(found) if len(found) > 1 else None)
    if optimizer is None:
        return Keys(dict(enumerate(names.values())), None)
    found = group_names(optimizer, names)
    fqns = list(chain.from_iterable(found))
    return Keys(_named(optimizer, model, fqns) if named else dict(enumerate(fqns)), _as_groups(found))


def _as_groups(found: list[list[str]]) -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(group) for group in found)


def check_is_optimizer_state(state_dict: object, subject: str = "optim_state_dict") -> None:
    """Raise for what is no state of an optimizer.

    Raises:
        OptimStateError: it has no "state".
    """
    if not isinstance(state_dict, Mapping) or "state" not in state_dict:
        problem = f"is a {type(state_dict).__name__} without the key 'state'"
        rule = '`optim_state_dict` must have the keys "state"to be a valid optimizer state dict'  # FSDP1's words
        fix = "Pass what optim_state_dict gave; with rank0_only=True rank 0 alone needs it"
        raise OptimStateError(message(subject, problem, rule, fix))


def labels_of(state_dict: Mapping[str, Any]) -> list[Any]:
    """What a dict of an optimizer calls its parameters: what its groups hold or, without groups, its state's keys."""
    return [key for group in state_dict.get("param_groups") or () for key in group["params"]] or [*state_dict["state"]]


def _named(optimizer: Optimizer, model: nn.Module, fqns: list[str]) -> dict[Key, str]:
    """FQNs by the names that a named optimizer was made with: its own, or those of ``model.named_parameters()``."""
    labels = labels_of(optimizer.state_dict())
    if not all(isinstance(label, str) for label in labels):  # the one inside of a named optimizer
        clean = parameter_names(model)
        raw = {clean[param]: name for name, param in _torch.named_sharded_parameters(model)}
        labels = [raw[fqn] for fqn in fqns]
    return {label: clean_name(label) for label in labels if clean_name(label) in set(fqns)}


def _groups_of_input(given: Iterable[Any], names: Mapping[nn.Parameter, str]) -> list[list[str]]:
    """The FQNs of an optimizer's input, one list for each group, or one for all."""
    rule = "It is what the optimizer was made from, an iterable of parameters or of groups"
    fix = "Leave it out and pass optim"
    try:
        found = list(given)
    except TypeError as error:
        problem = f"Optimizer input should be an iterable of Tensors or dicts, but got {type(given).__name__}"
        raise NotAnOptimInput(message("optim_input", problem, rule, fix)) from error
    if not found:
        problem = "Optimizer input should not be empty"
        raise OptimStateError(message("optim_input", problem, rule, f"{fix}. An iterator can be read only once"))
    if all(isinstance(each, Tensor) for each in found):
        groups = [found]
    elif all(isinstance(each, dict) and "params" in each for each in found):
        groups = [list(each["params"]) for each in found]
    else:
        problem = "Optimizer input should be an iterable of Tensors or dicts"
        raise NotAnOptimInput(message("optim_input", problem, rule, fix))
    strangers = [f"of shape {tuple(param.shape)}" for group in groups for param in group if param not in names]
    if strangers:
        problem = f"{len(strangers)} of its parameters are not in the model, the first {strangers[0]}"
        raise OptimStateError(message("optim_input", problem, rule, fix))
    return [[names[param] for param in group] for group in groups]
