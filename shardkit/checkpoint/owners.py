"""Which rank writes which piece of a tensor, and the check that together they wrote all of it exactly once.

Where a DTensor's part lies follows from its own mesh. A mesh is one that this rank is in: of a slice of a larger mesh,
other ranks are in other slices, and each slice has the whole tensor. The one with the lowest rank writes it.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardkit.checkpoint.format import Spec
from shardkit.checkpoint.pieces import MASK, Part, part_of, part_sum, whole
from shardkit.errors import CheckpointError, listing, message
from shardkit.ranks import Groups, collective_device, raise_together
from shardkit.shards import Box, is_first_replica

Meshes: TypeAlias = "list[DeviceMesh | None]"


def meshes_of(tensors: Mapping[str, Tensor]) -> tuple[Meshes, dict[str, int]]:
    """The different meshes in order of appearance, None for plain tensors, and the number of each tensor's. Local."""
    meshes: dict[DeviceMesh | None, int] = {}
    found = {name: tensor.device_mesh if isinstance(tensor, DTensor) else None for name, tensor in tensors.items()}
    number = {name: meshes.setdefault(mesh, len(meshes)) for name, mesh in found.items()}
    return list(meshes), number


def owned(tensors: Mapping[str, Tensor], groups: Groups) -> dict[str, Part]:
    """The pieces that this rank writes, by name. Collective over ``groups``: one all-reduce of 16 bytes a mesh.

    Every piece has one writer: the first of its replicas, on the mesh with the lowest rank. Where ranks have a tensor
    on meshes of their own, all of them must hold the same values, which takes reading those once.

    Args:
        tensors: the same names on every rank, on meshes that correspond.
        groups: which together reach all ranks that write, each rank once: one group, or the axes of one mesh.

    Raises:
        CheckpointError: on every rank, naming tensors that lie on several meshes with different values.
    """
    meshes, number = meshes_of(tensors)
    here = dist.get_rank() if dist.is_initialized() else 0
    own = [here if mesh is None else int(mesh.mesh.min()) for mesh in meshes]  # the lowest rank of each
    lowest, highest = _range_of(own, groups)
    several = {n for n, mesh in enumerate(meshes) if mesh is not None and lowest[n] != highest[n]}
    _check_copies({name: tensor for name, tensor in tensors.items() if number[name] in several}, groups)
    return {
        name: part_of(tensor)
        for name, tensor in tensors.items()
        if own[number[name]] == lowest[number[name]] and (not isinstance(tensor, DTensor) or is_first_replica(tensor))
    }


def _range_of(values: list[int], groups: Groups) -> tuple[list[int], list[int]]:
    """The smallest and the largest of each value over all ranks. Collective."""
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
        assert mesh is not None, "plain tensors are the first rank's"
        own = {name: _sum_here(tensor) for name, tensor in tensors.items() if number[name] == n}
        axes = [axis for axis in mesh.get_all_groups() if axis.size() > 1]
        sums |= zip(own, added(list(own.values()), axes), strict=True)
    words = [half for value in sums.values() for half in (value >> 32, value & 0xFFFFFFFF)]
    low, high = _range_of(words, groups) if sums else ([], [])
    differ = [name for n, name in enumerate(sums) if low[2 * n : 2 * n + 2] != high[2 * n : 2 * n + 2]]
    problem = f"{len(differ)} lie whole on several meshes, with different values: {listing(differ)}"
    rule = "Ranks that hold different parts of a tensor must have it as one DTensor on a mesh of all of them"
    fix = (
        "Give the tensor the mesh axis that it differs along, such as DTensor.from_local(part, mesh['ep'], [Shard(0)])"
    )
    fix += " before fully_shard, or save each mesh by itself with group="
    error = CheckpointError(message("tensors", problem, rule, fix)) if differ else None
    raise_together(error, groups, CheckpointError)


def _sum_here(tensor: Tensor) -> int:
    assert isinstance(tensor, DTensor), "plain tensors are the first rank's"
    return part_sum(*part_of(tensor), tensor.shape) if is_first_replica(tensor) else 0


def added(own: list[int], groups: Groups) -> list[int]:
    """The sums over all ranks of as many numbers from each, mod 2**64. Collective; ``groups`` reach each rank once."""
    for group in groups:
        halves = [[value & 0xFFFFFFFF, value >> 32] for value in own]  # of which int64 can add up four billion
        values = torch.tensor(halves, dtype=torch.int64, device=collective_device(group)).reshape(-1, 2)
        dist.all_reduce(values, group=group)
        own = [(low + (high << 32)) & MASK for low, high in values.tolist()]
    return own


# ---- that it was all written, once ----------------------------------------------------------------------------


def check_written(
    tensors: Mapping[str, Tensor | Spec], written: Iterable[tuple[str, Box]], sums: Mapping[str, int], groups: Groups
) -> dict[str, int]:
    """Check that ranks wrote every element exactly once. Collective: one all-reduce of 32 bytes a tensor.

    No list of pieces is gathered, so it costs the same on any number of ranks.

    Args:
        tensors: all that were to be written.
        written: the boxes that this rank wrote, each with its tensor's name.
        sums: what they add to the checksums of their tensors.
        groups: as for :func:`owned`.

    Returns:
        the checksums of the whole tensors.

    Raises:
        CheckpointError: on every rank, naming the tensors of which a part was not written, or written twice.
    """
    boxes: dict[str, list[Box]] = {name: [] for name in tensors}
    for name, box in written:
        boxes[name].append(box)
    own = [fingerprint(boxes[name], tensor.shape) for name, tensor in tensors.items()]
    found = added([*own, *(sums.get(name, 0) for name in tensors)], groups)
    expected = [fingerprint([whole(tensor.shape)], tensor.shape) for tensor in tensors.values()]
    if wrong := [name for name, want, have in zip(tensors, expected, found, strict=False) if want != have]:
        rule = "Every element is written once, by the one rank that it is on"
        fix = "Report it, with the model's meshes and placements; format='dcp' may save the model meanwhile"
        raise CheckpointError(message(listing(wrong), "not all of it was written, or some of it twice", rule, fix))
    return dict(zip(tensors, found[len(boxes) :], strict=True))


def fingerprint(boxes: Iterable[Box], shape: torch.Size) -> int:
    """A number that sets of boxes share if, and but for chance of 2**-64 only if, they cover the same, equally often.

    A box is known by its corners, with the signs of a mixed difference: where boxes meet, corners cancel. So what is
    left of boxes that fill a tensor, however it was cut, are the tensor's own corners. Pure.
    """
    wide = [dim for dim, size in enumerate(shape) if size > 1]  # no others can be cut; each doubles the corners
    solid = (box for box in boxes if all(length for _, length in box))
    return sum(_corners([box[dim] for dim in wide]) for box in solid) & MASK


def _corners(box: Sequence[tuple[int, int]]) -> int:
    total = 0
    for ends in itertools.product((0, 1), repeat=len(box)):
        corner = [start + length * end for (start, length), end in zip(box, ends, strict=True)]
        digest = hashlib.blake2b(repr(corner).encode(), digest_size=8).digest()
        total += (-1) ** sum(ends) * int.from_bytes(digest, "little")
    return total
