"""Move bytes between memory and files, all of them or an error, and report progress."""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from shardkit._torch import has_own_dispatch

# Called with the bytes that this rank has written or read so far, and how many there will be.
Progress: TypeAlias = Callable[[int, int], None]

_AT_ONCE = 1 << 26  # bytes in one system call


class ProgressLine:
    """A Progress that shows bytes and rate in one line on stderr, if this is rank 0 at a terminal."""

    def __init__(self, title: str) -> None:
        self._title, self._begun = title, False
        self._shown = self._started = time.monotonic()
        self._visible = sys.stderr.isatty() and (not dist.is_initialized() or dist.get_rank() == 0)

    def __call__(self, done: int, total: int) -> None:
        """Update the line, five times a second."""
        now = time.monotonic()
        if self._visible and (now - self._shown >= 0.2 or done >= total):
            self._shown, self._begun = now, True
            rate = done / max(now - self._started, 1e-9)
            line = f"{self._title}  {done / 2**30:.2f}/{total / 2**30:.2f} GiB  {rate / 2**30:.2f} GiB/s"
            print(f"\r{line}", end="", file=sys.stderr, flush=True)

    def close(self) -> None:
        """End the line."""
        if self._begun:
            print(file=sys.stderr, flush=True)


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
    """A bounded buffer in CPU memory for values on other devices, of other dtypes, or not contiguous."""

    BYTES = 1 << 24

    def __init__(self) -> None:
        self._memory: Tensor | None = None

    def take(self, shape: Sequence[int], dtype: torch.dtype, other: torch.device) -> Tensor:
        """Return the start of the buffer as a tensor of at most ``BYTES`` bytes; pinned if ``other`` is not the CPU."""
        pinned = other.type != "cpu"
        if self._memory is None or pinned > self._memory.is_pinned():
            self._memory = torch.empty(self.BYTES, dtype=torch.uint8, pin_memory=pinned)
        return self._memory[: math.prod(shape) * dtype.itemsize].view(dtype).view(tuple(shape))


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


def write_all(descriptor: int, data: memoryview, start: int, meter: Meter | None = None) -> None:
    """Write all of the data at ``start`` bytes into the file."""
    while data:
        count = os.pwrite(descriptor, data[:_AT_ONCE], start)
        data, start = data[count:], start + count
        if meter is not None:
            meter.add(count)


def read_all(descriptor: int, data: memoryview, start: int, meter: Meter | None = None) -> None:
    """Fill the memory from ``start`` bytes into the file; raise OSError if the file ends before that."""
    while data:
        count = os.preadv(descriptor, [data[:_AT_ONCE]], start)
        if count == 0:
            raise OSError(f"the file ends at byte {start:,}, {len(data):,} too early")
        data, start = data[count:], start + count
        if meter is not None:
            meter.add(count)


def flush_files(paths: Iterable[Path]) -> None:
    """Flush files to the disk, including what other processes of this machine wrote. Local."""
    for path in paths:
        with opened(path, os.O_RDWR) as descriptor:
            os.fsync(descriptor)


def flush_directory(path: Path) -> None:
    """Flush the names in a directory to the disk. Local; some network file systems refuse, and do not need it."""
    with opened(path, os.O_RDONLY | os.O_DIRECTORY) as descriptor, contextlib.suppress(OSError):
        os.fsync(descriptor)
