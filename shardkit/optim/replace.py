"""Replace the step of an optimizer: its class becomes a subclass of the same name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch.optim import Optimizer

from shardkit._torch.steps import count_for_schedulers, counts_for_schedulers
from shardkit.errors import ShardkitError, message

AnyOptimizer = TypeVar("AnyOptimizer", bound=Optimizer)


def check_replaceable(optimizer: object, caller: str) -> None:
    """Raise a ShardkitError unless it is an optimizer that steps by its own class's ``step``. Local, pure."""
    if not isinstance(optimizer, Optimizer):
        problem = f"must be a torch.optim.Optimizer, got {type(optimizer).__name__}"
        raise ShardkitError(message("optimizer", problem, "", "Pass the optimizer that it wraps"))
    for name, value in vars(optimizer).items():
        if isinstance(value, Optimizer) or getattr(value, "param_groups", None) is optimizer.param_groups:
            problem = f"is {type(optimizer).__name__}, which wraps another one in its attribute {name!r}"
            rule = f"{caller} replaces the step of one object, and the state is kept by the other"
            inner = f"{type(value).__name__}(...)"
            fix = f"Wrap the inner one: {type(optimizer).__name__}({caller}({inner}))"
            raise ShardkitError(message("optimizer", problem, rule, fix))
    if "step" in vars(optimizer) and not counts_for_schedulers(optimizer.step):
        rule, fix = f"{caller} replaces the step of the class", f"Call {caller} before optimizer.step is replaced"
        raise ShardkitError(message("optimizer.step", f"was replaced by {vars(optimizer)['step']!r}", rule, fix))
    ways = {"step_on_local_shards": "steps_on_local_shards", "step_on_whole_matrices": "steps_on_whole_matrices"}
    if other := [way for way, mark in ways.items() if way != caller and getattr(type(optimizer), mark, False)]:
        raise ShardkitError(message("optimizer", f"was already given to {other[0]}", "", "Build another one"))


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
