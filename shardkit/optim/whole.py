"""Optimizers that need whole matrices, such as Muon: each matrix is stepped by one rank, its
owner.
"""

from __future__ import annotations

import functools
import math
import pickle
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from shardkit._torch import is_wrapper
from shardkit._torch.dispatch import tree_leaves, tree_map
from shardkit._torch.steps import note_step
from shardkit.boxes import Batch, ModelGroup, copy_into, holders, wire_device
from shardkit.errors import ShardkitError
from shardkit.optim.local import (
    AnyOptimizer,
    check_replaceable,
    hooked,
    replace_class,
    step_of,
    subclass,
)
from shardkit.ranks import all_gather_bytes, own_rank, raise_on_all_ranks
from shardkit.shards import Box, cut, dtensor_from_local, local_box, local_value

BUCKET_BYTES = 1 << 26  # of parameters, on each rank
# by place, a group's index or one of the two others, and name
_Numbers = dict[tuple[Any, Any], Any]
ATTRIBUTES, STATE = "an attribute", "optimizer.state"


def step_on_whole_matrices(optimizer: AnyOptimizer, *, slices: bool = False) -> AnyOptimizer:
    """Step each parameter whole, on one rank that owns it for the step. In place, local, once.

    For optimizers whose update of an element needs the rest of its matrix: Muon, Shampoo, SOAP,
    CAME, Adafactor, LAMB. The results are the bits of the same step on the unsharded parameters and
    gradients, in any world.

    After this call ``step()`` is **collective** over the ranks that hold each parameter, and the
    same parameters must have gradients on all of them. Owners are balanced by cost, ``numel *
    min(rows, columns)``. For each bucket of 64 MiB on a rank, ranks send their shards of parameter,
    gradient and state to the owners in one exchange, and receive parameter and state in another. So
    a rank sends and receives the bytes of its own shards, and holds whole tensors as large as a
    bucket. On an HSDP mesh each replica does the same.

    Between steps ``param_groups`` and ``state`` hold sharded DTensors, so state dicts and
    checkpoints work as before. State of another shape than its parameter is sharded on its first
    dim.

    Args:
        optimizer: any ``torch.optim.Optimizer`` that steps each parameter by itself, which this
            call promises. Numbers in its groups and attributes, such as a count of steps, must not
            depend on which parameters it steps; the step raises if they do, as with Prodigy and
            D-Adaptation.
        slices: step a parameter of three dims, such as the experts of a layer, as one matrix for
            each index of the first dim. Muon's constructor takes matrices only: use
            ``optimizer.add_param_group`` for such parameters.

    Returns:
        The same object. Its class becomes a subclass of the same name.

    Raises:
        ShardkitError: it is not a ``torch.optim.Optimizer``, wraps another one, steps on local
            shards, or has a replaced ``step``; nothing was changed. In ``step()``, on every rank:
            the step of an owner failed, owners disagree on a number, or state is of a tensor
            subclass.

    Examples:
        >>> optimizer = step_on_whole_matrices(torch.optim.Muon(matrices, lr=0.02))
    """
    check_replaceable(optimizer, "step_on_whole_matrices")
    if getattr(type(optimizer), "steps_on_whole_matrices", False):
        return optimizer
    return replace_class(optimizer, functools.partial(_whole_class, slices=slices))


@functools.cache
def _whole_class(base: Any, slices: bool) -> Any:
    inner = step_of(base)

    @functools.wraps(inner)
    def step(self: Any, closure: Callable[[], Any] | None = None) -> Any:
        note_step(self)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            before, changed = _numbers_of(self), _Numbers()
            for bucket in _buckets(self):
                _step_bucket(inner, self, bucket, before, changed)
            _set_numbers(self, changed)
        return loss

    return subclass(base, {"steps_on_whole_matrices": True, "slices": slices, "step": hooked(step)})


# ---- which rank owns what ------------------------------------------------------------------------


@dataclass(eq=False)
class _Matrix:
    """A parameter, or a slice of one along its first dim, in one step."""

    param: Tensor
    group: int
    index: int | None
    owner: int = 0  # a global rank
    whole: Any = None  # on the owner: the parameter to step
    state: Any = None  # on the owner: its state

    def cost(self) -> int:
        shape = self.param.shape if self.index is None else self.param.shape[1:]
        return math.prod(shape) * min(shape[-2:], default=1)

    def holders_of(self, stored: Tensor) -> list[tuple[int, Box]]:
        """Return the ranks that hold parts of this matrix of a stored tensor, with their boxes in
        the matrix.
        """
        if self.index is None:
            return _holders(stored)
        with_index = []
        for rank, box in _holders(stored):
            start, length = box[0]
            if start <= self.index < start + length:
                with_index.append((rank, box[1:]))
        return with_index

    def part_of(self, stored: Tensor) -> Tensor:
        """Return the part of this matrix that this rank holds of a stored tensor, as a view."""
        own = local_value(stored)
        if self.index is None:
            return own
        start = local_box(stored)[0][0] if isinstance(stored, DTensor) else 0
        return own[self.index - start]


@dataclass
class _Bucket:
    ranks: tuple[int, ...]  # that hold the parameters
    matrices: list[_Matrix] = field(default_factory=list)
    bytes: int = 0


def _holders(tensor: Tensor) -> list[tuple[int, Box]]:
    """Return the ranks of this one's replica that hold a tensor, with their boxes; this rank alone
    if it is plain.
    """
    if isinstance(tensor, DTensor):
        return holders(tensor, tensor.device_mesh.get_coordinate())
    return [(own_rank(), tuple((0, size) for size in tensor.shape))]


def _buckets(optimizer: Any) -> list[_Bucket]:
    """Return the matrices that have a gradient, with owners; the same on every rank. Local."""
    buckets: list[_Bucket] = []
    filling: dict[tuple[int, ...], _Bucket] = {}
    for number, group in enumerate(optimizer.param_groups):
        for param in group["params"]:
            if param.grad is None:
                continue
            ranks = tuple(rank for rank, _ in _holders(param))
            bucket = filling.get(ranks)
            if bucket is None or bucket.bytes > BUCKET_BYTES * len(ranks):
                bucket = filling[ranks] = _Bucket(ranks)
                buckets.append(bucket)
            bucket.bytes += param.numel() * param.element_size()
            is_sliced = optimizer.slices and param.ndim == 3
            for index in range(len(param)) if is_sliced else [None]:
                bucket.matrices.append(_Matrix(param, number, index))
    # each matrix, the most costly first, goes to the rank with the least work so far
    work = {ranks: dict.fromkeys(ranks, 0) for ranks in filling}
    for bucket in buckets:
        by_rank = work[bucket.ranks]
        for matrix in sorted(bucket.matrices, key=_Matrix.cost, reverse=True):
            matrix.owner = min(by_rank, key=by_rank.__getitem__)
            by_rank[matrix.owner] += matrix.cost()
    return buckets


def _group_of(bucket: _Bucket) -> dist.ProcessGroup | None:
    """Return the process group of a bucket's ranks. Collective where several axes of the mesh
    shard.
    """
    if len(bucket.ranks) == 1:
        return None
    param: Any = bucket.matrices[0].param
    mesh = param.device_mesh
    axes = []
    for axis, placement in enumerate(param.placements):
        if hasattr(placement, "dim") and mesh.size(axis) > 1:
            axes.append(axis)
    return mesh.get_group(axes[0]) if len(axes) == 1 else ModelGroup(bucket.ranks, None).connect()


# ---- one bucket ----------------------------------------------------------------------------------


def _step_bucket(
    inner: Callable[..., Any], optimizer: Any, bucket: _Bucket, before: _Numbers, changed: _Numbers
) -> None:
    """Gather to the owners, step, and write what they computed. Collective over the bucket's
    ranks.
    """
    group, here = _group_of(bucket), own_rank()
    device = wire_device(bucket.matrices[0].param, group)
    # 1. Owners get their whole parameters, gradients and state.
    batch = Batch(group, device)
    for matrix in bucket.matrices:
        _gather(optimizer, matrix, batch)
    batch.run()
    # 2. They step, and tell all ranks the form of their state, and the numbers that changed.
    owned = [matrix for matrix in bucket.matrices if matrix.owner == here]
    with raise_on_all_ranks([group] if group is not None else []):
        changes = _step_owned(inner, optimizer, owned, before)
        told = [tree_map(_described, matrix.state) for matrix in owned], changes
    by_rank = {here: told}
    if group is not None:
        ranks = dist.get_process_group_ranks(group)
        packed = all_gather_bytes(pickle.dumps(told), group)
        by_rank = {rank: pickle.loads(data) for rank, data in zip(ranks, packed, strict=True)}
    for _, changes in by_rank.values():
        _add_numbers(changed, changes)
    states = {rank: iter(described) for rank, (described, _) in by_rank.items()}
    # 3. Parameters and state go to the ranks that hold parts of them.
    batch = Batch(group, device)
    for matrix in bucket.matrices:
        _scatter(optimizer, matrix, next(states[matrix.owner]), batch)
    batch.run()
    for matrix in bucket.matrices:
        matrix.whole = matrix.state = None


def _gather(optimizer: Any, matrix: _Matrix, batch: Batch) -> None:
    """Add messages that fill the owner's whole parameter, gradient and state."""
    param: Any = matrix.param
    grad = param.grad
    if isinstance(grad, DTensor) and grad.placements != param.placements:
        grad = grad.redistribute(placements=param.placements)
    whole = _whole_of(param, matrix, batch)
    whole_grad = _whole_of(grad, matrix, batch)
    state = dict(optimizer.state.get(param, {}))
    matrix.state = tree_map(lambda stored: _whole_of(stored, matrix, batch), state)
    if whole is not None:
        matrix.whole = nn.Parameter(whole)
        matrix.whole.grad = whole_grad


def _whole_of(stored: Any, matrix: _Matrix, batch: Batch) -> Any:
    """Return what the owner gets of a stored value: a tensor that is filled when the batch has run,
    or a copy. None on other ranks.
    """
    here = own_rank()
    if not isinstance(stored, Tensor) or not stored.ndim:
        return stored.clone() if isinstance(stored, Tensor) else stored  # slices share it
    if matrix.owner != here:
        # not what the owner has too, as replicas do
        is_on_owner = matrix.owner in dict(_holders(stored))
        if is_on_owner and here in dict(matrix.holders_of(stored)):
            batch.send(matrix.part_of(stored), stored.dtype, matrix.owner)
        return None
    first = 0 if matrix.index is None else 1
    shape, strides = stored.shape[first:], stored.stride()[first:]
    device = local_value(stored).device
    whole = torch.empty_strided(shape, strides, dtype=stored.dtype, device=device)
    for rank, box in matrix.holders_of(stored):
        if rank == here:
            copy_into(cut(whole, box), matrix.part_of(stored))
        else:
            batch.receive(cut(whole, box), stored.dtype, rank)
    return whole


def _step_owned(
    inner: Callable[..., Any], optimizer: Any, owned: list[_Matrix], numbers: _Numbers
) -> _Numbers:
    """Step the whole matrices of this rank; return the numbers it changed, and set them back.
    Local.
    """
    params, state = [group["params"] for group in optimizer.param_groups], optimizer.state
    whole_state = defaultdict[Any, Any](dict)
    for key, value in state.items():
        if not isinstance(key, Tensor):
            whole_state[key] = value
    for matrix in owned:
        if matrix.state:
            whole_state[matrix.whole] = matrix.state
    try:
        optimizer.state = whole_state
        for number, group in enumerate(optimizer.param_groups):
            group["params"] = [matrix.whole for matrix in owned if matrix.group == number]
        inner(optimizer)
        for matrix in owned:
            matrix.state = optimizer.state.get(matrix.whole, {})
    finally:
        changes: _Numbers = {}
        for place, value in _numbers_of(optimizer).items():
            if not _same(numbers.get(place), value):
                changes[place] = value
        for place, key in changes.keys() - numbers.keys():
            del _places(optimizer)[place][key]
        _set_numbers(optimizer, numbers)
        for group, own in zip(optimizer.param_groups, params, strict=True):
            group["params"] = own
        optimizer.state = state
    return changes


def _scatter(optimizer: Any, matrix: _Matrix, described: Any, batch: Batch) -> None:
    """Add messages that write the owner's parameter and state on all ranks that hold them."""
    here = own_rank()
    targets = [matrix.param, *tree_leaves(_allocate(optimizer, matrix, described))]
    wholes: list[Any] = [None] * len(targets)
    if matrix.owner == here:
        wholes = [matrix.whole.detach(), *tree_leaves(matrix.state)]
    for stored, whole in zip(targets, wholes, strict=True):
        if not isinstance(stored, Tensor) or not stored.ndim:
            continue
        for rank, box in matrix.holders_of(stored):
            if matrix.owner != here:
                if rank == here:
                    batch.receive(matrix.part_of(stored), stored.dtype, matrix.owner)
            elif rank == here:
                copy_into(matrix.part_of(stored), cut(whole, box))
            else:
                batch.send(cut(whole, box), stored.dtype, rank)


# ---- state between steps -------------------------------------------------------------------------


@dataclass(frozen=True)  # a leaf of torch's trees, unlike a named tuple
class _Described:
    """A tensor of an owner's state; one without dims comes with its value."""

    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    on_cpu: bool
    value: Any


def _described(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    if is_wrapper(leaf):
        raise ShardkitError(
            f"optimizer has state of {type(leaf).__name__}, which has no parts to send. Step it on "
            "DTensors, as it is."
        )
    strides = torch.empty_like(leaf, device="meta").stride()  # dense, in the order of the leaf's
    value = None if leaf.ndim else leaf.item()
    return _Described(leaf.shape, strides, leaf.dtype, leaf.device.type == "cpu", value)


def _allocate(optimizer: Any, matrix: _Matrix, described: Any) -> Any:
    """Give a parameter state of the described form, in the memory that it has where that fits;
    return it. Local.
    """
    old = tree_leaves(dict(optimizer.state.get(matrix.param, {})))
    number = len(tree_leaves(described))
    leaves = iter(old if len(old) == number else [None] * number)
    state = tree_map(lambda leaf: _stored(leaf, next(leaves), matrix), described)
    if old or number:
        optimizer.state[matrix.param] = state
    return state


def _stored(leaf: Any, old: Any, matrix: _Matrix) -> Any:
    """Return the sharded tensor for one of an owner's, the old one if it fits; other values as they
    are.
    """
    if not isinstance(leaf, _Described):
        return leaf
    param, is_sliced = matrix.param, matrix.index is not None
    device = torch.device("cpu") if leaf.on_cpu else local_value(param).device
    if not leaf.shape:
        return torch.tensor(leaf.value, dtype=leaf.dtype, device=device)
    shape, strides = leaf.shape, leaf.strides
    if is_sliced:
        shape, strides = torch.Size([len(param), *shape]), (shape.numel(), *strides)
    if is_sliced and shape != param.shape:
        raise ShardkitError(
            f"optimizer has state of shape {tuple(leaf.shape)} for a slice of a parameter of "
            f"shape {tuple(param.shape)}. State of slices must have their shape, so that it is "
            "stored as one tensor. Pass slices=False."
        )
    placements: tuple[Any, ...] = ()
    if isinstance(param, DTensor):
        placements = param.placements
    if shape != param.shape:
        placements = tuple(Shard(0) if hasattr(place, "dim") else place for place in placements)
    if isinstance(old, Tensor):
        old_form = old.shape, old.stride(), old.dtype, getattr(old, "placements", ())
        if old_form == (shape, strides, leaf.dtype, placements):
            return old
    if not isinstance(param, DTensor):
        return torch.empty_strided(shape, strides, dtype=leaf.dtype, device=device)
    # With the strides of the whole: matrix products of another memory order round differently.
    mesh = param.device_mesh
    like = dtensor_from_local(torch.empty(0, device="meta"), mesh, placements, shape, strides)
    lengths = [length for _, length in local_box(like)]
    local = torch.empty(lengths, dtype=leaf.dtype, device=device)
    return dtensor_from_local(local, mesh, placements, shape, strides)


# ---- numbers that a step changes besides parameters and their state, such as a count of steps ----


def _add_numbers(changed: _Numbers, changes: _Numbers) -> None:
    """Add what a part of the step changed, on this rank or another: each number once, to one
    value.
    """
    for (place, key), value in changes.items():
        known = changed.setdefault((place, key), value)
        if not _same(known, value):
            where = f"group {place}" if isinstance(place, int) else place
            raise ShardkitError(
                f"optimizer changed {key!r} in {where} to {known} for some parameters, to {value} "
                "for others. Each rank steps some of the parameters, and such a number must not "
                "depend on which. Step it on DTensors as it is, which prodigyopt's Prodigy can, or "
                "keep it in optimizer.state[param]."
            )


def _places(optimizer: Any) -> dict[Any, dict[Any, Any]]:
    """Return the dictionaries that hold numbers."""
    groups = dict(enumerate(optimizer.param_groups))
    return {ATTRIBUTES: vars(optimizer), STATE: optimizer.state, **groups}


def _numbers_of(optimizer: Any) -> _Numbers:
    numbers: _Numbers = {}
    for place, values in _places(optimizer).items():
        for key, value in values.items():
            if isinstance(value, Tensor) and value.numel() == 1:
                numbers[place, key] = value.detach().cpu().clone()
            elif isinstance(value, (int, float)):
                numbers[place, key] = value
    return numbers


def _same(a: Any, b: Any) -> bool:
    return bool(a == b) or bool(a != a and b != b)  # NaN


@torch.no_grad()
def _set_numbers(optimizer: Any, numbers: _Numbers) -> None:
    places = _places(optimizer)
    for (place, key), value in numbers.items():
        old = places[place].get(key)
        if isinstance(old, Tensor):
            old.copy_(value)
        else:
            places[place][key] = value
