"""Optimizers that need whole matrices, such as Muon: each matrix is stepped by one rank, its owner."""

from __future__ import annotations

import functools
import pickle
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer

from shardkit._torch import is_wrapper, local_tensor, note_step, tree_leaves, tree_map
from shardkit.errors import ShardkitError, message
from shardkit.optim.numbers import Changes, Numbers
from shardkit.optim.owners import Bucket, Cut, Matrix, Ranks, buckets, cut_of
from shardkit.optim.replace import check_replaceable, replace_class, step_of, stepping_class
from shardkit.ranks import agree, all_gather_bytes, collective_device, together
from shardkit.shards import around
from shardkit.state.wire import Parcel, copy_into, exchange

AnyOptimizer = TypeVar("AnyOptimizer", bound=Optimizer)


def step_on_whole_matrices(optimizer: AnyOptimizer, *, slices: bool = False) -> AnyOptimizer:
    """Step each parameter whole, on one rank that owns it for the step. In place, local, once.

    For optimizers whose update of an element needs the rest of its matrix: Muon, Shampoo, SOAP, CAME, Adafactor, LAMB.
    The results are the bits of the same step on the unsharded parameters and gradients, in any world.

    After this call ``step()`` is **collective** over the shard axis of each parameter's mesh. Owners are balanced by
    cost, ``numel * min(rows, columns)``, so each of W ranks does 1/W of the work. For each bucket of 64 MiB on a rank,
    ranks send their shards of parameter, gradient and state to the owners in one exchange, and receive parameter and
    state in another. So a rank sends and receives the bytes of its own shards, and holds whole parameters, gradients
    and state as large as its shards of a bucket. On an HSDP mesh each replica does the same.

    Optimizers that join all parameters by sums and norms, such as Prodigy and D-Adaptation, step their local shards
    instead. Each sum, norm or extreme over a whole tensor is an all-reduce of one number over its shards. The results
    are those of the unsharded step up to the order of the sums, and the same on all ranks.

    Between steps nothing changes: ``param_groups`` and ``state`` hold sharded DTensors, so state dicts, checkpoints and
    loads at another world work as before. State of another shape than its parameter is sharded on its first dim.

    Args:
        optimizer: any ``torch.optim.Optimizer`` that steps each parameter by itself, or joins them by sums. Copies of
            it step small tensors together, apart and in halves, and the results must agree. Numbers in its groups and
            attributes, such as a count of steps, must change in the same way whichever parameters it steps.
        slices: step a parameter of three dims, such as the experts of a layer, as one matrix for each index of the
            first dim. Muon's constructor takes matrices only: use ``optimizer.add_param_group`` for such parameters.

    Returns:
        The same object. Its class becomes a subclass of the same name.

    Raises:
        ShardkitError: it is not a ``torch.optim.Optimizer``, joins parameters otherwise, cannot be tried, already
            steps on local shards, or its ``step`` was replaced. Nothing was changed. In ``step()``, on every rank:
            a parameter is sharded on two axes, the step of an owner failed, or owners disagree on a number.

    Example:
        >>> optimizer = step_on_whole_matrices(torch.optim.Muon(matrices, lr=0.02))
    """
    check_replaceable(optimizer, "step_on_whole_matrices")
    if getattr(type(optimizer), "steps_on_whole_matrices", False):
        return optimizer
    return replace_class(optimizer, _whole_class, slices=slices)


@functools.cache
def _whole_class(base: Any) -> Any:
    inner = step_of(base)

    @functools.wraps(inner)
    def step(self: Any, closure: Callable[[], Any] | None = None) -> Any:
        note_step(self)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        _agree_on_gradients(self)
        with torch.no_grad():
            numbers = Numbers(self)
            for bucket in buckets(self):
                _step_bucket(inner, self, bucket, numbers)
            numbers.write()
        return loss

    return stepping_class(base, _whole_class, step, {"steps_on_whole_matrices": True}, kept="slices")


# ---- one bucket --------------------------------------------------------------------------------------------------


def _agree_on_gradients(optimizer: Any) -> None:
    """Raise on every rank unless all have the same parameters' gradients. Collective."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    meshes = dict.fromkeys(param.device_mesh for param in params if isinstance(param, DTensor))
    groups = list(dict.fromkeys(group for mesh in meshes for group in mesh.get_all_groups() if group.size() > 1))
    numbers = [number for number, param in enumerate(params) if param.grad is not None]
    fix = "Run the same backward on every rank before step()"
    agree({"which parameters have gradients, by number": numbers}, groups, "optimizer.step", fix=fix)


def _step_bucket(inner: Callable[..., Any], optimizer: Any, bucket: Bucket, numbers: Numbers) -> None:
    """Gather to the owners, step, and write what they computed. Collective over the bucket's ranks."""
    ranks, mesh = bucket.ranks, bucket.ranks.mesh
    groups = [group for group in mesh.get_all_groups() if group.size() > 1] if mesh is not None else []
    _gather(optimizer, bucket)
    mine = [matrix for matrix in bucket.matrices if matrix.owner == ranks.here]
    with together(groups):
        changes = _run(inner, optimizer, mine, numbers)
        described = [tree_map(_described, matrix.state) for matrix in mine]
    of_ranks = [(described, changes)]
    if ranks.axis is not None and mesh is not None:
        gathered = all_gather_bytes(pickle.dumps(of_ranks[0]), mesh.get_group(ranks.axis))
        of_ranks = [pickle.loads(each) for each in gathered]
    for _, changes in of_ranks:
        numbers.add(changes, (matrix.group for matrix in bucket.matrices))
    owned = [iter(each) for each, _ in of_ranks]
    _scatter(optimizer, bucket, {matrix: next(owned[matrix.owner]) for matrix in bucket.matrices})


def _gather(optimizer: Any, bucket: Bucket) -> None:
    """Fill the owners' whole parameters, gradients and state."""
    ranks, here = bucket.ranks, bucket.ranks.here
    out, into = defaultdict[int, list[Any]](list), defaultdict[int, list[Any]](list)
    for matrix in bucket.matrices:

        def whole_of(stored: Any, matrix: Matrix = matrix) -> Any:
            if not isinstance(stored, Tensor) or not stored.ndim:
                return stored
            cut = cut_of(stored, ranks, matrix.index)
            part = cut.of_stored(_local(stored), here)
            if matrix.owner != here:
                out[matrix.owner] += [(part, part.dtype)] * (cut.dim is not None)
                return None
            of_slice = slice(matrix.index is not None, None)
            shape, strides = stored.shape[of_slice], stored.stride()[of_slice]
            whole = torch.empty_strided(shape, strides, dtype=stored.dtype, device=part.device)
            copy_into(cut.of_whole(whole, here), part)
            for peer in range(ranks.size) if cut.dim is not None else ():
                into[peer] += [(cut.of_whole(whole, peer), whole.dtype)] * (peer != here)
            return whole

        matrix.whole, grad = whole_of(matrix.param), whole_of(_grad_of(matrix.param))
        matrix.state = tree_map(whole_of, _by_key(optimizer.state.get(matrix.param, {})))
        if matrix.owner == here:
            matrix.whole = nn.Parameter(matrix.whole)
            matrix.whole.grad = grad
    _exchange(bucket, out, into)


def _exchange(bucket: Bucket, out: Mapping[int, Parcel], into: Mapping[int, Parcel]) -> None:
    ranks = bucket.ranks
    if ranks.axis is not None and ranks.mesh is not None:
        group, device = ranks.mesh.get_group(ranks.axis), _local(bucket.matrices[0].param).device
        exchange(out, into, group, device if device.type != "cpu" else torch.device(collective_device(group)))


def _run(inner: Callable[..., Any], optimizer: Any, mine: list[Matrix], numbers: Numbers) -> Changes:
    """Step the whole matrices of this rank with the optimizer's options; return the numbers it changed. Local."""
    numbers.begin()
    try:
        for number, group in enumerate(optimizer.param_groups):
            group["params"] = [matrix.whole for matrix in mine if matrix.group == number]
        optimizer.state.update({matrix.whole: matrix.state for matrix in mine if matrix.state})
        inner(optimizer)
        for matrix in mine:
            matrix.state = _by_key(optimizer.state.get(matrix.whole, {}))
    finally:
        changes = numbers.end()
    return changes


def _scatter(optimizer: Any, bucket: Bucket, found: dict[Matrix, Any]) -> None:
    """Write parameters and state of all ranks from the owners' results."""
    ranks, here = bucket.ranks, bucket.ranks.here
    out, into = defaultdict[int, list[Any]](list), defaultdict[int, list[Any]](list)
    for matrix in bucket.matrices:

        def write(stored: Tensor, whole: Tensor | None, matrix: Matrix = matrix) -> None:
            cut = cut_of(stored, ranks, matrix.index)
            part = cut.of_stored(_local(stored), here)
            if whole is None:
                into[matrix.owner].append((part, part.dtype))
                return
            copy_into(part, cut.of_whole(whole, here))
            for peer in range(ranks.size):
                out[peer] += [(cut.of_whole(whole, peer), whole.dtype)] * (peer != here)

        is_owner = matrix.owner == here
        write(matrix.param, matrix.whole.detach() if is_owner else None)
        rooms = tree_leaves(_rooms(optimizer, matrix, ranks, found[matrix]))
        for room, whole in zip(rooms, tree_leaves(matrix.state) if is_owner else [None] * len(rooms), strict=True):
            if isinstance(room, Tensor) and room.ndim:
                write(room, whole)
    _exchange(bucket, out, into)
    for matrix in bucket.matrices:
        matrix.whole = matrix.state = None


# ---- state between steps -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Described:
    """A tensor of an owner's state; one without dims comes with its value."""

    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    on_cpu: bool
    value: Any = None


def _described(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    if is_wrapper(leaf):
        rule = "State is sent and stored in parts, which a tensor subclass may not have"
        problem, fix = f"its state is of {type(leaf).__name__}", "Step it on DTensors, as it is"
        raise ShardkitError(message("optimizer", problem, rule, fix))
    strides = torch.empty_like(leaf, device="meta").stride()  # dense, in the order of the leaf's
    return _Described(leaf.shape, strides, leaf.dtype, leaf.device.type == "cpu", None if leaf.ndim else leaf.item())


def _by_key(state: Mapping[Any, Any]) -> dict[Any, Any]:
    return {key: state[key] for key in sorted(state, key=str)}  # in one order on all ranks


def _rooms(optimizer: Any, matrix: Matrix, ranks: Ranks, described: Any) -> Any:
    """Give a parameter state of the described form, in the memory that it has where that fits, and return it. Local."""
    old, new = tree_leaves(_by_key(optimizer.state.get(matrix.param, {}))), tree_leaves(described)
    before = iter(old if len(old) == len(new) else [None] * len(new))

    def room(leaf: Any) -> Any:
        held, home = next(before), _local(matrix.param).device
        if not isinstance(leaf, _Described):
            return leaf
        device = torch.device("cpu") if leaf.on_cpu else home
        if not leaf.shape:
            return torch.tensor(leaf.value, dtype=leaf.dtype, device=device)
        return _room(matrix, ranks, leaf, held, device)

    made = tree_map(room, described)
    if old or new:
        optimizer.state[matrix.param] = made
    return made


def _room(matrix: Matrix, ranks: Ranks, leaf: _Described, held: Any, device: torch.device) -> Tensor:
    param = matrix.param
    shape = leaf.shape if matrix.index is None else torch.Size([len(param), *leaf.shape])
    if matrix.index is not None and shape != param.shape:
        problem = f"state of shape {tuple(leaf.shape)} of a slice of a parameter of shape {tuple(param.shape)}"
        rule, fix = "State of slices has their shape, so that it is stored as one tensor", "Pass slices=False"
        raise ShardkitError(message("optimizer", problem, rule, fix))
    strides = leaf.strides if matrix.index is None else (leaf.shape.numel(), *leaf.strides)
    own = param.placements if isinstance(param, DTensor) else ()
    wanted = tuple(own if shape == param.shape else [Shard(0) if each.is_shard() else each for each in own])
    fits = isinstance(held, Tensor) and (held.shape, held.stride(), held.dtype) == (shape, strides, leaf.dtype)
    if fits and getattr(held, "placements", ()) == wanted:
        return held  # type: ignore[no-any-return]
    if not isinstance(param, DTensor):
        return torch.empty_strided(shape, strides, dtype=leaf.dtype, device=device)
    dim = None if ranks.axis is None else wanted[ranks.axis].dim  # type: ignore[attr-defined]
    like = torch.empty(shape, device="meta")
    part = Cut(dim, 0 if dim is None else shape[dim], ranks.size).of_whole(like, ranks.here)
    local = torch.empty(part.shape, dtype=leaf.dtype, device=device)
    # With the strides of the whole: matrix products of another memory order round differently.
    return around(local, param.device_mesh, wanted, shape, strides)


def _local(tensor: Tensor) -> Tensor:
    return local_tensor(tensor) if isinstance(tensor, DTensor) else tensor.detach()


def _grad_of(param: Tensor) -> Tensor:
    """Return the gradient, placed like the parameter. Collective if it is not yet."""
    grad = param.grad
    assert grad is not None
    is_placed = not isinstance(param, DTensor) or not isinstance(grad, DTensor) or grad.placements == param.placements
    return grad if is_placed else grad.redistribute(placements=param.placements)  # type: ignore[attr-defined]
