"""Detect whether an optimizer is element-wise by stepping small tensors whole and in halves.

Copies of the optimizer step plain tensors: one copy the whole tensors, two others one half each, as two ranks would
hold them. The optimizer is element-wise if parameters, state and the numbers in groups agree.
"""

from __future__ import annotations

import copy
import inspect
import math
import random
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shardkit._torch import local_tensor, make_adagrad_state
from shardkit.errors import ShardkitError, message

STEPS = 4
# By number of dimensions: odd sizes, and long ones. 8-bit optimizers leave tensors below 4,096 elements alone, and
# those that their blocks of 256 do not divide; the halves of the long ones are such, the whole ones are not.
SHAPES: dict[int, list[tuple[int, ...]]] = {
    1: [(5,), (8448,), (8320,)],
    2: [(5, 4), (132, 64), (130, 64)],
    3: [(5, 3, 4)],
    4: [(5, 2, 3, 3)],
}
# Relative to the largest element. Vectorized loops round the ends of a tensor differently, by 1e-7. An update that is
# not element-wise is off by 1e-3 and more, because the gradients of one half are larger than those of the other.
RELATIVE = 1e-4
LR = 0.01  # so that parameters move even where a warmup begins with 0

Group = dict[str, Any]
_found: dict[tuple[type, frozenset[str]], str | None] = {}  # by class and kinds of groups
# What each copy holds of a tensor: all of it, or one of the two parts that torch.chunk makes.
PARTS: list[Callable[[Tensor], Tensor]] = [lambda t: t, lambda t: t.chunk(2)[0], lambda t: t.chunk(2)[1]]


def check_elementwise(optimizer: Optimizer, vouched: bool) -> None:
    """Raise unless the probe finds the optimizer element-wise, or cannot run and it is vouched for. Local, pure."""
    rule = "The step of a shard equals that of the whole parameter only if each element is updated by itself"
    name = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
    try:
        found = _difference(optimizer)
    except Exception as error:  # whatever a class raises that cannot step plain copies
        if vouched:
            return
        problem = f"is {name}, which cannot be tried on small plain tensors: {type(error).__name__}: {error}"
        fix = "If its update is element-wise, pass elementwise=True"
        raise ShardkitError(message("optimizer", problem, rule, fix)) from error
    if found is not None:
        whole = _is_separable(optimizer)
        fix = (
            "Call step_on_whole_matrices(optimizer)" if whole else "Use an element-wise one, such as AdamW, Lion or SGD"
        )
        problem = f"is {name}, whose {found!r} for a tensor differs from that for its halves"
        raise ShardkitError(message("optimizer", problem, rule, fix))


def check_separable(optimizer: Optimizer, slices: bool) -> None:
    """Raise unless the optimizer steps each parameter, or with ``slices`` each matrix, by itself. Local, pure."""
    name = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
    rule = "An owner steps its matrices without those of others"
    fix = "Use an optimizer that steps each parameter by itself, such as Muon, Adafactor or AdamW"
    try:
        found = _coupled(optimizer, slices)
    except Exception as error:  # whatever a class raises that cannot step plain copies
        problem = f"is {name}, which cannot be tried on small plain tensors: {type(error).__name__}: {error}"
        raise ShardkitError(message("optimizer", problem, rule, fix)) from error
    if found is not None:
        problem = f"is {name}, whose {found!r} for a tensor depends on its other tensors"
        raise ShardkitError(message("optimizer", problem, rule, fix))


def _is_separable(optimizer: Optimizer) -> bool:
    try:
        return _coupled(optimizer, slices=False) is None
    except Exception:  # as in check_separable
        return False


def _coupled(optimizer: Optimizer, slices: bool) -> str | None:
    """Return what differs where parameters are stepped apart, or None. Local."""

    def stood_in(param: Any) -> Any:
        return torch.empty(param.shape[1:], device="meta") if slices and param.ndim == 3 else param

    all_groups = [{**group, "params": [*map(stood_in, group["params"])]} for group in optimizer.param_groups]
    groups = list({_kind(group): group for group in all_groups}.values())
    with _undisturbed({device.index for device in map(_device, groups) if device.type == "cuda"}):
        joint = _step_copy(optimizer, groups, PARTS[0], {}, slice(None))
        for kept in (slice(0, 1), slice(1, None)):
            for (i, *rest), value in _step_copy(optimizer, groups, PARTS[0], {}, kept).items():
                place = (rest[0] + kept.start, *rest[1:]) if isinstance(rest[0], int) else tuple(rest)
                other = joint.get((i, *place))
                pair = (value[0], other[0]) if isinstance(value, tuple) and isinstance(other, tuple) else (value, other)
                if not _is_close(*pair):
                    return str(rest[-1])
    return None


def _difference(optimizer: Optimizer) -> str | None:
    """Return ``difference(optimizer)``; optimizers of torch's own classes with equal options share one probe."""
    methods = any(callable(value) for name, value in vars(optimizer).items() if name != "step")
    if methods or not type(optimizer).__module__.startswith("torch.optim."):
        return difference(optimizer)
    key = type(optimizer), frozenset(map(_kind, optimizer.param_groups))
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
    groups = list({_kind(group): group for group in optimizer.param_groups}.values())
    with _undisturbed({device.index for device in map(_device, groups) if device.type == "cuda"}):
        for options in ({}, {"weight_decay": 0.1, "momentum": 0.9}):
            whole, first, second = (_step_copy(optimizer, groups, part, options) for part in PARTS)
            for key, value in whole.items():
                if not _agree(value, first.get(key), second.get(key)):
                    return str(key[-1])
            if not whole.keys() == first.keys() == second.keys():
                return "state"
    return None


@contextmanager
def _undisturbed(cuda: set[int | None]) -> Iterator[None]:
    """Run steps uncompiled, and restore torch's and Python's random number generators; raise if steps used them."""
    before = random.getstate()
    try:
        with torch.random.fork_rng(devices=cuda), torch.compiler.set_stance("force_eager"):
            start = torch.get_rng_state()
            yield
            drawn = not torch.equal(start, torch.get_rng_state()) or random.getstate() != before
    finally:
        random.setstate(before)
    if drawn:
        raise ArithmeticError("its step draws random numbers")


def _kind(group: Group) -> str:
    """Return a key that is equal for groups of which the probe needs only one."""
    options = {key: value for key, value in group.items() if key not in ("params", "param_names", "lr", "initial_lr")}
    return repr((options, _ndims(group), _device(group)))


def _ndims(group: Group) -> list[int]:
    return sorted({min(max(param.ndim, 1), max(SHAPES)) for param in group["params"]}) or [1]


def _device(group: Group) -> torch.device:
    for param in group["params"][:1]:
        device = (local_tensor(param) if isinstance(param, DTensor) else param).device
        return torch.device("cpu") if device.type == "meta" else device
    return torch.device("cpu")


def _step_copy(
    optimizer: Optimizer,
    groups: list[Group],
    part: Callable[[Tensor], Tensor],
    options: dict[str, float],
    kept: slice | None = None,
) -> dict[tuple[Any, ...], Any]:
    """Step a copy that holds parts of small tensors; return parameter updates, state and the numbers of its groups."""
    starts = [_values(group, part, 0, kept) for group in groups]
    copied = _copy(optimizer, groups, starts, options)
    closure = [lambda: torch.zeros(())] if "closure" in inspect.signature(copied.step).parameters else []
    for step in range(1, STEPS + 1):
        for group, each in zip(copied.param_groups, groups, strict=True):
            for param, grad in zip(group["params"], _values(each, part, step, kept), strict=True):
                param.grad = grad
        copied.step(*closure)
    found: dict[tuple[Any, ...], Any] = {}
    for i, (group, befores) in enumerate(zip(copied.param_groups, starts, strict=True)):
        for j, (param, before) in enumerate(zip(group["params"], befores, strict=True)):
            found[i, j, "update"] = param.detach() - before, param.shape
            found |= {(i, j, str(key)): (value, param.shape) for key, value in copied.state.get(param, {}).items()}
        found |= {(i, key): value for key, value in group.items() if isinstance(value, (int, float, Tensor))}
    return found


def _values(group: Group, part: Callable[[Tensor], Tensor], seed: int, kept: slice | None = None) -> list[Tensor]:
    """Return parts of random tensors of the group's shapes, small at the beginning and large at the end.

    With ``kept``, that slice of a list with two of the first shape of each number of dims.
    """
    generator = torch.Generator().manual_seed(seed)
    values = []
    shapes = [shape for ndim in _ndims(group) for shape in (SHAPES[ndim] if kept is None else SHAPES[ndim][:1] * 2)]
    for shape in shapes:
        whole = torch.randn(shape, generator=generator, device="cpu")
        whole.mul_(torch.linspace(0.2, 4, len(whole), device="cpu").reshape(-1, *[1] * (whole.ndim - 1)))
        values.append(part(whole).to(_device(group), copy=True).contiguous())
    return values if kept is None else values[kept]


def _copy(optimizer: Optimizer, groups: list[Group], starts: list[list[Tensor]], options: dict[str, float]) -> Any:
    """Copy an optimizer, without state and hooks, for parameters of these values, with a learning rate.

    ``options`` replace those that a group has and leaves at zero.
    """
    params = [[nn.Parameter(start.clone()) for start in each] for each in starts]
    memo: dict[int, Any] = {id(optimizer.param_groups): [], id(optimizer.state): defaultdict(dict)}
    memo |= {id(old): params[0][0] for group in optimizer.param_groups for old in group["params"]}
    copied: Any = type(optimizer).__new__(type(optimizer))
    for name, value in vars(optimizer).items():
        if name != "step":  # an LR scheduler's wrapper
            vars(copied)[name] = OrderedDict() if name.endswith("_hooks") else copy.deepcopy(value, memo)
    copied.param_groups = []
    for group, own in zip(groups, params, strict=True):
        new = copy.deepcopy({**group, "params": []}, memo)
        new |= {key: value for key, value in options.items() if key in group and not group[key]}
        if (lr := group.get("lr")) is not None:
            new["lr"] = torch.full_like(lr, LR) if isinstance(lr, Tensor) else LR
        copied.param_groups.append(new | {"params": own})
    make_adagrad_state(copied)
    if callable(getattr(copied, "train", None)):
        copied.train()  # schedule-free ones refuse to step otherwise
    return copied


def _agree(whole: Any, first: Any, second: Any) -> bool:
    """Whether the halves' values are the halves of the whole's, or are numbers that all of them share."""
    if not isinstance(whole, tuple):
        return _is_close(whole, first) and _is_close(whole, second)
    if not isinstance(first, tuple) or not isinstance(second, tuple):
        return False
    (whole, shape), *halves = whole, first, second
    if isinstance(whole, Tensor) and whole.shape == shape:
        fit = all(isinstance(half, Tensor) and half.shape == each for half, each in halves)
        return fit and _is_close(whole, torch.cat([half for half, _ in halves]))
    return all(_is_close(whole, half) for half, _ in halves)


def _is_close(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        if a.shape != b.shape or not a.is_floating_point():
            return a.shape == b.shape and torch.equal(a, b)
        return bool(((a - b).abs() <= RELATIVE * a.abs().max()).all()) if a.numel() else True
    if isinstance(a, float) and isinstance(b, float):
        return math.isclose(a, b, rel_tol=RELATIVE)
    return type(a) is type(b) and (not isinstance(a, (int, str)) or a == b)
