"""Replace the step of an optimizer: its class becomes a subclass of the same name."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shardkit._torch import count_for_schedulers, counts_for_schedulers, note_step
from shardkit.errors import ShardkitError, message
from shardkit.ranks import agree

AnyOptimizer = TypeVar("AnyOptimizer", bound=Optimizer)


def check_replaceable(optimizer: object, caller: str) -> None:
    """Raise a ShardkitError unless it is an optimizer whose ``step`` is its class's, or an LR scheduler's wrapper."""
    if not isinstance(optimizer, Optimizer):
        rule, fix = f"{caller} changes the class of a torch.optim.Optimizer", "Pass the optimizer that it wraps"
        raise ShardkitError(message("optimizer", f"is a {type(optimizer).__name__}", rule, fix))
    if "step" in vars(optimizer) and not counts_for_schedulers(optimizer.step):
        rule = f"{caller} replaces the step of the class, which this one hides"
        fix = f"Call {caller} before optimizer.step is replaced"
        raise ShardkitError(message("optimizer.step", f"is {vars(optimizer)['step']!r}", rule, fix))


def replace_class(optimizer: AnyOptimizer, make: Callable[[Any], Any], **attributes: Any) -> AnyOptimizer:
    """Give the optimizer the class that ``make`` makes of its own, and attributes, in place; return it."""
    vars(optimizer).pop("step", None)  # an LR scheduler's wrapper, which would go past ours
    optimizer.__class__ = make(type(optimizer))
    vars(optimizer).update(attributes)
    return optimizer


def step_of(base: Any) -> Callable[..., Any]:
    """Return the step of a class without the hooks that torch puts around it."""
    step: Any = base.step
    return getattr(step, "__wrapped__", step) if getattr(step, "hooked", False) else step  # type: ignore[no-any-return]


def collective_step(inner: Callable[..., Any], run: Callable[[Any], None]) -> Callable[..., Any]:
    """Return a step in place of ``inner`` that all ranks take together: a closure, then ``run(optimizer)``."""

    @functools.wraps(inner)
    def step(self: Any, closure: Callable[[], Any] | None = None) -> Any:
        note_step(self)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        _agree_on_gradients(self)
        with torch.no_grad():
            run(self)
        return loss

    return step


def params_of(optimizer: Any) -> list[Tensor]:
    """Return the parameters of all groups, in order."""
    return [param for group in optimizer.param_groups for param in group["params"]]


def groups_of(optimizer: Any) -> list[dist.ProcessGroup]:
    """Return the process groups of the meshes of an optimizer's parameters."""
    meshes = dict.fromkeys(param.device_mesh for param in params_of(optimizer) if isinstance(param, DTensor))
    return list(dict.fromkeys(group for mesh in meshes for group in mesh.get_all_groups() if group.size() > 1))


def _agree_on_gradients(optimizer: Any) -> None:
    """Raise on every rank unless all have the same parameters' gradients. Collective."""
    params, groups = params_of(optimizer), groups_of(optimizer)
    numbers = [number for number, param in enumerate(params) if param.grad is not None]
    fix = "Run the same backward on every rank before step()"
    agree({"which parameters have gradients, by number": numbers}, groups, "optimizer.step", fix=fix)


def stepping_class(
    base: Any, make: Callable[[Any], Any], step: Callable[..., Any], body: dict[str, Any], *, kept: str
) -> Any:
    """Return a subclass with this step. Its objects are pickled and copied as such, with the attribute ``kept``."""

    def reduce(self: Any, protocol: int) -> tuple[Any, ...]:
        return _restored, (make, base), self.__getstate__() | {kept: getattr(self, kept)}

    return subclass(base, {"step": hooked(step), "__reduce_ex__": reduce, **body})


def _restored(make: Callable[[Any], Any], base: Any) -> Any:
    cls = make(base)
    return cls.__new__(cls)


def subclass(base: Any, body: dict[str, Any]) -> Any:
    """Return a subclass with the name, module and docstring of its base."""
    return type(base.__name__, (base,), {"__module__": base.__module__, "__doc__": base.__doc__, **body})


def hooked(step: Callable[..., Any]) -> Callable[..., Any]:
    """Return the step for a class: it runs the user's hooks, and LR schedulers do not wrap it."""
    outer: Any = Optimizer.profile_hook_step(step)
    outer.hooked = True  # as torch marks it, so that it is not wrapped again
    count_for_schedulers(outer)
    return outer  # type: ignore[no-any-return]
