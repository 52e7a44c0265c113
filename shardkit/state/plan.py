"""Plan a load into a model: pair names, and report everything that does not fit, before anything is read."""

from __future__ import annotations

import logging
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from shardkit.errors import CheckpointError, ShardkitError, message
from shardkit.state.names import first_names

logger = logging.getLogger("shardkit")

# Maps offered names to the model's: a function (None leaves the name out), a dict of full names, or pairs of a regular
# expression and its replacement.
KeyMap: TypeAlias = "Callable[[str], str | None] | Mapping[str, str] | Sequence[tuple[str, str]]"


class IncompatibleKeys(NamedTuple):
    """The names that a load with ``strict=False`` left alone, as ``nn.Module.load_state_dict`` returns them."""

    missing_keys: list[str]
    unexpected_keys: list[str]


@dataclass(frozen=True)
class Spec:
    """The dtype and shape of a full tensor."""

    dtype: torch.dtype
    shape: torch.Size

    @property
    def bytes(self) -> int:
        """The bytes of the full tensor."""
        return math.prod(self.shape) * self.dtype.itemsize  # torch.Size.numel() wraps around at 2**63


def is_spec(value: object) -> bool:
    """Whether it is a :class:`Spec`."""
    return isinstance(value, Spec)


def exactly(have: torch.dtype, want: torch.dtype) -> bool:
    """Whether the dtypes are equal: no conversion."""
    return have == want


def among_floats(have: torch.dtype, want: torch.dtype) -> bool:
    """Whether a conversion is between floating-point dtypes."""
    return have == want or (have.is_floating_point and want.is_floating_point)


def unless_complex(have: torch.dtype, want: torch.dtype) -> bool:
    """Whether ``Tensor.copy_`` converts without dropping imaginary parts."""
    return want.is_complex or not have.is_complex


@dataclass(frozen=True)
class Request:
    """How the offered tensors may differ from the wanted ones, and what errors say."""

    where: str  # the subject of errors
    strict: bool = True  # missing and unexpected names, and different values for one tied tensor, are errors
    key_map: KeyMap | None = None  # from offered names to the model's
    converts: Callable[[torch.dtype, torch.dtype], bool] = among_floats  # whether the first may become the second
    fix: str = "Pass key_map= to rename, or strict=False to ignore names that only one side has"
    error: type[ShardkitError] = CheckpointError


@dataclass(frozen=True)
class LoadPlan:
    """Which offered tensor is loaded into which of the model's, by names."""

    copies: dict[str, str]  # the offered name for each name that is loaded, the first one of a tied tensor
    ties: list[tuple[str, str, str]]  # the first name of a tied tensor, another of its names, the offered name for that
    keys: IncompatibleKeys


def plan_load(
    wanted: Mapping[str, object],
    offered: Mapping[str, object],
    request: Request,
    dtypes: Mapping[str, torch.dtype] | None = None,
) -> LoadPlan:
    """Pair wanted with offered names. Pure.

    Args:
        wanted: tensors by name; one object under several names is tied, and one of its names is enough. Other values
            accept any value.
        offered: a :class:`Spec` for each tensor, and other values.
        request: how both may differ.
        dtypes: dtypes that tensors are loaded as, instead of their own.

    Raises:
        ShardkitError: of the request's class, listing every name that is missing, unexpected, mapped to twice, or of
            a different shape or dtype.
    """
    check_key_map(request.key_map, request.error)
    renamed = [(rename(name, request.key_map), name) for name in offered]
    sources = {new: name for new, name in reversed(renamed) if new is not None}
    copies: dict[str, str] = {}
    ties = []
    firsts = first_names({name: value for name, value in wanted.items() if isinstance(value, Tensor)})
    firsts = {name: firsts.get(name, name) for name in wanted}
    for name, first in firsts.items():
        if name in sources and first in copies:
            ties.append((first, name, sources[name]))
        elif name in sources:
            copies[first] = sources[name]
    missing = [name for name, first in firsts.items() if first not in copies]
    unexpected = [name for new, name in renamed if new is not None and new not in wanted]
    counts = Counter(new for new, _ in renamed if new is not None)
    pairs = [(name, name, source) for name, source in copies.items()] + ties
    problems = {
        "mapped to twice": [f"{new} ({count} times)" for new, count in counts.items() if count > 1],
        "of a different shape or dtype": [
            f"{name} ({reason})"
            for first, name, source in pairs
            if isinstance(like := wanted[first], Tensor)
            for reason in _misfit(offered[source], like, (dtypes or {}).get(first, like.dtype), request)
        ],
    }
    if request.strict:
        problems |= {"missing": missing, "unexpected": unexpected}
    rule = "Names, shapes and dtypes must match; nothing was changed"
    raise_listed(request.where, problems, rule, request.fix, request.error)
    return LoadPlan(copies, ties, IncompatibleKeys(missing, unexpected))


def _misfit(have: object, want: Tensor, dtype: torch.dtype, request: Request) -> Iterator[str]:
    if not isinstance(have, Spec):
        yield f"{type(have).__name__}, not a tensor"
        return
    if have.shape != want.shape:
        yield f"shape {tuple(have.shape)}, the model has {tuple(want.shape)}"
    if not request.converts(have.dtype, dtype):
        yield f"{have.dtype}, the model has {dtype}"


def raise_listed(
    subject: str, problems: Mapping[str, Sequence[str]], rule: str, fix: str, error: type[ShardkitError] = ShardkitError
) -> None:
    """Raise one error with every name of every kind of problem, if there is any."""
    there = {kind: names for kind, names in problems.items() if names}
    if there:
        counts = ", ".join(f"{len(names)} {kind}" for kind, names in there.items())
        lines = [f"- {kind}: {name}" for kind, names in there.items() for name in names]
        raise error("\n".join([message(subject, counts, rule, fix), *lines]))


def check_ties(plan: LoadPlan, are_equal: Callable[[str, str, str], bool], request: Request) -> None:
    """Compare the values that are offered for one tensor; a difference is an error, if strict, or a warning. Local."""
    found = [(f"{name} differs from {first}", first, source) for first, name, source in plan.ties]
    differ = [text for text, first, source in found if not are_equal(first, plan.copies[first], source)]
    if not differ:
        return
    rule = "They are one tied tensor in the model, which has one value"
    fix = "Untie them (config.tie_word_embeddings=False), leave one out, or pass strict=False to take the first"
    text = message(request.where, "; ".join(differ), rule, fix)
    if request.strict:
        raise request.error(text)
    logger.warning(text)


def same_values(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one shape and dtype are equal, NaN being equal to itself. Local."""
    if torch.equal(one, other):
        return True
    return torch.equal(*(each.contiguous().flatten().view(torch.uint8) for each in (one, other)))


def rename(name: str, key_map: KeyMap | None) -> str | None:
    """Return an offered name as the model's, or None to leave it out. The first pattern found in the name applies."""
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


def check_key_map(key_map: KeyMap | None, error: type[ShardkitError]) -> None:
    """Raise unless it is a valid ``KeyMap``."""
    if key_map is None or callable(key_map):
        return
    try:
        pairs = list(key_map.items() if isinstance(key_map, Mapping) else key_map)
        if not all(isinstance(text, str) for pair in pairs for text in pair) or any(len(pair) != 2 for pair in pairs):
            raise TypeError("its items are not pairs of strings")
        for pattern, replacement in [] if isinstance(key_map, Mapping) else pairs:
            re.sub(pattern, replacement, "")
    except (TypeError, ValueError, re.error) as problem:
        rule = "It must be a function, a dict of names, or a list of (regular expression, replacement)"
        fix = r'Pass for example [("^transformer\.", "model.")]'
        raise error(message("key_map", f"cannot be used ({problem})", rule, fix)) from None
