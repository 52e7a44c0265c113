"""Chunks of a tensor as runs of bytes, which files have row by row: where they lie, checksums, and moving them."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import math
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardkit._torch import has_own_dispatch
from shardkit.errors import CheckpointError, listing, message
from shardkit.shards import Box, cut, local_box, local_value

Part: TypeAlias = "tuple[Tensor, Box]"  # a rank's part of a tensor, and its box in the full tensor

STAGE = 1 << 24  # bytes of CPU memory through which other values go
MASK = (1 << 64) - 1
_WORD = 8  # bytes
_SUMMED = 1 << 20  # bytes of an unaligned part that are summed at a time


class Runs(NamedTuple):
    """Contiguous elements of the full tensor, in the order of the part's own elements."""

    starts: Sequence[int]  # of each run in the full tensor, in elements, ascending
    length: int  # of every run, in elements


def runs_of(box: Box, shape: Sequence[int]) -> Runs:
    """Return the longest contiguous runs of a box. Pure; a box of full rows is one run, an empty box none."""
    if any(size == 0 for _, size in box):
        return Runs((), 0)
    rows = len(shape)  # a run spans all of the dims from here on, and a range of the dim before
    while rows > 0 and box[rows - 1] == (0, shape[rows - 1]):
        rows -= 1
    outer, strides = max(rows - 1, 0), [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    offset = sum(start * stride for (start, _), stride in zip(box, strides, strict=True))
    steps = [range(0, size * stride, stride) for (_, size), stride in zip(box[:outer], strides, strict=False)]
    length = math.prod(size for _, size in box[outer:])
    return Runs([offset + sum(at) for at in itertools.product(*steps)], length)


def blocks(box: Box, limit: int) -> Iterator[Box]:
    """Cut a box into blocks of at most ``limit`` elements, in the order of elements. Pure."""
    sizes = [size for _, size in box]
    if math.prod(sizes) <= limit:
        yield from [box] if all(sizes) else []
        return
    dim = next(dim for dim, size in enumerate(sizes) if size > 1)
    step = max(1, limit // math.prod(sizes[dim + 1 :]))
    for first in range(0, sizes[dim], step):
        part = (box[dim][0] + first, min(step, sizes[dim] - first))
        yield from blocks((*box[:dim], part, *box[dim + 1 :]), limit)


def full_box(shape: Sequence[int]) -> Box:
    """Return the box of a full tensor."""
    return tuple((0, size) for size in shape)


def covers(boxes: Collection[Box], shape: Sequence[int]) -> bool:
    """Whether different boxes lie in a tensor and have as many elements as it. Pure."""
    fit = all(start >= 0 and start + n <= size for box in boxes for (start, n), size in zip(box, shape, strict=True))
    return fit and sum(math.prod(n for _, n in box) for box in boxes) == math.prod(shape)


def part_of(tensor: Tensor) -> Part:
    """Return this rank's part of a tensor; a plain tensor is a part of its own. Local, no copy."""
    return local_value(tensor), local_box(tensor) if isinstance(tensor, DTensor) else full_box(tensor.shape)


def refuse_subclasses(tensors: Mapping[str, Tensor]) -> None:
    """Raise for tensors of subclasses that are not memory of their own, such as NF4 weights. Local."""
    kinds = {name: type(local_value(tensor)) for name, tensor in tensors.items()}
    if unfit := [f"{name} ({cls.__name__})" for name, cls in kinds.items() if has_own_dispatch(cls)]:
        rule = "Of tensor subclasses, float8 training weights and quantized optimizer state are saved, as their values"
        fix = "Save with trainable_only=True, and quantize the base again from its own files"
        raise CheckpointError(message("tensors", f"cannot be of a subclass: {listing(unfit)}", rule, fix))


def common(one: Box, other: Box) -> Box | None:
    """Return the intersection of two boxes, or None if it is empty."""
    starts = [max(a, b) for (a, _), (b, _) in zip(one, other, strict=True)]
    stops = [min(a + m, b + n) for (a, m), (b, n) in zip(one, other, strict=True)]
    box = tuple((start, stop - start) for start, stop in zip(starts, stops, strict=True))
    return box if all(length > 0 for _, length in box) else None


def inside(part: Tensor, box: Box, block: Box) -> Tensor:
    """Return the view of a block in a part that lies at ``box``."""
    return cut(part, tuple((first - start, count) for (start, _), (first, count) in zip(box, block, strict=True)))


def staged(part: Part, dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor, Box]]:
    """Yield a part block by block: the view of it, CPU memory of the file's dtype for its values, and its box. Local.

    The memory is the view itself where it lies as in the file, else a buffer, for the caller to copy.
    """
    values, box = part
    on_cpu = values.device.type == "cpu"
    if on_cpu and values.dtype == dtype and values.is_contiguous() and not values.is_conj() and not values.is_neg():
        yield values, values, box
        return
    buffer = torch.empty(min(STAGE, values.numel() * dtype.itemsize), dtype=torch.uint8, pin_memory=not on_cpu)
    for block in blocks(box, STAGE // dtype.itemsize):
        view = inside(values, box, block)
        yield view, buffer[: view.numel() * dtype.itemsize].view(dtype).view(view.shape), block


# ---- checksums --------------------------------------------------------------------------------------------------


def part_sum(part: Tensor, box: Box, shape: Sequence[int]) -> int:
    """Return what a part adds to the checksum of its tensor, however the tensor is cut. Pure; waits for the GPU.

    The checksum is the sum of the tensor's bytes as little-endian 64-bit words, the last one padded with zeros, mod
    2**64. It detects corruption at the speed of memory, and not tampering.
    """
    if part.numel() == 0:
        return 0
    runs, size = runs_of(box, shape), part.element_size()
    is_ragged = runs.length * size % _WORD != 0 or any(start * size % _WORD for start in runs.starts)
    if is_ragged and part.nbytes > _SUMMED:
        return sum(part_sum(inside(part, box, each), each, shape) for each in blocks(box, _SUMMED // size)) & MASK
    data = part.detach().resolve_conj().resolve_neg().contiguous().view(-1).unsqueeze(-1).view(torch.uint8)
    if not is_ragged:
        words = data.flatten()
        words = words.clone() if words.storage_offset() % _WORD or words.data_ptr() % _WORD else words
        return int(words.view(torch.int64).sum()) & MASK
    rows = data.view(len(runs.starts), -1)
    lanes = torch.tensor(runs.starts).unsqueeze(1) * size + torch.arange(rows.shape[1])  # the byte of a word, below
    return int((rows.long() << (lanes % _WORD * 8).to(rows.device)).sum()) & MASK


# ---- files ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def opened(path: Path, flags: int) -> Iterator[int]:
    """Open a file, yield its descriptor, and close it."""
    descriptor = os.open(path, flags | os.O_CLOEXEC, 0o666)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def raw(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor, to read and to write. Valid while the tensor lives."""
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
    """Fill the memory from ``start`` bytes into the file; raise OSError if the file ends before that."""
    while data:
        count = os.preadv(descriptor, [data], start)
        if count == 0:
            raise OSError(f"the file ends at byte {start:,}, {len(data):,} too early")
        data, start = data[count:], start + count


def flush_files(paths: Iterable[Path]) -> None:
    """Flush files to the disk, including what other processes of this machine wrote. Local."""
    for path in paths:
        with opened(path, os.O_RDWR) as descriptor:
            os.fsync(descriptor)


def flush_directory(path: Path) -> None:
    """Flush the names in a directory to the disk. Local; some network file systems refuse, and do not need it."""
    with opened(path, os.O_RDONLY | os.O_DIRECTORY) as descriptor, contextlib.suppress(OSError):
        os.fsync(descriptor)
