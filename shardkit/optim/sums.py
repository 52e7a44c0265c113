"""Steps on shards of optimizers that join all parameters by sums and norms, such as Prodigy."""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import Optimizer

from shardkit._torch import TorchDispatchMode, arguments_by_name, tree_leaves, tree_map
from shardkit.errors import ShardkitError, message
from shardkit.optim.local import local_inside
from shardkit.optim.probe import PARTS, SMALL, parts_of, unequal
from shardkit.optim.replace import collective_step, step_of, stepping_class
from shardkit.optim.trial import groups_to_try, step_copy, undisturbed
from shardkit.ranks import collective_device

_HALF = (torch.bfloat16, torch.float16)
_EXTREMES = {"any": "max", "all": "min", "max": "max", "amax": "max", "min": "min", "amin": "min"}
Combine = Callable[[Tensor, str], Tensor]  # a value of this rank and "sum", "max" or "min": that of all ranks
# What changes no element's place besides pointwise operations, by name. torch tags neither these nor the lists.
KEEPS_PLACES = {
    *("copy_", "_to_copy", "fill_", "zero_", "detach", "alias", "lift_fresh", "view", "_unsafe_view", "_reshape_alias"),
    *("unsqueeze", "squeeze", "zeros_like", "empty_like", "ones_like", "full_like"),
    *("new_zeros", "new_empty", "new_ones", "new_full"),
}
SUMS = {
    *("sum", "dot", "vdot", "count_nonzero", "mean", "norm", "linalg_vector_norm"),
    *("any", "all", "max", "amax", "min", "amin"),
}
NOT_BY_ELEMENT = {"_foreach_max", "_foreach_mm", "_foreach_powsum"}  # of the operations on lists, besides norms


class JoinedBySums(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Operations on parts of tensors: element by element on this rank, or over all elements of all ranks.

    What is computed of a part is a part, but for sums, norms, extremes and the like over all elements. Any other
    operation raises.
    """

    def __init__(self, parts: Iterable[tuple[Tensor, Combine]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # By memory, which ``param.data`` and views share; weak, so that temporary tensors can be freed.
        self.parts = {_memory(tensor): combine for tensor, combine in parts}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation; collective if it reduces a part."""
        kwargs = kwargs or {}
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        combines = {id(found): found for each in tensors if (found := self.parts.get(_memory(each))) is not None}
        if not combines:
            return func(*args, **kwargs)
        name = func.overloadpacket.__name__
        bound = arguments_by_name(func, args, kwargs)
        if name.startswith("_foreach_") and name not in NOT_BY_ELEMENT:
            return self._of_lists(name, func, args, kwargs, bound)
        if len(combines) == 1 and name in SUMS and _is_of_all(bound):
            (combine,) = combines.values()
            return _over_all(name, func, args, kwargs, bound, combine)
        is_whole_slice = name == "slice" and (found := func(*args, **kwargs)).shape == bound["self"].shape
        if not (torch.Tag.pointwise in func.tags or name in KEEPS_PLACES or is_whole_slice):
            raise NotImplementedError(f"its step calls {name} on a part of a parameter")
        found = func(*args, **kwargs)
        combine = next(iter(combines.values()))
        self.parts.update((_memory(each), combine) for each in tree_leaves(found) if isinstance(each, Tensor))
        return found

    def _of_lists(self, name: str, func: Any, args: Any, kwargs: Any, bound: dict[str, Any]) -> Any:
        """Run an operation on lists, each place of which may hold parts of other ranks than the next, or no parts."""
        lists = [each for each in bound.values() if isinstance(each, (list, tuple)) and isinstance(each[0], Tensor)]
        known = [[self.parts.get(_memory(each)) for each in place] for place in zip(*lists, strict=True)]
        combines = [next((combine for combine in place if combine is not None), None) for place in known]
        if name == "_foreach_norm":
            norm = functools.partial(_norm, order=bound.get("ord", 2), dtype=bound.get("dtype"))
            return [norm(part, combine=combine or _alone) for part, combine in zip(lists[0], combines, strict=True)]
        found = func(*args, **kwargs)
        changed = zip(found or lists[0], combines, strict=True)  # in place they return None
        self.parts.update((_memory(each), combine) for each, combine in changed if combine is not None)
        return found


def _alone(value: Tensor, how: str) -> Tensor:
    """Combine nothing: the value of a whole tensor."""
    return value


def _memory(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


def _is_of_all(bound: dict[str, Any]) -> bool:
    """Whether a reduction with these arguments is over all elements."""
    dim, ndim = bound.get("dim"), bound["self"].ndim
    dims = [dim] if isinstance(dim, int) else dim
    return not dims or {each % max(ndim, 1) for each in dims} >= {*range(ndim)}


def _over_all(name: str, func: Any, args: Any, kwargs: Any, bound: dict[str, Any], combine: Combine) -> Tensor:
    """Reduce a part, and the results of all ranks. Collective."""
    part, keepdim = bound["self"], bound.get("keepdim", False)
    if name in ("norm", "linalg_vector_norm"):
        order = bound.get("p", bound.get("ord", 2))
        return _norm(part, 2 if order is None else order, combine, bound.get("dtype"), keepdim)
    if name in ("max", "amax", "min", "amin") and not part.numel():
        value = part.new_full([1] * part.ndim if keepdim else [], math.inf)
        return combine(-value if "max" in name else value, name[-3:])
    if name in _EXTREMES:
        return combine(func(*args, **kwargs), _EXTREMES[name])
    # Sums of half-precision values are rounded once, as those of one tensor are.
    wide = tree_map(lambda each: each.float() if isinstance(each, Tensor) and each.dtype in _HALF else each, args)
    found = func(*wide, **kwargs)
    if name == "mean":
        count = found.new_tensor(part.numel())
        own = found * count if part.numel() else torch.zeros_like(found)  # the mean of no elements is NaN
        found = combine(own, "sum") / combine(count, "sum")
    else:
        found = combine(found, "sum")
    return found if part.dtype not in _HALF or bound.get("dtype") is not None else found.to(part.dtype)


def _norm(
    part: Tensor, order: Any, combine: Combine, dtype: torch.dtype | None = None, keepdim: bool = False
) -> Tensor:
    """Return the norm over the parts of all ranks: the ``order``-th root of the sum of the powers. Collective."""
    wanted = part.dtype if dtype is None else dtype
    norm = functools.partial(torch.linalg.vector_norm, part, order, dtype=torch.promote_types(wanted, torch.float32))
    if order == 0:
        found = combine(norm(), "sum")
    elif math.isinf(order):
        empty = part.new_full([], 0 if order > 0 else math.inf, dtype=torch.promote_types(wanted, torch.float32))
        found = combine(norm() if part.numel() else empty, "max" if order > 0 else "min")
    else:
        found = combine(norm().pow(order), "sum").pow(1 / order)
    return (found.reshape([1] * part.ndim) if keepdim else found).to(wanted)


# ---- steps of an optimizer ---------------------------------------------------------------------------------------


@functools.cache
def sums_class(base: Any) -> Any:
    """Return a subclass of the same name that steps on local shards, with sums over all ranks."""
    inner = step_of(base)

    def run(optimizer: Any) -> None:
        # One for all parameters of a mesh, since FSDP2 keeps the gradients of a unit in one memory.
        known: dict[Any, Combine] = {}
        combines = [_combine_of(param, known) for group in optimizer.param_groups for param in group["params"]]
        with local_inside(optimizer, optimizer.flat_state), JoinedBySums(_parts(optimizer, combines)):
            inner(optimizer)

    step = collective_step(inner, run)
    return stepping_class(base, sums_class, step, {"steps_on_whole_matrices": True}, kept="flat_state")


def _parts(optimizer: Any, combines: Iterable[Combine | None]) -> Iterator[tuple[Tensor, Combine]]:
    """Yield the parts that an optimizer holds for its parameters, in order, which have parts on other ranks."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for param, combine in zip(params, combines, strict=True):
        if combine is not None:
            state = [each for each in tree_leaves(optimizer.state.get(param, {})) if isinstance(each, Tensor)]
            parts = [each for each in state if each.shape == param.shape or is_flat(each, param)]
            grad = [] if param.grad is None else [param.grad]
            yield from ((each, combine) for each in (param.detach(), *grad, *parts))


def is_flat(state: Any, param: Tensor) -> bool:
    """Whether state is its parameter's, or a shard's, as a vector."""
    return isinstance(state, Tensor) and state.ndim == 1 != param.ndim and state.numel() == param.numel() > 1


def _combine_of(param: Tensor, known: dict[Any, Combine]) -> Combine | None:
    if not isinstance(param, DTensor):
        return None
    mesh = param.device_mesh
    axes = [axis for axis, place in enumerate(param.placements) if not place.is_replicate() and mesh.size(axis) > 1]
    groups = tuple(mesh.get_group(axis) for axis in axes)
    return known.setdefault(groups, functools.partial(_combine, groups)) if groups else None


def _combine(groups: Sequence[dist.ProcessGroup], value: Tensor, how: str) -> Tensor:
    """Reduce a value over the ranks of all groups. Collective."""
    op = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}[how]
    sent = value.to(collective_device(groups[0]), torch.uint8 if value.dtype == torch.bool else value.dtype, copy=True)
    for group in groups:
        dist.all_reduce(sent, op, group)
    return sent.to(value.device, value.dtype)


# ---- which optimizers can ----------------------------------------------------------------------------------------


def flat_state_if_joined_by_sums(optimizer: Optimizer) -> frozenset[str]:
    """Return the names of the state that an optimizer keeps as vectors. Local, pure.

    Raises:
        ShardkitError: it joins parameters in other ways than by sums and norms.
    """
    try:
        return _flat_state(optimizer)
    except Exception as error:  # whatever a class raises
        name = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
        problem = f"is {name}, whose update of a parameter depends on others: {error}"
        rule = "Ranks step whole matrices by themselves, or shards of all parameters joined by sums and norms"
        fix = "Use an optimizer that steps each parameter by itself, such as Muon, Adafactor or AdamW"
        raise ShardkitError(message("optimizer", problem, rule, fix)) from error


def _flat_state(optimizer: Optimizer) -> frozenset[str]:
    """Step copies with halves of small tensors in two threads, with sums over both; compare them with the whole."""
    groups, exchange = groups_to_try(optimizer), _Exchange()

    @contextmanager
    def joined(copied: Any) -> Iterator[None]:
        combine = functools.partial(exchange.combine, threading.get_ident())
        count = sum(len(group["params"]) for group in copied.param_groups)
        with JoinedBySums(_parts(copied, [combine] * count)):
            yield

    def half(part: Callable[[Tensor], Tensor]) -> Any:
        try:
            return step_copy(optimizer, groups, parts_of(SMALL, part), {}, joined)
        except BaseException:
            exchange.barrier.abort()
            raise

    with undisturbed(groups), ThreadPoolExecutor(2) as pool:
        whole = step_copy(optimizer, groups, parts_of(SMALL, PARTS[0]), {})
        halves = [pool.submit(half, part) for part in PARTS[1:]]
        errors = [error for each in halves if (error := each.exception()) is not None]
        for error in sorted(errors, key=lambda each: isinstance(each, threading.BrokenBarrierError)):
            raise error
        if (found := unequal(whole, halves[0].result(), halves[1].result(), flat=True)) is not None:
            raise ArithmeticError(f"its {found!r} for a tensor differs from that for its halves, with sums over both")
    return frozenset(
        key[-1]
        for key, value in whole.items()
        if isinstance(value, tuple) and isinstance(value[0], Tensor) and is_flat(value[0], torch.empty(value[1]))
    )


class _Exchange:
    """Where two threads combine their values."""

    def __init__(self) -> None:
        self.barrier = threading.Barrier(2, timeout=10)
        self.values: dict[int, Tensor] = {}

    def combine(self, thread: int, value: Tensor, how: str) -> Tensor:
        self.values[thread] = value
        self.barrier.wait()
        both = torch.stack([self.values[each] for each in sorted(self.values)])
        self.barrier.wait()
        as_numbers = both.to(torch.uint8) if both.dtype == torch.bool else both
        found: Tensor = getattr(as_numbers, {"sum": "sum", "max": "amax", "min": "amin"}[how])(0)
        return found.to(value.dtype)
