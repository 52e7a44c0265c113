"""Where a rank's part of a DTensor lies in the full tensor."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate

from shardkit import _torch

Box: TypeAlias = tuple[tuple[int, int], ...]  # (start, length) in elements for each dim of the full tensor


def local_box(like: DTensor) -> Box:
    """The part of the full tensor that this rank has. Local, pure; replicas have the same box.

    A strided placement says that FSDP2 cut what another mesh axis (tensor parallelism) had cut before, so these
    are applied last, each in torch.chunk's way (``torch/distributed/fsdp/_fully_shard/_fsdp_param.py``). Partial
    placements have no part of their own, so they count as the whole.
    """
    coordinate = like.device_mesh.get_coordinate()
    assert coordinate is not None, "a rank outside its parameters' mesh"
    return box_at(like, tuple(coordinate))


def box_at(like: DTensor, coordinate: tuple[int, ...], axes: Iterable[int] | None = None) -> Box:
    """As :func:`local_box`, of the rank at ``coordinate`` of the mesh, were it cut along ``axes`` only (None: all)."""
    box = [(0, size) for size in like.shape]
    for axis in cutting_order(like, range(len(coordinate)) if axes is None else axes):
        dim = getattr(like.placements[axis], "dim", None)
        if dim is not None:
            start, size = box[dim]
            step = -(-size // like.device_mesh.size(axis))
            skipped = min(step * coordinate[axis], size)
            box[dim] = (start + skipped, min(step, size - skipped))
    return tuple(box)


def cutting_order(like: DTensor, axes: Iterable[int]) -> list[int]:
    """Axes of the mesh in the order in which they cut the tensor: strided ones last."""
    return sorted(axes, key=lambda axis: hasattr(like.placements[axis], "split_factor"))


def local_part(full: Tensor, like: DTensor) -> Tensor:
    """The part of a full tensor that this rank has, as a view. Local."""
    for dim, (start, length) in enumerate(local_box(like)):
        full = full.narrow(dim, start, length)
    return full


def misplaced(like: DTensor) -> str:
    """How this rank's part is of another shape than its placements say, such as of ``from_local`` of uneven parts."""
    local, expected = tuple(like.to_local().shape), tuple(length for _, length in local_box(like))
    if local == expected or 0 == math.prod(local) == math.prod(expected):
        return ""
    return f"this rank's part is {local}, and by its placements {expected}"


def local_value(tensor: Tensor) -> Tensor:
    """What this rank has of a tensor, as plain memory where that is all there is to it. Local, a view.

    A subclass that wraps one tensor of its own shape and dtype, such as float8 training weights, is that tensor; any
    other, such as a quantised one, stays what it is: it has no memory of its own, and its ``data_ptr()`` is 0.
    """
    with torch.no_grad():
        local = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
    while _torch.is_wrapper(local):
        inner = [getattr(local, name) for name in local.__tensor_flatten__()[0]]  # type: ignore[attr-defined]
        if len(inner) != 1 or (inner[0].shape, inner[0].dtype) != (local.shape, local.dtype):
            break
        local = inner[0]
    return local


def wrapped_as(memory: Tensor, like: Tensor) -> Tensor:
    """Plain memory inside of the same subclasses as a local tensor that :func:`local_value` sees through. Local."""
    if not _torch.is_wrapper(like):
        return memory
    (name,), context = like.__tensor_flatten__()  # type: ignore[attr-defined]
    inner = {name: wrapped_as(memory, getattr(like, name))}
    made: Tensor = type(like).__tensor_unflatten__(inner, context, memory.shape, memory.stride())  # type: ignore[attr-defined]
    return made


def around(
    local: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: torch.Size, stride: tuple[int, ...]
) -> DTensor:
    """A DTensor of a local tensor that stays where it is, such as offloaded on the CPU. Local.

    ``DTensor.from_local`` moves what is not on meta to the mesh's device.
    """
    alike = torch.empty(local.shape, dtype=local.dtype, device="meta")
    like = DTensor.from_local(alike, mesh, placements, run_check=False, shape=shape, stride=stride)
    return _torch.with_local(like, local)


def as_sharded(local: Tensor, like: DTensor) -> DTensor:
    """A DTensor placed as ``like``, with this local part, of any dtype and on any device. Local."""
    return around(local, like.device_mesh, like.placements, like.shape, like.stride())


def replicated(whole: Tensor, mesh: DeviceMesh) -> DTensor:
    """A DTensor that every rank has all of, where it is. Local."""
    return around(whole, mesh, [Replicate()] * mesh.ndim, whole.shape, whole.stride())


def is_first_replica(like: DTensor) -> bool:
    """Whether this rank is the one that writes among those with the same part: first on every axis that replicates."""
    coordinate = like.device_mesh.get_coordinate()
    assert coordinate is not None, "a rank outside its parameters' mesh"
    return all(at == 0 for at, place in zip(coordinate, like.placements, strict=True) if not hasattr(place, "dim"))


def device_of(mesh: DeviceMesh) -> torch.device:
    """The device of this rank in a mesh."""
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.get_device_module(mesh.device_type).current_device())
