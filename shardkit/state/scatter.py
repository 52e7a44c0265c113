"""Full tensors to shards: from the lead, each rank its own part, or cut by every rank from its own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardkit.shards import local_part
from shardkit.state.gather import BUCKET_BYTES
from shardkit.state.routes import Axis, Lead, Route, box_along, local_of, part_of, wire_device
from shardkit.state.wire import Parcel, broadcast, exchange, narrower


@dataclass
class Move:
    """A full tensor and where it goes.

    Attributes:
        target: DTensor or plain, written in place.
        dtype: of the full tensor.
        source: the full tensor, on any device, on the ranks that have it.
    """

    target: Tensor
    dtype: torch.dtype
    source: Tensor | None = None


@torch.no_grad()
def cut(moves: Iterable[Move]) -> None:
    """Copy this rank's part of each full tensor into its target. Local."""
    for move in moves:
        assert move.source is not None, "every rank has the tensors"
        like = move.target
        part = local_part(move.source, like) if isinstance(like, DTensor) else move.source
        _put(local_of(like), part)


@torch.no_grad()
def scatter(moves: Iterable[Move], lead: Lead) -> None:
    """Send each rank its part of each full tensor that the lead has. Collective over all ranks that hold the model.

    Along the axes that shard, every rank is sent its part alone; along those that replicate, parts are broadcast.
    Where no route is known the full tensor is broadcast. At most a bucket, or one tensor, is held besides.
    """
    filling: dict[tuple[Route, torch.device], list[Move]] = {}
    bytes_in: dict[tuple[Route, torch.device], int] = {}
    for move in moves:
        route = lead.route(move.target) if isinstance(move.target, DTensor) else lead.everyone
        if route is None:
            cut([replace(move, source=_everywhere(move, lead))])
            continue
        key = (route, wire_device(move.target, route))
        filling.setdefault(key, []).append(move)
        bytes_in[key] = bytes_in.get(key, 0) + move.target.numel() * move.dtype.itemsize
        if bytes_in[key] >= BUCKET_BYTES:
            _scatter_bucket(filling.pop(key), *key)
            del bytes_in[key]
    for key, bucket in filling.items():
        _scatter_bucket(bucket, *key)


def _everywhere(move: Move, lead: Lead) -> Tensor:
    full = torch.empty(move.target.shape, dtype=move.dtype) if move.source is None else move.source
    spread([(full, move.dtype)], lead.everyone, wire_device(full, lead.everyone))
    return full


def _scatter_bucket(moves: Sequence[Move], route: Route, device: torch.device) -> None:
    values = [move.source for move in moves]
    for done, axis in enumerate(route.cuts):
        if all(other.at_root for other in (*route.cuts[done + 1 :], *route.copies)):
            values = _cut_along(axis, moves, values, route.cuts[: done + 1], device)
    locals_ = [local_of(move.target) for move in moves]
    for target, value in zip(locals_, values, strict=True):
        if value is not None and value is not target:
            _put(target, value)
    spread(list(zip(locals_, _wire(moves), strict=True)), route, device)


def _cut_along(
    axis: Axis, moves: Sequence[Move], values: Sequence[Tensor | None], cuts: tuple[Axis, ...], device: torch.device
) -> list[Tensor | None]:
    """Pass on the parts of the last axis's other ranks, or receive one's own; what this rank then has."""
    wire = _wire(moves)
    if not axis.at_root:
        rooms = [_room(move, cuts, dtype, device) for move, dtype in zip(moves, wire, strict=True)]
        exchange({}, {axis.root: list(zip(rooms, wire, strict=True))}, axis.group, device)
        return list(rooms)

    def parts(peer: int) -> list[Tensor]:
        likes = [move.target for move in moves]
        return [
            part_of(value, box_along(like, cuts[:-1]), box_along(like, cuts, peer))
            for value, like in zip(values, likes, strict=True)
            if value is not None  # which it is where the last axis begins
        ]

    others = [peer for peer in range(axis.group.size()) if peer != axis.here]
    exchange({peer: list(zip(parts(peer), wire, strict=True)) for peer in others}, {}, axis.group, device)
    return list(parts(axis.here))


def _room(move: Move, cuts: tuple[Axis, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Where a part is received: in the target if nothing will cut it any more."""
    local = local_of(move.target)
    shape = [length for _, length in box_along(move.target, cuts)]
    if list(local.shape) == shape or not local.numel():
        return local
    return torch.empty(shape, dtype=dtype, device=device)


def _wire(moves: Sequence[Move]) -> list[torch.dtype]:
    return [narrower(move.dtype, move.target.dtype) for move in moves]


def spread(parcel: Parcel, route: Route, device: torch.device) -> None:
    """Broadcast tensors along the axes of a route that hold copies, from where the lead is. Collective."""
    for number, axis in enumerate(route.copies):
        if all(other.at_root for other in route.copies[number + 1 :]):
            broadcast(parcel, axis.group, axis.root, device)


def share(data: bytes, lead: Lead) -> bytes:
    """The lead's bytes, on all ranks. Collective over all ranks that hold the model."""
    size = torch.tensor([len(data)])
    device = wire_device(size, lead.everyone)
    spread([(size, size.dtype)], lead.everyone, device)
    buffer = bytearray(data if lead.is_here else int(size))
    if buffer:
        content = torch.frombuffer(buffer, dtype=torch.uint8)
        spread([(content, content.dtype)], lead.everyone, device)
    return bytes(buffer)


def _put(target: Tensor, value: Tensor) -> None:
    if target.numel():  # FSDP2 makes the shards of a tensor without elements (0, ...), whatever its first dim
        target.copy_(value)
