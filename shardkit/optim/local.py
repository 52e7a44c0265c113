"""Optimizers that step on the plain local shards of sharded parameters."""

from __future__ import annotations

import functools
import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import SGD, Optimizer

from shardkit._torch import (
    COLLECT,
    count_for_schedulers,
    counts_for_schedulers,
    local_tensor,
    local_tensors,
    note_step,
    placements,
    plain_attributes,
    with_local,
)
from shardkit.errors import ShardkitError, message
from shardkit.optim.probe import check_elementwise

# State of torch's optimizers that is a number for each parameter, though a parameter of no dimension has its shape.
NUMBERS = frozenset({"step", "mu_product", "eta", "mu"})
AnyOptimizer = TypeVar("AnyOptimizer", bound=Optimizer)


def step_on_local_shards(
    optimizer: AnyOptimizer, *, elementwise: bool = False, cpu_threads: int | None = None
) -> AnyOptimizer:
    """Step the optimizer on local shards, without DTensor dispatch overhead. In place, local, once.

    A step on DTensors dispatches every operation through Python: five times the CPU time of the same step on
    plain tensors, for many small parameters. After this call only ``step()`` differs, and gives the same bits.
    ``param_groups`` and ``optimizer.state`` hold the same parameters and DTensors, so that LR schedulers (made before
    or after), ``zero_grad``, state dicts, ``torch.distributed.checkpoint``, ``torch.amp.GradScaler``, clipping, hooks,
    closures, and parameters added later work as before. Each step reads parameters, gradients and state anew, so
    they may be replaced or moved between steps. Plain parameters may stand beside sharded ones, on any meshes, also
    with ``foreach=True`` and ``fused=True``, which torch refuses for such a mixture.

    Args:
        optimizer: any ``torch.optim.Optimizer`` whose update is element-wise. Copies of it step small tensors, whole
            and in halves, and the results must agree: some 20 ms. Its state is tensors directly in
            ``optimizer.state[param]``; those of the shard's shape are sharded like it.
        elementwise: vouch for one that cannot be tried, such as one that draws random numbers: its update of an element
            reads that element of parameter, gradient and state alone. One that is seen to do otherwise is refused.
        cpu_threads: threads that a step may use for shards on the CPU. None leaves torch's setting, but for
            CPU-offloaded shards it shares the cores of this process among the ranks on this machine
            (``LOCAL_WORLD_SIZE``), since torchrun sets ``OMP_NUM_THREADS=1``.

    Returns:
        The same object. Its class becomes a subclass of the same name. Pickled and copied ones step like it.

    Raises:
        ShardkitError: it is not a ``torch.optim.Optimizer``, is not element-wise, cannot be tried and is not vouched
            for, is told to be ``differentiable``, or has a ``step`` that something other than an LR scheduler
            replaced. Nothing was changed.

    Example:
        >>> optimizer = step_on_local_shards(torch.optim.AdamW(model.parameters(), fused=True))
    """
    if isinstance(optimizer, Optimizer) and getattr(type(optimizer), "steps_on_local_shards", False):
        return optimizer
    _check(optimizer, elementwise)
    threads = _threads(optimizer) if cpu_threads is None else cpu_threads
    vars(optimizer).pop("step", None)  # an LR scheduler's wrapper, which would go past ours
    base: Any = type(optimizer)
    optimizer.__class__ = local_class(base)
    vars(optimizer)["cpu_threads"] = threads
    return optimizer


def _check(optimizer: Optimizer, elementwise: bool) -> None:
    if not isinstance(optimizer, Optimizer):
        name = type(optimizer).__name__
        rule = "It is a torch.optim.Optimizer, whose class is exchanged"
        raise ShardkitError(message("optimizer", f"is a {name}", rule, "Pass the optimizer that it wraps"))
    if any(group.get("differentiable") for group in optimizer.param_groups):
        rule = "A step that autograd records must go through the DTensors"
        raise ShardkitError(message("optimizer", "has differentiable=True", rule, "Step it as it is"))
    if "step" in vars(optimizer) and not counts_for_schedulers(optimizer.step):
        rule = "The step that is patched is the one of the class"
        fix = "Call step_on_local_shards before whatever replaced it"
        raise ShardkitError(message("optimizer.step", f"is {vars(optimizer)['step']!r}", rule, fix))
    check_elementwise(optimizer, elementwise)


@functools.cache
def local_class(base: Any) -> Any:
    """A subclass of the same name that steps on local shards, and is pickled and copied as such."""
    inner = getattr(base.step, "__wrapped__", base.step) if getattr(base.step, "hooked", False) else base.step
    by_lists = hasattr(base, COLLECT) and inner.__module__.startswith("torch.optim")
    run = functools.partial(_collected if by_lists else exchanged, inner)
    body = {"steps_on_local_shards": True, "step": hooked(_step(inner, run)), "__reduce_ex__": _reduce}
    if by_lists:
        body[COLLECT] = _collecting(getattr(base, COLLECT))
    return type(base.__name__, (base,), {"__module__": base.__module__, "__doc__": base.__doc__, **body})


def hooked(step: Callable[..., Any]) -> Callable[..., Any]:
    """A step for a class: with the user's hooks around it, and known to LR schedulers."""
    outer: Any = Optimizer.profile_hook_step(step)
    outer.hooked = True  # as torch marks it, so that it is not wrapped again
    count_for_schedulers(outer)
    return outer  # type: ignore[no-any-return]


def _step(inner: Callable[..., Any], run: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(inner)
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        note_step(self)
        with _using_threads(self.cpu_threads):
            return run(self, args, kwargs)

    return step


def _reduce(self: Any, protocol: int) -> tuple[Any, ...]:
    base = type(self).__mro__[1]
    return _restored, (base, self.cpu_threads), self.__getstate__()


def _restored(base: Any, cpu_threads: int | None) -> Any:
    cls = local_class(base)
    optimizer = cls.__new__(cls)
    vars(optimizer)["cpu_threads"] = cpu_threads
    return optimizer


# torch's own classes: they collect lists of tensors, state made as usual, and the update then sees their local parts.


def _collecting(collect: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(collect)
    def collect_locals(self: Any, group: dict[str, Any], params: list[Any], grads: list[Any], *state: list[Any]) -> Any:
        with plain_attributes():
            result = collect(self, group, params, grads, *state)
            layouts = layouts_of(params)
            grads[:] = local_tensors(grads, params, layouts, _placed)
            for values in state:
                if values:  # a kind of state that these options have no use for is an empty list
                    values[:] = local_tensors(values, params, layouts, _refused)
            if isinstance(self, SGD):
                vars(self).setdefault("collected", []).extend(params)
            params[:] = [local_tensor(param) if isinstance(param, DTensor) else param for param in params]
        return result

    return collect_locals


def _collected(inner: Callable[..., Any], optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    try:
        return inner(optimizer, *args, **kwargs)
    finally:
        finish_step(optimizer)


def finish_step(optimizer: Optimizer) -> None:
    """Moves the state that SGD alone writes under the local shards that it stepped, after the step. In place, local."""
    for param in vars(optimizer).pop("collected", ()):
        if isinstance(param, DTensor) and local_tensor(param) in optimizer.state:
            shard = local_tensor(param)
            keep(optimizer.state[param], optimizer.state.pop(shard), param, shard)


def _threads(optimizer: Optimizer) -> int | None:
    """Each rank's share of the cores where shards are offloaded to the CPU, else None."""
    params = (param for group in optimizer.param_groups for param in group["params"])
    if not any(_is_offloaded(param) for param in params):
        return None
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def _is_offloaded(param: Tensor) -> bool:
    return isinstance(param, DTensor) and local_tensor(param).device.type == "cpu" != param.device_mesh.device_type


@contextmanager
def _using_threads(number: int | None) -> Iterator[None]:
    if number is None:
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def layouts_of(params: list[Any]) -> list[Any]:
    """The placements of each DTensor, and None for other tensors."""
    return [placements(param) if isinstance(param, DTensor) else None for param in params]


def _placed(grad: DTensor, param: Any) -> Tensor:
    """A gradient that is not placed like its parameter, such as a Partial one of tensor parallelism. Collective."""
    return grad.redistribute(placements=param.placements).to_local()


def _refused(value: DTensor, param: Any) -> Tensor:
    where = param.placements if isinstance(param, DTensor) else "no mesh"
    problem = f"a DTensor of shape {tuple(value.shape)} has placements {value.placements}, its parameter {where}"
    rule, fix = "State is placed like its parameter", "Redistribute it, or load it with load_state_dict"
    raise ShardkitError(message("optimizer.state", problem, rule, fix))


def keep(outer: dict[Any, Any], inner: dict[Any, Any], param: DTensor, local: Tensor) -> None:
    """Write one parameter's state after a step, ``inner``, into what the user sees, with DTensors for shards."""
    for key, value in inner.items():
        held = outer.get(key)
        if not (isinstance(held, DTensor) and local_tensor(held) is value):
            sharded = isinstance(value, Tensor) and value.shape == local.shape and key not in NUMBERS
            outer[key] = _around(value, param) if sharded else value


def _around(value: Tensor, param: DTensor) -> Tensor:
    like = param if value.dtype == param.dtype else torch.empty_like(param, dtype=value.dtype)
    return value if isinstance(value, DTensor) else with_local(like, value)  # type: ignore[arg-type]


@contextmanager
def _local_inside(optimizer: Optimizer) -> Iterator[None]:
    """Local tensors in an optimizer's groups and state; afterwards what was there, with what a step has changed.

    All is read on entering and nothing is kept, so nothing can be out of date. Of the groups only ``"params"`` changes.
    """
    before, state = [group["params"] for group in optimizer.param_groups], optimizer.state
    with plain_attributes():
        flat = [param for params in before for param in params]
        aliases = dict(zip(flat, _aliases(flat), strict=True))
        known = {aliases[key]: _inner(key, values) for key, values in state.items() if key in aliases}
        others = {key: values for key, values in state.items() if key not in aliases}
    for group, params in zip(optimizer.param_groups, before, strict=True):
        group["params"] = [aliases[param] for param in params]
    optimizer.state = defaultdict(dict, known | others)
    try:
        yield
    finally:
        after, optimizer.state = optimizer.state, state
        for group, params in zip(optimizer.param_groups, before, strict=True):
            group["params"] = params
        shards = {alias: param for param, alias in aliases.items() if alias is not param}
        for key, values in after.items():
            if key not in shards:
                state[key] = values
                continue
            outer = state[shards[key]]
            for name in outer.keys() - values.keys():
                del outer[name]
            keep(outer, values, shards[key], key)
        for alias, param in shards.items():
            _settle(param, alias)


def _inner(key: Any, values: Any) -> Any:
    if not isinstance(key, DTensor) or not isinstance(values, dict):
        return values
    params, layouts = [key] * len(values), [placements(key)] * len(values)
    return dict(zip(values, local_tensors([*values.values()], params, layouts, _refused), strict=True))


def _aliases(params: list[Tensor]) -> list[Tensor]:
    """Each plain parameter itself; for each sharded one a leaf on the memory of its shard, with its gradient."""
    grads = local_tensors([param.grad for param in params], params, layouts_of(params), _placed)
    aliases = []
    for param, grad in zip(params, grads, strict=True):
        alias = param
        if isinstance(param, DTensor):
            alias = local_tensor(param).detach().requires_grad_(param.requires_grad)
            alias.grad = grad
        aliases.append(alias)
    return aliases


@torch.no_grad()
def _settle(param: DTensor, alias: Tensor) -> None:
    """Repeat on the shard what a step did to the alias itself rather than to its memory."""
    shard = local_tensor(param)
    if alias.data_ptr() != shard.data_ptr():  # the step assigned to ``param.data``
        shard.copy_(alias)
    if alias.grad is None:
        param.grad = None


def exchanged(step: Callable[..., Any], optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run ``step(optimizer, ...)`` on local tensors, and a closure that it is given on what the user knows."""
    with ExitStack() as stack:
        stack.enter_context(_local_inside(optimizer))

        def outside(closure: Any) -> Any:
            def run() -> Any:
                stack.close()
                try:
                    return closure()
                finally:
                    stack.enter_context(_local_inside(optimizer))

            return run if callable(closure) else closure

        return step(optimizer, *map(outside, args), **{name: outside(value) for name, value in kwargs.items()})
