"""Write and read parts of tensors at their places in files: byte ranges, and checksums of files.

A file holds a tensor row by row. The part of a rank is a box of the tensor, so it lies there in
runs of equal length.
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
from shardkit.checkpoint.format import Entry, NewFile
from shardkit.shards import Box, local_box, local_value

Part: TypeAlias = "tuple[Tensor, Box]"  # a rank's part of a tensor, and where it lies in it

STAGE = 1 << 24  # bytes of CPU memory through which other values go
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
    if any(size == 0 for _, size in box):
        return [], 0
    # the dims from here on are in the box whole; a run is a range of the dim before
    whole = len(shape)
    while whole > 0 and box[whole - 1] == (0, shape[whole - 1]):
        whole -= 1
    outer = max(whole - 1, 0)
    length = math.prod(size for _, size in box[outer:])
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    first = sum(start * stride for (start, _), stride in zip(box, strides, strict=True))
    steps = []
    for (_, size), stride in zip(box[:outer], strides[:outer], strict=True):
        steps.append(range(0, size * stride, stride))
    return [first + sum(offsets) for offsets in itertools.product(*steps)], length


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
            at = (box[0][0] + first, len(rows))
            yield rows, buffer[: len(rows)], (at, *box[1:])


def _file_runs(memory: Tensor, box: Box, entry: Entry) -> Iterator[tuple[memoryview, int]]:
    """Yield the memory of each run of a contiguous part, and where it starts in the file."""
    starts, length = runs_of(box, entry.shape)
    size = entry.dtype.itemsize
    data = raw(memory)
    for number, start in enumerate(starts):
        yield (
            data[number * length * size : (number + 1) * length * size],
            entry.start + start * size,
        )


def write_parts(
    files: Sequence[NewFile],
    parts: Iterable[tuple[Entry, Part]],
    *,
    create: bool = False,
    turn: int = 0,
    flush: bool = True,
) -> dict[Path, tuple[int, int]]:
    """Write this rank's parts of tensors to their places in files. Local.

    Args:
        files: every file of the save.
        parts: with the entries of their tensors.
        create: whether to make the files, with their headers, as the first rank does; the others
            may be writing into them already.
        turn: the file to begin with, another one for each rank: ext4 and XFS lock a file for each
            write, so that ranks would wait for each other.
        flush: have the bytes on the disk.

    Returns:
        for each file the bytes written, and what they add to its checksum.
    """
    by_file: dict[Path, list[tuple[Entry, Part]]] = {file.path: [] for file in files}
    for entry, part in parts:
        by_file[entry.file].append((entry, part))
    written = {}
    for number in range(len(files)):
        file = files[(number + turn) % len(files)]
        count = total = 0
        if create or by_file[file.path]:
            with open_file(file.path, os.O_WRONLY | os.O_CREAT) as descriptor:
                if create:
                    os.ftruncate(descriptor, file.size)
                    write_all(descriptor, memoryview(file.header), 0)
                    count, total = len(file.header), bytes_sum(file.header, 0)
                for entry, part in sorted(by_file[file.path], key=lambda job: job[0].start):
                    for view, memory, box in staged(part, entry.dtype):
                        if memory is not view:
                            memory.copy_(view)
                        for data, start in _file_runs(memory, box, entry):
                            write_all(descriptor, data, start)
                        count += memory.nbytes
                        total += _part_sum(memory, box, entry)
                if flush:
                    os.fsync(descriptor)
        written[file.path] = count, total & MASK
    return written


def read_parts(jobs: Iterable[tuple[Entry, Part]]) -> None:
    """Fill parts of tensors from files, converted to their dtypes. Local."""
    by_file: dict[Path, list[tuple[Entry, Part]]] = {}
    for entry, part in jobs:
        by_file.setdefault(entry.file, []).append((entry, part))
    for file, own in sorted(by_file.items()):
        with open_file(file, os.O_RDONLY) as descriptor:
            for entry, part in sorted(own, key=lambda job: job[0].start):
                for view, memory, box in staged(part, entry.dtype):
                    for data, start in _file_runs(memory, box, entry):
                        read_all(descriptor, data, start)
                    if memory is not view:
                        view.copy_(memory)


# ---- checksums: the sum of a file's bytes as little-endian 64-bit words, mod 2**64, however it is


def bytes_sum(data: bytes | memoryview | Tensor, start: int) -> int:
    """Return what bytes that lie at ``start`` in a file add to its checksum. Pure."""
    flat = (
        data if isinstance(data, Tensor) else torch.frombuffer(bytearray(data), dtype=torch.uint8)
    )
    total = 0
    for first in range(0, flat.numel(), STAGE):
        words = flat[first : first + STAGE]
        lead = (start + first) % 8
        if lead or words.numel() % 8 or words.data_ptr() % 8 or words.storage_offset() % 8:
            padded = torch.zeros(-(-(lead + words.numel()) // 8) * 8, dtype=torch.uint8)
            padded[lead : lead + words.numel()] = words
            words = padded
        total += int(words.view(torch.int64).sum())
    return total & MASK


def _part_sum(memory: Tensor, box: Box, entry: Entry) -> int:
    starts, length = runs_of(box, entry.shape)
    size = entry.dtype.itemsize
    data = memory.reshape(-1).view(torch.uint8)
    if length * size % 8 == 0 and all((entry.start + start * size) % 8 == 0 for start in starts):
        return bytes_sum(data, 0)
    total = 0
    for number, start in enumerate(starts):
        run = data[number * length * size : (number + 1) * length * size]
        total += bytes_sum(run, entry.start + start * size)
    return total & MASK


def file_sums(sizes: Mapping[Path, int], share: int, shares: int) -> list[int]:
    """Return what every ``shares``-th block of all files, from number ``share`` on, adds to each
    file's checksum.
    """
    buffer = torch.empty(STAGE, dtype=torch.uint8)
    sums, number = [], 0
    for file, size in sizes.items():
        total = 0
        blocks = range(0, size, STAGE)
        mine = blocks[(share - number) % shares :: shares]
        if mine:
            with open_file(file, os.O_RDONLY) as descriptor:
                for start in mine:
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


def write_bytes(path: Path, data: bytes) -> None:
    """Write a small file, and flush it."""
    with open_file(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) as descriptor:
        write_all(descriptor, memoryview(data), 0)
        os.fsync(descriptor)


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
