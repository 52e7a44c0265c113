"""Write safetensors files from all ranks in parallel: each rank writes its own bytes at their offsets."""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardkit import _torch
from shardkit.checkpoint.agreement import spanning_axes
from shardkit.checkpoint.chunks import MASK, Part, blocks, inside, is_plain_memory, part_sum, runs_of
from shardkit.checkpoint.format import METADATA, NAMES, Entry, File, Spec, lay_out
from shardkit.checkpoint.owners import check_written, meshes_of, owned
from shardkit.checkpoint.transfer import Meter, Progress, Staging, opened, raw, write_all
from shardkit.errors import CheckpointError, listing, message
from shardkit.ranks import Groups, agree, together
from shardkit.shards import local_value, misplaced

MAX_SHARD_SIZE = 5 * 10**9  # bytes


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

    **Collective** over ``groups``. The first rank allocates the files in full size, so that a full disk fails right
    there, and writes headers and plain tensors; each shard is written by its first replica. Nothing is gathered. Ranks
    check that together they wrote every element exactly once. A shard in CPU memory is written from where it is; one
    on another device, of another dtype or not contiguous goes through a buffer of 16 MiB. All ranks must see the
    directory. After an error files are incomplete: write into a new directory, and rename it when this returns.

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
        groups: process groups that together reach each rank that writes once; None: the axes of the tensors' largest
            mesh, or the world if that mesh does not have all ranks, or if there is no DTensor.

    Returns:
        the files, the index last; the same on every rank.

    Raises:
        CheckpointError: on every rank: safetensors cannot hold a tensor, ranks pass different tensors, separate meshes
            have different values of one tensor, or writing failed on some rank, with its reason.
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
) -> list[File]:
    """As :func:`write_tensors`; adds the checksums of the tensors to ``sums``."""
    with together(groups, CheckpointError):
        once = _by_first_name(tensors)
        files = checked_layout(once, name, max_shard_size, metadata or {}, dtype)
    _, number = meshes_of(once)
    rows = {name: f"{described(tensor)}, mesh {number[name]}" for name, tensor in once.items()}
    rows |= {file.name: hashlib.sha256(file.head).hexdigest() for file in files}
    is_first = agree({"tensors": rows}, groups, "write_tensors", CheckpointError)
    mine, own = owned(once, groups), None if sums is None else dict[str, int]()
    write_files(target, files, mine.items(), groups, is_first, flush, progress, own)
    found = check_written(once, [(name, box) for name, (_, box) in mine.items()], own or {}, groups)
    if sums is not None:
        sums.update(found)
    return files


def described(tensor: Tensor) -> str:
    """Return a tensor's shape, dtype and placements, for messages."""
    return f"{tuple(tensor.shape)} {tensor.dtype} {getattr(tensor, 'placements', 'plain')}"


def _by_first_name(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    # By identity: empty shards of different tensors have the same memory.
    first = {id(tensors[name]): name for name in reversed(list(tensors))}
    return {name: tensor for name, tensor in tensors.items() if first[id(tensor)] == name}


# ---- what is written ------------------------------------------------------------------------------------------


def checked_layout(
    tensors: Mapping[str, Tensor], name: str, most: int, metadata: Mapping[str, str], dtype: torch.dtype | None
) -> list[File]:
    """Assign different tensors to files, after checking the arguments and that safetensors can hold them. Local."""
    if os.path.basename(name) != name or not name:
        raise CheckpointError(message("name", f"is {name!r}", "It must be the start of file names", "Use 'model'"))
    if not isinstance(most, int) or most <= 0:
        rule = "It must be a positive number of bytes"
        raise CheckpointError(message("max_shard_size", f"is {most!r}", rule, "Use 5 * 10**9"))
    if dtype is not None and not (dtype.is_floating_point and dtype in NAMES):
        floats = ", ".join(str(each) for each in NAMES if each.is_floating_point)
        raise CheckpointError(message("dtype", f"is {dtype}", f"It must be one of {floats}", "Leave it out"))
    specs = {name: Spec(written_dtype(tensor, dtype), tensor.shape) for name, tensor in tensors.items()}
    if unfit := [f"{name} ({reason})" for name in tensors for reason in _unfit(name, tensors[name], specs[name])]:
        rule = "A safetensors file holds strided tensors of " + ", ".join(str(each) for each in NAMES)
        fix = "Leave them out, or convert them"
        if any(local_value(tensor).is_meta for tensor in tensors.values()):
            fix = "Call shardkit.materialize(model), or load_pretrained, before saving"
        raise CheckpointError(message("tensors", listing(unfit), rule, fix))
    if unfit := [key for key, text in metadata.items() if not isinstance(key, str) or not isinstance(text, str)]:
        rule = "Metadata maps strings to strings"
        raise CheckpointError(message("metadata", f"{unfit} are not strings", rule, "Use str()"))
    return lay_out(specs, name, most, {"format": "pt", **metadata})


def written_dtype(tensor: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """Return the dtype of a tensor in the file."""
    return dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype


def _unfit(name: str, tensor: Tensor, spec: Spec) -> Iterator[str]:
    local = local_value(tensor)
    if name == METADATA or any("\ud800" <= character <= "\udfff" for character in name):  # half a surrogate pair
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


# ---- how it is written ----------------------------------------------------------------------------------------


def write_files(
    place: Path,
    files: list[File],
    parts: Iterable[tuple[str, Part]],
    groups: Groups,
    is_first: bool,
    flush: bool,
    progress: Progress | None = None,
    sums: dict[str, int] | None = None,
) -> None:
    """Create files on the first rank, then write this rank's parts, as :func:`write_parts`. Collective."""
    with together(groups, CheckpointError):
        for file in files if is_first else []:
            with opened(place / file.name, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as descriptor:
                _allocate(descriptor, file.bytes)
                write_all(descriptor, memoryview(file.head), 0)
                if flush:
                    os.fsync(descriptor)
    with together(groups, CheckpointError):
        write_parts(place, files, parts, flush, progress, sums)


def _allocate(descriptor: int, size: int) -> None:
    """Have the disk reserve all blocks, so that a full disk fails before anything is copied."""
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
            raise
        os.ftruncate(descriptor, size)  # on file systems without it a full disk fails in the copy


def write_parts(
    directory: Path,
    files: list[File],
    parts: Iterable[tuple[str, Part]],
    flush: bool = False,
    progress: Progress | None = None,
    sums: dict[str, int] | None = None,
) -> None:
    """Write parts of tensors, given with the tensors' names, to their places in existing files. Local.

    Adds what they add to the checksums of their tensors to ``sums``. Raises OSError where the system refuses.
    """
    places = {name: (file.name, entry) for file in files for name, entry in file.tensors.items()}
    jobs: dict[str, list[tuple[str, Part, Entry]]] = {file.name: [] for file in files}
    for name, part in sorted(parts, key=lambda each: places[each[0]][1].start):
        file, entry = places[name]
        jobs[file].append((name, part, entry))
    total = sum(part.numel() * entry.dtype.itemsize for job in jobs.values() for _, (part, _), entry in job)
    meter, staging = Meter(progress, total), Staging()
    busy = [file for file, job in jobs.items() if job]
    # Each rank starts with another file: ext4 and XFS lock a file for each write, so ranks would wait for each other.
    first = dist.get_rank() * len(busy) // dist.get_world_size() if dist.is_initialized() else 0
    for target in busy[first:] + busy[:first]:
        with opened(directory / target, os.O_WRONLY) as descriptor:
            for name, part, entry in jobs[target]:
                for values, box in _as_stored(part, entry, staging):
                    data = raw(values)
                    for low, high, start in runs_of(box, entry.shape).bytes(entry.dtype.itemsize):
                        write_all(descriptor, data[low:high], entry.start + start, meter)
                    if sums is not None:
                        sums[name] = (sums.get(name, 0) + part_sum(values, box, entry.shape)) & MASK
            if flush:
                os.fsync(descriptor)


def _as_stored(part: Part, entry: Entry, staging: Staging) -> Iterator[Part]:
    """Yield a part as plain memory of the file's dtype: its own memory, or block by block in the staging buffer."""
    values, box = part
    if values.dtype == entry.dtype and is_plain_memory(values):
        yield part
        return
    for block in blocks(box, entry.shape, Staging.BYTES // entry.dtype.itemsize):
        view = inside(values, box, block)
        yield staging.take(view.shape, entry.dtype, view.device).copy_(view), block
