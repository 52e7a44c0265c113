"""A checkpoint that is read, of whatever kind: what is in it, and how a tensor's part comes out of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from shardkit.checkpoint.format import Spec
from shardkit.checkpoint.transfer import Progress
from shardkit.errors import CheckpointError, listing, message
from shardkit.shards import local_value
from shardkit.state.optimizer import renamed_state
from shardkit.state.place import unwritten
from shardkit.state.plan import same_values

# Where programs put a model and an optimizer in what they save.
MODEL_NAMES = ("model", "model_state_dict", "model_state", "state_dict", "module")
OPTIMIZER_NAMES = ("optimizer", "optim", "optimizer_state_dict", "optim_state_dict", "optimizer_state", "optim_state")
WRAPPER_NAMES = ("app", "state", "app_state")  # around both, as in torch's own DCP tutorial


@dataclass(frozen=True)
class Stored(Spec):
    """A tensor in a checkpoint, and what its source calls it."""

    key: str


@dataclass
class Contents:
    """What a checkpoint holds, with :class:`Stored` in the place of every tensor."""

    model: dict[str, Any]  # by FQN
    # {"state": {fqn: {name: value}}, "param_groups": [{"params": [fqn, ...], ...}]}, or with the numbers of parameters
    # in the place of FQNs; None where there is none.
    optimizer: dict[str, Any] | None = None
    scheduler: Any = None  # its state dict
    extra: Any = None  # what the user gave
    random: dict[str, list[bytes]] = field(default_factory=dict)  # for each kind of generator the states of all ranks
    trainable_only: bool = False  # whether frozen parameters were left out
    no_optimizer: str = ""  # why an optimizer that is there cannot be read
    ties: dict[str, str] = field(default_factory=dict)  # other names, each with the one that is stored
    config: str = ""  # the text of the model's config.json


class Source(Protocol):
    """A checkpoint that is open. Every method is local."""

    contents: Contents

    def read(self, targets: Iterable[tuple[str, Tensor]], progress: Progress | None = None) -> None:
        """Fill each target from the tensor of its key: a DTensor's local part, or a plain tensor of its shape."""


def holds_same(like: Tensor, read: Callable[[list[Tensor]], None]) -> bool:
    """Whether two tensors that ``read`` fills are equal, in this rank's part of a tensor like this one. Local."""
    rooms = [unwritten(like, like.dtype, torch.device("cpu")) for _ in range(2)]
    read(rooms)
    return same_values(*map(local_value, rooms))


def contents_of(tree: Mapping[Any, Any], where: str) -> Contents:
    """Find model and optimizer in what a program saved: nested dicts of :class:`Stored` and plain values."""
    for name in WRAPPER_NAMES:
        inner = tree.get(name)
        if len(tree) == 1 and isinstance(inner, Mapping):
            tree = inner
    optimizer = _section(tree, OPTIMIZER_NAMES)
    if optimizer is None and "param_groups" in tree and "state" in tree:
        return Contents({}, _optimizer(tree))
    model = _section(tree, MODEL_NAMES)
    if model is None and optimizer is None:
        model = {key: value for key, value in tree.items() if isinstance(key, str)}
    flat = dict(_flattened(model or {}))
    if optimizer is None and not any(isinstance(value, Stored) for value in flat.values()):
        rule = f"A model is under one of {', '.join(MODEL_NAMES)}, or the tensors are at the top"
        problem = f"no tensors under {listing(map(str, tree))}"
        raise CheckpointError(message(where, problem, rule, "Pass that part alone"))
    return Contents(flat, None if optimizer is None else _optimizer(optimizer))


def checked_optimizer(found: Any) -> dict[str, Any] | None:
    """An optimizer's state, or None; raise ValueError where it is not one."""
    if found is None:
        return None
    if not isinstance(found, dict) or found.keys() != {"state", "param_groups"}:
        raise ValueError("an optimizer has state and param_groups")
    groups, entries = found["param_groups"], found["state"]
    if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
        raise ValueError("param_groups are a list of dicts")
    names = [name for group in groups for name in group.get("params", [None])]
    if not all(isinstance(name, str) for name in names):
        raise ValueError("params are names")
    if not isinstance(entries, dict) or not all(isinstance(entry, dict) for entry in entries.values()):
        raise ValueError("state is a dict of dicts")
    return found


def _section(tree: Mapping[Any, Any], names: Iterable[str]) -> Mapping[Any, Any] | None:
    return next((tree[name] for name in names if isinstance(tree.get(name), Mapping)), None)


def _flattened(tree: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flattened(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _optimizer(tree: Mapping[Any, Any]) -> dict[str, Any]:
    if "state" not in tree and any(str(key).startswith("state.") for key in tree):
        return _unflattened(tree)
    groups = tree.get("param_groups", [])
    if isinstance(groups, Mapping):  # DCP numbers what was in a list
        groups = [groups[number] for number in sorted(groups)]
    return {"state": dict(tree.get("state", {})), "param_groups": [dict(group) for group in groups]}


def _unflattened(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Of torch's ``flatten_optimizer_state_dict``: ``state.<fqn>.<name>`` and ``param_groups.<fqn>.<option>``."""
    state: dict[str, dict[str, Any]] = {}
    options: dict[str, dict[str, Any]] = {}
    for key, value in tree.items():
        part, _, rest = key.partition(".")
        fqn, _, name = rest.rpartition(".")
        (state if part == "state" else options).setdefault(fqn, {})[name] = value
    groups: list[dict[str, Any]] = []
    for fqn, own in options.items():
        group = next((each for each in groups if {k: v for k, v in each.items() if k != "params"} == own), None)
        if group is None:
            groups.append(group := {**own, "params": []})
        group["params"].append(fqn)
    return {"state": state, "param_groups": groups}


def by_name(optimizer: dict[str, Any], names: list[str]) -> dict[str, Any]:
    """An optimizer's state by FQN, also where parameters were numbered; the numbers count ``names``."""
    numbers = {number for group in optimizer["param_groups"] for number in group["params"] if type(number) is int}
    numbers |= {number for number in optimizer["state"] if type(number) is int}
    if not numbers:
        return optimizer
    if max(numbers) >= len(names):
        problem = f"its parameters are numbered up to {max(numbers)}, and the model has {len(names)}"
        rule = "Numbers count the model's parameters in order"
        raise CheckpointError(message("optimizer", problem, rule, "Save it by names: FSDP.rekey_optim_state_dict"))
    return renamed_state(optimizer, lambda key: names[key] if type(key) is int else key)
