"""Optimizers that step on the plain local shards of sharded parameters."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor, optim
from torch.distributed.tensor import DTensor
from torch.optim import SGD, Optimizer

from shardkit._torch import local_tensor, plain_attributes, steps, with_local
from shardkit.errors import ShardkitError

# torch's optimizers whose update of an element reads only that element of parameter, gradient and
# state.
ELEMENTWISE: tuple[Any, ...] = (
    SGD,
    optim.Adam,
    optim.AdamW,
    optim.ASGD,
    optim.Adadelta,
    optim.Adagrad,
)
ELEMENTWISE += (optim.Adamax, optim.NAdam, optim.RAdam, optim.RMSprop, optim.Rprop)

AnyOptimizer = TypeVar("AnyOptimizer", bound=Optimizer)


def step_on_local_shards(optimizer: AnyOptimizer) -> AnyOptimizer:
    """Step one of torch's element-wise optimizers on local shards, without DTensor dispatch. In
    place, local, once.

    After this call only ``step()`` differs, and its results are bit for bit the same (with the same
    ``foreach``: left out, torch takes the for-loop for DTensors, and foreach for plain tensors on a
    GPU, which rounds otherwise).
    ``param_groups`` and ``optimizer.state`` hold the same parameters and DTensors, so LR schedulers
    (made before or after), ``zero_grad``, state dicts, ``torch.distributed.checkpoint``,
    ``torch.amp.GradScaler``, clipping, hooks, closures, and parameters added later work as before.
    Plain parameters may be mixed with sharded ones, on any meshes, also with ``foreach=True`` and
    ``fused=True``, where torch refuses the mixture.

    Args:
        optimizer: torch's ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, RAdam, RMSprop
            or Rprop, or a subclass that does not override its step. Any other steps on DTensors as
            it is.

    Returns:
        The same object. Its class becomes a subclass of the same name.

    Raises:
        ShardkitError: it is not one of these, has ``differentiable=True``, wraps another one, or
            has a replaced ``step``. Nothing was changed.

    Examples:
        >>> optimizer = step_on_local_shards(torch.optim.AdamW(model.parameters(), fused=True))
    """
    check_replaceable(optimizer, "step_on_local_shards")
    if getattr(type(optimizer), "steps_on_local_shards", False):
        return optimizer
    kind = type(optimizer)
    if not is_elementwise(kind):
        raise ShardkitError(
            f"optimizer is {kind.__module__}.{kind.__qualname__}, and not one of torch's "
            "element-wise ones. Step it on DTensors, as it is; one that needs whole matrices, as "
            "Muon and Adafactor, may be faster by step_on_whole_matrices(optimizer)."
        )
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise ShardkitError("optimizer has differentiable=True. Step it on DTensors, as it is.")
    return replace_class(optimizer, _local_class)


def is_elementwise(kind: Any) -> bool:
    """Return whether a class steps as one of torch's element-wise ones."""
    for base in ELEMENTWISE:
        same_step = issubclass(kind, base) and step_of(kind) is step_of(base)
        if same_step and getattr(kind, steps.COLLECT) is getattr(base, steps.COLLECT):
            return True
    return False


@functools.cache
def _local_class(base: Any) -> Any:
    """Return a subclass that replaces DTensors by local tensors where torch collects them in
    lists.
    """
    inner = step_of(base)
    collect = getattr(base, steps.COLLECT)

    @functools.wraps(inner)
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        steps.note_step(self)
        try:
            return inner(self, *args, **kwargs)
        finally:
            finish_step(self)

    @functools.wraps(collect)
    def collect_locals(
        self: Any, group: dict[str, Any], params: list[Any], grads: list[Any], *state: list[Any]
    ) -> Any:
        with plain_attributes():
            result = collect(self, group, params, grads, *state)
            grads[:] = steps.local_tensors(grads, params, steps.redistributed)
            for values in state:
                # torch leaves the list empty of a kind of state that these options do not use
                if values:
                    values[:] = steps.local_tensors(values, params, _number_or_refuse)
            if isinstance(self, SGD):
                vars(self).setdefault("collected", []).extend(params)
            params[:] = steps.local_tensors(params, params, steps.redistributed)
        return result

    return subclass(
        base, {"steps_on_local_shards": True, "step": hooked(step), steps.COLLECT: collect_locals}
    )


def finish_step(optimizer: Optimizer) -> None:
    """Move the state that SGD gave to local shards to their parameters. In place, local."""
    for param in vars(optimizer).pop("collected", ()):
        if not isinstance(param, DTensor) or local_tensor(param) not in optimizer.state:
            continue
        state = optimizer.state[param]
        for key, value in optimizer.state.pop(local_tensor(param)).items():
            old = state.get(key)
            is_same = isinstance(old, DTensor) and local_tensor(old) is value
            if not is_same:
                state[key] = with_local(param, value) if isinstance(value, Tensor) else value


def _number_or_refuse(value: DTensor, param: Any) -> Tensor:
    """Return a replicated number, as which a load gives those of one element; raise for any other
    layout.
    """
    if value.numel() == 1 and all(place.is_replicate() for place in value.placements):
        return local_tensor(value)
    where = param.placements if isinstance(param, DTensor) else "no mesh"
    raise ShardkitError(
        f"optimizer.state holds a DTensor of shape {tuple(value.shape)} with placements "
        f"{value.placements}, its parameter {where}. Redistribute it, or load it with "
        "load_state_dict."
    )


# ---- replacing the step of an optimizer: its class becomes a subclass of the same name -----------


def check_replaceable(optimizer: object, caller: str) -> None:
    """Raise a ShardkitError unless it is an optimizer that steps by its own class's ``step``.
    Local, pure.
    """
    if not isinstance(optimizer, Optimizer):
        raise ShardkitError(
            f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}. Pass the "
            "optimizer that it wraps."
        )
    outer = type(optimizer).__name__
    for name, value in vars(optimizer).items():
        groups = getattr(value, "param_groups", None)
        if isinstance(value, Optimizer) or groups is optimizer.param_groups:
            raise ShardkitError(
                f"optimizer is {outer}, which wraps another one in its attribute {name!r}, where "
                f"the state is. Wrap the inner one: {outer}({caller}({type(value).__name__}(...)))."
            )
    if "step" in vars(optimizer) and not steps.counts_for_schedulers(optimizer.step):
        raise ShardkitError(
            f"optimizer.step was replaced by {vars(optimizer)['step']!r}. {caller} replaces the "
            f"step of the class. Call {caller} before optimizer.step is replaced."
        )
    marks = {
        "step_on_local_shards": "steps_on_local_shards",
        "step_on_whole_matrices": "steps_on_whole_matrices",
    }
    for function, mark in marks.items():
        if function != caller and getattr(optimizer, mark, False):
            raise ShardkitError(f"optimizer was already given to {function}. Build another one.")


def replace_class(optimizer: AnyOptimizer, make: Callable[[Any], Any]) -> AnyOptimizer:
    """Give the optimizer the class that ``make`` makes of its own, in place; return it."""
    vars(optimizer).pop("step", None)  # an LR scheduler's wrapper, which would go past ours
    optimizer.__class__ = make(type(optimizer))
    return optimizer


def step_of(base: Any) -> Callable[..., Any]:
    """Return the step of a class without the hooks that torch puts around it."""
    step: Any = base.step
    if getattr(step, "hooked", False):
        step = getattr(step, "__wrapped__", step)
    return step  # type: ignore[no-any-return]


def subclass(base: Any, body: dict[str, Any]) -> Any:
    """Return a subclass with the name, module and docstring of its base."""
    return type(
        base.__name__, (base,), {"__module__": base.__module__, "__doc__": base.__doc__, **body}
    )


def hooked(step: Callable[..., Any]) -> Callable[..., Any]:
    """Return the step for a class: it runs the user's hooks, and LR schedulers do not wrap it."""
    outer: Any = Optimizer.profile_hook_step(step)
    outer.hooked = True  # as torch marks it, so that it is not wrapped again
    steps.count_for_schedulers(outer)
    return outer  # type: ignore[no-any-return]
