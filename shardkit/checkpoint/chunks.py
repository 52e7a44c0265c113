"""Parts of a tensor as runs of bytes in the whole tensor, which is written row by row; and their checksums."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardkit.shards import Box, local_box, local_value

Part: TypeAlias = "tuple[Tensor, Box]"  # a rank's part of a tensor, and where it lies in the whole

WORD = 8  # bytes
MASK = (1 << 64) - 1
_CHUNK = 1 << 17  # bytes that are summed byte by byte at a time; each takes 8 bytes of memory meanwhile


@dataclass(frozen=True)
class Runs:
    """Contiguous elements of the whole tensor, in the order of the part's own elements."""

    starts: Sequence[int]  # of each run in the whole tensor, in elements, ascending
    length: int  # of every run, in elements

    @property
    def span(self) -> int:
        """Elements from the start of the first run to the end of the last one."""
        return self.starts[-1] + self.length - self.starts[0] if self.starts else 0

    def bytes(self, itemsize: int) -> Iterator[tuple[int, int, int]]:
        """For each run its first byte and its end in the part, and its first byte in the whole tensor."""
        step = self.length * itemsize
        for number, start in enumerate(self.starts):
            yield number * step, (number + 1) * step, start * itemsize


def runs_of(box: Box, shape: Sequence[int]) -> Runs:
    """Return the longest contiguous runs of a part. Pure; a part of whole rows is one run, an empty part none."""
    if any(size == 0 for _, size in box):
        return Runs((), 0)
    rows = len(shape)  # a run spans all of the dims from here on, and a range of the dim before
    while rows > 0 and box[rows - 1] == (0, shape[rows - 1]):
        rows -= 1
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    length = math.prod(size for _, size in box[max(rows - 1, 0) :])
    offset = sum(start * stride for (start, _), stride in zip(box, strides, strict=True))
    steps = [
        range(0, size * stride, stride) for (_, size), stride in zip(box[: max(rows - 1, 0)], strides, strict=False)
    ]
    if len(steps) == 1:
        return Runs(range(offset, offset + steps[0].stop, steps[0].step), length)
    return Runs([offset + sum(at) for at in itertools.product(*steps)], length)


def blocks(box: Box, shape: Sequence[int], limit: int) -> Iterator[Box]:
    """Cut a part into blocks with a span of at most ``limit`` elements, in the order of elements. Pure.

    The span includes the elements between the runs, so that a block can be read in one piece.
    """
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    if not all(size for _, size in box):
        return
    if 1 + sum((size - 1) * stride for (_, size), stride in zip(box, strides, strict=True)) <= limit:
        yield box
        return
    dim = next(dim for dim, (_, size) in enumerate(box) if size > 1)
    start, size = box[dim]
    inner = 1 + sum((n - 1) * stride for (_, n), stride in zip(box[dim + 1 :], strides[dim + 1 :], strict=True))
    step = max(1, (limit - inner) // strides[dim] + 1) if inner <= limit else 1
    for first in range(0, size, step):
        part = (start + first, min(step, size - first))
        yield from blocks((*box[:dim], part, *box[dim + 1 :]), shape, limit)


def full_box(shape: Sequence[int]) -> Box:
    """Return the box of a whole tensor."""
    return tuple((0, size) for size in shape)


def covers(boxes: Collection[Box], shape: Sequence[int]) -> bool:
    """Whether different boxes lie in a tensor and have as many elements as it. Pure."""
    fit = all(start >= 0 and start + n <= size for box in boxes for (start, n), size in zip(box, shape, strict=True))
    return fit and sum(math.prod(n for _, n in box) for box in boxes) == math.prod(shape)


def part_of(tensor: Tensor) -> Part:
    """Return this rank's part of a tensor; a plain tensor is a part of its own. Local, no copy."""
    return local_value(tensor), local_box(tensor) if isinstance(tensor, DTensor) else full_box(tensor.shape)


def common(one: Box, other: Box) -> Box | None:
    """Return the intersection of two boxes, or None if it is empty."""
    starts = [max(a, b) for (a, _), (b, _) in zip(one, other, strict=True)]
    stops = [min(a + m, b + n) for (a, m), (b, n) in zip(one, other, strict=True)]
    box = tuple((start, stop - start) for start, stop in zip(starts, stops, strict=True))
    return box if all(length > 0 for _, length in box) else None


def inside(part: Tensor, box: Box, block: Box) -> Tensor:
    """Return the view of a block in a part that lies at ``box``."""
    for dim, ((start, size), (first, count)) in enumerate(zip(box, block, strict=True)):
        if (start, size) != (first, count):  # most quantized tensors cannot be narrowed
            part = part.narrow(dim, first - start, count)
    return part


def is_plain_memory(tensor: Tensor) -> bool:
    """Whether a tensor's elements are in CPU memory in the order of the file."""
    return tensor.device.type == "cpu" and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


# ---- checksums --------------------------------------------------------------------------------------------------

# The sum of a tensor's bytes as little-endian 64-bit words, the last one padded with zeros, mod 2**64. The sums of the
# parts add up to the sum of the whole, however it is cut: each rank reads only its own part, nothing is gathered, and
# any other world size can verify it. It detects corruption by disks and networks (flipped bits, lost pages, zeros at
# the end) at the speed of memory. It does not detect tampering.


def part_sum(part: Tensor, box: Box, shape: torch.Size) -> int:
    """Return what a part adds to the checksum of its tensor. Pure; waits for the GPU."""
    if part.numel() == 0:
        return 0
    part = part.detach().resolve_conj().resolve_neg().contiguous()
    data = part.flatten().unsqueeze(-1).view(torch.uint8)  # a lone element may have any stride
    runs, size = runs_of(box, shape), part.element_size()
    if runs.length * size % WORD == 0 and all(start * size % WORD == 0 for start in runs.starts):
        return _words(data.flatten())
    if len(runs.starts) == 1:
        return run_sum(data.flatten(), runs.starts[0] * size)
    starts = torch.tensor(runs.starts, device=data.device) * size
    rows, columns = data.reshape(len(starts), -1), torch.arange(runs.length * size, device=data.device)
    total, step = 0, max(1, _CHUNK // len(columns))
    for first in range(0, len(rows), step):
        lanes = (starts[first : first + step, None] + columns) % WORD
        total += int((rows[first : first + step].to(torch.int64) << (8 * lanes)).sum())
    return total & MASK


def run_sum(data: Tensor, start: int) -> int:
    """Return what contiguous bytes, as a uint8 tensor, add that start ``start`` bytes into the tensor."""
    head = min(-start % WORD, len(data))
    tail = head + (len(data) - head) // WORD * WORD
    total = _words(data[head:tail])
    for piece, at in ((data[:head], start), (data[tail:], start + tail)):
        total += sum(byte << 8 * ((at + index) % WORD) for index, byte in enumerate(piece.tolist()))
    return total & MASK


def _words(data: Tensor) -> int:
    if data.storage_offset() % WORD or data.data_ptr() % WORD:
        data = data.clone()
    return int(data.view(torch.int64).sum()) & MASK
