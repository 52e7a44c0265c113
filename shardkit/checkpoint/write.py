"""Write safetensors files from all ranks in parallel: each rank writes its own bytes at their offsets."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardkit._torch import has_own_dispatch
from shardkit.checkpoint.agreement import on_each, own_rank, ranks_of, world
from shardkit.checkpoint.chunks import MASK, Part, blocks, inside, is_plain_memory, part_sum, runs_of
from shardkit.checkpoint.format import NAMES, Entry, File, Spec, lay_out
from shardkit.checkpoint.owners import check_copies, check_written, copies, owned
from shardkit.checkpoint.transfer import Meter, Progress, Staging, flush_files, opened, raw, write_all
from shardkit.errors import CheckpointError, listing, message
from shardkit.ranks import Groups, together
from shardkit.shards import local_value, misplaced

MAX_SHARD_SIZE = 5 * 10**9  # bytes


class Layout(NamedTuple):
    """Different tensors, by their first names, and the files for them."""

    tensors: dict[str, Tensor]
    files: list[File]


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
) -> list[File]:
    """Write tensors into ``directory`` as ordinary safetensors files, each rank its own bytes.

    **Collective** over ``groups``, whose ranks must all see the directory. The first rank allocates the files in full
    size, so that a full disk fails right there, and writes headers and plain tensors; each shard is written by its
    first replica, and nothing is gathered. A shard that is on another device than the CPU, of another dtype or not
    contiguous goes through a buffer of 16 MiB. After an error files are incomplete: write into a new directory, and
    rename it when this returns.

    Args:
        directory: exists, and has none of the files.
        tensors: DTensors and plain tensors, the same names, shapes and dtypes on every rank. Plain ones must be equal
            on all ranks. The same object under several names is written once, under the first.
        name: the file is ``<name>.safetensors``; above ``max_shard_size`` the files are
            ``<name>-00001-of-0000n.safetensors`` with ``<name>.safetensors.index.json``.
        max_shard_size: bytes of tensors in a file; a larger tensor has a file to itself.
        metadata: strings for the header, besides ``{"format": "pt"}``, which transformers requires.
        dtype: convert floating-point tensors to this dtype while writing; None keeps theirs.
        flush: flush the files to the disk (fsync) before this returns, though not the directory.
        progress: called on each rank with the bytes it has written, and its total, every 64 MiB.
        groups: process groups that together reach each rank that writes once; None: all ranks.

    Returns:
        the files, the index last; the same on every rank.

    Raises:
        CheckpointError: on every rank: safetensors cannot hold a tensor, ranks pass different tensors, separate meshes
            have different values of one tensor, or writing failed on some rank, with its reason.
    """
    groups, target = world() if groups is None else groups, Path(directory)
    with together(groups, CheckpointError, call="write_tensors") as poll:
        layout = laid_out(tensors, name, max_shard_size, metadata, dtype)
        rows = {name: described(tensor) for name, tensor in layout.tensors.items()}
        poll.same = {"tensors": rows, "files": [file.name for file in layout.files]}
    ranks = ranks_of(groups)
    with together(groups, CheckpointError):
        if own_rank() == ranks[0]:
            create_files(target, layout.files)

    def write() -> tuple[Any, Any]:
        return write_own(target, layout, ranks, progress, flush=flush), copies(layout.tensors, ranks)

    reports = on_each(write, groups).values()
    check_copies(copied for _, copied in reports)
    check_written({name: each.numel() for name, each in layout.tensors.items()}, (written for written, _ in reports))
    return layout.files


def described(tensor: Tensor) -> str:
    """Return a tensor's shape, dtype and placements, for messages."""
    return f"{tuple(tensor.shape)} {tensor.dtype} {getattr(tensor, 'placements', 'plain')}"


# ---- what is written ------------------------------------------------------------------------------------------


def laid_out(
    tensors: Mapping[str, Tensor],
    name: str,
    most: int = MAX_SHARD_SIZE,
    metadata: Mapping[str, str] | None = None,
    dtype: torch.dtype | None = None,
) -> Layout:
    """Assign different tensors to files, after checking that safetensors can hold them. Local."""
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
    return Layout(different, lay_out(specs, name, most, {"format": "pt", **(metadata or {})}))


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


# ---- how it is written ----------------------------------------------------------------------------------------


def create_files(directory: Path, files: Iterable[File]) -> None:
    """Create files in full size, with their headers. Local: the first rank calls it."""
    for file in files:
        with opened(directory / file.name, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as descriptor:
            try:  # have the disk reserve all blocks, so that a full disk fails before anything is copied
                os.posix_fallocate(descriptor, 0, file.bytes)
            except OSError as error:
                if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                    raise
                os.ftruncate(descriptor, file.bytes)  # on file systems without it a full disk fails in the copy
            write_all(descriptor, memoryview(file.head), 0)


def write_own(
    directory: Path, layout: Layout, ranks: Sequence[int], progress: Progress | None = None, *, flush: bool
) -> dict[str, tuple[int, int]]:
    """Write this rank's parts into the files, as :func:`write_parts`. Local."""
    parts = owned(layout.tensors, ranks)
    written = write_parts(directory, layout.files, parts.items(), progress)
    if flush:
        is_first = own_rank() == ranks[0]  # which wrote the headers
        flush_files(directory / f.name for f in layout.files if is_first or not f.tensors.keys().isdisjoint(parts))
    return written


def write_parts(
    directory: Path, files: Sequence[File], parts: Iterable[tuple[str, Part]], progress: Progress | None = None
) -> dict[str, tuple[int, int]]:
    """Write parts of tensors, given with the tensors' names, to their places in existing files. Local.

    Returns:
        by name, the elements that were written, and what they add to the checksum of the tensor.

    Raises OSError where the system refuses.
    """
    places = {name: (file.name, entry) for file in files for name, entry in file.tensors.items()}
    jobs: dict[str, list[tuple[str, Part, Entry]]] = {file.name: [] for file in files}
    for name, part in sorted(parts, key=lambda each: places[each[0]][1].start):
        file, entry = places[name]
        jobs[file].append((name, part, entry))
    total = sum(part.numel() * entry.dtype.itemsize for job in jobs.values() for _, (part, _), entry in job)
    meter, staging, written = Meter(progress, total), Staging(), dict[str, tuple[int, int]]()
    busy = [file for file, job in jobs.items() if job]
    # Each rank starts with another file: ext4 and XFS lock a file for each write, so ranks would wait for each other.
    first = own_rank() % max(len(busy), 1)
    for target in busy[first:] + busy[:first]:
        with opened(directory / target, os.O_WRONLY) as descriptor:
            for name, part, entry in jobs[target]:
                for values, box in _as_stored(part, entry, staging):
                    data = raw(values)
                    for low, high, start in runs_of(box, entry.shape).bytes(entry.dtype.itemsize):
                        write_all(descriptor, data[low:high], entry.start + start, meter)
                    count, known = written.get(name, (0, 0))
                    written[name] = count + values.numel(), (known + part_sum(values, box, entry.shape)) & MASK
    return written


def _as_stored(part: Part, entry: Entry, staging: Staging) -> Iterator[Part]:
    """Yield a part as plain memory of the file's dtype: its own memory, or block by block in the staging buffer."""
    values, box = part
    if values.dtype == entry.dtype and is_plain_memory(values):
        yield part
        return
    for block in blocks(box, Staging.BYTES // entry.dtype.itemsize):
        view = inside(values, box, block)
        yield staging.take(view.shape, entry.dtype, view.device).copy_(view), block
