"""Plain data as JSON and back, exactly; tensors are taken out and named by where they were.

What JSON has no word for is an object with the one key ``"$"``, such as ``{"$": ["tuple", [1, 2]]}``. Numbers keep
their type and every bit: JSON's floats are written by ``repr``, which round-trips, and integers have no limit.
"""

from __future__ import annotations

import json
import math
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardkit.errors import CheckpointError, message

TAG = "$"
DEEPEST = 100  # levels of nesting; Python's own limit would be met first in the C code of json, with a crash of depth

# Tag, exact type, to JSON, from JSON. Types are compared exactly: a subclass may hold more than its base's value.
_TYPES: list[tuple[str, type, Callable[[Any], Any], Callable[[Any], Any]]] = [
    # Half a surrogate pair: os.fsdecode makes them of file names, and JSON would join two of them.
    ("text", type(None), str, lambda text: bytes.fromhex(_text(text)).decode("utf-8", "surrogatepass")),
    ("bytes", bytes, lambda value: value.hex(), lambda text: bytes.fromhex(_text(text))),
    ("complex", complex, lambda value: [_hex(value.real), _hex(value.imag)], lambda pair: _complex(pair)),
    ("dtype", torch.dtype, lambda value: str(value).removeprefix("torch."), lambda name: _dtype(name)),
    ("device", torch.device, str, lambda name: torch.device(_text(name))),
]
_SEQUENCES: dict[str, type] = {"tuple": tuple, "size": torch.Size, "set": set, "frozenset": frozenset}
_MAPPINGS: dict[str, type] = {"dict": dict, "ordered": OrderedDict, "counter": Counter}


def encode(value: Any, where: str, *, sharded: bool = False) -> tuple[Any, dict[str, Tensor]]:
    """``value`` as what ``json.dumps`` takes, and its tensors by their paths in it. Local, pure.

    Args:
        value: None, bool, int, float, complex, str, bytes, torch.dtype, torch.device, plain tensors, and list, tuple,
            torch.Size, set, dict, OrderedDict, Counter and defaultdict (as a dict) of these.
        where: what the value is called in errors and in tensors' names; may be empty.
        sharded: take DTensors too.

    Raises:
        CheckpointError: naming the paths of all values of other types, of cycles, and of sharded tensors.
    """
    tensors: dict[str, Tensor] = {}
    problems: list[str] = []
    encoded = _Encoder(tensors, problems, sharded).encode(value, where, ())
    if problems:
        raise CheckpointError("\n".join(problems))
    return encoded, tensors


def decode(encoded: Any, tensors: Mapping[str, Tensor]) -> Any:
    """What :func:`encode` was given.

    Raises:
        CheckpointError: this is not what :func:`encode` writes, or a tensor is missing.
    """
    try:
        return _decode(encoded, tensors)
    except (TypeError, ValueError, KeyError, AttributeError, RuntimeError, RecursionError) as error:
        problem = f"a value that no save writes ({type(error).__name__}: {error})"
        raise CheckpointError(
            message("state.json", problem, "It was changed since", "Use another checkpoint")
        ) from None


def dumps(value: Any) -> bytes:
    """The JSON text of encoded values."""
    return json.dumps(value, allow_nan=False, indent=1).encode()


@dataclass
class _Encoder:
    """Attributes:
    tensors: those found so far, by name.
    problems: what was refused so far.
    sharded: whether DTensors are taken.
    """

    tensors: dict[str, Tensor]
    problems: list[str]
    sharded: bool

    def encode(self, value: Any, path: str, outer: tuple[int, ...]) -> Any:
        """The JSON of a value inside of the containers ``outer``, given by their ids."""
        kind = type(value)
        if value is None or kind in (bool, int):
            return value
        if kind is str:
            return value if _is_unicode(value) else {TAG: ["text", value.encode("utf-8", "surrogatepass").hex()]}
        if kind is float:
            return value if math.isfinite(value) else {TAG: ["float", _hex(value)]}
        if isinstance(value, Tensor):
            return self._tensor(value, path)
        for tag, type_, to_json, _ in _TYPES:
            if kind is type_:
                return {TAG: [tag, to_json(value)]}
        if id(value) in outer or len(outer) > DEEPEST:
            return self._refuse(path, "it contains itself" if id(value) in outer else f"{DEEPEST} levels deep")
        return self._container(value, path, (*outer, id(value)))

    def _container(self, value: Any, path: str, outer: tuple[int, ...]) -> Any:
        kind = type(value)
        if kind is list or kind in _SEQUENCES.values():
            items = [self.encode(each, _join(path, index), outer) for index, each in enumerate(value)]
            return items if kind is list else {TAG: [_tag(_SEQUENCES, kind), items]}
        if kind in (dict, defaultdict) and TAG not in value and all(type(k) is str and _is_unicode(k) for k in value):
            return {key: self.encode(each, _join(path, key), outer) for key, each in value.items()}
        if kind is defaultdict or kind in _MAPPINGS.values():
            keys = [self.encode(key, _join(path, "keys"), outer) for key in value]
            values = [self.encode(each, _join(path, key), outer) for key, each in value.items()]
            return {TAG: [_tag(_MAPPINGS, kind), [list(pair) for pair in zip(keys, values, strict=True)]]}
        return self._refuse(path, f"a {kind.__module__}.{kind.__qualname__}")

    def _tensor(self, value: Tensor, path: str) -> Any:
        if (isinstance(value, DTensor) and not self.sharded) or value.layout != torch.strided or value.is_meta:
            return self._refuse(path, f"a tensor that is sharded, sparse or on meta ({type(value).__name__})")
        name, number = path, 1
        while name in self.tensors:  # keys 1 and "1" of one dict
            name, number = f"{path}#{number}", number + 1
        self.tensors[name] = value
        return {TAG: ["tensor", name]}

    def _refuse(self, path: str, problem: str) -> None:
        self.problems.append(_refusal(path, problem))


def _join(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)


def _tag(tags: Mapping[str, type], kind: type) -> str:
    return next((tag for tag, each in tags.items() if each is kind), "dict")  # a defaultdict is saved as a dict


def _refusal(path: str, problem: str) -> str:
    rule = (
        "Saved are None, bool, int, float, complex, str, bytes, torch's dtypes and devices, plain tensors, and lists, "
    )
    rule += "tuples, sets and dicts of them; nothing is pickled"
    return message(path, problem, rule, "Leave it out, or save what it is made of, such as its state_dict()")


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
    if tag == "float":
        return float(content)
    if tag in _SEQUENCES:
        return _SEQUENCES[tag](_decode(each, tensors) for each in content)
    if tag in _MAPPINGS:
        pairs = {_decode(key, tensors): _decode(each, tensors) for key, each in content}
        return _MAPPINGS[tag](pairs)  # of pairs, a Counter would count them
    return {name: from_json for name, _, _, from_json in _TYPES}[tag](content)


def tensor_names(encoded: Any) -> Iterator[str]:
    """The names of the tensors that decoding will ask for."""
    if isinstance(encoded, dict) and TAG in encoded:
        tag, content = encoded[TAG]
        if tag == "tensor":
            yield str(content)
        elif isinstance(content, list):
            yield from tensor_names(content)
    elif isinstance(encoded, (dict, list)):
        for each in encoded.values() if isinstance(encoded, dict) else encoded:
            yield from tensor_names(each)


def leaves_of(encoded: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The values of nested dicts and lists, encoded, by their paths."""
    if isinstance(encoded, (dict, list)) and encoded and TAG not in encoded:
        for key, each in encoded.items() if isinstance(encoded, dict) else enumerate(encoded):
            yield from leaves_of(each, _join(path, key))
    else:
        yield path, encoded


def _is_unicode(text: str) -> bool:
    return text.isascii() or not any("\ud800" <= character <= "\udfff" for character in text)


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no text")
    return value


def _hex(value: float) -> str:
    """What ``float.fromhex`` reads; Python writes NaN without its sign, which it reads."""
    return "-nan" if math.isnan(value) and math.copysign(1, value) < 0 else float.hex(value)


def _complex(pair: Any) -> complex:
    real, imaginary = pair
    return complex(float.fromhex(real), float.fromhex(imaginary))


def _dtype(name: Any) -> torch.dtype:
    found = getattr(torch, _text(name))
    if not isinstance(found, torch.dtype):
        raise TypeError(f"{name!r} is no dtype")
    return found
