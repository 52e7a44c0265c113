"""What a checkpoint is that is open for reading, and how a model and an optimizer are found in nested dicts.

Each kind of file is a class with these two members (:class:`Source`), used by ``load_checkpoint`` and ``convert``:

- ``contents``, a :class:`Contents`: everything that is not a tensor, and a :class:`Stored` (dtype, shape, key) for each
  tensor. It is complete when the source is opened, and its tensors are not read yet.
- ``read(targets)``: fill each ``(key, tensor)``. A DTensor gets this rank's part, found by its own mesh; a
  plain tensor gets all. Values are converted to the dtype of the target. Local: the ranks read independently.

``contents_of(tree)`` makes the contents from the nested dicts of foreign files.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from shardkit._torch.dispatch import tree_map
from shardkit.checkpoint.format import Spec
from shardkit.errors import CheckpointError, listing, message
from shardkit.shards import local_value
from shardkit.state.load import unwritten
from shardkit.state.model import is_extra
from shardkit.state.optimizer import renamed_state
from shardkit.state.plan import LoadPlan, Request, check_ties, same_values

# The keys under which programs save a model and an optimizer.
MODEL_NAMES = ("model", "model_state_dict", "model_state", "state_dict", "module")
OPTIMIZER_NAMES = ("optimizer", "optim", "optimizer_state_dict", "optim_state_dict", "optimizer_state", "optim_state")
WRAPPER_NAMES = ("app", "state", "app_state")  # around both, as in torch's own DCP tutorial


@dataclass(frozen=True)
class Stored(Spec):
    """A tensor in a checkpoint, and its key in the source."""

    key: str


@dataclass
class Contents:
    """Everything in a checkpoint, with a :class:`Stored` in place of each tensor."""

    model: dict[str, Any]  # by FQN
    # {"state": {fqn: {name: value}}, "param_groups": [{"params": [fqn, ...], ...}]}, or with numbers instead of FQNs;
    # None if there is none.
    optimizer: dict[str, Any] | None = None
    scheduler: Any = None  # its state dict
    extra: Any = None  # as passed by the user
    random: dict[str, list[bytes]] = field(default_factory=dict)  # the states of all ranks, by kind of generator
    trainable_only: bool = False  # whether frozen parameters were left out
    quantized: bool = False  # whether optimizer state was quantized, and is stored as its values
    no_optimizer: str = ""  # why an existing optimizer cannot be read
    ties: dict[str, str] = field(default_factory=dict)  # other names of tied tensors, each with the stored one


class Source(Protocol):
    """An open checkpoint. Every method is local."""

    contents: Contents

    def read(self, targets: Iterable[tuple[str, Tensor]]) -> None:
        """Fill each target from the tensor with its key: the local part of a DTensor, or all of a plain tensor."""


def is_stored(value: object) -> bool:
    """Whether a value stands for a tensor of a source."""
    return isinstance(value, Stored)


def read_values(source: Source, tree: Any) -> Any:
    """Return nested values with their tensors read. Local."""
    targets: list[tuple[str, Tensor]] = []

    def room(leaf: Any) -> Any:
        if not isinstance(leaf, Stored):
            return leaf
        targets.append((leaf.key, torch.empty(leaf.shape, dtype=leaf.dtype)))
        return targets[-1][1]

    values = tree_map(room, tree)
    source.read(targets)
    return values


def check_stored_ties(source: Source, plan: LoadPlan, tensors: Mapping[str, Tensor], request: Request) -> None:
    """Raise, or warn, if a source has different values for one tied tensor, in this rank's part of it. Local."""

    def are_equal(name: str, *names: str) -> bool:
        rooms = [unwritten(tensors[name], tensors[name].dtype, torch.device("cpu")) for _ in names]
        source.read((source.contents.model[each].key, room) for each, room in zip(names, rooms, strict=True))
        return same_values(*map(local_value, rooms))

    check_ties(plan, are_equal, request)


def contents_of(tree: Mapping[Any, Any], where: str) -> Contents:
    """Find model and optimizer in the nested dicts that a program saved."""
    for name in WRAPPER_NAMES:
        inner = tree.get(name)
        if len(tree) == 1 and isinstance(inner, Mapping):
            tree = inner

    def section(names: Iterable[str]) -> Mapping[Any, Any] | None:
        return next((tree[name] for name in names if isinstance(tree.get(name), Mapping)), None)

    optimizer = section(OPTIMIZER_NAMES)
    if optimizer is None and "param_groups" in tree and "state" in tree:
        return Contents({}, _optimizer(tree))
    model = section(MODEL_NAMES)
    if model is None and optimizer is None:
        model = {key: value for key, value in tree.items() if isinstance(key, str)}
    flat = dict(_flattened(model or {}))
    if optimizer is None and not any(map(is_stored, flat.values())):
        rule = f"A model is under one of {', '.join(MODEL_NAMES)}, or its tensors are at the top level"
        problem = f"it has no tensors under {listing(map(str, tree))}"
        raise CheckpointError(message(where, problem, rule, "Save the model's state dict under one of these keys"))
    return Contents(flat, None if optimizer is None else _optimizer(optimizer))


def _flattened(tree: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping) and not is_extra(str(key)):  # an extra state may be a dict, and is one value
            yield from _flattened(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _optimizer(tree: Mapping[Any, Any]) -> dict[str, Any]:
    if "state" in tree or not any(str(key).startswith("state.") for key in tree):
        groups = tree.get("param_groups", [])
        if isinstance(groups, Mapping):  # DCP saves a list as a dict with numbers as keys
            groups = [groups[number] for number in sorted(groups)]
        return {"state": dict(tree.get("state", {})), "param_groups": [dict(group) for group in groups]}
    # torch's flatten_optimizer_state_dict: "state.<fqn>.<name>" and "param_groups.<fqn>.<option>"
    state: dict[str, dict[str, Any]] = {}
    options: dict[str, dict[str, Any]] = {}
    for key, value in tree.items():
        part, _, rest = key.partition(".")
        fqn, _, name = rest.rpartition(".")
        (state if part == "state" else options).setdefault(fqn, {})[name] = value
    found: list[dict[str, Any]] = []
    for fqn, own in options.items():
        group = next((each for each in found if {k: v for k, v in each.items() if k != "params"} == own), None)
        if group is None:
            found.append(group := {**own, "params": []})
        group["params"].append(fqn)
    return {"state": state, "param_groups": found}


def by_name(optimizer: dict[str, Any], names: list[str]) -> dict[str, Any]:
    """Return an optimizer's state by FQN; parameters that are numbered count ``names``."""
    numbers = {number for group in optimizer["param_groups"] for number in group["params"] if type(number) is int}
    numbers |= {number for number in optimizer["state"] if type(number) is int}
    if not numbers:
        return optimizer
    if max(numbers) >= len(names):
        problem = f"its parameters are numbered up to {max(numbers)}, and the model has {len(names)}"
        rule = "Numbers count the model's parameters in order"
        fix = "Save the state by name, with FSDP.rekey_optim_state_dict"
        raise CheckpointError(message("optimizer", problem, rule, fix))
    return renamed_state(optimizer, lambda key: names[key] if type(key) is int else key)
