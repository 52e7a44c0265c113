"""A checksum that ranks can add up: the sum of a tensor's bytes, taken as little-endian 64-bit words, mod 2**64.

The last word is filled up with zeros. A sum over parts is the sum over the whole, however ranks cut it, so each rank
reads only what it has, nothing is gathered, and another world size can check it. It notices what disks and networks do
(flipped bits, lost pages, zeros at the end) and runs at the speed of memory; it is no protection from people.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from shardkit.checkpoint.pieces import runs_of
from shardkit.ranks import Groups, collective_device
from shardkit.shards import Box

WORD = 8  # bytes
_CHUNK = 1 << 17  # bytes that are summed byte by byte at a time; each takes 8 bytes of memory for that
MASK = (1 << 64) - 1


def part_sum(part: Tensor, box: Box, shape: torch.Size) -> int:
    """What a part adds to the checksum of the tensor it is cut from. Local, pure; on a GPU it waits for it.

    Args:
        part: of any dtype and device, contiguous or not.
        box: where it lies in the tensor; see :func:`shardkit.shards.local_box`.
        shape: of the whole tensor, in elements.
    """
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
    return _bytewise(data.reshape(len(starts), runs.length * size), starts)


def run_sum(data: Tensor, start: int) -> int:
    """What contiguous bytes add that lie ``start`` bytes into the tensor; uint8 of shape (bytes,)."""
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


def _bytewise(rows: Tensor, starts: Tensor) -> int:
    total, columns = 0, torch.arange(rows.shape[1], device=rows.device)
    step = max(1, _CHUNK // rows.shape[1])
    for first in range(0, len(rows), step):
        lanes = (starts[first : first + step, None] + columns) % WORD
        total += int((rows[first : first + step].to(torch.int64) << (8 * lanes)).sum())
    return total & MASK


def added(own: list[int], groups: Groups) -> list[int]:
    """The sums over all ranks of as many numbers from each, mod 2**64. Collective; ``groups`` reach each rank once."""
    for group in groups:
        halves = [[value & 0xFFFFFFFF, value >> 32] for value in own]  # of which int64 can add up four billion
        values = torch.tensor(halves, dtype=torch.int64, device=collective_device(group)).reshape(-1, 2)
        dist.all_reduce(values, group=group)
        own = [(low + (high << 32)) & MASK for low, high in values.tolist()]
    return own
