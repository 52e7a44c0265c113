"""Send tensors between ranks of one group as bytes: large ones straight from and into place, small ones packed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

ALONE = 1 << 18  # bytes from which a tensor is a message of its own: packing costs a copy on both ends
ALIGNMENT = 16  # bytes of the widest element

# Backends whose all-gather of large tensors takes longer than messages between all ranks at once: gloo's is a ring, and
# took 1.5 to 2.9 times as long (4 ranks of one machine, parts of 4 MiB to 256 KiB, torch 2.13).
BY_MESSAGES = {"gloo"}

# The same by its older name before torch 2.13, where that warns that it is deprecated.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

# Views to read from or write to, each with the dtype in which it is sent. Both ends of a message list the same
# shapes and wire dtypes in the same order; the dtypes and strides of the views may differ.
Parcel: TypeAlias = "Sequence[tuple[Tensor, torch.dtype]]"


@dataclass
class Message:
    """Contiguous bytes to be sent or received."""

    data: Tensor
    parts: list[tuple[Tensor, Tensor]]  # each view with its part of ``data``; empty where that is the view's own memory

    def pack(self) -> Tensor:
        """Write the views into the bytes, converted."""
        for view, part in self.parts:
            part.copy_(view)
        return self.data

    def unpack(self) -> None:
        """Write the bytes into the views, converted."""
        for view, part in self.parts:
            view.copy_(part)


def exchange(
    out: Mapping[int, Parcel], into: Mapping[int, Parcel], group: dist.ProcessGroup, device: torch.device
) -> None:
    """Send ``out`` and receive ``into``, by rank of the group. Collective over the ranks named."""
    sending = [(peer, message) for peer, parcel in out.items() for message in messages(parcel, device)]
    receiving = [(peer, message) for peer, parcel in into.items() for message in messages(parcel, device)]
    operations = [dist.P2POp(dist.irecv, each.data, group=group, group_peer=peer) for peer, each in receiving]
    operations += [dist.P2POp(dist.isend, each.pack(), group=group, group_peer=peer) for peer, each in sending]
    for work in dist.batch_isend_irecv(operations) if operations else []:
        work.wait()
    for _, each in receiving:
        each.unpack()


def all_gather(own: Parcel, into: Sequence[Parcel], group: dist.ProcessGroup, device: torch.device) -> None:
    """Write each rank's ``own`` into ``into[rank]``. Collective over the group.

    Large tensors go straight into place: by messages between all ranks where the backend's all-gather is slower, else
    by one all-gather each if the parts of all ranks are of one size. All others share one all-gather, with rows as long
    as the longest. Every rank decides by ``into`` alone, whose views must have the same strides on all ranks.
    """
    packed, sent, by_messages = [], [], dist.get_backend(group) in BY_MESSAGES
    for index, (value, wire) in enumerate(own):
        parts = [parcel[index][0] for parcel in into]
        is_large = parts[0].numel() * wire.itemsize >= ALONE
        if is_large and by_messages:
            sent.append(index)
        elif is_large and wire == parts[0].dtype and _are_rows(parts):
            whole = parts[0].as_strided((parts[0].numel() * len(parts),), (1,))
            all_gather_single(memory(whole), memory(value.to(wire).contiguous()), group=group)
        else:
            packed.append(index)
    here = dist.get_rank(group)
    others = [peer for peer in range(len(into)) if peer != here]
    parcel = [own[i] for i in sent]
    exchange(dict.fromkeys(others, parcel), {peer: [into[peer][i] for i in sent] for peer in others}, group, device)
    for i in sent:
        copy_into(into[here][i][0], own[i][0])
    _all_gather_packed([own[i] for i in packed], [[parcel[i] for i in packed] for parcel in into], group, device)


def _are_rows(parts: Sequence[Tensor]) -> bool:
    """Whether parts of one size lie one after the other in memory."""
    size, start = parts[0].numel(), parts[0].storage_offset()
    return all(
        part.numel() == size and part.is_contiguous() and part.storage_offset() == start + rank * size
        for rank, part in enumerate(parts)
    )


def _all_gather_packed(own: Parcel, into: Sequence[Parcel], group: dist.ProcessGroup, device: torch.device) -> None:
    length = max(sum(_spans(parcel)) for parcel in into)
    if not length:
        return
    rows = torch.empty(len(into) * length, dtype=torch.uint8, device=device)
    row = torch.empty(length, dtype=torch.uint8, device=device)
    _packed(own, row).pack()
    all_gather_single(rows, row, group=group)
    for parcel, received in zip(into, rows.chunk(len(into)), strict=True):
        _packed(parcel, received).unpack()


def broadcast(parcel: Parcel, group: dist.ProcessGroup, root: int, device: torch.device) -> None:
    """Broadcast from the rank ``root`` of the group. Collective over the group."""
    is_root = dist.get_rank(group) == root
    for each in messages(parcel, device):
        dist.broadcast(each.pack() if is_root else each.data, group=group, group_src=root)
        if not is_root:
            each.unpack()


def messages(parcel: Parcel, device: torch.device) -> Iterator[Message]:
    """Yield the messages of a parcel: each large tensor alone, then all small ones in one."""
    small = []
    for view, dtype in parcel:
        if view.numel() * dtype.itemsize < ALONE:
            small.append((view, dtype))
        elif view.dtype == dtype and view.device == device and view.is_contiguous():
            yield Message(memory(view), [])
        else:
            yield _packed([(view, dtype)], torch.empty(sum(_spans([(view, dtype)])), dtype=torch.uint8, device=device))
    if any(view.numel() for view, _ in small):
        yield _packed(small, torch.empty(sum(_spans(small)), dtype=torch.uint8, device=device))


def _spans(parcel: Parcel) -> list[int]:
    """Return the bytes of each view in a message that holds them all."""
    return [-(-view.numel() * dtype.itemsize // ALIGNMENT) * ALIGNMENT for view, dtype in parcel]


def _packed(parcel: Parcel, data: Tensor) -> Message:
    """Return a message in these bytes; views without elements have no part of it, whatever their shape."""
    parts, start = [], 0
    for (view, dtype), span in zip(parcel, _spans(parcel), strict=True):
        if span:
            part = data[start : start + view.numel() * dtype.itemsize]
            parts.append((view, part.view(dtype).view(view.shape)))
        start += span
    return Message(data, parts)


def narrower(source: torch.dtype, target: torch.dtype) -> torch.dtype:
    """Return the dtype to send in from ``source`` to ``target``, the smaller one, so that nothing is rounded twice."""
    return target if target.itemsize <= source.itemsize else source


def copy_into(target: Tensor, value: Tensor) -> None:
    """Copy what has elements; FSDP2 makes the shards of a tensor without elements (0, ...), whatever its first dim."""
    if target.numel():
        target.copy_(value)


def memory(tensor: Tensor) -> Tensor:
    """Return the bytes of a contiguous tensor, as a view, so that any dtype can be sent."""
    return tensor.view(-1).view(torch.uint8)
