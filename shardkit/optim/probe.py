"""Find out how an optimizer's updates depend on each other: copies of it step small tensors, and are compared.

An element-wise optimizer gives the same for tensors and for their halves, as two ranks would hold them. A separable one
gives the same for tensors together and apart. What is compared: parameters, state, and the numbers in groups.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from shardkit.errors import ShardkitError, listing, message
from shardkit.optim.trial import (
    Found,
    Give,
    Group,
    Shape,
    device_of,
    groups_to_try,
    kind,
    ndims,
    random_values,
    step_copy,
    undisturbed,
)

Shapes = dict[int, list[Shape]]  # by number of dims
SMALL: Shapes = {1: [(5,)], 2: [(5, 4)], 3: [(5, 3, 4)], 4: [(5, 2, 3, 3)]}
# 8-bit optimizers leave tensors below 4,096 elements alone, and those that their blocks of 256 do not divide; the
# halves of these are such, the whole ones are not. They come after the small ones, since Shampoo would take minutes.
LONG: Shapes = {1: [(8448,), (8320,)], 2: [(132, 64), (130, 64)], 3: [], 4: []}
QUANTIZED: Shapes = SMALL | {2: [(64, 64)]}  # the smallest matrix whose state torchao's optimizers quantize
OPTIONS = {"weight_decay": 0.1, "momentum": 0.9}  # in place of zeros
# Relative to the largest element. Vectorized loops round the ends of a tensor differently, by 1e-7. An update that is
# not element-wise is off by 1e-3 and more, because the gradients of one half are larger than those of the other.
RELATIVE = 1e-4

_found: dict[tuple[type, frozenset[str]], str | None] = {}  # by class and kinds of groups
# What each copy holds of a tensor: all of it, or one of the two parts that torch.chunk makes.
PARTS: list[Callable[[Tensor], Tensor]] = [lambda t: t, lambda t: t.chunk(2)[0], lambda t: t.chunk(2)[1]]


def check_elementwise(optimizer: Optimizer, vouched: bool) -> None:
    """Raise unless the probe finds the optimizer element-wise, or cannot run and it is vouched for. Local, pure."""
    rule = "The step of a shard equals that of the whole parameter only if each element is updated by itself"
    try:
        found = _difference(optimizer)
    except Exception as error:  # whatever a class raises that cannot step plain copies
        if vouched:
            return
        raise _untried(optimizer, error, rule, "If its update is element-wise, pass elementwise=True") from error
    if found is not None:
        fix = "Use an element-wise one, such as AdamW, Lion or SGD. step_on_whole_matrices may take it"
        fix = "Call step_on_whole_matrices(optimizer)" if _is_separable(optimizer) else fix
        problem = f"is {_name(optimizer)}, whose {found!r} for a tensor differs from that for its halves"
        raise ShardkitError(message("optimizer", problem, rule, fix))


def _is_separable(optimizer: Optimizer) -> bool:
    try:
        return is_separable(optimizer, slices=False)
    except ShardkitError:
        return False


def is_separable(optimizer: Optimizer, slices: bool) -> bool:
    """Whether the optimizer steps each parameter, or with ``slices`` each matrix, by itself. Local, pure.

    Raises:
        ShardkitError: it cannot be tried.
    """
    try:
        return coupled(optimizer, slices) is None
    except Exception as error:  # whatever a class raises that cannot step plain copies
        rule = "An owner steps its matrices without those of others"
        fix = "Use an optimizer that steps each parameter by itself, such as Muon, Adafactor or AdamW"
        raise _untried(optimizer, error, rule, fix) from error


def _name(optimizer: Optimizer) -> str:
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"


def _untried(optimizer: Optimizer, error: Exception, rule: str, fix: str) -> ShardkitError:
    what = f"{type(error).__name__}: {error}"
    problem = f"is {_name(optimizer)}, which cannot be tried on small plain tensors: {what}"
    return ShardkitError(message("optimizer", problem, rule, fix))


def coupled(optimizer: Optimizer, slices: bool) -> str | None:
    """Return what differs where parameters, or with ``slices`` matrices, are stepped apart, or None. Local, pure."""

    def stand_in(param: Any) -> Any:
        return torch.empty(param.shape[1:], device="meta") if slices and param.ndim == 3 else param

    def kept(part: slice) -> Give:
        def give(group: Group, seed: int) -> list[Tensor]:
            shapes = [shape for ndim in ndims(group) for shape in SMALL[ndim] * 2]
            return random_values(shapes, seed, device_of(group))[part]

        return give

    groups = groups_to_try(optimizer, stand_in)
    with undisturbed(groups):
        joint = step_copy(optimizer, groups, kept(slice(None)), {})
        _check_state(step_copy(optimizer, groups, parts_of(QUANTIZED, PARTS[0]), {}))
        for part in (slice(0, 1), slice(1, None)):
            for key, value in step_copy(optimizer, groups, kept(part), {}).items():
                is_tensor = len(key) == 4
                other = joint.get((key[0], key[1] + part.start, *key[2:]) if is_tensor else key)
                pair = (value[0], other[0]) if is_tensor and other is not None else (value, other)
                if not is_close(*pair):
                    return str(key[-1])
    return None


def _check_state(found: dict[Any, Any]) -> None:
    subclasses = {each[0].__name__ for each in found.values() if isinstance(each, tuple) and isinstance(each[0], type)}
    if subclasses:
        raise TypeError(f"its state is of {listing(sorted(subclasses))}, which cannot be sent and stored in parts")


def _difference(optimizer: Optimizer) -> str | None:
    """Return ``difference(optimizer)``; optimizers of torch's own classes with equal options share one probe."""
    methods = any(callable(value) for name, value in vars(optimizer).items() if name != "step")
    if methods or not type(optimizer).__module__.startswith("torch.optim."):
        return difference(optimizer)
    key = type(optimizer), frozenset(map(kind, optimizer.param_groups))
    if key not in _found:
        _found[key] = difference(optimizer)
    return _found[key]


def difference(optimizer: Optimizer) -> str | None:
    """Return what differs between the halves and the whole, or None for an element-wise optimizer. Local.

    The optimizer's class runs with its options as they are, then with weight decay and momentum where it has them.
    The optimizer, its parameters and the random number generators are not changed.

    Raises:
        Exception: whatever the optimizer raises when it is copied, or steps plain tensors in float32.
        ArithmeticError: it draws random numbers, so that two runs cannot be compared.
    """
    groups = groups_to_try(optimizer)
    with undisturbed(groups):
        for shapes, options, later in ((SMALL, {}, True), (SMALL, OPTIONS, False), (LONG, {}, False)):
            each = [step_copy(optimizer, groups, parts_of(shapes, part), options, later=later) for part in PARTS]
            if (found := unequal(each[0], each[1], each[2])) is not None:
                return found
    return None


def parts_of(shapes: Shapes, part: Callable[[Tensor], Tensor]) -> Give:
    """Return what gives a copy the same part of every tensor."""

    def give(group: Group, seed: int) -> list[Tensor]:
        values = random_values([shape for ndim in ndims(group) for shape in shapes[ndim]], seed, device_of(group))
        return [part(value).clone(memory_format=torch.contiguous_format) for value in values]

    return give


def unequal(whole: Found, first: Found, second: Found, flat: bool = False) -> str | None:
    """Return what of the whole is not what its two halves have, or None. ``flat`` state is a vector of a tensor."""
    for key, value in whole.items():
        if not _agree(value, first.get(key), second.get(key), flat):
            return str(key[-1])
    return None if whole.keys() == first.keys() == second.keys() else "state"


def _agree(whole: Any, first: Any, second: Any, flat: bool) -> bool:
    """Whether the halves' values are the halves of the whole's, or are numbers that all of them share."""
    if not isinstance(whole, tuple):
        return is_close(whole, first) and is_close(whole, second)
    if not isinstance(first, tuple) or not isinstance(second, tuple):
        return False
    (whole, shape), *halves = whole, first, second
    if isinstance(whole, Tensor) and whole.shape == shape:
        fit = all(isinstance(half, Tensor) and half.shape == each for half, each in halves)
        return fit and is_close(whole, torch.cat([half for half, _ in halves]))
    if flat and isinstance(whole, Tensor) and whole.ndim == 1 and len(whole) == shape.numel():
        fit = all(isinstance(half, Tensor) and half.ndim == 1 for half, _ in halves)
        return fit and is_close(whole, torch.cat([half for half, _ in halves]))
    return all(is_close(whole, half) for half, _ in halves)


def is_close(a: Any, b: Any) -> bool:
    """Whether two values are equal but for rounding; what is not a tensor, number or string need only be of a type."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        if a.shape != b.shape or not a.is_floating_point():
            return a.shape == b.shape and torch.equal(a, b)
        largest = a.nan_to_num(0, 0, 0).abs().max().item() if a.numel() else 0.0
        return torch.allclose(a, b, rtol=0, atol=RELATIVE * largest, equal_nan=True)
    if isinstance(a, float) and isinstance(b, float):
        return math.isclose(a, b, rel_tol=RELATIVE) or (math.isnan(a) and math.isnan(b))
    return type(a) is type(b) and (not isinstance(a, (int, str)) or a == b)
