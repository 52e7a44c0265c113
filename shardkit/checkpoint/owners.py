"""Decide which rank writes which part of a tensor, and check that together they wrote every element exactly once.

A DTensor's own mesh says where its parts lie. Where the mesh is a slice of a larger one, each slice has the whole
tensor, and the slice with the lowest rank writes it.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Mapping
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardkit.checkpoint.chunks import MASK, Part, full_box, part_of, part_sum
from shardkit.checkpoint.format import Spec
from shardkit.errors import CheckpointError, listing, message
from shardkit.ranks import Groups, collective_device, raise_together
from shardkit.shards import Box, is_first_replica

Meshes: TypeAlias = "list[DeviceMesh | None]"


def meshes_of(tensors: Mapping[str, Tensor]) -> tuple[Meshes, dict[str, int]]:
    """Return the meshes in order of appearance, None for plain tensors, and the index of each tensor's. Local."""
    meshes: dict[DeviceMesh | None, int] = {}
    number = {
        name: meshes.setdefault(tensor.device_mesh if isinstance(tensor, DTensor) else None, len(meshes))
        for name, tensor in tensors.items()
    }
    return list(meshes), number


def owned(tensors: Mapping[str, Tensor], groups: Groups) -> dict[str, Part]:
    """Return the parts that this rank writes, by name. Collective: one all-reduce of 16 bytes for each mesh.

    Each part is written by its first replica, on the mesh with the lowest rank. If several meshes have a tensor, their
    values are read once and compared.

    Args:
        tensors: the same names on every rank, on corresponding meshes.
        groups: that together reach each rank that writes once: one group, or the axes of one mesh.

    Raises:
        CheckpointError: on every rank, for tensors that several meshes have with different values.
    """
    meshes, number = meshes_of(tensors)
    here = dist.get_rank() if dist.is_initialized() else 0
    own = [here if mesh is None else int(mesh.mesh.min()) for mesh in meshes]  # of each, the lowest rank
    lowest, highest = _range_of(own, groups)
    several = {n for n, mesh in enumerate(meshes) if mesh is not None and lowest[n] != highest[n]}
    _check_copies({name: tensor for name, tensor in tensors.items() if number[name] in several}, groups)
    return {
        name: part_of(tensor)
        for name, tensor in tensors.items()
        if own[number[name]] == lowest[number[name]] and (not isinstance(tensor, DTensor) or is_first_replica(tensor))
    }


def _range_of(values: list[int], groups: Groups) -> tuple[list[int], list[int]]:
    """Return the minimum and the maximum of each value over all ranks. Collective."""
    both = torch.tensor([values, [-value for value in values]], dtype=torch.int64)
    for group in groups:
        both = both.to(collective_device(group))
        dist.all_reduce(both, dist.ReduceOp.MIN, group=group)
    low, negative = both.tolist()
    return low, [-value for value in negative]


def _check_copies(tensors: Mapping[str, Tensor], groups: Groups) -> None:
    """Raise on every rank unless all meshes that have a tensor have the same values. Collective."""
    sums: dict[str, int] = {}
    meshes, number = meshes_of(tensors)
    for n, mesh in enumerate(meshes):
        assert mesh is not None, "the first rank writes plain tensors"
        own = {
            name: part_sum(*part_of(tensor), tensor.shape)
            if isinstance(tensor, DTensor) and is_first_replica(tensor)
            else 0
            for name, tensor in tensors.items()
            if number[name] == n
        }
        axes = [axis for axis in mesh.get_all_groups() if axis.size() > 1]
        sums |= zip(own, added(list(own.values()), axes), strict=True)
    words = [half for value in sums.values() for half in (value >> 32, value & 0xFFFFFFFF)]
    low, high = _range_of(words, groups) if sums else ([], [])
    differ = [name for n, name in enumerate(sums) if low[2 * n : 2 * n + 2] != high[2 * n : 2 * n + 2]]
    problem = f"{len(differ)} tensors are full on several meshes, with different values: {listing(differ)}"
    rule = "A tensor whose parts differ between ranks must be one DTensor on a mesh of all of these ranks"
    fix = "Call DTensor.from_local(part, mesh['ep'], [Shard(0)]), for example, before fully_shard, with the mesh axis "
    fix += "along which the tensor differs; or save each mesh by itself with group="
    error = CheckpointError(message("tensors", problem, rule, fix)) if differ else None
    raise_together(error, groups, CheckpointError)


def added(own: list[int], groups: Groups) -> list[int]:
    """Add up each number over all ranks, mod 2**64. Collective; ``groups`` together reach each rank once."""
    for group in groups:
        halves = [[value & 0xFFFFFFFF, value >> 32] for value in own]  # int64 can add up four billion of them
        values = torch.tensor(halves, dtype=torch.int64, device=collective_device(group)).reshape(-1, 2)
        dist.all_reduce(values, group=group)
        own = [(low + (high << 32)) & MASK for low, high in values.tolist()]
    return own


# ---- check that every element was written once ----------------------------------------------------------------


def check_written(
    tensors: Mapping[str, Tensor | Spec], written: Iterable[tuple[str, Box]], sums: Mapping[str, int], groups: Groups
) -> dict[str, int]:
    """Check that ranks wrote every element exactly once. Collective: one all-reduce of 32 bytes for each tensor.

    No list of parts is gathered, so the cost does not depend on the number of ranks.

    Args:
        tensors: all tensors.
        written: the boxes that this rank wrote, each with its tensor's name.
        sums: what they add to the checksums of their tensors.
        groups: as for :func:`owned`.

    Returns:
        the checksums of the whole tensors.

    Raises:
        CheckpointError: on every rank, for tensors of which a part was not written, or was written twice.
    """
    boxes: dict[str, list[Box]] = {name: [] for name in tensors}
    for name, box in written:
        boxes[name].append(box)
    own = [fingerprint(boxes[name], tensor.shape) for name, tensor in tensors.items()]
    found = added([*own, *(sums.get(name, 0) for name in tensors)], groups)
    expected = [fingerprint([full_box(tensor.shape)], tensor.shape) for tensor in tensors.values()]
    if wrong := [name for name, want, have in zip(tensors, expected, found, strict=False) if want != have]:
        problem, rule = "a part of it was not written, or was written twice", "Every element is written once"
        fix = "Report this, with the model's meshes and placements; format='dcp' may save the model meanwhile"
        raise CheckpointError(message(listing(wrong), problem, rule, fix))
    return dict(zip(tensors, found[len(boxes) :], strict=True))


def fingerprint(boxes: Iterable[Box], shape: torch.Size) -> int:
    """Return a number that sets of boxes share if they cover the same elements equally often. Pure.

    Other sets share it with a chance of 2**-64. It is the sum of the hashes of all corners, with the signs of a mixed
    difference: where boxes meet, corners cancel. So boxes that fill a tensor leave only the tensor's own corners.
    """
    wide = [dim for dim, size in enumerate(shape) if size > 1]  # other dims cannot be cut; each doubles the corners
    total = 0
    for box in boxes:
        for ends in itertools.product((0, 1), repeat=len(wide)) if all(length for _, length in box) else ():
            corner = [box[dim][0] + box[dim][1] * end for dim, end in zip(wide, ends, strict=True)]
            digest = hashlib.blake2b(repr(corner).encode(), digest_size=8).digest()
            total += (-1) ** sum(ends) * int.from_bytes(digest, "little")
    return total & MASK
