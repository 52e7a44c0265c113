"""Optimizers that step on the plain local shards of sharded parameters."""

from __future__ import annotations

import functools
import operator
import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, optim
from torch.distributed.tensor import DTensor
from torch.optim import SGD, Adam, Optimizer

from shardkit._torch import local_tensor, plain_attributes
from shardkit._torch.dispatch import tree_leaves, tree_map
from shardkit._torch.states import with_local
from shardkit._torch.steps import COLLECT, local_tensors, note_step, placements
from shardkit.errors import ShardkitError, message
from shardkit.optim.replace import AnyOptimizer, check_replaceable, replace_class, step_of, stepping_class

# torch's optimizers whose update of an element reads only that element of parameter, gradient and state.
ELEMENTWISE: tuple[Any, ...] = (SGD, Adam, optim.AdamW, optim.ASGD, optim.Adadelta, optim.Adagrad, optim.Adamax)
ELEMENTWISE += (optim.NAdam, optim.RAdam, optim.RMSprop, optim.Rprop)
# State of torch's optimizers that is one number for each parameter, also if the parameter itself has no dimensions.
NUMBERS = frozenset({"step", "mu_product", "eta", "mu"})
# On the CPU torch steps Adam's parameters one after another. As a list (foreach) small ones take two thirds of the CPU
# time and give the same bits in every dtype (torch 2.11 to 2.15); those of other classes differ. Large ones, from 2**13
# elements on, take up to twice the time as a list, which reads all of them from memory again for each operation. A list
# also needs memory for a copy of its parameters.
SMALL_SHARD, FEW_ELEMENTS = 2**12, 2**22
_on_cpu: Callable[[Tensor], bool] = operator.attrgetter("is_cpu")  # a tenth of the time of .device.type


def step_on_local_shards(
    optimizer: AnyOptimizer, *, elementwise: bool = False, cpu_threads: int | None = None
) -> AnyOptimizer:
    """Step the optimizer on local shards, without DTensor dispatch overhead. In place, local, once.

    A step on DTensors dispatches every operation through Python: five times the CPU time of the same step on
    plain tensors, for many small parameters. After this call only ``step()`` differs, and its results are bit for bit
    the same. ``param_groups`` and ``optimizer.state`` hold the same parameters and DTensors, so LR schedulers (made
    before or after), ``zero_grad``, state dicts, ``torch.distributed.checkpoint``, ``torch.amp.GradScaler``, clipping,
    hooks, closures, and parameters added later work as before. Nothing is cached between steps, so parameters,
    gradients and state may be replaced or moved. Plain parameters may be mixed with sharded ones, on any meshes, also
    with ``foreach=True`` and ``fused=True``, where torch refuses the mixture.

    Args:
        optimizer: one whose update is element-wise: torch's ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam,
            RAdam, RMSprop and Rprop, and subclasses that do not override their step; any other with
            ``elementwise=True``. Tensors in ``optimizer.state[param]`` of the shard's shape are sharded like it.
        elementwise: promise that the update of an element reads only that element of parameter, gradient and state,
            as Lion's does. It is not checked: an optimizer that uses norms, matrices or blocks would silently compute
            those of the shards.
        cpu_threads: threads that a step may use for shards on the CPU. None leaves torch's setting, but for
            CPU-offloaded shards it shares the cores of this process among the ranks on this machine
            (``LOCAL_WORLD_SIZE``), since torchrun sets ``OMP_NUM_THREADS=1``.

    Returns:
        The same object. Its class becomes a subclass of the same name. Pickled and copied ones step like it.

    Raises:
        ShardkitError: it is not a ``torch.optim.Optimizer``, is not known to be element-wise, has
            ``differentiable=True``, wraps another optimizer, or has a ``step`` that something other than an LR
            scheduler replaced. Nothing was changed.

    Example:
        >>> optimizer = step_on_local_shards(torch.optim.AdamW(model.parameters(), fused=True))
    """
    check_replaceable(optimizer, "step_on_local_shards")
    if getattr(type(optimizer), "steps_on_local_shards", False):
        return optimizer
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise ShardkitError(message("optimizer", "has differentiable=True", "", "Step it on DTensors, as it is"))
    _check_elementwise(optimizer, elementwise)
    threads = _threads(optimizer) if cpu_threads is None else cpu_threads
    return replace_class(optimizer, local_class, cpu_threads=threads)


def _check_elementwise(optimizer: Optimizer, vouched: bool) -> None:
    kind = type(optimizer)
    for each in ELEMENTWISE:
        same_step = isinstance(optimizer, each) and step_of(kind) is step_of(each)
        if same_step and getattr(kind, COLLECT) is getattr(each, COLLECT):
            return
    is_torchs = step_of(kind).__module__.startswith("torch.optim.")
    if vouched and not is_torchs:
        return
    known = "" if is_torchs else "known to be "
    problem = f"is {kind.__module__}.{kind.__qualname__}, which is not {known}element-wise"
    rule = "The step of a shard equals that of the whole parameter only if each element is updated by itself"
    fix = "If it needs whole matrices, as Muon and Adafactor do, call step_on_whole_matrices(optimizer)"
    fix += "" if is_torchs else "; if it updates each element by itself, pass elementwise=True"
    raise ShardkitError(message("optimizer", problem, rule, fix))


@functools.cache
def local_class(base: Any) -> Any:
    """Return a subclass of the same name that steps on local shards, and is pickled and copied as such."""
    inner = step_of(base)
    collects = hasattr(base, COLLECT) and inner.__module__.startswith("torch.optim")

    @functools.wraps(inner)
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        note_step(self)
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
        body[COLLECT] = _collecting(getattr(base, COLLECT))
    return stepping_class(base, local_class, step, body, kept="cpu_threads")


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
            layouts = [placements(param) if isinstance(param, DTensor) else None for param in params]
            grads[:] = local_tensors(grads, params, layouts, _redistributed)
            for values in state:
                if values:  # torch leaves the list empty of a kind of state that these options do not use
                    values[:] = local_tensors(values, params, layouts, _number_or_refuse)
            if isinstance(self, SGD):
                vars(self).setdefault("collected", []).extend(params)
            params[:] = [local_tensor(param) if isinstance(param, DTensor) else param for param in params]
        if isinstance(self, Adam) and _may_be_listed(group, params):
            group["foreach"] = True  # for this step
            vars(self).setdefault("listed", []).append(group)
        return result

    return collect_locals


def _may_be_listed(group: dict[str, Any], shards: list[Tensor]) -> bool:
    """Whether torch may choose how to step these shards, and they are small and on the CPU."""
    numbers = [group["lr"], *group["betas"]]  # as tensors they need foreach=False
    most = min(FEW_ELEMENTS, SMALL_SHARD * len(shards))
    is_open = group["foreach"] is None and not group["fused"] and not any(isinstance(x, Tensor) for x in numbers)
    return is_open and all(map(_on_cpu, shards)) and sum(map(Tensor.numel, shards)) <= most


def finish_step(optimizer: Optimizer) -> None:
    """Undo what collecting did to groups, and move state from shards to their parameters (SGD's). In place, local."""
    for group in vars(optimizer).pop("listed", ()):
        group["foreach"] = None
    for param in vars(optimizer).pop("collected", ()):
        if isinstance(param, DTensor) and local_tensor(param) in optimizer.state:
            shard = local_tensor(param)
            _keep_state(optimizer.state[param], optimizer.state.pop(shard), param, shard)


def _redistributed(grad: DTensor, param: Any) -> Tensor:
    """Place a gradient like its parameter, such as a Partial one of tensor parallelism. Collective."""
    return grad.redistribute(placements=param.placements).to_local()


def _number_or_refuse(value: DTensor, param: Any) -> Tensor:
    """Return a replicated number, as which a load gives those of one element; raise for any other layout."""
    if value.numel() == 1 and all(each.is_replicate() for each in value.placements):
        return local_tensor(value)
    where = param.placements if isinstance(param, DTensor) else "no mesh"
    problem = f"holds a DTensor of shape {tuple(value.shape)} with placements {value.placements}, its parameter {where}"
    raise ShardkitError(message("optimizer.state", problem, "", "Redistribute it, or load it with load_state_dict"))


def _keep_state(outer: dict[Any, Any], inner: dict[Any, Any], param: DTensor, local: Tensor) -> None:
    """Write one parameter's state after a step, ``inner``, into what the user sees, with DTensors for shards."""
    for key, value in inner.items():
        outer[key] = _kept(key, param, local, value, outer.get(key))


def _kept(key: str, param: DTensor, local: Tensor, value: Any, held: Any) -> Any:
    """Return what the user sees of a value of the state: a DTensor for what has the shard's shape."""
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
        stack.enter_context(local_inside(optimizer))

        def outside(closure: Any) -> Any:
            def run() -> Any:
                stack.close()
                try:
                    return closure()
                finally:
                    stack.enter_context(local_inside(optimizer))

            return run if callable(closure) else closure

        return step(optimizer, *map(outside, args), **{name: outside(value) for name, value in kwargs.items()})


@contextmanager
def local_inside(optimizer: Optimizer) -> Iterator[None]:
    """Put local tensors into an optimizer's groups and state; put back what was there, with the step's changes.

    Everything is read on entering and nothing is cached. Of the groups only ``"params"`` changes.
    """
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
    found = iter(local_tensors(leaves, [param] * len(leaves), [placements(param)] * len(leaves), _number_or_refuse))
    return tree_map(lambda _: next(found), values)


def _aliases(params: list[Tensor]) -> dict[Tensor, Tensor]:
    """Map each sharded parameter to a leaf on the memory of its shard, with its gradient; a plain one to itself."""
    layouts = [placements(param) if isinstance(param, DTensor) else None for param in params]
    grads = local_tensors([param.grad for param in params], params, layouts, _redistributed)
    aliases = dict(zip(params, params, strict=True))
    for param, grad in zip(params, grads, strict=True):
        if isinstance(param, DTensor):
            aliases[param] = alias = local_tensor(param).detach().requires_grad_(param.requires_grad)
            alias.grad = grad
    return aliases
