"""Write safetensors files from all ranks at once: each its own bytes, at their own places."""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardkit import _torch
from shardkit.checkpoint.agreement import agree, spanning_axes
from shardkit.checkpoint.format import METADATA, NAMES, Entry, Layout, Spec, lay_out
from shardkit.checkpoint.owners import check_written, meshes_of, owned
from shardkit.checkpoint.pieces import MASK, Part, blocks, inside, is_plain_memory, part_sum, runs_of
from shardkit.checkpoint.transfer import Meter, Progress, Staging, opened, raw, write_all
from shardkit.errors import CheckpointError, listing, message
from shardkit.ranks import Groups, together
from shardkit.shards import Box, local_value, misplaced

MAX_SHARD_SIZE = 5 * 10**9  # bytes
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL


@dataclass(frozen=True)
class WrittenFile:
    """Attributes:
    name: in its directory.
    bytes: of the whole file.
    head: bytes before the first tensor; all of it for an index.
    tensors: the names of its tensors.
    """

    name: str
    bytes: int
    head: int
    tensors: tuple[str, ...] = ()


def write_tensors(
    directory: str | os.PathLike[str],
    tensors: Mapping[str, Tensor],
    *,
    name: str = "model",
    max_shard_size: int = MAX_SHARD_SIZE,
    metadata: Mapping[str, str] | None = None,
    dtype: torch.dtype | None = None,
    flush: bool = False,
    progress: Progress | None = None,
    groups: Groups | None = None,
) -> list[WrittenFile]:
    """Write tensors into ``directory`` as ordinary safetensors files, every rank its own bytes.

    **Collective** over ``groups``. The first rank makes the files in their full size, so that a full disk fails
    there and then, and writes headers and plain tensors; of a DTensor's replicas the first one writes. Nothing is
    gathered. Ranks check that together they wrote every element exactly once. A shard in CPU memory is written from
    where it lies; one on another device, of another dtype or not contiguous goes through 16 MiB of memory. All ranks
    must see the directory. Errors leave files half written: write into a directory of your own, and rename it when
    this returns.

    Args:
        directory: exists, and has none of the files.
        tensors: DTensor and plain, the same names, shapes and dtypes on every rank. Plain ones are taken to be equal
            on all ranks. The same object under several names is written once, under the first.
        name: the file is ``<name>.safetensors``; above ``max_shard_size`` they are
            ``<name>-00001-of-0000n.safetensors`` with ``<name>.safetensors.index.json``.
        max_shard_size: bytes of tensors in a file; a larger tensor has one to itself.
        metadata: texts for the header, beside ``{"format": "pt"}``, which transformers wants.
        dtype: what floating-point tensors are converted to on the way; None: as they are.
        flush: have the system write the files' bytes to the disk (fsync) before this returns. It does not flush the
            directory.
        progress: called on each rank with its bytes written, and its total, every 64 MiB.
        groups: which together reach all ranks that write, each once; None: the axes of the tensors' largest mesh, or
            the world if that has not all ranks of the others, or without a DTensor.

    Returns:
        the files, the index last; the same on every rank.

    Raises:
        CheckpointError: on every rank; a tensor that safetensors cannot hold, ranks that pass different tensors,
            separate meshes with different values of one tensor, and, with its reason, whatever failed on any rank.
    """
    groups = spanning_axes(tensors.values()) if groups is None else groups
    options = (name, max_shard_size, metadata, dtype, flush, progress)
    return write_shards(Path(directory), tensors, groups, *options)


def write_shards(
    target: Path,
    tensors: Mapping[str, Tensor],
    groups: Groups,
    name: str,
    max_shard_size: int = MAX_SHARD_SIZE,
    metadata: Mapping[str, str] | None = None,
    dtype: torch.dtype | None = None,
    flush: bool = False,
    progress: Progress | None = None,
    sums: dict[str, int] | None = None,
) -> list[WrittenFile]:
    """As :func:`write_tensors`; puts the checksums of the tensors into ``sums``."""
    with together(groups, CheckpointError):
        layout = checked_layout(tensors, name, max_shard_size, metadata or {}, dtype)
    once = _by_first_name(tensors)
    is_first = agree({"tensors": _described(once, layout)}, groups, "write_tensors")
    mine, own = owned(once, groups), None if sums is None else dict[str, int]()
    with together(groups, CheckpointError):
        if is_first:
            make_files(target, layout, flush)
    with together(groups, CheckpointError):
        write_parts(target, layout, mine.items(), progress, flush, own)
    found = check_written(once, [(name, box) for name, (_, box) in mine.items()], own or {}, groups)
    if sums is not None:
        sums.update(found)
    return written_files(layout)


def _described(tensors: Mapping[str, Tensor], layout: Layout) -> dict[str, str]:
    """What ranks must agree on: each tensor's type, placements, which of the meshes it is on, and the files."""
    _, number = meshes_of(tensors)
    rows = {name: f"{described(tensor)}, mesh {number[name]}" for name, tensor in tensors.items()}
    return rows | {file.name: hashlib.sha256(file.head).hexdigest() for file in layout.files}


def described(tensor: Tensor) -> str:
    """What a tensor is and how it lies, for messages."""
    return f"{tuple(tensor.shape)} {tensor.dtype} {getattr(tensor, 'placements', 'plain')}"


def _by_first_name(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Each tensor under its first name. By identity: by memory one could not tell, where this rank's shard is empty."""
    first = {id(tensors[name]): name for name in reversed(list(tensors))}
    return {name: tensor for name, tensor in tensors.items() if first[id(tensor)] == name}


# ---- what is written ------------------------------------------------------------------------------------------


def checked_layout(
    tensors: Mapping[str, Tensor], name: str, most: int, metadata: Mapping[str, str], dtype: torch.dtype | None
) -> Layout:
    """Where tensors go in which file, after checking the arguments and that safetensors can hold them. Local."""
    if os.path.basename(name) != name or not name:
        raise CheckpointError(message("name", f"is {name!r}", "It is the beginning of file names", "Use 'model'"))
    if not isinstance(most, int) or most <= 0:
        raise CheckpointError(message("max_shard_size", f"is {most!r}", "It is a number of bytes", "Use 5 * 10**9"))
    if dtype is not None and not (dtype.is_floating_point and dtype in NAMES):
        floats = ", ".join(str(each) for each in NAMES if each.is_floating_point)
        raise CheckpointError(message("dtype", f"is {dtype}", f"It is one of {floats}", "Leave it out"))
    once = _by_first_name(tensors)
    specs = {name: Spec(written_dtype(tensor, dtype), tensor.shape) for name, tensor in once.items()}
    if unfit := [f"{name} ({reason})" for name in once for reason in _unfit(name, once[name], specs[name])]:
        rule = "A safetensors file holds strided tensors of " + ", ".join(str(each) for each in NAMES)
        raise CheckpointError(message("tensors", listing(unfit), rule, "Leave them out, or convert them"))
    if unfit := [key for key, text in metadata.items() if not isinstance(key, str) or not isinstance(text, str)]:
        raise CheckpointError(message("metadata", f"{unfit} are not texts", "It is a map of texts", "Use str()"))
    return lay_out(specs, name, most, {"format": "pt", **metadata})


def written_dtype(tensor: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """What a tensor is in the file."""
    return dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype


def _unfit(name: str, tensor: Tensor, spec: Spec) -> Iterator[str]:
    """Why a tensor cannot be written, if it cannot."""
    local = local_value(tensor)
    if name == METADATA or not _is_text(name):
        yield "the name"
    if spec.dtype not in NAMES:
        yield str(spec.dtype)
    elif local.is_meta:
        yield "on the meta device, without values"
    elif local.layout != torch.strided or local.is_quantized or _torch.has_own_dispatch(type(local)):
        yield type(local).__name__ if local.layout == torch.strided else str(local.layout)
    if isinstance(tensor, DTensor) and any(placement.is_partial() for placement in tensor.placements):
        yield "Partial: its value is a sum over ranks"
    elif isinstance(tensor, DTensor) and (problem := misplaced(tensor)):
        yield problem


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:  # half a surrogate pair
        return False
    return True


def written_files(layout: Layout) -> list[WrittenFile]:
    """The files of a layout, the index last."""
    files = [
        WrittenFile(file.name, file.header.file_bytes, file.header.bytes, tuple(file.header.tensors))
        for file in layout.files
    ]
    if layout.index is None:
        return files
    name, text = layout.index
    return [*files, WrittenFile(name, len(text), len(text))]


# ---- the writing ----------------------------------------------------------------------------------------------


def make_files(directory: Path, layout: Layout, flush: bool) -> None:
    """Make every file in its full size, with its header, and the index. Local: one rank does it.

    Raises OSError where a file is there already, or the disk is full.
    """
    made = [(file.name, file.head, file.header.file_bytes) for file in layout.files]
    made += [] if layout.index is None else [(*layout.index, len(layout.index[1]))]
    for name, head, size in made:
        with opened(directory / name, _NEW) as descriptor:
            _allocate(descriptor, size)
            write_all(descriptor, memoryview(head), 0)
            if flush:
                os.fsync(descriptor)


def _allocate(descriptor: int, size: int) -> None:
    """Have the disk set aside all blocks, so that it is full before anything was copied, or not at all."""
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
            raise
        os.ftruncate(descriptor, size)  # a file system that cannot: there a full disk shows in the copy


def write_parts(
    directory: Path,
    layout: Layout,
    parts: Iterable[tuple[str, Part]],
    progress: Progress | None = None,
    flush: bool = False,
    sums: dict[str, int] | None = None,
) -> None:
    """Write parts of tensors, given with their names, to their places in files that :func:`make_files` made. Local.

    What they add to the checksums of their tensors is added to ``sums``. Raises OSError where the system refuses.
    """
    places = {name: (file.name, entry) for file in layout.files for name, entry in file.header.tensors.items()}
    jobs: dict[str, list[tuple[str, Part, Entry]]] = {file.name: [] for file in layout.files}
    for name, part in sorted(parts, key=lambda each: places[each[0]][1].start):
        file, entry = places[name]
        jobs[file].append((name, part, entry))
    total = sum(part.numel() * entry.dtype.itemsize for job in jobs.values() for _, (part, _), entry in job)
    meter, staging = Meter(progress, total), Staging()
    for target in _rotated_by_rank([file for file, job in jobs.items() if job]):
        with opened(directory / target, os.O_WRONLY) as descriptor:
            for name, part, entry in jobs[target]:
                for values, box in _as_stored(part, entry, staging):
                    _write_runs(descriptor, values, box, entry, meter)
                    if sums is not None:
                        sums[name] = (sums.get(name, 0) + part_sum(values, box, entry.shape)) & MASK
            if flush:
                os.fsync(descriptor)


def _rotated_by_rank(files: list[str]) -> list[str]:
    """The files from another one on for each rank: ext4 and XFS lock a file for each write, so ranks would wait."""
    first = dist.get_rank() * len(files) // dist.get_world_size() if dist.is_initialized() else 0
    return files[first:] + files[:first]


def _as_stored(part: Part, entry: Entry, staging: Staging) -> Iterator[Part]:
    """A part as plain memory of its dtype in the file: its own, or blocks of it in memory that the next one uses."""
    values, box = part
    if values.dtype == entry.dtype and is_plain_memory(values):
        yield part
        return
    for block in blocks(box, entry.shape, Staging.BYTES // entry.dtype.itemsize):
        view = inside(values, box, block)
        yield staging.take(view.shape, entry.dtype, view.device).copy_(view), block


def _write_runs(descriptor: int, values: Tensor, box: Box, entry: Entry, meter: Meter) -> None:
    data, size, runs = raw(values), entry.dtype.itemsize, runs_of(box, entry.shape)
    for number, start in enumerate(runs.starts):
        run = data[number * runs.length * size : (number + 1) * runs.length * size]
        write_all(descriptor, run, entry.start + start * size, meter)
