"""Try an optimizer: a copy of it steps small plain tensors."""

from __future__ import annotations

import copy
import inspect
import random
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shardkit._torch import is_wrapper, local_tensor, make_adagrad_state, tree_map

STEPS = 4
# Some optimizers change their update after a number of steps, or each so many, such as Shampoo. So after the first
# steps, the numbers that count them are set to just below this one, which most intervals divide.
LATER = 1_000_000
LR = 0.01  # so that parameters move even where a warmup begins with 0

Group = dict[str, Any]
Shape = tuple[int, ...]
# Makes a group's tensors: their values at the start for seed 0, and the gradients of a step for its number.
Give = Callable[[Group, int], list[Tensor]]
Found = dict[tuple[Any, ...], Any]


def groups_to_try(optimizer: Optimizer, stand_in: Callable[[Any], Any] = lambda param: param) -> list[Group]:
    """Return one group of each kind, with what ``stand_in`` makes of its parameters."""
    groups = [{**group, "params": [*map(stand_in, group["params"])]} for group in optimizer.param_groups]
    return list({kind(group): group for group in groups}.values())


def kind(group: Group) -> str:
    """Return a key that is equal for groups of which only one need be tried."""
    options = {key: value for key, value in group.items() if key not in ("params", "param_names", "lr", "initial_lr")}
    return repr((options, ndims(group), device_of(group)))


def ndims(group: Group) -> list[int]:
    """Return the numbers of dims of the group's parameters, from 1 to 4."""
    return sorted({min(max(param.ndim, 1), 4) for param in group["params"]}) or [1]


def device_of(group: Group) -> torch.device:
    """Return where the group's parameters are; the CPU for those on meta."""
    for param in group["params"][:1]:
        device = (local_tensor(param) if isinstance(param, DTensor) else param).device
        return torch.device("cpu") if device.type == "meta" else device
    return torch.device("cpu")


def random_values(shapes: list[Shape], seed: int, device: torch.device) -> list[Tensor]:
    """Return random tensors, with small values at the beginning and large ones at the end."""
    generator = torch.Generator().manual_seed(seed)
    values = []
    for shape in shapes:
        whole = torch.randn(shape, generator=generator, device="cpu")
        whole.mul_(torch.linspace(0.2, 4, len(whole), device="cpu").reshape(-1, *[1] * (whole.ndim - 1)))
        values.append(whole.to(device))
    return values


@contextmanager
def undisturbed(groups: list[Group]) -> Iterator[None]:
    """Run steps uncompiled, and restore torch's and Python's random number generators; raise if steps used them."""
    before = random.getstate()
    cuda = {device.index for device in map(device_of, groups) if device.type == "cuda"}
    try:
        with torch.random.fork_rng(devices=cuda), torch.compiler.set_stance("force_eager"):
            start = torch.get_rng_state()
            yield
            drawn = not torch.equal(start, torch.get_rng_state()) or random.getstate() != before
    finally:
        random.setstate(before)
    if drawn:
        raise ArithmeticError("its step draws random numbers")


def step_copy(
    optimizer: Optimizer,
    groups: list[Group],
    give: Give,
    options: dict[str, float],
    within: Callable[[Any], AbstractContextManager[None]] = nullcontext,
    *,
    later: bool = True,
) -> Found:
    """Step a copy that holds small tensors; return parameter updates, state, and the numbers of groups and optimizer.

    Each step runs in ``within(copy)``. With ``later``, steps about :data:`LATER` follow the first ones. An error of
    those is not raised, since schedules may end before.
    """
    starts = [give(group, 0) for group in groups]
    copied = _copy(optimizer, groups, starts, options)
    before = _numbers(copied)
    _step(copied, groups, give, range(1, STEPS + 1), within)
    found = _found(copied, starts, "first")
    if not later:
        return found
    _set_counters(copied, before)
    try:
        _step(copied, groups, give, range(STEPS + 1, 2 * STEPS + 1), within)
    except Exception:
        return found
    return found | _found(copied, starts, "later")


def _step(copied: Any, groups: list[Group], give: Give, steps: range, within: Callable[[Any], Any]) -> None:
    closure = [lambda: torch.zeros(())] if "closure" in inspect.signature(copied.step).parameters else []
    for step in steps:
        for group, each in zip(copied.param_groups, groups, strict=True):
            for param, grad in zip(group["params"], give(each, step), strict=True):
                param.grad = grad
        with within(copied):
            copied.step(*closure)


def _found(copied: Any, starts: list[list[Tensor]], when: str) -> Found:
    """Return copies of what the steps so far have made; a tensor of a parameter comes with the parameter's shape."""
    found: Found = {}
    for i, (group, befores) in enumerate(zip(copied.param_groups, starts, strict=True)):
        for j, (param, before) in enumerate(zip(group["params"], befores, strict=True)):
            found[i, j, when, "update"] = param.detach() - before, param.shape
            state = copied.state.get(param, {})
            found |= {(i, j, when, str(key)): (_cloned(value), param.shape) for key, value in state.items()}
        numbers = {key: _cloned(value) for key, value in group.items() if isinstance(value, (int, float, Tensor))}
        found |= {(i, when, key): value for key, value in numbers.items()}
    others = {key: value for key, value in copied.state.items() if isinstance(key, str)} | vars(copied)
    numbers = {key: _cloned(value) for key, value in others.items() if isinstance(value, (int, float, Tensor))}
    return found | {(when, key): value for key, value in numbers.items()}


def _cloned(value: Any) -> Any:
    """Return a value with copies of its tensors, and classes for those of subclasses: torchao's have no copies."""

    def cloned(leaf: Any) -> Any:
        return leaf if not isinstance(leaf, Tensor) else type(leaf) if is_wrapper(leaf) else leaf.clone()

    return tree_map(cloned, value)


def _places(copied: Any) -> list[tuple[Any, dict[str, Any]]]:
    """Return the dicts that hold an optimizer's numbers, each with a key."""
    states = [(id(param), state) for param, state in copied.state.items() if isinstance(state, dict)]
    return [(None, vars(copied)), ("state", copied.state), *enumerate(copied.param_groups), *states]


def _numbers(copied: Any) -> dict[tuple[Any, str], float]:
    return {
        (place, key): float(value)
        for place, held in _places(copied)
        for key, value in held.items()
        if isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.numel() == 1)
    }


def _set_counters(copied: Any, before: dict[tuple[Any, str], float]) -> None:
    """Set every number that has counted the steps to just below ``LATER``. In place."""
    counters = {at for at, value in _numbers(copied).items() if value - before.get(at, 0) == STEPS}
    for place, held in _places(copied):
        for key in [key for key in held if (place, key) in counters]:
            if isinstance(held[key], Tensor):
                held[key] = torch.full_like(held[key], LATER - STEPS // 2)
            else:
                held[key] = type(held[key])(LATER - STEPS // 2)


def _copy(optimizer: Optimizer, groups: list[Group], starts: list[list[Tensor]], options: dict[str, float]) -> Any:
    """Copy an optimizer, without parameters' state and hooks, for parameters of these values, with a learning rate.

    ``options`` replace those that a group has and leaves at zero.
    """
    params = [[nn.Parameter(start.clone()) for start in each] for each in starts]
    named = {key: copy.deepcopy(value) for key, value in optimizer.state.items() if not isinstance(key, Tensor)}
    memo: dict[int, Any] = {id(optimizer.param_groups): [], id(optimizer.state): defaultdict(dict, named)}
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
