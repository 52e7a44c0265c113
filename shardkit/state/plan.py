"""Plan a load into a model: pair names, and report everything that does not fit, before anything is read."""

from __future__ import annotations

import logging
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from shardkit.errors import CheckpointError, ShardkitError, message
from shardkit.state.model import first_names

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


def among_floats(have: torch.dtype, want: torch.dtype) -> bool:
    """Whether a conversion is between floating-point dtypes."""
    return have == want or (have.is_floating_point and want.is_floating_point)


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
    renamed = [(rename(name, request.key_map), name) for name in offered]
    sources = {new: name for new, name in reversed(renamed) if new is not None}
    firsts = first_names({name: value for name, value in wanted.items() if isinstance(value, Tensor)})
    copies: dict[str, str] = {}
    ties, misfits = [], []
    for name in (name for name in wanted if name in sources):
        first, source = firsts.get(name, name), sources[name]
        if copies.setdefault(first, source) != source:
            ties.append((first, name, source))
        like, have = wanted[name], offered[source]
        if not isinstance(like, Tensor):
            continue
        dtype = (dtypes or {}).get(first, like.dtype)
        if not isinstance(have, Spec):
            misfits.append(f"{name} ({type(have).__name__}, not a tensor)")
        elif have.shape != like.shape:
            misfits.append(f"{name} (shape {tuple(have.shape)}, the model has {tuple(like.shape)})")
        elif not request.converts(have.dtype, dtype):
            misfits.append(f"{name} ({have.dtype}, the model has {dtype})")
    missing = [name for name in wanted if firsts.get(name, name) not in copies]
    unexpected = [name for new, name in renamed if new is not None and new not in wanted]
    counts = Counter(new for new, _ in renamed if new is not None)
    problems = {
        "mapped to twice": [f"{new} ({count} times)" for new, count in counts.items() if count > 1],
        "of a different shape or dtype": misfits,
        "missing": missing if request.strict else [],
        "unexpected": unexpected if request.strict else [],
    }
    rule = "Names, shapes and dtypes must match; nothing was changed"
    raise_listed(request.where, problems, rule, request.fix, request.error)
    return LoadPlan(copies, ties, IncompatibleKeys(missing, unexpected))


def raise_listed(
    subject: str, problems: Mapping[str, Sequence[str]], rule: str, fix: str, error: type[ShardkitError] = ShardkitError
) -> None:
    """Raise one error with every name of every kind of problem, if there is any."""
    there = {kind: names for kind, names in problems.items() if names}
    if there:
        counts = ", ".join(f"{len(names)} {kind}" for kind, names in there.items())
        lines = [f"- {kind}: {name}" for kind, names in there.items() for name in names]
        raise error("\n".join([message(subject, f"does not match: {counts}", rule, fix), *lines]))


def check_ties(plan: LoadPlan, are_equal: Callable[[str, str, str], bool], request: Request) -> None:
    """Compare the values that are offered for one tensor; a difference is an error, if strict, or a warning. Local."""
    ties = [(f"{name} differs from {first}", first, source) for first, name, source in plan.ties]
    differ = [text for text, first, source in ties if not are_equal(first, plan.copies[first], source)]
    if differ:
        rule = "They are one tied tensor in the model, which has one value"
        fix = "Untie them (config.tie_word_embeddings=False), leave one out, or pass strict=False to take the first"
        text = message(f"{request.where}:", "; ".join(differ), rule, fix)
        if request.strict:
            raise request.error(text)
        logger.warning(text)


def same_values(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one shape and dtype are equal, NaN being equal to itself. Local."""
    return torch.equal(one, other) or torch.equal(
        *(each.contiguous().flatten().view(torch.uint8) for each in (one, other))
    )


def rename(name: str, key_map: KeyMap | None) -> str | None:
    """Return an offered name as the model's, or None to leave it out. The first pattern found in the name applies."""
    if callable(key_map):
        return key_map(name)
    if isinstance(key_map, Mapping):
        return key_map.get(name, name)
    for pattern, replacement in key_map or ():
        new, count = re.subn(pattern, replacement, name)
        if count:
            return new
    return name
