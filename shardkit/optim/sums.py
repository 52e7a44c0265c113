"""Steps on shards of optimizers that join all parameters by sums and norms, such as Prodigy."""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import Optimizer

from shardkit._torch import TorchDispatchMode, arguments_by_name, has_tag, local_tensor, tree_leaves, tree_map
from shardkit.errors import ShardkitError, message
from shardkit.optim.local import local_inside
from shardkit.optim.owners import Ranks, ranks_of
from shardkit.optim.probe import PARTS, SMALL, parts_of, unequal
from shardkit.optim.replace import collective_step, groups_of, params_of, step_of, stepping_class
from shardkit.optim.trial import groups_to_try, step_copy, undisturbed
from shardkit.ranks import collective_device, together

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
        if not (has_tag(func, "pointwise") or name in KEEPS_PLACES or is_whole_slice):
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
        limits = torch.iinfo(part.dtype) if not part.is_floating_point() else None
        least, most = (limits.min, limits.max) if limits else (-math.inf, math.inf)
        empty = part.new_full([1] * part.ndim if keepdim else [], least if "max" in name else most)
        return combine(empty, name[-3:])
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
        with ExitStack() as stack:
            with together(groups_of(optimizer)):
                combines, state = _combines(optimizer), _sharded_state(optimizer)
                stack.enter_context(local_inside(optimizer, optimizer.flat_state))
                stack.enter_context(JoinedBySums(_parts(optimizer, combines, state)))
            inner(optimizer)

    step = collective_step(inner, run)
    return stepping_class(base, sums_class, step, {"steps_on_whole_matrices": True}, kept="flat_state")


def _parts(
    optimizer: Any, combines: Iterable[Combine | None], state: Iterable[list[Tensor]]
) -> Iterator[tuple[Tensor, Combine]]:
    """Yield what an optimizer holds of each parameter that has parts on other ranks: itself, its gradient and state."""
    for param, combine, parts in zip(params_of(optimizer), combines, state, strict=True):
        if combine is not None:
            grad = [] if param.grad is None else [param.grad]
            yield from ((each, combine) for each in (param.detach(), *grad, *parts))


def _sharded_state(optimizer: Any) -> list[list[Tensor]]:
    """Return the shards of each parameter's state."""
    leaves = [tree_leaves(optimizer.state.get(param, {})) for param in params_of(optimizer)]
    return [[local_tensor(leaf) for leaf in each if isinstance(leaf, DTensor)] for each in leaves]


def is_flat(state: Any, shape: torch.Size) -> bool:
    """Whether state is that of a parameter of this shape as a vector."""
    return isinstance(state, Tensor) and state.ndim == 1 != len(shape) and state.numel() == shape.numel()


def _combines(optimizer: Any) -> list[Combine | None]:
    """Return what reduces over the shards of each parameter, or None for a whole one.

    It is one for all parameters with shards on the same ranks, since FSDP2 keeps the gradients of a unit in one memory.
    """
    every = [ranks_of(param) for param in params_of(optimizer)]
    known = {ranks: _combine_over(ranks) for ranks in every}
    return [known[ranks] for ranks in every]


def _combine_over(ranks: Ranks) -> Combine | None:
    if ranks.mesh is None or ranks.axis is None:
        return None
    return functools.partial(_combine, ranks.mesh.get_group(ranks.axis))


def _combine(group: dist.ProcessGroup, value: Tensor, how: str) -> Tensor:
    """Reduce a value over the ranks of a group. Collective."""
    device = collective_device(group)
    if how == "sum":
        sent = value.to(device, copy=True)
        dist.all_reduce(sent, group=group)
        return sent.to(value.device)
    # As maxima of the value and of whether it is NaN, which backends may lose.
    sign = 1 if how == "max" else -1
    as_number = sign * value.to(device, torch.float64 if value.is_floating_point() else torch.int64)
    is_nan = as_number != as_number
    sent = torch.stack([as_number.masked_fill(is_nan, 0), is_nan.to(as_number.dtype)])
    sent[0][is_nan] = -math.inf if value.is_floating_point() else 0
    dist.all_reduce(sent, dist.ReduceOp.MAX, group)
    found = torch.where(sent[1] > 0, math.nan, sign * sent[0]) if value.is_floating_point() else sign * sent[0]
    return found.to(value.device, value.dtype)


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
    matrix = torch.empty(2, 2, device="meta")  # parameters that are added later may be matrices
    groups = [{**group, "params": [*group["params"], matrix]} for group in groups_to_try(optimizer)]
    exchange = _Exchange()

    @contextmanager
    def joined(copied: Any) -> Iterator[None]:
        combine = functools.partial(exchange.combine, threading.get_ident())
        params = params_of(copied)
        leaves = [[each for each in tree_leaves(copied.state.get(p, {})) if isinstance(each, Tensor)] for p in params]
        state = [
            [each for each in held if each.shape == param.shape or is_flat(each, param.shape)]
            for held, param in zip(leaves, params, strict=True)
        ]
        with JoinedBySums(_parts(copied, [combine] * len(params), state)):
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
        if isinstance(value, tuple) and isinstance(value[0], Tensor) and is_flat(value[0], value[1])
    )


class _Exchange:
    """Where two threads combine their values."""

    def __init__(self) -> None:
        self.barrier = threading.Barrier(2, timeout=60)
        self.values: dict[int, Tensor] = {}

    def combine(self, thread: int, value: Tensor, how: str) -> Tensor:
        self.values[thread] = value
        self.barrier.wait()
        both = torch.stack([self.values[each] for each in sorted(self.values)])
        self.barrier.wait()
        as_numbers = both.to(torch.uint8) if both.dtype == torch.bool else both
        found: Tensor = getattr(as_numbers, {"sum": "sum", "max": "amax", "min": "amin"}[how])(0)
        return found.to(value.dtype)
