"""Which tensor of a file goes into which of a model: names, shapes and dtypes, all compared before anything is read."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from shardkit.checkpoint.format import Spec
from shardkit.errors import CheckpointError, message

# From names in the file to names in the model: a function (None: leave it out), whole names, or patterns with what
# replaces them.
KeyMap: TypeAlias = "Callable[[str], str | None] | Mapping[str, str] | Sequence[tuple[str, str]]"


class Loaded(NamedTuple):
    """What a load that is not strict left alone, as ``nn.Module.load_state_dict`` returns it."""

    missing_keys: list[str]
    unexpected_keys: list[str]


@dataclass(frozen=True)
class Match:
    """Attributes:
    sources: for each name of the model that is read, the name in the file; of tied ones the first that the file has.
    loaded: what is missing and unexpected.
    also: the first name of a tied tensor, another of its names, and what the file has for that.
    """

    sources: dict[str, str]
    loaded: Loaded
    also: list[tuple[str, str, str]]


def match(
    found: Mapping[str, Spec],
    wanted: Mapping[str, Tensor],
    *,
    where: str,
    key_map: KeyMap | None = None,
    dtypes: Mapping[str, torch.dtype] | None = None,
    cast: bool = False,
    strict: bool = True,
) -> Match:
    """Pair what a file has with what a model wants. Pure.

    Args:
        found: what the file has, by its own names.
        wanted: by name; the same object under several names is tied, and one of them is enough.
        where: the path, for messages.
        key_map: from the file's names to those of ``wanted``; None: they are the same.
        dtypes: what tensors of ``wanted`` are to be instead of their own dtype.
        cast: floating-point values may be converted between dtypes.
        strict: missing and unexpected names are errors.

    Raises:
        CheckpointError: listing every name that is missing, unexpected, there twice, or of another shape or dtype.
    """
    _check_key_map(key_map)
    renamed = [(rename(name, key_map), name) for name in found]
    sources = {new: name for new, name in reversed(renamed) if new is not None}
    ties: dict[int, list[str]] = {}
    for name, tensor in wanted.items():
        ties.setdefault(id(tensor), []).append(name)
    read = {names[0]: next((sources[n] for n in names if n in sources), None) for names in ties.values()}
    also = [
        (names[0], name, sources[name])
        for names in ties.values()
        for name in names
        if name in sources and sources[name] != read[names[0]]
    ]
    loaded = Loaded(
        [name for names in ties.values() for name in names if read[names[0]] is None],
        [name for new, name in renamed if new is not None and new not in wanted],
    )
    twice = [f"{new} ({count} times)" for new, count in Counter(new for new, _ in renamed).items() if new and count > 1]
    misfits = [
        f"{name} ({reason})"
        for name, source in read.items()
        if source is not None
        for reason in _misfit(found[source], wanted[name], (dtypes or {}).get(name, wanted[name].dtype), cast)
    ]
    misfits += [
        f"{name} ({reason})"
        for first, name, source in also
        for reason in _misfit(found[source], wanted[first], (dtypes or {}).get(first, wanted[first].dtype), cast)
    ]
    problems = {"mapped to twice": twice, "of another shape or dtype": misfits}
    if strict:
        problems |= {"missing": loaded.missing_keys, "unexpected": loaded.unexpected_keys}
    _raise_if_any(problems, where)
    return Match({name: source for name, source in read.items() if source is not None}, loaded, also)


def rename(name: str, key_map: KeyMap | None) -> str | None:
    """A file's name as the model's; None: left out. Of patterns the first that is found in the name is applied."""
    if key_map is None:
        return name
    if callable(key_map):
        return key_map(name)
    if isinstance(key_map, Mapping):
        return key_map.get(name, name)
    for pattern, replacement in key_map:
        new, count = re.subn(pattern, replacement, name)
        if count:
            return new
    return name


def _check_key_map(key_map: KeyMap | None) -> None:
    if key_map is None or callable(key_map):
        return
    try:
        pairs = list(key_map.items() if isinstance(key_map, Mapping) else key_map)
        if not all(isinstance(text, str) for pair in pairs for text in pair) or any(len(pair) != 2 for pair in pairs):
            raise TypeError("not of pairs of texts")
        for pattern, replacement in [] if isinstance(key_map, Mapping) else pairs:
            re.sub(pattern, replacement, "")
    except (TypeError, ValueError, re.error) as error:
        rule = "It is a function, a map of names, or a list of (regular expression, replacement)"
        fix = r'Pass such as [("^transformer\.", "model.")]'
        raise CheckpointError(message("key_map", f"cannot be used ({error})", rule, fix)) from None


def _misfit(have: Spec, want: Tensor, dtype: torch.dtype, cast: bool) -> Iterable[str]:
    if have.shape != want.shape:
        yield f"{tuple(have.shape)} in the file, {tuple(want.shape)} here"
    if have.dtype != dtype and not (cast and have.dtype.is_floating_point and dtype.is_floating_point):
        yield f"{have.dtype} in the file, {dtype} here"


def _raise_if_any(problems: Mapping[str, Sequence[str]], where: str) -> None:
    there = {kind: names for kind, names in problems.items() if names}
    if there:
        counts = ", ".join(f"{len(names)} {kind}" for kind, names in there.items())
        rule = "Names, shapes and dtypes must fit; nothing was changed"
        fix = "Pass key_map= for other names, or strict=False to leave names that do not match alone"
        lines = [f"- {kind}: {name}" for kind, names in there.items() for name in names]
        raise CheckpointError("\n".join([message(where, counts, rule, fix), *lines]))
