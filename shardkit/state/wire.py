"""Tensors between ranks of one group, as plain bytes: large ones straight from and into place, small ones packed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

ALONE = 1 << 18  # bytes from which a tensor is a message of its own: packing costs a copy on both ends
ALIGNMENT = 16  # bytes, the widest element there is

# Backends whose all-gather of large tensors takes longer than messages between all ranks at once: gloo's is a ring, and
# took 1.5 to 2.9 times as long (4 ranks of one machine, parts of 4 MiB to 256 KiB, torch 2.13).
BY_MESSAGES = {"gloo"}

# The same by its older name before torch 2.13, where that warns that it is deprecated.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

# Views to read from or write to, each with the dtype that it has on the wire. Both ends of a message list the same
# shapes and wire dtypes in the same order; the dtypes and strides of the views are local to each end.
Parcel: TypeAlias = "Sequence[tuple[Tensor, torch.dtype]]"


@dataclass
class Message:
    """Contiguous bytes to be sent or received."""

    data: Tensor
    parts: list[tuple[Tensor, Tensor]]  # each view with its part of ``data``; none where that is the view's own memory

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
    """Send ``out`` and receive ``into``, by rank of the group, on a device. Collective over the ranks named."""
    sending = [(peer, message) for peer, parcel in out.items() for message in messages(parcel, device)]
    receiving = [(peer, message) for peer, parcel in into.items() for message in messages(parcel, device)]
    operations = [dist.P2POp(dist.irecv, each.data, group=group, group_peer=peer) for peer, each in receiving]
    operations += [dist.P2POp(dist.isend, each.pack(), group=group, group_peer=peer) for peer, each in sending]
    for work in dist.batch_isend_irecv(operations) if operations else []:
        work.wait()
    for _, each in receiving:
        each.unpack()


def all_gather(own: Parcel, into: Sequence[Parcel], group: dist.ProcessGroup, device: torch.device) -> None:
    """Put what each rank of the group has into its parcel of ``into``, by rank. Collective over the group.

    Large tensors go straight into place: by messages between all ranks at once where the backend's own all-gather is
    slower, else by a collective each where the parts of all ranks are of one size. All others share one collective,
    whose rows are as long as the longest. Every rank decides by ``into`` alone, whose views must be laid out alike.
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
    _send_to_all([own[i] for i in sent], [[parcel[i] for i in sent] for parcel in into], group, device)
    _all_gather_packed([own[i] for i in packed], [[parcel[i] for i in packed] for parcel in into], group, device)


def _send_to_all(own: Parcel, into: Sequence[Parcel], group: dist.ProcessGroup, device: torch.device) -> None:
    here = dist.get_rank(group)
    others = [peer for peer in range(len(into)) if peer != here]
    exchange(dict.fromkeys(others, own), {peer: into[peer] for peer in others}, group, device)
    for (part, _), (value, _) in zip(into[here], own, strict=True):
        if value.numel():  # an empty shard is (0, ...), whatever its first dim
            part.copy_(value)


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
    _together(own, row).pack()
    all_gather_single(rows, row, group=group)
    for parcel, received in zip(into, rows.chunk(len(into)), strict=True):
        _together(parcel, received).unpack()


def broadcast(parcel: Parcel, group: dist.ProcessGroup, root: int, device: torch.device) -> None:
    """Send what the rank ``root`` of the group has to all others. Collective over the group."""
    is_root = dist.get_rank(group) == root
    for each in messages(parcel, device):
        dist.broadcast(each.pack() if is_root else each.data, group=group, group_src=root)
        if not is_root:
            each.unpack()


def messages(parcel: Parcel, device: torch.device) -> Iterator[Message]:
    """The messages that a parcel makes: each large tensor alone, then all small ones in one."""
    small = []
    for view, dtype in parcel:
        if view.numel() * dtype.itemsize < ALONE:
            small.append((view, dtype))
        elif view.dtype == dtype and view.device == device and view.is_contiguous():
            yield Message(memory(view), [])
        else:
            yield _packed([(view, dtype)], device)
    if any(view.numel() for view, _ in small):
        yield _packed(small, device)


def _packed(parcel: Parcel, device: torch.device) -> Message:
    return _together(parcel, torch.empty(sum(_spans(parcel)), dtype=torch.uint8, device=device))


def _spans(parcel: Parcel) -> list[int]:
    """Bytes of each view in a message that holds them all."""
    return [-(-view.numel() * dtype.itemsize // ALIGNMENT) * ALIGNMENT for view, dtype in parcel]


def _together(parcel: Parcel, data: Tensor) -> Message:
    """A message in these bytes; views without elements have no part of it, whatever their shape."""
    parts, start = [], 0
    for (view, dtype), span in zip(parcel, _spans(parcel), strict=True):
        if span:
            part = data[start : start + view.numel() * dtype.itemsize]
            parts.append((view, part.view(dtype).view(view.shape)))
        start += span
    return Message(data, parts)


def narrower(source: torch.dtype, target: torch.dtype) -> torch.dtype:
    """The dtype to send in, where one end has ``source`` and the other wants ``target``: nothing is rounded twice."""
    return target if target.itemsize <= source.itemsize else source


def memory(tensor: Tensor) -> Tensor:
    """The bytes of a contiguous tensor, as a view: any dtype can be sent so."""
    return tensor.view(-1).view(torch.uint8)
