"""Gather full tensors from shards and scatter them to shards, in buckets, through one rank or on every rank."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardkit._fsdp.fsdp1 import gathered_sharded_tensor, is_sharded_tensor
from shardkit._torch.states import is_wrapper
from shardkit.errors import ShardkitError, listing, message
from shardkit.ranks import Groups
from shardkit.shards import local_box, local_part, local_value
from shardkit.state.routes import Axis, Route, Routes, box_along, local_of, part_of, wire_device
from shardkit.state.wire import Parcel, all_gather, broadcast, copy_into, exchange, narrower

BUCKET_BYTES = 1 << 26  # of full tensors that travel together
Source = Literal["rank0", "all"]


@dataclass(frozen=True)
class Want:
    """Where gathered tensors go, and as which dtype."""

    everywhere: bool = False  # to all ranks, else to the root only
    device: torch.device | None = None  # None: where it was gathered, the device of the shards or of their mesh
    dtype: torch.dtype | None = None  # of floating-point tensors; None keeps theirs

    def dtype_of(self, tensor: Tensor) -> torch.dtype:
        """Return the dtype of the gathered tensor."""
        return self.dtype if self.dtype is not None and tensor.is_floating_point() else tensor.dtype


@dataclass
class Move:
    """A full tensor and its target."""

    target: Tensor  # DTensor or plain, written in place
    dtype: torch.dtype  # of the full tensor
    source: Any = None  # the full tensor, on the ranks that have it; ``cut`` also takes a sharded one


@dataclass
class Bucket:
    """Tensors that are sent together."""

    route: Route | None  # None where torch must gather
    device: torch.device  # where parts are sent from and received
    items: list[Any] = field(default_factory=list)
    bytes: int = 0  # of the full tensors


def buckets(items: Iterable[tuple[Tensor, torch.dtype, Any]], routes: Routes, plain: Route) -> list[Bucket]:
    """Return items in buckets of at most ``BUCKET_BYTES``, or of one item. Local, and the same on every rank.

    Each item comes with its tensor and the dtype of the full one. Tensors other than DTensors take the route ``plain``.
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
    """Return the buckets in which tensors are gathered, by name; other than DTensors are not sent. Local.

    Raises a ShardkitError for quantized weights, whose shards torch cannot join.
    """
    tensors = list(tensors)
    if unfit := [name for name, like in tensors if isinstance(like, DTensor) and is_wrapper(local_value(like))]:
        rule = "Shards of a quantized weight have no full tensor: blocks and scales are each shard's own"
        fix = "Save it with save_checkpoint; merge adapters into the base in full precision"
        raise ShardkitError(message(listing(unfit), "quantized, and cannot be gathered", rule, fix))
    return buckets(((like, want.dtype_of(like), (name, like)) for name, like in tensors), routes, Route())


def gathered(tensors: Iterable[tuple[str, Tensor]], routes: Routes, want: Want) -> Iterator[tuple[str, Tensor]]:
    """Yield all full tensors, in new memory, on the ranks that get them; nothing on others. Collective.

    Every rank must pass the same names, and exhaust the iterator.
    """
    for bucket in gathers(tensors, routes, want):
        yield from gather_bucket(bucket, routes, want)


@torch.no_grad()
def gather_bucket(bucket: Bucket, routes: Routes, want: Want) -> list[tuple[str, Tensor]]:
    """Return the full tensors of one bucket, on the ranks that get them. Collective over the bucket's ranks."""
    names, likes = zip(*bucket.items, strict=True)
    cuts, copies = (bucket.route.cuts, bucket.route.copies) if bucket.route else ((), ())
    fulls = [local_of(like).to(bucket.device) if bucket.route else like.full_tensor() for like in likes]
    for left in range(len(cuts), 0, -1):
        if not want.everywhere and not all(axis.at_root for axis in (*cuts[left:], *copies)):
            break  # this rank has sent its parts already
        fulls = _join(cuts[:left], likes, fulls, want)
    if not (want.everywhere or routes.is_root):
        return []
    is_new = bucket.route is None or bool(cuts)
    found = zip(names, fulls, strict=True)
    return [(name, full.to(want.device or full.device, want.dtype_of(full), copy=not is_new)) for name, full in found]


def _join(cuts: tuple[Axis, ...], likes: Sequence[Tensor], values: list[Tensor], want: Want) -> list[Tensor]:
    """Undo the last cut: return what the ranks along its axis have together where that is wanted, else ``values``."""
    axis, device = cuts[-1], values[0].device
    dtypes = [want.dtype_of(value) for value in values]
    wire = [narrower(value.dtype, dtype) for value, dtype in zip(values, dtypes, strict=True)]
    own = list(zip(values, wire, strict=True))
    if not (want.everywhere or axis.at_root):
        exchange({axis.root: own}, {}, axis.group, device)
        return values
    boxes = [box_along(like, cuts[:-1]) for like in likes]
    shapes = [[length for _, length in box] for box in boxes]
    wholes = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in zip(shapes, dtypes, strict=True)]

    def parcel(peer: int) -> list[tuple[Tensor, torch.dtype]]:
        found = zip(wholes, boxes, likes, wire, strict=True)
        return [(part_of(whole, box, box_along(like, cuts, peer)), dtype) for whole, box, like, dtype in found]

    if want.everywhere:
        all_gather(own, [parcel(peer) for peer in range(axis.group.size())], axis.group, device)
        return wholes
    others = [peer for peer in range(axis.group.size()) if peer != axis.here]
    exchange({}, {peer: parcel(peer) for peer in others}, axis.group, device)
    for (part, _), value in zip(parcel(axis.here), values, strict=True):
        copy_into(part, value)
    return wholes


# ---- scattering -----------------------------------------------------------------------------------------------


def check_src(src: object) -> None:
    """Raise for an unknown ``src``."""
    if src not in ("rank0", "all"):
        rule = 'It is "rank0" (one rank has the tensors) or "all" (every rank has them)'
        raise ShardkitError(message("src", f"is {src!r}", rule, 'Pass src="rank0" or src="all"'))


def world_groups(src: Source) -> Groups:
    """Return the groups for a model without DTensors: all ranks, if one sends tensors to the others."""
    return [None] if src == "rank0" and dist.is_initialized() and dist.get_world_size() > 1 else []


def transfer(moves: Sequence[Move], routes: Routes, src: Source) -> None:
    """Write each full tensor into its target. Collective if ``src`` is one rank."""
    cut(moves) if src == "all" else scatter(moves, routes)


@torch.no_grad()
def cut(moves: Sequence[Move]) -> None:
    """Copy this rank's part of each full tensor into its target. Local, unless a source is sharded.

    A DTensor that is sharded otherwise than its target is gathered, so every rank must pass its own; a ShardedTensor
    always is, since each rank knows only of its own part whether it is the wanted one.
    """
    for move in moves:
        like, value = move.target, move.source
        part = None if is_sharded_tensor(value) else own_part(like, value)
        if part is None:
            part = local_part(whole_of(value), like) if isinstance(like, DTensor) else whole_of(value)
        copy_into(local_of(like), part)
    torch.autograd.graph.increment_version([move.target for move in moves])  # for autograd to see it


def own_part(like: Tensor, value: Any) -> Tensor | None:
    """Return this rank's part of a value that is sharded as ``like``; None if it is sharded otherwise, or full. Local.

    A mesh that was read from a file has no groups, so meshes are compared by their ranks.
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
    """Return the full tensor. Collective if the value is sharded."""
    if isinstance(value, DTensor):
        return value.full_tensor()
    return gathered_sharded_tensor(value) if is_sharded_tensor(value) else value


def is_sharded(value: object) -> bool:
    """Whether it is a DTensor, or a ShardedTensor of FSDP1."""
    return isinstance(value, DTensor) or is_sharded_tensor(value)


def shape_of(value: Any) -> torch.Size:
    """Return the shape of the full tensor; a ShardedTensor warns when its ``shape`` is read."""
    return torch.Size(value.metadata().size) if is_sharded_tensor(value) else value.shape


@torch.no_grad()
def scatter(moves: Sequence[Move], routes: Routes) -> None:
    """Send each rank its part of each full tensor that the root has. Collective over all ranks that hold the model.

    Along the axes that shard, every rank is sent only its part; along those that replicate, parts are broadcast.
    Where no route is known the full tensor is broadcast. At most one bucket, or one tensor, is held besides.
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
    for done in range(1, len(route.cuts) + 1):
        if all(other.at_root for other in (*route.cuts[done:], *route.copies)):
            values = _split([move.target for move in moves], wire, values, route.cuts[:done], device)
    locals_ = [local_of(move.target) for move in moves]
    for target, value in zip(locals_, values, strict=True):
        if value is not None and value is not target:
            copy_into(target, value)
    spread(list(zip(locals_, wire, strict=True)), route, device)


def _split(
    likes: Sequence[Tensor],
    wire: Sequence[torch.dtype],
    values: Sequence[Tensor],
    cuts: tuple[Axis, ...],
    device: torch.device,
) -> list[Tensor]:
    """Make the last cut: send the ranks along its axis their parts, or receive one's own. Return this rank's parts."""
    axis = cuts[-1]
    if not axis.at_root:
        parts = []
        for like, dtype in zip(likes, wire, strict=True):
            local, shape = local_of(like), [length for _, length in box_along(like, cuts)]
            is_last = list(local.shape) == shape or not local.numel()  # nothing else cuts it: straight into the target
            parts.append(local if is_last else torch.empty(shape, dtype=dtype, device=device))
        exchange({}, {axis.root: list(zip(parts, wire, strict=True))}, axis.group, device)
        return parts

    def parts_of(peer: int) -> list[Tensor]:
        found = zip(values, likes, strict=True)
        return [part_of(value, box_along(like, cuts[:-1]), box_along(like, cuts, peer)) for value, like in found]

    others = [peer for peer in range(axis.group.size()) if peer != axis.here]
    exchange({peer: list(zip(parts_of(peer), wire, strict=True)) for peer in others}, {}, axis.group, device)
    return parts_of(axis.here)


def spread(parcel: Parcel, route: Route, device: torch.device) -> None:
    """Broadcast tensors along the axes of a route that hold copies, from where the root is. Collective."""
    for number, axis in enumerate(route.copies):
        if all(other.at_root for other in route.copies[number + 1 :]):
            broadcast(parcel, axis.group, axis.root, device)


def share(data: bytes, routes: Routes) -> bytes:
    """Return the root's bytes on all ranks. Collective over all ranks that hold the model."""
    size = torch.tensor([len(data)])
    device = wire_device(size, routes.everyone)
    spread([(size, size.dtype)], routes.everyone, device)
    buffer = bytearray(data if routes.is_root else int(size))
    if buffer:
        content = torch.frombuffer(buffer, dtype=torch.uint8)
        spread([(content, content.dtype)], routes.everyone, device)
    return bytes(buffer)
