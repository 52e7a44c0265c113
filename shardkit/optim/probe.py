"""Whether an optimizer updates each element from that element alone: seen by stepping a whole against its halves.

Copies of the optimizer step small plain tensors: one copy the whole ones, two others a half each, as two ranks hold
them. An element-wise optimizer is one for which parameters, state and counts agree.
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

from shardkit._torch import local_tensor
from shardkit.errors import ShardkitError, message

STEPS = 4
# By number of dimensions: odd sizes, and long ones. 8-bit optimizers leave tensors below 4,096 elements alone, and
# those that their blocks of 256 do not divide; the halves of the long ones are such, the wholes are not.
SHAPES: dict[int, list[tuple[int, ...]]] = {
    1: [(5,), (8448,), (8320,)],
    2: [(5, 4), (132, 64), (130, 64)],
    3: [(5, 3, 4)],
    4: [(5, 2, 3, 3)],
}
# Of the largest element. Vectorized loops round the ends of a tensor otherwise, by 1e-7. What is not element-wise is
# off by 1e-3 and more, because the gradients of one half are larger than those of the other.
RELATIVE = 1e-4
LR = 0.01  # so that something happens, also where a warmup begins with 0

# Not element-wise, but its step on DTensors is right (torch 2.13; test_optim_classes.py). Adafactor, LBFGS, Lamb,
# CAME, Prodigy and bitsandbytes' optimizers fail there.
RUNS_ON_DTENSORS = ("Muon",)

Group = dict[str, Any]
# What the copies hold of a whole tensor: all of it, and the two parts that torch's chunk makes of it.
PARTS: list[Callable[[Tensor], Tensor]] = [lambda t: t, lambda t: t.chunk(2)[0], lambda t: t.chunk(2)[1]]


def check_elementwise(optimizer: Optimizer, vouched: bool) -> None:
    """Raise unless the optimizer is seen to be element-wise, or cannot be tried and is vouched for. Local, pure."""
    rule = "On a shard only an update that reads one element at a time is the update of the whole parameter"
    name = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
    try:
        found = difference(optimizer)
    except Exception as error:  # whatever a class raises that was not made for plain copies
        if vouched:
            return
        problem = f"is {name}, which cannot be tried on small plain tensors: {type(error).__name__}: {error}"
        fix = "If its update is element-wise, say so with elementwise=True"
        raise ShardkitError(message("optimizer", problem, rule, fix)) from error
    if found is not None:
        torchs = [base.__name__ for base in type(optimizer).__mro__ if base.__module__.startswith("torch.optim")]
        runs = any(base in RUNS_ON_DTENSORS for base in torchs)
        fix = "Step it as it is, on DTensors" if runs else "Use an element-wise one, such as AdamW, Lion or SGD"
        problem = f"is {name}, whose {found!r} for a tensor differs from that for its halves"
        raise ShardkitError(message("optimizer", problem, rule, fix))


def difference(optimizer: Optimizer) -> str | None:
    """What differs between the halves and the whole; None if nothing, so that the optimizer is element-wise. Local.

    The optimizer's class runs with its options as they are, then with weight decay and momentum where it has them.
    The optimizer, its parameters and random numbers are not changed.

    Raises:
        Exception: whatever the optimizer raises when it is copied, or steps plain tensors in float32.
        ArithmeticError: it draws random numbers, so that two runs cannot be compared.
    """
    groups = list({_kind(group): group for group in optimizer.param_groups}.values())
    with _apart({device.index for device in map(_device, groups) if device.type == "cuda"}):
        for options in ({}, {"weight_decay": 0.1, "momentum": 0.9}):
            whole, first, second = (_Copy(optimizer, groups, part, options).run() for part in PARTS)
            for key, value in whole.items():
                if not _agree(value, first.get(key), second.get(key)):
                    return str(key[-1])
            if not whole.keys() == first.keys() == second.keys():
                return "state"
    return None


@contextmanager
def _apart(cuda: set[int | None]) -> Iterator[None]:
    """Steps that are not compiled, for which torch's and Python's random numbers are as before afterwards."""
    before = random.getstate()
    with torch.random.fork_rng(devices=cuda), torch.compiler.set_stance("force_eager"):
        start = torch.get_rng_state()
        yield
        drawn = not torch.equal(start, torch.get_rng_state()) or random.getstate() != before
    random.setstate(before)
    if drawn:
        raise ArithmeticError("its step draws random numbers")


def _kind(group: Group) -> str:
    """Equal for groups that a probe need not tell apart."""
    options = {key: value for key, value in group.items() if key not in ("params", "param_names", "lr", "initial_lr")}
    return repr((options, _ndims(group), _device(group)))


def _ndims(group: Group) -> list[int]:
    return sorted({min(max(param.ndim, 1), max(SHAPES)) for param in group["params"]}) or [1]


def _device(group: Group) -> torch.device:
    for param in group["params"][:1]:
        device = (local_tensor(param) if isinstance(param, DTensor) else param).device
        return torch.device("cpu") if device.type == "meta" else device
    return torch.device("cpu")


class _Copy:
    """A copy of an optimizer that holds parts of small tensors."""

    def __init__(
        self, optimizer: Optimizer, groups: list[Group], part: Callable[[Tensor], Tensor], options: dict[str, float]
    ) -> None:
        self.part = part
        self.shapes = [[shape for ndim in _ndims(group) for shape in SHAPES[ndim]] for group in groups]
        self.starts = self._values(groups, 0)
        params: list[Any] = [[nn.Parameter(value.clone()) for value in values] for values in self.starts]
        memo: dict[int, Any] = {id(optimizer.param_groups): [], id(optimizer.state): defaultdict(dict)}
        memo |= {id(old): params[0][0] for group in optimizer.param_groups for old in group["params"]}
        self.optimizer: Any = type(optimizer).__new__(type(optimizer))
        for name, value in vars(optimizer).items():
            if name != "step":  # an LR scheduler's wrapper
                vars(self.optimizer)[name] = OrderedDict() if name.endswith("_hooks") else copy.deepcopy(value, memo)
        self.optimizer.param_groups = [
            {**copy.deepcopy({**group, "params": []}, memo), **_options(group, options), "params": each}
            for group, each in zip(groups, params, strict=True)
        ]
        train = getattr(self.optimizer, "train", None)
        if callable(train):
            train()  # schedule-free ones refuse to step otherwise

    def run(self) -> dict[tuple[Any, ...], Any]:
        """Step, and return what the parameters moved by, their state, and the numbers of the groups."""
        closure = [lambda: torch.zeros(())] if "closure" in inspect.signature(self.optimizer.step).parameters else []
        groups = self.optimizer.param_groups
        for step in range(1, STEPS + 1):
            for group, grads in zip(groups, self._values(groups, step), strict=True):
                for param, grad in zip(group["params"], grads, strict=True):
                    param.grad = grad.clone()
            self.optimizer.step(*closure)
        return dict(self._results())

    def _values(self, groups: list[Group], seed: int) -> list[list[Tensor]]:
        values = []
        for group, shapes in zip(groups, self.shapes, strict=True):
            generator = torch.Generator().manual_seed(seed)
            wholes = [torch.randn(shape, generator=generator, device="cpu") for shape in shapes]
            for whole in wholes:  # small at the beginning, large at the end
                whole.mul_(torch.linspace(0.2, 4, len(whole), device="cpu").reshape(-1, *[1] * (whole.ndim - 1)))
            values.append([self.part(whole).contiguous().to(_device(group)) for whole in wholes])
        return values

    def _results(self) -> Iterator[tuple[tuple[Any, ...], Any]]:
        for i, (group, starts) in enumerate(zip(self.optimizer.param_groups, self.starts, strict=True)):
            for j, (param, start) in enumerate(zip(group["params"], starts, strict=True)):
                yield (i, j, "update"), (param.detach() - start, param.shape)
        for i, group in enumerate(self.optimizer.param_groups):
            yield from (((i, key), value) for key, value in group.items() if isinstance(value, (int, float, Tensor)))
            for j, param in enumerate(group["params"]):
                for key, value in self.optimizer.state.get(param, {}).items():
                    yield (i, j, str(key)), (value, param.shape)


def _options(group: Group, options: dict[str, float]) -> Group:
    """Those that the group has and leaves at zero, and a learning rate."""
    lr = group.get("lr")
    rate = {"lr": torch.full_like(lr, LR) if isinstance(lr, Tensor) else LR} if lr is not None else {}
    return {key: value for key, value in options.items() if key in group and not group[key]} | rate


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
