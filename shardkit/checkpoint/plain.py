"""Encode plain data as JSON, exactly; tensors are taken out and named by their paths.

Values that JSON lacks are objects with the one key ``"$"``, such as ``{"$": ["tuple", [1, 2]]}``. Numbers keep their
type and every bit: floats are written by ``repr``, which round-trips, and integers have no limit.
"""

from __future__ import annotations

import json
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
DEEPEST = 100  # levels of nesting; beyond Python's own limit the C code of json crashes
_UTF8 = ("utf-8", "surrogatepass")

# Type to tag, encoder and decoder. Types must match exactly: a subclass may hold more than its base's value.
_ATOMS: dict[type, tuple[str, Callable[[Any], Any], Callable[[Any], Any]]] = {
    float: ("float", lambda value: _hex(value), float),  # only if not finite
    # Only with half a surrogate pair, as in file names from os.fsdecode: JSON would join two of them.
    str: ("text", lambda text: text.encode(*_UTF8).hex(), lambda text: bytes.fromhex(_text(text)).decode(*_UTF8)),
    bytes: ("bytes", bytes.hex, lambda text: bytes.fromhex(_text(text))),
    complex: ("complex", lambda v: [_hex(v.real), _hex(v.imag)], lambda pair: complex(*map(float.fromhex, pair))),
    torch.dtype: ("dtype", lambda value: str(value).removeprefix("torch."), lambda name: _dtype(name)),
    torch.device: ("device", str, lambda name: torch.device(_text(name))),
}
_FROM_JSON = {tag: from_json for tag, _, from_json in _ATOMS.values()}
_SEQUENCES: dict[type, str] = {tuple: "tuple", torch.Size: "size", set: "set", frozenset: "frozenset"}
_MAPPINGS: dict[type, str] = {dict: "dict", OrderedDict: "ordered", Counter: "counter"}
_CONTAINERS = {tag: kind for kind, tag in (_SEQUENCES | _MAPPINGS).items()}


def encode(value: Any, where: str, *, sharded: bool = False) -> tuple[Any, dict[str, Any]]:
    """Return ``value`` as data for ``json.dumps``, and its tensors by their paths in it. Local, pure.

    Args:
        value: None, bool, int, float, complex, str, bytes, torch.dtype, torch.device, plain tensors, and list, tuple,
            torch.Size, set, dict, OrderedDict, Counter and defaultdict (as a dict) of these. A :class:`Stored` counts
            as a tensor.
        where: the name of the value in errors and in the names of tensors; may be empty.
        sharded: accept DTensors too.

    Raises:
        CheckpointError: with the paths of all values of other types, of cycles, and of sharded tensors.
    """
    encoder = _Encoder(sharded)
    encoded = encoder.encode(value, where, ())
    if encoder.problems:
        raise CheckpointError("\n".join(encoder.problems))
    return encoded, encoder.tensors


def decode(encoded: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return the value that :func:`encode` encoded.

    Raises:
        CheckpointError: :func:`encode` does not write this, or a tensor is missing.
    """
    try:
        return _decode(encoded, tensors)
    except (TypeError, ValueError, KeyError, AttributeError, RuntimeError, RecursionError) as error:
        problem = f"has a value that save_checkpoint does not write ({type(error).__name__}: {error})"
        rule = "It was changed after the save"
        raise CheckpointError(message("state.json", problem, rule, "Use another checkpoint")) from None


def dumps(value: Any) -> bytes:
    """Return encoded values as JSON."""
    return json.dumps(value, allow_nan=False, indent=1).encode()


class _Encoder:
    def __init__(self, sharded: bool) -> None:
        self.tensors: dict[str, Any] = {}
        self.problems: list[str] = []
        self._sharded = sharded

    def encode(self, value: Any, path: str, outer: tuple[int, ...]) -> Any:
        """Encode a value inside the containers with the ids ``outer``."""
        kind = type(value)
        if value is None or kind in (bool, int) or (kind is str and _is_unicode(value)):
            return value
        if kind is float and math.isfinite(value):
            return value
        if kind in _ATOMS:
            tag, to_json, _ = _ATOMS[kind]
            return {TAG: [tag, to_json(value)]}
        if isinstance(value, (Tensor, Stored)):
            return self._tensor(value, path)
        if id(value) in outer or len(outer) > DEEPEST:
            return self._refuse(path, "contains itself" if id(value) in outer else f"is {DEEPEST} levels deep")
        return self._container(value, path, (*outer, id(value)))

    def _container(self, value: Any, path: str, outer: tuple[int, ...]) -> Any:
        kind = type(value)
        if kind is list or kind in _SEQUENCES:
            items = [self.encode(each, _join(path, index), outer) for index, each in enumerate(value)]
            return items if kind is list else {TAG: [_SEQUENCES[kind], items]}
        if kind is not defaultdict and kind not in _MAPPINGS:
            return self._refuse(path, f"is a {kind.__module__}.{kind.__qualname__}")
        if kind in (dict, defaultdict) and TAG not in value and all(type(k) is str and _is_unicode(k) for k in value):
            return {key: self.encode(each, _join(path, key), outer) for key, each in value.items()}
        keys = [self.encode(key, _join(path, "keys"), outer) for key in value]
        values = [self.encode(each, _join(path, key), outer) for key, each in value.items()]
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
        rule = "A checkpoint holds None, bool, int, float, complex, str, bytes, torch's dtypes and devices, plain "
        rule += "tensors, and lists, tuples, sets and dicts of these; nothing is pickled"
        fix = "Leave it out, or save plain data instead, such as its state_dict()"
        self.problems.append(message(path, problem, rule, fix))


def _decode(encoded: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(encoded, list):
        return [_decode(each, tensors) for each in encoded]
    if not isinstance(encoded, dict):
        return encoded
    if TAG not in encoded:
        return {key: _decode(each, tensors) for key, each in encoded.items()}
    tag, content = encoded[TAG]
    if tag == "tensor":
        return tensors[content]
    kind = _CONTAINERS.get(tag)
    if kind is None:
        return _FROM_JSON[tag](content)
    if kind in _SEQUENCES:
        return kind(_decode(each, tensors) for each in content)
    return kind({_decode(key, tensors): _decode(each, tensors) for key, each in content})  # Counter(pairs) would count


def leaves_of(encoded: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of nested dicts and lists, encoded, with their paths."""
    if isinstance(encoded, (dict, list)) and encoded and TAG not in encoded:
        for key, each in encoded.items() if isinstance(encoded, dict) else enumerate(encoded):
            yield from leaves_of(each, _join(path, key))
    else:
        yield path, encoded


def _join(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)


def _is_unicode(text: str) -> bool:
    return text.isascii() or not any("\ud800" <= character <= "\udfff" for character in text)


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not text")
    return value


def _hex(value: float) -> str:
    """Return a float for ``float.fromhex``; Python's own ``hex`` loses the sign of NaN."""
    return "-nan" if math.isnan(value) and math.copysign(1, value) < 0 else float.hex(value)


def _dtype(name: Any) -> torch.dtype:
    found = getattr(torch, _text(name))
    if not isinstance(found, torch.dtype):
        raise TypeError(f"{name!r} is not a dtype")
    return found
