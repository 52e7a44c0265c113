"""Write safetensors files from all ranks in parallel: each rank writes its own bytes at their offsets.

A tensor's own mesh says where its parts lie. Where that mesh is a slice of a larger one, each slice has the full one:
the slice with the lowest rank writes it, and the values of all slices must be equal.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardkit._torch import has_own_dispatch
from shardkit.checkpoint.asynchronous import own_rank
from shardkit.checkpoint.chunks import MASK, Part, opened, part_of, part_sum, staged, write_all
from shardkit.checkpoint.format import NAMES, Entry, File, Spec, file_runs, lay_out
from shardkit.errors import CheckpointError, listing, message
from shardkit.shards import is_first_replica, local_value, misplaced

MAX_SHARD_SIZE = 5 * 10**9  # bytes
FILES = 64  # of a section, or at most twice as many: every rank opens all, so those of larger models are larger

# By name, the elements of a tensor that a rank has written, and what they add to its checksum.
Written: TypeAlias = "dict[str, tuple[int, int]]"
_NUMBERS = 5  # of each tensor: both, then over all slices with a random factor for each: both, and the sum of factors


class Layout(NamedTuple):
    """Different tensors, by their first names, and the files for them."""

    tensors: dict[str, Tensor]
    files: list[File]
    rows: Mapping[str, Part] = MappingProxyType({})  # of this rank, of tensors that are only in the files

    @property
    def numbers(self) -> int:
        """How many numbers :func:`write_own` returns."""
        return _NUMBERS * (len(self.tensors) + len(self.rows))


def described(tensor: Tensor) -> str:
    """Return a tensor's shape, dtype and placements, for messages."""
    return f"{tuple(tensor.shape)} {tensor.dtype} {getattr(tensor, 'placements', 'plain')}"


# ---- what is written ------------------------------------------------------------------------------------------


def laid_out(
    tensors: Mapping[str, Tensor], name: str, most: int | None = None, dtype: torch.dtype | None = None
) -> Layout:
    """Assign different tensors to files, after checking that safetensors can hold them. Local.

    A file has at most ``most`` bytes; None is ``MAX_SHARD_SIZE``, or more where that would be too many files.
    """
    if dtype is not None and not (dtype.is_floating_point and dtype in NAMES):
        floats = ", ".join(str(each) for each in NAMES if each.is_floating_point)
        raise CheckpointError(message("dtype", f"must be one of {floats}, got {dtype}", "", "Leave it out"))
    # By identity: empty shards of different tensors have the same memory.
    once = {id(tensor): name for name, tensor in reversed(list(tensors.items()))}
    different = {name: tensor for name, tensor in tensors.items() if once[id(tensor)] == name}
    specs = {name: Spec(written_dtype(tensor, dtype), tensor.shape) for name, tensor in different.items()}
    if unfit := [f"{n} ({reason})" for n, tensor in different.items() for reason in _unfit(tensor, specs[n])]:
        rule = "A safetensors file holds strided tensors of " + ", ".join(str(each) for each in NAMES)
        fix = "Leave them out, or convert them"
        if any(local_value(tensor).is_meta for tensor in different.values()):
            fix = "Call shardkit.materialize(model), or load_pretrained, before saving"
        raise CheckpointError(message("tensors", f"cannot be written: {listing(unfit)}", rule, fix))
    if most is None:
        most = max(MAX_SHARD_SIZE, sum(spec.bytes for spec in specs.values()) // FILES)
    return Layout(different, lay_out(specs, name, most))


def written_dtype(tensor: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """Return the dtype of a tensor in the file."""
    return dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype


def _unfit(tensor: Tensor, spec: Spec) -> Iterator[str]:
    local = local_value(tensor)
    if spec.dtype not in NAMES:
        yield str(spec.dtype)
    elif local.is_meta:
        yield "on the meta device, without values"
    elif local.layout != torch.strided or local.is_quantized or has_own_dispatch(type(local)):
        yield type(local).__name__ if local.layout == torch.strided else str(local.layout)
    if isinstance(tensor, DTensor) and any(placement.is_partial() for placement in tensor.placements):
        yield "Partial: its value is a sum over ranks"
    elif isinstance(tensor, DTensor) and (problem := misplaced(tensor)):
        yield problem


def held_parts(tensors: Mapping[str, Tensor], ranks: Sequence[int]) -> dict[str, dict[str, Part]]:
    """Return the parts of which this rank is the first replica, by slices; the one that is written is ``""``.

    It is the one with the lowest rank, which also writes plain tensors.
    """
    lowest: dict[DeviceMesh, int] = {}  # once for each mesh: torch 2.13 computes DeviceMesh.mesh anew each time
    found: dict[str, dict[str, Part]] = {}
    for name, tensor in tensors.items():
        at = own_rank()
        if isinstance(tensor, DTensor):
            mesh = tensor.device_mesh
            at = lowest[mesh] = lowest[mesh] if mesh in lowest else int(mesh.mesh.min())
        if is_first_replica(tensor) if isinstance(tensor, DTensor) else at == ranks[0]:
            found.setdefault("" if at == ranks[0] else str(at), {})[name] = part_of(tensor)
    return found


def check_written(layout: Layout, sums: Sequence[int]) -> dict[str, int]:
    """Check that ranks wrote as many elements of each tensor as it has, and that all slices have the same. Pure.

    ``sums`` are those over ranks of what :func:`write_own` returns. Returns the checksums of the tensors.
    """
    of_each = [sums[at : at + _NUMBERS] for at in range(0, len(sums), _NUMBERS)]
    found = dict(zip((*layout.tensors, *layout.rows), of_each, strict=True))
    check_counts(layout.files, {name: count for name, (count, *_) in found.items()})
    differ = [n for n, (count, total, *others, by) in found.items() if others != [by * count & MASK, by * total & MASK]]
    if differ:
        problem = f"are full on several meshes, with different values: {listing(sorted(differ))}"
        rule = "A tensor whose parts differ between ranks must be one DTensor on a mesh of all of these ranks"
        fix = "Call DTensor.from_local(part, mesh['ep'], [Shard(0)]), for example, before fully_shard, with the mesh "
        fix += "axis along which the tensor differs; or save each mesh by itself with group="
        raise CheckpointError(message(f"{len(differ)} tensors", problem, rule, fix))
    return {name: total for name, (_, total, *_) in found.items()}


def check_counts(files: Iterable[File], counts: Mapping[str, int]) -> None:
    """Check that as many elements were written of each tensor in the files as it has. Pure."""
    sizes = {name: entry.shape.numel() for file in files for name, entry in file.tensors.items()}
    if wrong := [f"{name} ({counts[name]:,} of {size:,})" for name, size in sizes.items() if counts[name] != size]:
        rule, fix = "Every element is written once", "Report this, with the model's meshes and placements"
        raise CheckpointError(message("elements written", f"do not add up: {listing(wrong)}", rule, fix))


# ---- how it is written ----------------------------------------------------------------------------------------


def write_own(directory: Path, layout: Layout, ranks: Sequence[int]) -> list[int]:
    """Write this rank's parts into the files, which the first makes; a layout without files is only summed. Local.

    Returns numbers whose sums over ranks :func:`check_written` takes.
    """
    held = held_parts(layout.tensors, ranks)
    written: Written = {}
    if layout.files:
        mine = {**held.pop("", {}), **layout.rows}
        written = write_parts(directory, layout.files, mine.items(), create=own_rank() == ranks[0], flush=True)
    numbers = {name: [*written.get(name, (0, 0)), 0, 0, 0] for name in (*layout.tensors, *layout.rows)}
    for at, parts in held.items():
        factor = int.from_bytes(hashlib.sha256(at.encode()).digest()[:8], "little") | 1
        for name, (part, box) in parts.items():
            count, total = part.numel(), part_sum(part, box, layout.tensors[name].shape)
            if not at:
                numbers[name][:2] = count, total
                continue
            is_origin = not any(layout.tensors[name].device_mesh.get_coordinate())  # type: ignore[attr-defined]
            numbers[name][2:] = factor * count & MASK, factor * total & MASK, factor * is_origin
    return [number for each in numbers.values() for number in each]


def write_parts(
    directory: Path, files: Sequence[File], parts: Iterable[tuple[str, Part]], create: bool = False, flush: bool = False
) -> Written:
    """Write parts of tensors, given with the tensors' names, to their places in files, each opened once. Local.

    The first rank is to ``create`` all files, in full size and with headers; others may be writing into them.
    """
    places = {name: (file.name, entry) for file in files for name, entry in file.tensors.items()}
    whole = {file.name: file for file in files}
    jobs: dict[str, list[tuple[str, Part, Entry]]] = {name: [] for name in whole if create}
    for name, part in sorted(parts, key=lambda each: places[each[0]][1].start):
        file, entry = places[name]
        jobs.setdefault(file, []).append((name, part, entry))
    written: Written = {}
    # Each rank starts with another file: ext4 and XFS lock a file for each write, so ranks would wait for each other.
    busy = sorted(jobs)
    first = own_rank() % max(len(busy), 1)
    for target in busy[first:] + busy[:first]:
        with opened(directory / target, os.O_WRONLY | os.O_CREAT) as descriptor:
            if create:
                os.ftruncate(descriptor, whole[target].bytes)
                write_all(descriptor, memoryview(whole[target].head), 0)
            for name, part, entry in jobs[target]:
                for view, values, box in staged(part, entry.dtype):
                    if values is not view:
                        values.copy_(view)
                    for data, start in file_runs(values, box, entry):
                        write_all(descriptor, data, start)
                    count, known = written.get(name, (0, 0))
                    written[name] = count + values.numel(), (known + part_sum(values, box, entry.shape)) & MASK
            if flush:
                os.fsync(descriptor)
    return written
