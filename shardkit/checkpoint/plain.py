"""Encode plain data as JSON, exactly; tensors are taken out and named by their paths.

Values that JSON lacks are objects with the one key ``"$"``, such as ``{"$": ["tuple", [1, 2]]}``.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardkit.checkpoint.source import Stored
from shardkit.errors import CheckpointError, message

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
_RULE = (
    "A checkpoint holds None, bool, int, float, complex, str, bytes, torch's dtypes and devices, plain tensors, and "
)
_RULE += "lists, tuples, sets and dicts of these; nothing is pickled"
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


def leaves_of(encoded: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of nested dicts and lists, encoded, with their paths."""
    if isinstance(encoded, (dict, list)) and encoded and TAG not in encoded:
        for key, each in encoded.items() if isinstance(encoded, dict) else enumerate(encoded):
            yield from leaves_of(each, _join(path, key))
    else:
        yield path, encoded


def _join(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)
