"""What a checkpoint is that is open for reading: nested dicts of foreign files, and plain data in JSON.

Each kind of file is a class with these two members (:class:`Source`), used by ``load_checkpoint`` and ``convert``:

- ``contents``, a :class:`Contents`: everything that is not a tensor, and a :class:`Stored` (dtype, shape, key) for each
  tensor. It is complete when the source is opened, and its tensors are not read yet.
- ``read(targets)``: fill each ``(key, tensor)``, converted to the dtype of the target. Local.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardkit._torch.dispatch import tree_map
from shardkit.checkpoint.format import Spec
from shardkit.errors import CheckpointError, listing, message
from shardkit.shards import local_value
from shardkit.state.load import LoadPlan, Request, check_ties, same_values, unwritten
from shardkit.state.model import is_extra
from shardkit.state.optimizer import renamed_state

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
    # By kind of generator a sequence of the states of all ranks, or of the one that all had.
    random: dict[str, Any] = field(default_factory=dict)
    trainable_only: bool = False  # whether frozen parameters were left out
    quantized: bool = False  # whether optimizer state was quantized, and is stored as its values
    ties: dict[str, str] = field(default_factory=dict)  # other names of tied tensors, each with the stored one


class Source(Protocol):
    """An open checkpoint."""

    contents: Contents

    def read(self, targets: Iterable[tuple[str, Tensor]]) -> None:
        """Fill each target from the tensor with its key: the local part of a DTensor, or all of a plain tensor."""


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
    if optimizer is None and not any(isinstance(value, Stored) for value in flat.values()):
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


# ---- plain data as JSON, exactly --------------------------------------------------------------------------------

# Values that JSON lacks are objects with this one key, such as {"$": ["tuple", [1, 2]]}.
TAG = "$"
_DTYPES = {str(each).removeprefix("torch."): each for each in vars(torch).values() if isinstance(each, torch.dtype)}
# Type to tag, encoder and decoder. Types must match exactly: a subclass may hold more than its base's value.
_ATOMS: dict[type, tuple[str, Callable[[Any], Any], Callable[[Any], Any]]] = {
    float: ("float", str, float),  # only if not finite
    bytes: ("bytes", bytes.hex, bytes.fromhex),
    complex: ("complex", lambda v: [str(v.real), str(v.imag)], lambda pair: complex(*map(float, pair))),
    torch.dtype: ("dtype", lambda value: str(value).removeprefix("torch."), _DTYPES.__getitem__),
    torch.device: ("device", str, torch.device),
}
_FROM_JSON = {tag: from_json for tag, _, from_json in _ATOMS.values()}
_SEQUENCES: dict[type, str] = {tuple: "tuple", torch.Size: "size", set: "set", frozenset: "frozenset"}
_MAPPINGS: dict[type, str] = {dict: "dict", OrderedDict: "ordered", Counter: "counter"}
_CONTAINERS = {tag: kind for kind, tag in (_SEQUENCES | _MAPPINGS).items()}
_RULE = "A checkpoint holds None, bool, int, float, complex, str, bytes, torch's dtypes and devices, plain tensors, "
_RULE += "and lists, tuples, sets and dicts of these; nothing is pickled"
_FIX = "Leave it out, or save plain data instead, such as its state_dict()"


def encode(value: Any, where: str, *, sharded: bool = False) -> tuple[Any, dict[str, Any]]:
    """Return ``value`` as data for ``json.dumps``, and its tensors by their paths in it. Local, pure.

    ``where`` names the value in errors and in the names of tensors, and may be empty; a :class:`Stored` counts as a
    tensor. Raises with the paths of all values that cannot be saved; of DTensors unless ``sharded``.
    """
    encoder = _Encoder(sharded)
    try:
        encoded = encoder.encode(value, where)
    except RecursionError:
        raise CheckpointError(message(where, "contains itself, or is nested too deeply", _RULE, _FIX)) from None
    if encoder.problems:
        raise CheckpointError("\n".join(encoder.problems))
    return encoded, encoder.tensors


class _Encoder:
    def __init__(self, sharded: bool) -> None:
        self.tensors: dict[str, Any] = {}
        self.problems: list[str] = []
        self._sharded = sharded

    def encode(self, value: Any, path: str) -> Any:
        kind = type(value)
        if value is None or kind in (bool, int, str) or (kind is float and math.isfinite(value)):
            return value
        if kind in _ATOMS:
            tag, to_json, _ = _ATOMS[kind]
            return {TAG: [tag, to_json(value)]}
        if isinstance(value, (Tensor, Stored)):
            return self._tensor(value, path)
        if kind is list or kind in _SEQUENCES:
            items = [self.encode(each, _join(path, index)) for index, each in enumerate(value)]
            return items if kind is list else {TAG: [_SEQUENCES[kind], items]}
        if kind is not defaultdict and kind not in _MAPPINGS:
            return self._refuse(path, f"is a {kind.__module__}.{kind.__qualname__}")
        values = [self.encode(each, _join(path, key)) for key, each in value.items()]
        if kind in (dict, defaultdict) and TAG not in value and all(type(key) is str for key in value):
            return dict(zip(value, values, strict=True))
        keys = [self.encode(key, _join(path, "keys")) for key in value]
        return {TAG: [_MAPPINGS.get(kind, "dict"), [list(pair) for pair in zip(keys, values, strict=True)]]}

    def _tensor(self, value: Any, path: str) -> Any:
        is_unfit = isinstance(value, Tensor) and (value.layout != torch.strided or value.is_meta)
        if is_unfit or (isinstance(value, DTensor) and not self._sharded):
            return self._refuse(path, f"is a tensor that is sharded, sparse or on meta ({type(value).__name__})")
        name, number = path, 1
        while name in self.tensors:  # keys 1 and "1" of one dict
            name, number = f"{path}#{number}", number + 1
        self.tensors[name] = value
        return {TAG: ["tensor", name]}

    def _refuse(self, path: str, problem: str) -> None:
        self.problems.append(message(path, problem, _RULE, _FIX))


def decode(encoded: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return the value that :func:`encode` encoded; raise KeyError, TypeError or ValueError for other data."""
    if isinstance(encoded, list):
        return [decode(each, tensors) for each in encoded]
    if not isinstance(encoded, dict):
        return encoded
    if TAG not in encoded:
        return {key: decode(each, tensors) for key, each in encoded.items()}
    tag, content = encoded[TAG]
    if tag == "tensor":
        return tensors[content]
    kind = _CONTAINERS.get(tag)
    if kind is None:
        return _FROM_JSON[tag](content)
    if kind in _SEQUENCES:
        return kind(decode(each, tensors) for each in content)
    return kind({decode(key, tensors): decode(each, tensors) for key, each in content})  # Counter(pairs) would count


def _join(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)
