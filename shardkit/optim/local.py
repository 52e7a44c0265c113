"""Optimizers that step on the plain local shards of sharded parameters."""

from __future__ import annotations

import functools
import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, optim
from torch.distributed.tensor import DTensor
from torch.optim import SGD, Adam, Optimizer

from shardkit._torch import local_tensor, plain_attributes, steps, with_local
from shardkit._torch.dispatch import tree_leaves, tree_map
from shardkit.errors import ShardkitError, message

# torch's optimizers whose update of an element reads only that element of parameter, gradient and state.
ELEMENTWISE: tuple[Any, ...] = (SGD, optim.Adam, optim.AdamW, optim.ASGD, optim.Adadelta, optim.Adagrad)
ELEMENTWISE += (optim.Adamax, optim.NAdam, optim.RAdam, optim.RMSprop, optim.Rprop)
# State of torch's optimizers that is one number for each parameter, also if the parameter itself has no dimensions.
NUMBERS = frozenset({"step", "mu_product", "eta", "mu"})
# On the CPU torch steps Adam's parameters one by one. As a list (foreach) small ones take two thirds of the CPU time,
# with the same bits (torch 2.13 to 2.15); large ones take more, as each operation reads all of them from memory again.
SMALL_SHARD, FEW_ELEMENTS = 2**12, 2**22

AnyOptimizer = TypeVar("AnyOptimizer", bound=Optimizer)


def step_on_local_shards(
    optimizer: AnyOptimizer, *, elementwise: bool = False, cpu_threads: int | None = None
) -> AnyOptimizer:
    """Step the optimizer on local shards, without DTensor dispatch overhead. In place, local, once.

    A step on DTensors dispatches every operation through Python: five times the CPU time for many small parameters.
    After this call only ``step()`` differs, and its results are bit for bit the same. ``param_groups`` and
    ``optimizer.state`` hold the same parameters and DTensors, so LR schedulers (made before or after), ``zero_grad``,
    state dicts, ``torch.distributed.checkpoint``, ``torch.amp.GradScaler``, clipping, hooks, closures, and parameters
    added later work as before. Plain parameters may be mixed with sharded ones, on any meshes, also with
    ``foreach=True`` and ``fused=True``, where torch refuses the mixture.

    Args:
        optimizer: one whose update is element-wise: torch's ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam,
            RAdam, RMSprop and Rprop, and subclasses that do not override their step; any other with
            ``elementwise=True``. Tensors in ``optimizer.state[param]`` of the shard's shape are sharded like it.
        elementwise: promise that the update of an element reads only that element of parameter, gradient and state, as
            Lion's does. It is not checked: norms, matrices or blocks would silently be those of the shards.
        cpu_threads: threads that a step may use for shards on the CPU. None leaves torch's setting, but shares the
            cores among the ranks on this machine (``LOCAL_WORLD_SIZE``) where shards are offloaded to the CPU, since
            torchrun sets ``OMP_NUM_THREADS=1``.

    Returns:
        The same object. Its class becomes a subclass of the same name. Pickled and copied ones step like it.

    Raises:
        ShardkitError: it is not a ``torch.optim.Optimizer``, is not known to be element-wise, has
            ``differentiable=True``, wraps another one, or has a replaced ``step``. Nothing was changed.

    Examples:
        >>> optimizer = step_on_local_shards(torch.optim.AdamW(model.parameters(), fused=True))
    """
    check_replaceable(optimizer, "step_on_local_shards")
    if getattr(type(optimizer), "steps_on_local_shards", False):
        return optimizer
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise ShardkitError(message("optimizer", "has differentiable=True", "", "Step it on DTensors, as it is"))
    _check_elementwise(optimizer, elementwise)
    threads = _threads(optimizer) if cpu_threads is None else cpu_threads
    return replace_class(optimizer, _local_class, cpu_threads=threads)


def _check_elementwise(optimizer: Optimizer, vouched: bool) -> None:
    kind = type(optimizer)
    for each in ELEMENTWISE:
        same_step = isinstance(optimizer, each) and step_of(kind) is step_of(each)
        if same_step and getattr(kind, steps.COLLECT) is getattr(each, steps.COLLECT):
            return
    is_torchs = step_of(kind).__module__.startswith("torch.optim.")
    if vouched and not is_torchs:
        return
    known = "" if is_torchs else "known to be "
    problem = f"is {kind.__module__}.{kind.__qualname__}, which is not {known}element-wise"
    fix = "If it needs whole matrices, as Muon and Adafactor do, call step_on_whole_matrices(optimizer)"
    fix += "" if is_torchs else "; if it updates each element by itself, pass elementwise=True"
    raise ShardkitError(message("optimizer", problem, "", fix))


@functools.cache
def _local_class(base: Any) -> Any:
    inner = step_of(base)
    collects = hasattr(base, steps.COLLECT) and inner.__module__.startswith("torch.optim")

    @functools.wraps(inner)
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        steps.note_step(self)
        threads = torch.get_num_threads()
        if self.cpu_threads is not None:
            torch.set_num_threads(self.cpu_threads)
        try:
            return inner(self, *args, **kwargs) if collects else _run_on_aliases(inner, self, args, kwargs)
        finally:
            if collects:
                finish_step(self)
            if self.cpu_threads is not None:
                torch.set_num_threads(threads)

    body: dict[str, Any] = {"steps_on_local_shards": True}
    if collects:
        body[steps.COLLECT] = _collecting(getattr(base, steps.COLLECT))
    return stepping_class(base, _local_class, step, body, kept="cpu_threads")


def _threads(optimizer: Optimizer) -> int | None:
    """Return each rank's share of the cores where shards are offloaded to the CPU, else None."""
    params = [param for group in optimizer.param_groups for param in group["params"] if isinstance(param, DTensor)]
    if not any(local_tensor(param).device.type == "cpu" != param.device_mesh.device_type for param in params):
        return None
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


# ---- torch's own classes: they collect lists of tensors, in which local tensors replace DTensors -----------------


def _collecting(collect: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(collect)
    def collect_locals(self: Any, group: dict[str, Any], params: list[Any], grads: list[Any], *state: list[Any]) -> Any:
        with plain_attributes():
            result = collect(self, group, params, grads, *state)
            layouts = steps.placements_of(params)
            grads[:] = steps.local_tensors(grads, params, layouts, steps.redistributed)
            for values in state:
                if values:  # torch leaves the list empty of a kind of state that these options do not use
                    values[:] = steps.local_tensors(values, params, layouts, _number_or_refuse)
            if isinstance(self, SGD):
                vars(self).setdefault("collected", []).extend(params)
            params[:] = steps.local_tensors(params, params, layouts, steps.redistributed)
        if isinstance(self, Adam) and _step_as_list(group, params):
            group["foreach"] = True  # until finish_step
            vars(self).setdefault("listed", []).append(group)
        return result

    return collect_locals


def _step_as_list(group: dict[str, Any], shards: list[Tensor]) -> bool:
    """Whether torch may choose how to step these shards, and they are small and on the CPU."""
    has_tensors = any(isinstance(number, Tensor) for number in (group["lr"], *group["betas"]))  # no list takes them
    is_open = group["foreach"] is None and not group["fused"] and not has_tensors
    most = min(FEW_ELEMENTS, SMALL_SHARD * len(shards))
    return is_open and all(shard.is_cpu for shard in shards) and sum(map(Tensor.numel, shards)) <= most


def finish_step(optimizer: Optimizer) -> None:
    """Undo what collecting did to groups, and move SGD's state from shards to their parameters. In place, local."""
    for group in vars(optimizer).pop("listed", ()):
        group["foreach"] = None
    for param in vars(optimizer).pop("collected", ()):
        if isinstance(param, DTensor) and local_tensor(param) in optimizer.state:
            shard = local_tensor(param)
            _keep_state(optimizer.state[param], optimizer.state.pop(shard), param, shard)


def _number_or_refuse(value: DTensor, param: Any) -> Tensor:
    """Return a replicated number, as which a load gives those of one element; raise for any other layout."""
    if value.numel() == 1 and all(each.is_replicate() for each in value.placements):
        return local_tensor(value)
    where = param.placements if isinstance(param, DTensor) else "no mesh"
    problem = f"holds a DTensor of shape {tuple(value.shape)} with placements {value.placements}, its parameter {where}"
    raise ShardkitError(message("optimizer.state", problem, "", "Redistribute it, or load it with load_state_dict"))


def _keep_state(outer: dict[Any, Any], inner: dict[Any, Any], param: DTensor, local: Tensor) -> None:
    for key, value in inner.items():
        outer[key] = _kept(key, param, local, value, outer.get(key))


def _kept(key: str, param: DTensor, local: Tensor, value: Any, held: Any) -> Any:
    if isinstance(value, (list, tuple, dict)):
        known = iter([*tree_leaves(held), *tree_leaves(value)])
        return tree_map(lambda leaf: _kept(key, param, local, leaf, next(known)), value)
    if isinstance(held, DTensor) and local_tensor(held) is value:
        return held
    is_shard = isinstance(value, Tensor) and value.shape == local.shape and key not in NUMBERS
    if not is_shard or isinstance(value, DTensor):
        return value
    like = param if value.dtype == param.dtype else torch.empty_like(param, dtype=value.dtype)
    return with_local(like, value)  # type: ignore[arg-type]


# ---- other classes: their groups and state hold local tensors during the step ------------------------------------


def _run_on_aliases(
    step: Callable[..., Any], optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run ``step(optimizer, ...)`` on local tensors, and a closure among its arguments on the DTensors."""
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


@contextmanager
def _local_inside(optimizer: Optimizer) -> Iterator[None]:
    """Put local tensors into an optimizer's groups and state; put back what was there, with the step's changes."""
    before, state = [group["params"] for group in optimizer.param_groups], optimizer.state
    with plain_attributes():
        aliases = _aliases([param for params in before for param in params])
        inner = {aliases.get(key, key): _local_state(key, values) for key, values in state.items()}
    for group, params in zip(optimizer.param_groups, before, strict=True):
        group["params"] = [aliases[param] for param in params]
    optimizer.state = defaultdict(dict, inner)
    try:
        yield
    finally:
        after, optimizer.state = optimizer.state, state
        for group, params in zip(optimizer.param_groups, before, strict=True):
            group["params"] = params
        shards = {alias: param for param, alias in aliases.items() if isinstance(param, DTensor)}
        for key, values in after.items():
            if key not in shards:
                state[key] = values
                continue
            outer = state[shards[key]]
            for name in outer.keys() - values.keys():
                del outer[name]
            _keep_state(outer, values, shards[key], key)
        for alias, param in shards.items():
            shard = local_tensor(param)
            if alias.data_ptr() != shard.data_ptr():  # the step assigned to ``param.data``
                with torch.no_grad():
                    shard.copy_(alias)
            if alias.grad is None:
                param.grad = None


def _local_state(param: Any, values: Any) -> Any:
    if not isinstance(param, DTensor):
        return values
    leaves = tree_leaves(values)
    params = [param] * len(leaves)
    found = iter(steps.local_tensors(leaves, params, steps.placements_of(params), _number_or_refuse))
    return tree_map(lambda _: next(found), values)


def _aliases(params: list[Tensor]) -> dict[Tensor, Tensor]:
    """Map each sharded parameter to a leaf on the memory of its shard, with its gradient; a plain one to itself."""
    own = [param.grad for param in params]
    grads = steps.local_tensors(own, params, steps.placements_of(params), steps.redistributed)
    aliases = dict(zip(params, params, strict=True))
    for param, grad in zip(params, grads, strict=True):
        if isinstance(param, DTensor):
            aliases[param] = alias = local_tensor(param).detach().requires_grad_(param.requires_grad)
            alias.grad = grad
    return aliases


# ---- replacing the step of an optimizer: its class becomes a subclass of the same name ---------------------------


def check_replaceable(optimizer: object, caller: str) -> None:
    """Raise a ShardkitError unless it is an optimizer that steps by its own class's ``step``. Local, pure."""
    if not isinstance(optimizer, Optimizer):
        problem = f"must be a torch.optim.Optimizer, got {type(optimizer).__name__}"
        raise ShardkitError(message("optimizer", problem, "", "Pass the optimizer that it wraps"))
    outer = type(optimizer).__name__
    for name, value in vars(optimizer).items():
        if isinstance(value, Optimizer) or getattr(value, "param_groups", None) is optimizer.param_groups:
            problem = f"is {outer}, which wraps another one in its attribute {name!r}, where the state is"
            fix = f"Wrap the inner one: {outer}({caller}({type(value).__name__}(...)))"
            raise ShardkitError(message("optimizer", problem, "", fix))
    if "step" in vars(optimizer) and not steps.counts_for_schedulers(optimizer.step):
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
    steps.count_for_schedulers(outer)
    return outer  # type: ignore[no-any-return]
