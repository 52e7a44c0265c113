"""Full tensors from shards and shards from full tensors, bucket by bucket, through one rank or on every rank."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardkit._fsdp.fsdp1 import gathered_sharded_tensor, is_sharded_tensor
from shardkit.errors import ShardkitError, message
from shardkit.ranks import Groups
from shardkit.shards import local_box, local_part
from shardkit.state.routes import Axis, Route, Routes, box_along, local_of, part_of, wire_device
from shardkit.state.wire import Parcel, all_gather, broadcast, exchange, narrower

BUCKET_BYTES = 1 << 26  # of full tensors that travel together
Source = Literal["rank0", "all"]


@dataclass(frozen=True)
class Want:
    """What a full tensor is wanted as."""

    everywhere: bool = False  # on all ranks, else on the root only
    device: torch.device | None = None  # None leaves it where it was gathered, on that of the shards or of their mesh
    dtype: torch.dtype | None = None  # of floating-point tensors; None keeps theirs

    def dtype_of(self, tensor: Tensor) -> torch.dtype:
        """The dtype that a tensor is wanted in."""
        return self.dtype if self.dtype is not None and tensor.is_floating_point() else tensor.dtype


@dataclass
class Move:
    """A full tensor and where it goes."""

    target: Tensor  # DTensor or plain, written in place
    dtype: torch.dtype  # of the full tensor
    source: Any = None  # the full tensor, on the ranks that have it; for ``cut`` a sharded one too


@dataclass
class Bucket:
    """What travels together."""

    route: Route | None  # None where none is known
    device: torch.device  # where parts are sent from and received
    items: list[Any] = field(default_factory=list)
    bytes: int = 0  # of the full tensors


def buckets(items: Iterable[tuple[Tensor, torch.dtype, Any]], routes: Routes, plain: Route) -> list[Bucket]:
    """Items in buckets of at most ``BUCKET_BYTES``, or of one item. Local, and the same on every rank.

    Each comes with its shards and the dtype of the full tensor; tensors that are not DTensors take the route ``plain``.
    """
    done: list[Bucket] = []
    filling: dict[object, Bucket] = {}
    for tensor, dtype, item in items:
        route = routes.of(tensor) if isinstance(tensor, DTensor) else plain
        device, size = wire_device(tensor, route or Route()), tensor.numel() * dtype.itemsize
        bucket = filling.setdefault((route, device), Bucket(route, device))
        if bucket.items and bucket.bytes + size > BUCKET_BYTES:
            done.append(bucket)
            bucket = filling[route, device] = Bucket(route, device)
        bucket.items.append(item)
        bucket.bytes += size
    return done + list(filling.values())


# ---- gathering ------------------------------------------------------------------------------------------------


def gathers(tensors: Iterable[tuple[str, Tensor]], routes: Routes, want: Want) -> list[Bucket]:
    """The buckets in which tensors are gathered, by name; what is not a DTensor is each rank's own. Local."""
    return buckets(((like, want.dtype_of(like), (name, like)) for name, like in tensors), routes, Route())


def gathered(tensors: Iterable[tuple[str, Tensor]], routes: Routes, want: Want) -> Iterator[tuple[str, Tensor]]:
    """All full tensors, in new memory, on the ranks that get them; nothing on others. Collective.

    Every rank must pass the same tensors, by name, and run the iterator to its end.
    """
    for bucket in gathers(tensors, routes, want):
        yield from gather_bucket(bucket, routes, want)


@torch.no_grad()
def gather_bucket(bucket: Bucket, routes: Routes, want: Want) -> list[tuple[str, Tensor]]:
    """The full tensors of one bucket, on the ranks that get them. Collective over the bucket's ranks."""
    names, likes = zip(*bucket.items, strict=True)
    route = bucket.route
    fulls = [like.full_tensor() for like in likes] if route is None else _whole(likes, route, bucket.device, want)
    if not (want.everywhere or routes.is_root):
        return []
    is_new = route is None or bool(route.cuts)
    found = zip(names, fulls, strict=True)
    return [(name, full.to(want.device or full.device, want.dtype_of(full), copy=not is_new)) for name, full in found]


def _whole(likes: Iterable[Tensor], route: Route, device: torch.device, want: Want) -> list[Tensor]:
    """Undo one cut after the other; ranks that have given their part away do not go on."""
    likes = list(likes)
    values = [local_of(like).to(device) for like in likes]
    for left in range(len(route.cuts), 0, -1):
        if not want.everywhere and not all(axis.at_root for axis in (*route.cuts[left:], *route.copies)):
            break
        values = _undo_last(route.cuts[:left], likes, values, want)
    return values


def _undo_last(cuts: tuple[Axis, ...], likes: list[Tensor], values: list[Tensor], want: Want) -> list[Tensor]:
    """What the ranks along the last axis have together, on those that get it; what there was, on the others."""
    axis, device = cuts[-1], values[0].device
    dtypes = [want.dtype_of(value) for value in values]
    wire = [narrower(value.dtype, dtype) for value, dtype in zip(values, dtypes, strict=True)]
    own = list(zip(values, wire, strict=True))
    if not (want.everywhere or axis.at_root):
        exchange({axis.root: own}, {}, axis.group, device)
        return values
    boxes = [box_along(like, cuts[:-1]) for like in likes]
    wholes = [
        torch.empty([length for _, length in box], dtype=dtype, device=device)
        for box, dtype in zip(boxes, dtypes, strict=True)
    ]

    def parcel(peer: int) -> list[tuple[Tensor, torch.dtype]]:
        found = zip(wholes, boxes, likes, wire, strict=True)
        return [(part_of(whole, box, box_along(like, cuts, peer)), dtype) for whole, box, like, dtype in found]

    if want.everywhere:
        all_gather(own, [parcel(peer) for peer in range(axis.group.size())], axis.group, device)
        return wholes
    others = [peer for peer in range(axis.group.size()) if peer != axis.here]
    exchange({}, {peer: parcel(peer) for peer in others}, axis.group, device)
    for (part, _), value in zip(parcel(axis.here), values, strict=True):
        if value.numel():  # FSDP2 makes the shards of a tensor without elements (0, ...), whatever its first dim
            part.copy_(value)
    return wholes


# ---- scattering -----------------------------------------------------------------------------------------------


def check_src(src: object) -> None:
    """Raise for an unknown ``src``."""
    if src not in ("rank0", "all"):
        rule = 'It is "rank0" (one rank has the tensors) or "all" (every rank has them)'
        raise ShardkitError(message("src", f"is {src!r}", rule, "Pass one of the two"))


def world_groups(src: Source) -> Groups:
    """The ranks that share a model without DTensors: all of them, if one is to send it to the others."""
    return [None] if src == "rank0" and dist.is_initialized() and dist.get_world_size() > 1 else []


def transfer(moves: Sequence[Move], routes: Routes, src: Source) -> None:
    """Carry out the moves. Collective if ``src`` is one rank."""
    cut(moves) if src == "all" else scatter(moves, routes)


@torch.no_grad()
def cut(moves: Sequence[Move]) -> None:
    """Copy this rank's part of each full tensor into its target. Local, but for sources that are sharded otherwise."""
    for move in moves:
        _put(local_of(move.target), part_for(move.target, move.source))
    torch.autograd.graph.increment_version([move.target for move in moves])  # for autograd to see it


def part_for(like: Tensor, value: Any) -> Tensor:
    """What a rank needs of a value for a tensor placed as ``like``; a view where it can be. Collective, or local.

    A DTensor that is sharded otherwise is gathered, so every rank must pass its own; a ShardedTensor in any case, since
    each rank knows of its own part alone whether it is the wanted one.
    """
    part = None if is_sharded_tensor(value) else own_part(like, value)
    if part is None:
        full = whole_of(value)
        part = local_part(full, like) if isinstance(like, DTensor) else full
    return part


def own_part(like: Tensor, value: Any) -> Tensor | None:
    """What this rank has of a value that is sharded as ``like``; None where it is sharded otherwise, or whole. Local.

    A mesh that was read from a file has no groups, and is another object than the model's, with the same ranks.
    """
    if not isinstance(like, DTensor):
        return None
    if isinstance(value, DTensor):
        alike = value.placements == like.placements and value.shape == like.shape
        return local_of(value) if alike and torch.equal(value.device_mesh.mesh, like.device_mesh.mesh) else None
    if not is_sharded_tensor(value):
        return None
    shards = value.local_shards()
    if not shards:
        return None if local_of(like).numel() else local_of(like)
    metadata = shards[0].metadata
    box = tuple(zip(metadata.shard_offsets, metadata.shard_sizes, strict=True))
    return shards[0].tensor if len(shards) == 1 and box == local_box(like) else None


def whole_of(value: Any) -> Tensor:
    """The whole of a value. Collective where it is sharded."""
    if isinstance(value, DTensor):
        return value.full_tensor()
    return gathered_sharded_tensor(value) if is_sharded_tensor(value) else value


def is_sharded(value: object) -> bool:
    """Whether it is a DTensor, or a ShardedTensor of FSDP1."""
    return isinstance(value, DTensor) or is_sharded_tensor(value)


def shape_of(value: Any) -> torch.Size:
    """Of the full tensor; a ShardedTensor warns when its ``shape`` is read."""
    return torch.Size(value.metadata().size) if is_sharded_tensor(value) else value.shape


@torch.no_grad()
def scatter(moves: Sequence[Move], routes: Routes) -> None:
    """Send each rank its part of each full tensor that the root has. Collective over all ranks that hold the model.

    Along the axes that shard, every rank is sent its part alone; along those that replicate, parts are broadcast.
    Where no route is known the full tensor is broadcast. At most a bucket, or one tensor, is held besides.
    """
    for bucket in buckets(((move.target, move.dtype, move) for move in moves), routes, routes.everyone):
        if bucket.route is not None:
            _scatter_bucket(bucket.items, bucket.route, bucket.device)
            continue
        for move in bucket.items:
            full = torch.empty(move.target.shape, dtype=move.dtype) if move.source is None else move.source
            spread([(full, move.dtype)], routes.everyone, wire_device(full, routes.everyone))
            cut([replace(move, source=full)])
    torch.autograd.graph.increment_version([move.target for move in moves])


def _scatter_bucket(moves: Sequence[Move], route: Route, device: torch.device) -> None:
    wire = [narrower(move.dtype, move.target.dtype) for move in moves]
    values = [move.source for move in moves]
    for done, axis in enumerate(route.cuts, start=1):
        if all(other.at_root for other in (*route.cuts[done:], *route.copies)):
            values = _cut_along(axis, moves, wire, values, route.cuts[:done], device)
    locals_ = [local_of(move.target) for move in moves]
    for target, value in zip(locals_, values, strict=True):
        if value is not None and value is not target:
            _put(target, value)
    spread(list(zip(locals_, wire, strict=True)), route, device)


def _cut_along(
    axis: Axis,
    moves: Sequence[Move],
    wire: Sequence[torch.dtype],
    values: Sequence[Tensor],
    cuts: tuple[Axis, ...],
    device: torch.device,
) -> list[Tensor]:
    """Pass on the parts of the last axis's other ranks, or receive one's own; what this rank then has."""
    likes = [move.target for move in moves]
    if not axis.at_root:
        rooms = [_room(like, cuts, dtype, device) for like, dtype in zip(likes, wire, strict=True)]
        exchange({}, {axis.root: list(zip(rooms, wire, strict=True))}, axis.group, device)
        return rooms

    def parts(peer: int) -> list[Tensor]:
        found = zip(values, likes, strict=True)
        return [part_of(value, box_along(like, cuts[:-1]), box_along(like, cuts, peer)) for value, like in found]

    others = [peer for peer in range(axis.group.size()) if peer != axis.here]
    exchange({peer: list(zip(parts(peer), wire, strict=True)) for peer in others}, {}, axis.group, device)
    return parts(axis.here)


def _room(like: Tensor, cuts: tuple[Axis, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Where a part is received: in the target if nothing will cut it any more."""
    local, shape = local_of(like), [length for _, length in box_along(like, cuts)]
    if list(local.shape) == shape or not local.numel():
        return local
    return torch.empty(shape, dtype=dtype, device=device)


def spread(parcel: Parcel, route: Route, device: torch.device) -> None:
    """Broadcast tensors along the axes of a route that hold copies, from where the root is. Collective."""
    for number, axis in enumerate(route.copies):
        if all(other.at_root for other in route.copies[number + 1 :]):
            broadcast(parcel, axis.group, axis.root, device)


def share(data: bytes, routes: Routes) -> bytes:
    """The root's bytes, on all ranks. Collective over all ranks that hold the model."""
    size = torch.tensor([len(data)])
    device = wire_device(size, routes.everyone)
    spread([(size, size.dtype)], routes.everyone, device)
    buffer = bytearray(data if routes.is_root else int(size))
    if buffer:
        content = torch.frombuffer(buffer, dtype=torch.uint8)
        spread([(content, content.dtype)], routes.everyone, device)
    return bytes(buffer)


def _put(target: Tensor, value: Tensor) -> None:
    if target.numel():  # FSDP2 makes the shards of a tensor without elements (0, ...), whatever its first dim
        target.copy_(value)
