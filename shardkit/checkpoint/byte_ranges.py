"""Write and read parts of tensors at their places in files, and compute checksums of files.

A file holds a tensor row by row. A rank's part is a box of the tensor, so in the file it is runs of
bytes of equal length.
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardkit._torch import has_own_dispatch
from shardkit.checkpoint.format import Location, NewFile
from shardkit.shards import Box, local_box, local_value

Part: TypeAlias = "tuple[Tensor, Box]"  # a rank's part of a tensor, and where it lies in it

STAGE = 1 << 24  # bytes of CPU memory through which values go that cannot be written as they lie
MASK = (1 << 64) - 1


def full_box(shape: Sequence[int]) -> Box:
    """Return the box of a full tensor."""
    return tuple((0, size) for size in shape)


def part_of(tensor: Tensor) -> Part:
    """Return this rank's part of a tensor; a plain tensor is a part of its own. Local, no copy."""
    box = local_box(tensor) if isinstance(tensor, DTensor) else full_box(tensor.shape)
    return local_value(tensor), box


def runs_of(box: Box, shape: Sequence[int]) -> tuple[list[int], int]:
    """Return where each contiguous run of a box starts in the full tensor, and their length, in
    elements. Pure.
    """
    sizes = [size for _, size in box]
    if 0 in sizes:
        return [], 0
    # The box has all of the last dims. A run is these, and a range of the dim before them.
    whole = len(shape)
    while whole > 0 and box[whole - 1] == (0, shape[whole - 1]):
        whole -= 1
    outer = max(whole - 1, 0)
    first, steps = 0, []
    for dim, (start, size) in enumerate(box):
        stride = math.prod(shape[dim + 1 :])
        first += start * stride
        if dim < outer:
            steps.append(range(0, size * stride, stride))
    starts = [first + sum(offsets) for offsets in itertools.product(*steps)]
    return starts, math.prod(sizes[outer:])


def staged(part: Part, dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor, Box]]:
    """Yield a part some rows at a time: the view of it, CPU memory for its values, and its box.
    Local.

    The memory is the view itself where it lies as in the file, else a buffer, for the caller to
    copy.
    """
    values, box = part
    on_cpu = values.device.type == "cpu"
    is_lazy = values.is_conj() or values.is_neg()
    if on_cpu and values.dtype == dtype and values.is_contiguous() and not is_lazy:
        yield values, values, box
    elif not values.ndim:
        yield values, torch.empty((), dtype=dtype), box
    else:
        row_bytes = math.prod(values.shape[1:]) * dtype.itemsize
        step = max(1, STAGE // max(row_bytes, 1))
        shape = (min(step, len(values)), *values.shape[1:])
        buffer = torch.empty(shape, dtype=dtype, pin_memory=not on_cpu)
        for first in range(0, len(values), step):
            rows = values[first : first + step]
            row_range = (box[0][0] + first, len(rows))
            yield rows, buffer[: len(rows)], (row_range, *box[1:])


def _file_runs(memory: Tensor, box: Box, location: Location) -> Iterator[tuple[memoryview, int]]:
    """Yield the bytes of each run of a contiguous part, and where it starts in the file."""
    starts, length = runs_of(box, location.shape)
    size = location.dtype.itemsize
    data = raw(memory)
    for number, start in enumerate(starts):
        run = data[number * length * size : (number + 1) * length * size]
        yield run, location.start + start * size


def header_parts(files: Iterable[NewFile]) -> list[tuple[Location, Part]]:
    """Return the headers of files as parts of them, which one rank writes."""
    parts = []
    for file in files:
        header = torch.frombuffer(bytearray(file.header), dtype=torch.uint8)
        parts.append((Location(torch.uint8, header.shape, file.path, 0), part_of(header)))
    return parts


def write_parts(
    files: Sequence[NewFile],
    parts: Iterable[tuple[Location, Part]],
    *,
    turn: int = 0,
    flush: bool = True,
) -> dict[Path, tuple[int, int]]:
    """Write this rank's parts of tensors to their places in files. Local.

    Args:
        files: every file of the save. Other ranks may be writing into them already.
        parts: with the locations of their tensors.
        turn: the file to begin with, another one for each rank: ext4 and XFS lock a file for each
            write, so that ranks would wait for each other.
        flush: have the bytes on the disk.

    Returns:
        for each file the bytes written, and what they add to its checksum.
    """
    by_file: dict[Path, list[tuple[Location, Part]]] = {file.path: [] for file in files}
    for location, part in parts:
        by_file[location.file].append((location, part))
    written = {}
    for number in range(len(files)):
        path = files[(number + turn) % len(files)].path
        count = total = 0
        if by_file[path]:
            with open_file(path, os.O_WRONLY | os.O_CREAT) as descriptor:
                for location, part in sorted(by_file[path], key=lambda item: item[0].start):
                    for view, memory, box in staged(part, location.dtype):
                        if memory is not view:
                            memory.copy_(view)
                        for run, start in _file_runs(memory, box, location):
                            write_all(descriptor, run, start)
                        count += memory.nbytes
                        total += _part_sum(memory, box, location)
                if flush:
                    os.fsync(descriptor)
        written[path] = count, total & MASK
    return written


def read_parts(parts: Iterable[tuple[Location, Part]]) -> None:
    """Fill parts of tensors from files, converted to their dtypes. Local."""
    by_file: dict[Path, list[tuple[Location, Part]]] = {}
    for location, part in parts:
        by_file.setdefault(location.file, []).append((location, part))
    for path, own in sorted(by_file.items()):
        with open_file(path, os.O_RDONLY) as descriptor:
            for location, part in sorted(own, key=lambda item: item[0].start):
                for view, memory, box in staged(part, location.dtype):
                    for run, start in _file_runs(memory, box, location):
                        read_all(descriptor, run, start)
                    if memory is not view:
                        view.copy_(memory)


# ---- checksums: the sum of a file's bytes as little-endian 64-bit words, mod 2**64 ---------------


def bytes_sum(data: Tensor, start: int) -> int:
    """Return what bytes that lie at ``start`` in a file add to its checksum. Pure."""
    total = 0
    for first in range(0, data.numel(), STAGE):
        words = data[first : first + STAGE]
        lead = (start + first) % 8
        if lead or words.numel() % 8 or words.data_ptr() % 8 or words.storage_offset() % 8:
            padded = torch.zeros(-(-(lead + words.numel()) // 8) * 8, dtype=torch.uint8)
            padded[lead : lead + words.numel()] = words
            words = padded
        total += int(words.view(torch.int64).sum())
    return total & MASK


def _part_sum(memory: Tensor, box: Box, location: Location) -> int:
    starts, length = runs_of(box, location.shape)
    size = location.dtype.itemsize
    # Where all runs are whole words they are summed at once: a part of columns has many.
    if length * size % 8 == 0 and all((location.start + at * size) % 8 == 0 for at in starts):
        return bytes_sum(memory.reshape(-1).view(torch.uint8), 0)
    total = 0
    for run, start in _file_runs(memory, box, location):
        total += bytes_sum(torch.frombuffer(run, dtype=torch.uint8), start)
    return total


def file_sums(sizes: Mapping[Path, int], share: int, shares: int) -> list[int]:
    """Return what every ``shares``-th block of all files, from number ``share`` on, adds to each
    file's checksum.
    """
    buffer = torch.empty(STAGE, dtype=torch.uint8)
    sums, number = [], 0
    for file, size in sizes.items():
        total = 0
        # Blocks are dealt out as cards, on from the last file, so that all shares read of a large
        # file, and not only the first ones of many small files.
        blocks = range(0, size, STAGE)
        own_blocks = blocks[(share - number) % shares :: shares]
        if own_blocks:
            with open_file(file, os.O_RDONLY) as descriptor:
                for start in own_blocks:
                    block = buffer[: min(STAGE, size - start)]
                    read_all(descriptor, raw(block), start)
                    total += bytes_sum(block, start)
        number += len(blocks)
        sums.append(total & MASK)
    return sums


# ---- files ---------------------------------------------------------------------------------------


@contextmanager
def open_file(path: Path, flags: int) -> Iterator[int]:
    """Open a file, yield its descriptor, and close it. Errors name the file."""
    descriptor = os.open(path, flags | os.O_CLOEXEC, 0o666)
    try:
        yield descriptor
    except OSError as error:
        if error.filename is None and error.errno is not None:  # those of a descriptor have no name
            error.filename = str(path)
        raise
    finally:
        os.close(descriptor)


def raw(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor, to read and to write. Valid while the tensor
    lives.
    """
    assert not has_own_dispatch(type(tensor)), "a wrapper has no memory: its data_ptr() is 0"
    if not tensor.numel():
        return memoryview(b"")
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def write_all(descriptor: int, data: memoryview, start: int) -> None:
    """Write all of the data at ``start`` bytes into the file."""
    while data:
        count = os.pwrite(descriptor, data, start)
        data, start = data[count:], start + count


def read_all(descriptor: int, data: memoryview, start: int) -> None:
    """Fill the memory from ``start`` bytes into the file; raise OSError if the file ends before
    that.
    """
    while data:
        count = os.preadv(descriptor, [data], start)
        if count == 0:
            raise OSError(errno.EIO, f"the file ends at byte {start:,}, {len(data):,} too early")
        data, start = data[count:], start + count


def flush_file(path: Path) -> None:
    """Flush a file to the disk, including what other processes of this machine wrote."""
    with open_file(path, os.O_RDWR) as descriptor:
        os.fsync(descriptor)


def flush_directory(path: Path) -> None:
    """Flush the names in a directory to the disk. Local; some network file systems refuse, and do
    not need it.
    """
    with open_file(path, os.O_RDONLY | os.O_DIRECTORY) as descriptor, suppress(OSError):
        os.fsync(descriptor)
