"""Bytes between memory and files: all of them or an error, in pieces that a progress line can follow."""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor

from shardkit import _torch

# Called with the bytes that this rank has written or read so far, and how many there will be.
Progress: TypeAlias = Callable[[int, int], None]

_AT_ONCE = 1 << 26  # bytes in one call of the system, between two calls of a Progress


class Meter:
    """Counts bytes for a Progress."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self._progress, self._total, self._done = progress, total, 0

    def add(self, count: int) -> None:
        """Count more bytes as done."""
        self._done += count
        if self._progress is not None:
            self._progress(self._done, self._total)


class Staging:
    """One bounded piece of CPU memory, through which go values of other devices, dtypes and strides."""

    BYTES = 1 << 24

    def __init__(self) -> None:
        self._memory: Tensor | None = None

    def take(self, shape: Sequence[int], dtype: torch.dtype, other: torch.device) -> Tensor:
        """The beginning of it as a tensor of at most ``BYTES`` bytes; pinned when it is for an accelerator."""
        pinned = other.type != "cpu"
        if self._memory is None or pinned > self._memory.is_pinned():
            self._memory = torch.empty(self.BYTES, dtype=torch.uint8, pin_memory=pinned)
        return self._memory[: math.prod(shape) * dtype.itemsize].view(dtype).view(tuple(shape))


@contextlib.contextmanager
def opened(path: Path, flags: int) -> Iterator[int]:
    """A file's descriptor, closed at the end."""
    descriptor = os.open(path, flags | os.O_CLOEXEC, 0o666)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def raw(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor, to read and to write; without numpy. Valid as long as the tensor is."""
    assert not _torch.has_own_dispatch(type(tensor)), "a wrapper has no memory: its data_ptr() is 0"
    if not tensor.numel():
        return memoryview(b"")
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def write_all(descriptor: int, data: memoryview, start: int, meter: Meter | None = None) -> None:
    """Write all of the data ``start`` bytes into the file; the system may take less in one call."""
    while data:
        count = os.pwrite(descriptor, data[:_AT_ONCE], start)
        data, start = data[count:], start + count
        if meter is not None:
            meter.add(count)


def read_all(descriptor: int, data: memoryview, start: int, meter: Meter | None = None) -> None:
    """Fill the memory from ``start`` bytes into the file; an OSError if the file ends before that."""
    while data:
        count = os.preadv(descriptor, [data[:_AT_ONCE]], start)
        if count == 0:
            raise OSError(f"the file ends at byte {start:,}, {len(data):,} too early")
        data, start = data[count:], start + count
        if meter is not None:
            meter.add(count)


def raw_bytes(descriptor: int, start: int, count: int) -> bytes:
    """``count`` bytes from ``start`` on; an OSError if the file ends before that."""
    data = bytearray(count)
    read_all(descriptor, memoryview(data), start)
    return bytes(data)
