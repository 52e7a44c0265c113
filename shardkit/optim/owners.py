"""Which rank owns each matrix of a step, and how stored tensors are cut over ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from shardkit.errors import ShardkitError, message

BUCKET_BYTES = 1 << 26  # of parameters, on each rank


@dataclass(frozen=True)
class Ranks:
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
class Cut:
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
class Matrix:
    """A parameter, or a slice of one, in one step."""

    param: Tensor
    group: int
    index: int | None
    owner: int = 0
    whole: Any = None  # on the owner: the parameter to step
    state: Any = None  # on the owner: its state


@dataclass
class Bucket:
    ranks: Ranks
    matrices: list[Matrix] = field(default_factory=list)
    bytes: int = 0


def buckets(optimizer: Any) -> list[Bucket]:
    """Return the matrices that have a gradient, with owners; the same on every rank. Local."""
    done: list[Bucket] = []
    filling: dict[Ranks, Bucket] = {}
    loads: dict[Ranks, list[int]] = {}
    for number, group in enumerate(optimizer.param_groups):
        for param in group["params"]:
            if param.grad is None:
                continue
            ranks = ranks_of(param)
            bucket = filling.setdefault(ranks, Bucket(ranks))
            if bucket.bytes > BUCKET_BYTES * ranks.size:
                done.append(bucket)
                bucket = filling[ranks] = Bucket(ranks)
            sliced = optimizer.slices and param.ndim == 3
            bucket.matrices += [Matrix(param, number, i) for i in (range(len(param)) if sliced else [None])]
            bucket.bytes += param.numel() * param.element_size()
    for bucket in (*done, *filling.values()):
        _choose_owners(bucket, loads.setdefault(bucket.ranks, [0] * bucket.ranks.size))
    return [*done, *filling.values()]


def _choose_owners(bucket: Bucket, loads: list[int]) -> None:
    """Give each matrix, the most costly first, to the rank with the least work so far."""

    def cost(matrix: Matrix) -> int:
        shape = matrix.param.shape if matrix.index is None else matrix.param.shape[1:]
        return math.prod(shape) * min(shape[-2:], default=1)

    for matrix in sorted(bucket.matrices, key=cost, reverse=True):
        matrix.owner = loads.index(min(loads))
        loads[matrix.owner] += cost(matrix)


def ranks_of(param: Tensor) -> Ranks:
    """Return the ranks that a parameter is sharded over; raise if they are of two axes of its mesh. Local."""
    if not isinstance(param, DTensor):
        return Ranks()
    mesh = param.device_mesh
    cut = [axis for axis, place in enumerate(param.placements) if not place.is_replicate() and mesh.size(axis) > 1]
    if len(cut) > 1 or any(type(param.placements[axis]) is not Shard for axis in cut):
        problem = f"a parameter of shape {tuple(param.shape)} has placements {param.placements}"
        rule = "step_on_whole_matrices communicates along one axis of the mesh"
        fix = "Step it with an element-wise optimizer, such as AdamW"
        raise ShardkitError(message("optimizer", problem, rule, fix))
    return Ranks(mesh, cut[0] if cut else None)


def cut_of(tensor: Tensor, ranks: Ranks, index: int | None) -> Cut:
    place = tensor.placements[ranks.axis] if isinstance(tensor, DTensor) and ranks.axis is not None else None
    dim = getattr(place, "dim", None)
    return Cut(dim, 0 if dim is None else tensor.shape[dim], ranks.size, index)
