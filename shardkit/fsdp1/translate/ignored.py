"""FSDP1's ignored_modules and ignored_states."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch.nn as nn

from shardkit.errors import TranslationError, listing, message
from shardkit.fsdp1.translate.policy import Ignored
from shardkit.planning.tree import ModelTree


def ignored_of(tree: ModelTree, ignored_modules: Any, ignored_states: Any) -> Ignored:
    """What FSDP1 would leave alone: the modules with all below them, and their or the given parameters.

    Raises:
        TranslationError: both are given, or hold something else, or leave nothing to shard.
    """
    if ignored_modules is not None and ignored_states is not None:
        rule = "Cannot pass both ignored_modules and ignored_states at the same time"
        raise _error("ignored_states", "given together with ignored_modules", "Pass ignored_states alone", rule)
    modules = _listed("ignored_modules", ignored_modules, nn.Module)
    states = _listed("ignored_states", ignored_states, (nn.Module, nn.Parameter))
    params = [state for state in states if isinstance(state, nn.Parameter)]
    if params and len(params) < len(states):
        rule = f"ignored_states expects all nn.Parameter or all nn.Module list elements but got types {_types(states)}"
        raise _error("ignored_states", "parameters and modules", "Pass either parameters or modules", rule)
    modules += [state for state in states if isinstance(state, nn.Module)]
    below = frozenset(inner for module in modules for inner in module.modules())
    ignored = Ignored(below, frozenset(params).union(param for module in modules for param in module.parameters()))
    if tree.params and ignored.params.issuperset(tree.params.values()):
        name = "ignored_modules" if ignored_modules is not None else "ignored_states"
        raise _error(name, "every parameter of the model", "Leave some parameters to shard")
    return ignored


def ignored_fqns(tree: ModelTree, ignored: Ignored) -> frozenset[str]:
    """The FQNs of the ignored parameters of the model."""
    return frozenset(fqn for fqn, param in tree.params.items() if param in ignored.params)


def _listed(argument: str, given: Any, kinds: Any) -> list[Any]:
    if given is None:
        return []
    what = "modules" if kinds is nn.Module else "parameters or modules"
    if not isinstance(given, Iterable) or isinstance(given, (str, nn.Module)):
        raise _error(argument, f"a {type(given).__name__}", f"Pass a list of {what}")
    states = list(given)
    wrong = dict.fromkeys(type(state).__name__ for state in states if not isinstance(state, kinds))
    if wrong:
        rule = f"{argument} expects {_KINDS[argument]} list elements but got types {_types(states)}"
        raise _error(argument, listing(wrong), f"Pass a list of {what}", rule)
    return states


# The rules that follow a subject are in FSDP1's words, which programs may look for.
_KINDS = {"ignored_modules": "nn.Module", "ignored_states": "all nn.Parameter or all nn.Module"}
_RULE = "What is ignored is a list of modules, or of parameters, and not all of the model"


def _types(states: Iterable[object]) -> list[type]:
    return sorted({type(state) for state in states}, key=repr)


def _error(argument: str, problem: str, fix: str, rule: str = _RULE) -> TranslationError:
    return TranslationError(message(argument, problem, rule, fix))
