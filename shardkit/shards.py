"""Compute which part of the full tensor a rank holds of a DTensor."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate

from shardkit._torch import is_wrapper, local_tensor, with_local

# (start, length) in elements for each dim of the full tensor
Box: TypeAlias = tuple[tuple[int, int], ...]


def local_box(like: DTensor) -> Box:
    """Return the part of the full tensor that this rank holds. Local, pure; replicas have the same
    box.
    """
    coordinate = like.device_mesh.get_coordinate()
    assert coordinate is not None, "a rank outside its parameters' mesh"
    return box_at(like, tuple(coordinate))


def box_at(like: DTensor, coordinate: tuple[int, ...]) -> Box:
    """Return the box of the rank at ``coordinate`` of the mesh; Partial placements hold the full
    tensor. Local, pure.

    Each axis splits like torch.chunk. Strided placements come last: FSDP2 shards what tensor
    parallelism has sharded.
    """
    box = [(0, size) for size in like.shape]
    strided_last = sorted(
        enumerate(like.placements), key=lambda placed: hasattr(placed[1], "split_factor")
    )
    for axis, placement in strided_last:
        dim = getattr(placement, "dim", None)
        if dim is not None:
            start, size = box[dim]
            step = -(-size // like.device_mesh.size(axis))
            skipped = min(step * coordinate[axis], size)
            box[dim] = (start + skipped, min(step, size - skipped))
    return tuple(box)


def local_part(full: Tensor, like: DTensor) -> Tensor:
    """Return this rank's part of a full tensor, as a view. Local."""
    return cut(full, local_box(like))


def cut(full: Tensor, box: Box) -> Tensor:
    """Return the part of a full tensor at a box, as a view."""
    for dim, (start, length) in enumerate(box):
        full = full.narrow(dim, start, length)
    return full


def inside(part: Tensor, box: Box, block: Box) -> Tensor:
    """Return the view of a block in a part that lies at ``box``."""
    for dim, (start, length) in enumerate(block):
        part = part.narrow(dim, start - box[dim][0], length)
    return part


def common(one: Box, other: Box) -> Box | None:
    """Return the intersection of two boxes, or None if it is empty."""
    box = []
    for (start, length), (other_start, other_length) in zip(one, other, strict=True):
        first = max(start, other_start)
        end = min(start + length, other_start + other_length)
        if end <= first:
            return None
        box.append((first, end - first))
    return tuple(box)


def covers(boxes: Collection[Box], shape: Sequence[int]) -> bool:
    """Whether different boxes lie in a tensor and have as many elements as it. Pure."""
    total = 0
    for box in boxes:
        numel = 1
        for (start, length), size in zip(box, shape, strict=True):
            if start < 0 or start + length > size:
                return False
            numel *= length
        total += numel
    return total == math.prod(shape)


def misplaced(like: DTensor) -> str:
    """Return an error text if the local shape contradicts the placements, as with ``from_local`` of
    uneven shards.
    """
    local, expected = tuple(like.to_local().shape), tuple(length for _, length in local_box(like))
    both_empty = math.prod(local) == math.prod(expected) == 0
    if local == expected or both_empty:
        return ""
    return f"the local shape is {local}, but its placements imply {expected}"


def local_value(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor, as a plain tensor where possible. Local, a view.

    A subclass that wraps one tensor of its own shape and dtype, such as float8 training weights, is
    unwrapped; others, such as quantized ones, are returned as they are, with ``data_ptr()`` 0.
    """
    local = (local_tensor(tensor) if isinstance(tensor, DTensor) else tensor).detach()
    while is_wrapper(local):
        kind: Any = type(local)
        names, _ = kind.__tensor_flatten__(local)
        inner = getattr(local, names[0])
        if len(names) > 1 or (inner.shape, inner.dtype) != (local.shape, local.dtype):
            break
        local = inner
    return local


def wrapped_as(memory: Tensor, like: Tensor) -> Tensor:
    """Wrap a plain tensor in the subclasses of ``like`` that :func:`local_value` unwraps. Local."""
    if not is_wrapper(like):
        return memory
    kind: Any = type(like)
    (name,), context = kind.__tensor_flatten__(like)
    inner = {name: wrapped_as(memory, getattr(like, name))}
    wrapped: Tensor = kind.__tensor_unflatten__(inner, context, memory.shape, memory.stride())
    return wrapped


def dtensor_from_local(
    local: Tensor,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    shape: torch.Size,
    stride: tuple[int, ...],
) -> DTensor:
    """Return a DTensor of a local tensor, which stays on its device, such as offloaded to the CPU.
    Local.
    """
    # on meta, since from_local moves a tensor to the mesh's device
    meta = torch.empty(local.shape, dtype=local.dtype, device="meta")
    like = DTensor.from_local(meta, mesh, placements, run_check=False, shape=shape, stride=stride)
    return with_local(like, local)


def as_sharded(local: Tensor, like: DTensor) -> DTensor:
    """Return a DTensor with the placements of ``like`` and this local tensor, of any dtype and
    device. Local.
    """
    return dtensor_from_local(local, like.device_mesh, like.placements, like.shape, like.stride())


def replicated(whole: Tensor, mesh: DeviceMesh) -> DTensor:
    """Return a replicated DTensor, which stays on its device. Local."""
    return dtensor_from_local(whole, mesh, [Replicate()] * mesh.ndim, whole.shape, whole.stride())


def is_first_replica(like: DTensor) -> bool:
    """Return whether this rank is the first of those with the same shard: index 0 on every
    replicate axis.
    """
    coordinate = like.device_mesh.get_coordinate()
    assert coordinate is not None, "a rank outside its parameters' mesh"
    for index, placement in zip(coordinate, like.placements, strict=True):
        if index > 0 and not hasattr(placement, "dim"):
            return False
    return True


def device_of(mesh: DeviceMesh) -> torch.device:
    """Return the device of this rank in a mesh."""
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(
        mesh.device_type, torch.get_device_module(mesh.device_type).current_device()
    )
