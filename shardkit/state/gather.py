"""Shards to full tensors, bucket by bucket: on the lead only, or on every rank."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardkit.state.routes import Axis, Lead, Route, box_along, local_of, part_of, wire_device
from shardkit.state.wire import all_gather, exchange, narrower

BUCKET_BYTES = 1 << 26  # of full tensors that travel together


@dataclass(frozen=True)
class Want:
    """What a full tensor is wanted as.

    Attributes:
        everywhere: on all ranks, else on the lead only.
        device: where; None leaves it where it was gathered, on the device of the shards or of their mesh.
        dtype: of floating-point tensors; None keeps theirs. Others keep theirs in any case.
    """

    everywhere: bool = False
    device: torch.device | None = None
    dtype: torch.dtype | None = None

    def dtype_of(self, tensor: Tensor) -> torch.dtype:
        """The dtype that a tensor is wanted in."""
        return self.dtype if self.dtype is not None and tensor.is_floating_point() else tensor.dtype


@dataclass
class Bucket:
    """Tensors that are gathered together.

    Attributes:
        route: how they travel; None where none is known, and torch gathers.
        device: where their parts are sent from.
        tensors: by name.
        bytes: that they take when they are full.
    """

    route: Route | None
    device: torch.device
    tensors: dict[str, Tensor] = field(default_factory=dict)
    bytes: int = 0


def buckets(tensors: Iterable[tuple[str, Tensor]], lead: Lead, want: Want) -> list[Bucket]:
    """Tensors in buckets of at most ``BUCKET_BYTES``, or of one tensor. Local, and the same on every rank."""
    done: list[Bucket] = []
    filling: dict[object, Bucket] = {}
    for name, tensor in tensors:
        route = lead.route(tensor) if isinstance(tensor, DTensor) else Route()  # each rank has its own
        device = wire_device(tensor, route or Route())
        size = tensor.numel() * want.dtype_of(tensor).itemsize
        bucket = filling.setdefault((route, device), Bucket(route, device))
        if bucket.tensors and bucket.bytes + size > BUCKET_BYTES:
            done.append(bucket)
            bucket = filling[route, device] = Bucket(route, device)
        bucket.tensors[name] = tensor
        bucket.bytes += size
    return done + list(filling.values())


def gathered(tensors: Iterable[tuple[str, Tensor]], lead: Lead, want: Want) -> Iterator[tuple[str, Tensor]]:
    """All full tensors, in new memory, on the ranks that get them; nothing on others. Collective.

    Every rank must pass the same tensors, by name, and run the iterator to its end.
    """
    for bucket in buckets(tensors, lead, want):
        yield from gather_bucket(bucket, lead, want)


@torch.no_grad()
def gather_bucket(bucket: Bucket, lead: Lead, want: Want) -> list[tuple[str, Tensor]]:
    """The full tensors of one bucket, on the ranks that get them. Collective over the bucket's ranks."""
    likes = list(bucket.tensors.values())
    if bucket.route is None:
        fulls, fresh = [like.full_tensor() for like in likes], True  # type: ignore[attr-defined]
    else:
        fulls, fresh = _whole(likes, bucket.route, bucket.device, want), bool(bucket.route.cuts)
    if not (want.everywhere or lead.is_here):
        return []
    return [(name, _as_wanted(full, want, fresh)) for name, full in zip(bucket.tensors, fulls, strict=True)]


def _as_wanted(full: Tensor, want: Want, fresh: bool) -> Tensor:
    return full.to(want.device or full.device, want.dtype_of(full), copy=not fresh)


def _whole(likes: list[Tensor], route: Route, device: torch.device, want: Want) -> list[Tensor]:
    """Undo one cut after the other; ranks that have given their part away do not go on."""
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
