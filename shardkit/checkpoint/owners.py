"""Which rank writes which part of a tensor, and whether together they wrote every element.

A tensor's own mesh says where its parts lie. Where that mesh is a slice of a larger one, each slice has the full one:
the slice with the lowest rank writes it, and the values of all slices must be equal.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor
from torch.distributed.tensor import DTensor

from shardkit.checkpoint.agreement import own_rank
from shardkit.checkpoint.chunks import MASK, Part, part_of, part_sum
from shardkit.errors import CheckpointError, listing, message
from shardkit.shards import is_first_replica


def owned(tensors: Mapping[str, Tensor], ranks: Sequence[int]) -> dict[str, Part]:
    """Return the parts that this one of the ``ranks``, ascending, writes. Local, no copy.

    The lowest rank writes plain tensors; the first replica of each shard writes it, on the slice with the lowest rank.
    """
    parts = {n: t for (n, t), lowest in zip(tensors.items(), _slices(tensors), strict=True) if lowest == ranks[0]}
    return {n: part_of(t) for n, t in parts.items() if not isinstance(t, DTensor) or is_first_replica(t)}


def _slices(tensors: Mapping[str, Tensor]) -> list[int]:
    """Return for each tensor the lowest rank of those that hold it together."""
    meshes = [tensor.device_mesh if isinstance(tensor, DTensor) else None for tensor in tensors.values()]
    # Once for each mesh: torch 2.13 computes DeviceMesh.mesh anew each time.
    lowest = {mesh: own_rank() if mesh is None else int(mesh.mesh.min()) for mesh in dict.fromkeys(meshes)}
    return [lowest[mesh] for mesh in meshes]


def copies(tensors: Mapping[str, Tensor], ranks: Sequence[int]) -> dict[str, tuple[int, int]]:
    """Return the slice and the checksum of this rank's part, for each tensor that several slices have. Local."""
    several = {n: t for n, t in tensors.items() if isinstance(t, DTensor) and t.device_mesh.size() < len(ranks)}
    found = zip(several.items(), _slices(several), strict=True)
    return {n: (at, part_sum(*part_of(t), t.shape)) for (n, t), at in found if is_first_replica(t)}


def check_copies(of_ranks: Iterable[Mapping[str, Sequence[int]]]) -> None:
    """Raise a CheckpointError unless all slices that have a tensor have the same values, by :func:`copies`."""
    sums: dict[str, dict[int, int]] = {}
    for name, (at, total) in (each for of_rank in of_ranks for each in of_rank.items()):
        of_slices = sums.setdefault(name, {})
        of_slices[at] = (of_slices.get(at, 0) + total) & MASK
    if differ := [name for name, of_slices in sums.items() if len(set(of_slices.values())) > 1]:
        problem = f"are full on several meshes, with different values: {listing(differ)}"
        rule = "A tensor whose parts differ between ranks must be one DTensor on a mesh of all of these ranks"
        fix = "Call DTensor.from_local(part, mesh['ep'], [Shard(0)]), for example, before fully_shard, with the mesh "
        fix += "axis along which the tensor differs; or save each mesh by itself with group="
        raise CheckpointError(message(f"{len(differ)} tensors", problem, rule, fix))


def check_written(sizes: Mapping[str, int], of_ranks: Iterable[Mapping[str, Sequence[int]]]) -> dict[str, int]:
    """Check that ranks wrote as many elements of each tensor as it has. Pure.

    Args:
        sizes: the elements of each tensor.
        of_ranks: what each rank wrote: by name, elements, and what they add to the tensor's checksum.

    Returns:
        the checksums of the tensors.

    Raises:
        CheckpointError: a part of a tensor was not written, or was written twice.
    """
    counts, sums = dict.fromkeys(sizes, 0), dict.fromkeys(sizes, 0)
    for name, (count, total) in (each for of_rank in of_ranks for each in of_rank.items()):
        counts[name], sums[name] = counts[name] + count, (sums[name] + total) & MASK
    if wrong := [f"{name} ({counts[name]:,} of {size:,})" for name, size in sizes.items() if counts[name] != size]:
        rule, fix = "Every element is written once", "Report this, with the model's meshes and placements"
        raise CheckpointError(message("elements written", f"do not add up: {listing(wrong)}", rule, fix))
    return sums
