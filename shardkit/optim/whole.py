"""Optimizers that need whole matrices, such as Muon: each matrix is stepped by one rank, its owner."""

from __future__ import annotations

import functools
import math
import pickle
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer

from shardkit._torch import counts_for_schedulers, is_wrapper, local_tensor, note_step, tree_leaves, tree_map
from shardkit.errors import ShardkitError, listing, message
from shardkit.optim.local import hooked, subclass
from shardkit.optim.probe import check_separable
from shardkit.ranks import all_gather_bytes, collective_device, together
from shardkit.shards import around
from shardkit.state.wire import Parcel, copy_into, exchange

BUCKET_BYTES = 1 << 26  # of parameters, on each rank
AnyOptimizer = TypeVar("AnyOptimizer", bound=Optimizer)


def step_on_whole_matrices(optimizer: AnyOptimizer, *, slices: bool = False) -> AnyOptimizer:
    """Step each parameter whole, on one rank that owns it for the step. In place, local, once.

    For optimizers whose update of an element needs the rest of its matrix: Muon, Adafactor, LAMB, Shampoo, SOAP. The
    results are the bits of the same step on the unsharded parameters and gradients, in any world.

    After this call ``step()`` is **collective** over the shard axis of each parameter's mesh. Owners are balanced by
    cost, ``numel * min(rows, columns)``, so each of W ranks does 1/W of the work. For each bucket of 64 MiB on a rank,
    ranks send their shards of parameter, gradient and state to the owners in one exchange, and receive parameter and
    state in another. So a rank sends and receives the bytes of its own shards, and holds whole parameters, gradients
    and state as large as its shards of a bucket. On an HSDP mesh each replica does the same.

    Between steps nothing changes: ``param_groups`` and ``state`` hold sharded DTensors, so state dicts, checkpoints and
    loads at another world work as before. State of another shape than its parameter is sharded on its first dim.

    Args:
        optimizer: any ``torch.optim.Optimizer`` that steps each parameter by itself, with no state in its groups.
            Copies of it step small tensors together and apart, and the results must agree.
        slices: step a parameter of three dims, such as the experts of a layer, as one matrix for each index of the
            first dim. Muon's constructor takes matrices only: use ``optimizer.add_param_group`` for such parameters.

    Returns:
        The same object. Its class becomes a subclass of the same name.

    Raises:
        ShardkitError: it is not a ``torch.optim.Optimizer``, steps parameters together, cannot be tried, already
            steps on local shards, or its ``step`` was replaced. Nothing was changed. In ``step()``, on every rank:
            a parameter is sharded on two axes, or the step of an owner failed.

    Example:
        >>> optimizer = step_on_whole_matrices(torch.optim.Muon(matrices, lr=0.02))
    """
    if not isinstance(optimizer, Optimizer):
        rule, fix = "It changes the class of a torch.optim.Optimizer", "Pass the optimizer that it wraps"
        raise ShardkitError(message("optimizer", f"is a {type(optimizer).__name__}", rule, fix))
    if getattr(type(optimizer), "steps_on_whole_matrices", False):
        return optimizer
    if getattr(type(optimizer), "steps_on_local_shards", False):
        rule, fix = "An optimizer steps in one way", "Build another one"
        raise ShardkitError(message("optimizer", "steps on local shards already", rule, fix))
    if "step" in vars(optimizer) and not counts_for_schedulers(optimizer.step):
        rule, fix = "The step of the class is replaced, which this one hides", "Call it before replacing optimizer.step"
        raise ShardkitError(message("optimizer.step", f"is {vars(optimizer)['step']!r}", rule, fix))
    check_separable(optimizer, slices)
    vars(optimizer).pop("step", None)  # an LR scheduler's wrapper, which would go past ours
    base: Any = type(optimizer)
    optimizer.__class__ = _whole_class(base)
    vars(optimizer)["slices"] = slices
    return optimizer


@functools.cache
def _whole_class(base: Any) -> Any:
    inner = getattr(base.step, "__wrapped__", base.step) if getattr(base.step, "hooked", False) else base.step

    @functools.wraps(inner)
    def step(self: Any, closure: Callable[[], Any] | None = None) -> Any:
        note_step(self)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            for bucket in _buckets(self):
                _step_bucket(inner, self, bucket)
        return loss

    def reduce(self: Any, protocol: int) -> tuple[Any, ...]:
        return _restored, (type(self).__mro__[1],), self.__getstate__() | {"slices": self.slices}

    return subclass(base, {"steps_on_whole_matrices": True, "step": hooked(step), "__reduce_ex__": reduce})


def _restored(base: Any) -> Any:
    cls = _whole_class(base)
    return cls.__new__(cls)


# ---- who owns what -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Ranks:
    """The ranks that a parameter is sharded over: an axis of its mesh, or this rank alone."""

    mesh: DeviceMesh | None = None
    axis: int | None = None

    @property
    def size(self) -> int:
        return 1 if self.axis is None or self.mesh is None else self.mesh.size(self.axis)

    @property
    def here(self) -> int:
        return 0 if self.axis is None or self.mesh is None else self.mesh.get_local_rank(self.axis)


@dataclass(frozen=True)
class _Cut:
    """How a stored tensor, or one of its slices, is cut over ranks."""

    dim: int | None  # of the stored tensor; None: every rank has all of it
    length: int  # of that dim
    ranks: int
    index: int | None = None  # of a slice along the first dim

    def bounds(self, peer: int) -> tuple[int, int]:
        """Return where a rank's part begins and ends, as torch.chunk splits."""
        step = -(-self.length // self.ranks)
        return min(step * peer, self.length), min(step * (peer + 1), self.length)

    def of_whole(self, whole: Tensor, peer: int) -> Tensor:
        """Return the part of a whole matrix that a rank stores, as a view."""
        if self.dim is None:
            return whole
        start, stop = self.bounds(peer)
        if self.index is None:
            return whole.narrow(self.dim, start, stop - start)
        if self.dim == 0:
            return whole if start <= self.index < stop else whole[:0]
        return whole.narrow(self.dim - 1, start, stop - start)

    def of_stored(self, local: Tensor, rank: int) -> Tensor:
        """Return the same part of what this rank stores, as a view."""
        if self.index is None:
            return local
        if self.dim != 0:
            return local[self.index]
        start, stop = self.bounds(rank)
        return local[self.index - start] if start <= self.index < stop else local[:0].flatten()


@dataclass(eq=False)
class _Matrix:
    """A parameter, or a slice of one, in one step."""

    param: Tensor
    group: int
    index: int | None
    owner: int = 0
    whole: Any = None  # on the owner: the parameter to step
    state: Any = None  # on the owner: its state


@dataclass
class _Bucket:
    ranks: _Ranks
    matrices: list[_Matrix] = field(default_factory=list)
    bytes: int = 0


def _buckets(optimizer: Any) -> list[_Bucket]:
    """Return the matrices that have a gradient, with owners; the same on every rank. Local."""
    done: list[_Bucket] = []
    filling: dict[_Ranks, _Bucket] = {}
    loads: dict[_Ranks, list[int]] = {}
    for number, group in enumerate(optimizer.param_groups):
        for param in group["params"]:
            if param.grad is None:
                continue
            ranks = _ranks_of(param)
            bucket = filling.setdefault(ranks, _Bucket(ranks))
            if bucket.bytes > BUCKET_BYTES * ranks.size:
                done.append(bucket)
                bucket = filling[ranks] = _Bucket(ranks)
            sliced = optimizer.slices and param.ndim == 3
            bucket.matrices += [_Matrix(param, number, i) for i in (range(len(param)) if sliced else [None])]
            bucket.bytes += param.numel() * param.element_size()
    for bucket in (*done, *filling.values()):
        _choose_owners(bucket, loads.setdefault(bucket.ranks, [0] * bucket.ranks.size))
    return [*done, *filling.values()]


def _choose_owners(bucket: _Bucket, loads: list[int]) -> None:
    """Give each matrix, the most costly first, to the rank with the least work so far."""

    def cost(matrix: _Matrix) -> int:
        shape = matrix.param.shape if matrix.index is None else matrix.param.shape[1:]
        return math.prod(shape) * min(shape[-2:], default=1)

    for matrix in sorted(bucket.matrices, key=cost, reverse=True):
        matrix.owner = loads.index(min(loads))
        loads[matrix.owner] += cost(matrix)


def _ranks_of(param: Tensor) -> _Ranks:
    if not isinstance(param, DTensor):
        return _Ranks()
    mesh = param.device_mesh
    cut = [axis for axis, place in enumerate(param.placements) if not place.is_replicate() and mesh.size(axis) > 1]
    if len(cut) > 1 or any(type(param.placements[axis]) is not Shard for axis in cut):
        problem = f"a parameter of shape {tuple(param.shape)} has placements {param.placements}"
        rule = "step_on_whole_matrices gathers along one axis of the mesh"
        fix = "Step it with an element-wise optimizer, such as AdamW"
        raise ShardkitError(message("optimizer", problem, rule, fix))
    return _Ranks(mesh, cut[0] if cut else None)


def _cut_of(tensor: Tensor, ranks: _Ranks, index: int | None) -> _Cut:
    place = tensor.placements[ranks.axis] if isinstance(tensor, DTensor) and ranks.axis is not None else None
    dim = getattr(place, "dim", None)
    return _Cut(dim, 0 if dim is None else tensor.shape[dim], ranks.size, index)


# ---- one bucket --------------------------------------------------------------------------------------------------


def _step_bucket(inner: Callable[..., Any], optimizer: Any, bucket: _Bucket) -> None:
    """Gather to the owners, step, and write what they computed. Collective over the bucket's ranks."""
    ranks, mesh = bucket.ranks, bucket.ranks.mesh
    groups = [group for group in mesh.get_all_groups() if group.size() > 1] if mesh is not None else []
    _gather(optimizer, bucket)
    mine = [matrix for matrix in bucket.matrices if matrix.owner == ranks.here]
    with together(groups):
        _run(inner, optimizer, mine)
        described = [tree_map(_described, matrix.state) for matrix in mine]
    found = dict(zip(mine, described, strict=True))
    if ranks.axis is not None and mesh is not None:
        of_ranks = [
            iter(pickle.loads(each)) for each in all_gather_bytes(pickle.dumps(described), mesh.get_group(ranks.axis))
        ]
        found = {matrix: next(of_ranks[matrix.owner]) for matrix in bucket.matrices}
    _scatter(optimizer, bucket, found)


def _gather(optimizer: Any, bucket: _Bucket) -> None:
    """Fill the owners' whole parameters, gradients and state."""
    ranks, here = bucket.ranks, bucket.ranks.here
    out, into = defaultdict[int, list[Any]](list), defaultdict[int, list[Any]](list)
    for matrix in bucket.matrices:

        def whole_of(stored: Any, matrix: _Matrix = matrix) -> Any:
            if not isinstance(stored, Tensor) or not stored.ndim:
                return stored
            cut = _cut_of(stored, ranks, matrix.index)
            part = cut.of_stored(_local(stored), here)
            if matrix.owner != here:
                out[matrix.owner] += [(part, part.dtype)] * (cut.dim is not None)
                return None
            whole = torch.empty(stored.shape[matrix.index is not None :], dtype=stored.dtype, device=part.device)
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


def _exchange(bucket: _Bucket, out: Mapping[int, Parcel], into: Mapping[int, Parcel]) -> None:
    ranks = bucket.ranks
    if ranks.axis is not None and ranks.mesh is not None:
        group, device = ranks.mesh.get_group(ranks.axis), _local(bucket.matrices[0].param).device
        exchange(out, into, group, device if device.type != "cpu" else torch.device(collective_device(group)))


def _run(inner: Callable[..., Any], optimizer: Any, mine: list[_Matrix]) -> None:
    """Step the whole matrices of this rank with the optimizer's options. Local."""
    groups, state = optimizer.param_groups, optimizer.state
    optimizer.param_groups = [
        {**group, "params": [matrix.whole for matrix in mine if matrix.group == number]}
        for number, group in enumerate(groups)
    ]
    optimizer.state = defaultdict(dict, {matrix.whole: matrix.state for matrix in mine if matrix.state})
    try:
        inner(optimizer)
        if changed := [
            key for old, new in zip(groups, optimizer.param_groups, strict=True) for key in _changed(old, new)
        ]:
            problem = f"its step changed {listing(dict.fromkeys(changed))} of its groups"
            rule = "Each owner steps its own matrices, so that numbers of a group would differ between ranks"
            fix = "Use an optimizer that keeps its state by parameter"
            raise ShardkitError(message("optimizer", problem, rule, fix))
        for matrix in mine:
            matrix.state = _by_key(optimizer.state.get(matrix.whole, {}))
    finally:
        optimizer.param_groups, optimizer.state = groups, state


def _changed(old: dict[str, Any], new: dict[str, Any]) -> Iterator[str]:
    for key, value in new.items():
        if key != "params" and isinstance(value, (int, float)) and value != old.get(key):
            yield key


def _scatter(optimizer: Any, bucket: _Bucket, found: dict[_Matrix, Any]) -> None:
    """Write parameters and state of all ranks from the owners' results."""
    ranks, here = bucket.ranks, bucket.ranks.here
    out, into = defaultdict[int, list[Any]](list), defaultdict[int, list[Any]](list)
    for matrix in bucket.matrices:

        def write(stored: Tensor, whole: Tensor | None, matrix: _Matrix = matrix) -> None:
            cut = _cut_of(stored, ranks, matrix.index)
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
    return _Described(leaf.shape, leaf.dtype, leaf.device.type == "cpu", None if leaf.ndim else leaf.item())


def _by_key(state: Mapping[Any, Any]) -> dict[Any, Any]:
    return {key: state[key] for key in sorted(state, key=str)}  # in one order on all ranks


def _rooms(optimizer: Any, matrix: _Matrix, ranks: _Ranks, described: Any) -> Any:
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


def _room(matrix: _Matrix, ranks: _Ranks, leaf: _Described, held: Any, device: torch.device) -> Tensor:
    param = matrix.param
    shape = leaf.shape if matrix.index is None else torch.Size([len(param), *leaf.shape])
    if matrix.index is not None and shape != param.shape:
        problem = f"state of shape {tuple(leaf.shape)} of a slice of a parameter of shape {tuple(param.shape)}"
        rule, fix = "State of slices has their shape, so that it is stored as one tensor", "Pass slices=False"
        raise ShardkitError(message("optimizer", problem, rule, fix))
    own = param.placements if isinstance(param, DTensor) else ()
    wanted = tuple(own if shape == param.shape else [Shard(0) if each.is_shard() else each for each in own])
    fits = isinstance(held, Tensor) and (held.shape, held.dtype) == (shape, leaf.dtype)
    if fits and getattr(held, "placements", ()) == wanted:
        return held  # type: ignore[no-any-return]
    if not isinstance(param, DTensor):
        return torch.empty(shape, dtype=leaf.dtype, device=device)
    like = torch.empty(shape, device="meta")
    dim = None if ranks.axis is None else wanted[ranks.axis].dim  # type: ignore[attr-defined]
    part = _Cut(dim, 0 if dim is None else shape[dim], ranks.size).of_whole(like, ranks.here)
    local = torch.empty(part.shape, dtype=leaf.dtype, device=device)
    return around(local, param.device_mesh, wanted, shape, like.stride())


def _local(tensor: Tensor) -> Tensor:
    return local_tensor(tensor) if isinstance(tensor, DTensor) else tensor.detach()


def _grad_of(param: Tensor) -> Tensor:
    """Return the gradient, placed like the parameter. Collective if it is not yet."""
    grad = param.grad
    assert grad is not None
    is_placed = not isinstance(param, DTensor) or not isinstance(grad, DTensor) or grad.placements == param.placements
    return grad if is_placed else grad.redistribute(placements=param.placements)  # type: ignore[attr-defined]
