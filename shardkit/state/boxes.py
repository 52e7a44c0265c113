"""Move full tensors to and from shards, in buckets, by messages between the ranks that hold parts of them.

A tensor's own mesh says which rank holds which box of it. So one rule serves FSDP, HSDP, tensor and expert parallelism
and strided shards: boxes travel straight between the rank that has the full tensor and the ranks that hold them.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardkit._torch.states import is_wrapper
from shardkit.errors import ShardkitError, listing, message
from shardkit.ranks import collective_device
from shardkit.shards import Box, box_at, device_of, local_part, local_value

BUCKET = 1 << 26  # bytes of full tensors that travel together
ALONE = 1 << 18  # bytes from which a view is a message of its own: packing costs a copy on both ends
# Where messages between all ranks are faster than an all-gather: gloo's is a ring, and took 1.5 to 2.9 times as long
# (4 ranks of one machine, torch 2.13). NCCL's sends what crosses nodes once, and not once for each rank.
BY_MESSAGES = ("gloo", "fake")

Item = TypeVar("Item")
Part: TypeAlias = tuple[Tensor, torch.dtype]  # a view to read or write, and the dtype in which it travels

_holders: WeakKeyDictionary[DeviceMesh, dict[object, list[tuple[int, Box]]]] = WeakKeyDictionary()
_groups: dict[object, dist.ProcessGroup] = {}  # that were made, by default group and ranks


class Move(NamedTuple):
    """A full tensor to be written into the shards of another."""

    target: Tensor  # DTensor or plain
    full: Tensor | None  # on the ranks that have it
    dtype: torch.dtype  # of the full tensor


@dataclass(frozen=True)
class ModelGroup:
    """The ranks that hold a model's tensors."""

    ranks: tuple[int, ...]  # global; empty without a process group
    root: int  # the one that gathers and scatters
    mesh: DeviceMesh | None  # of all the ranks; None: the default group

    @property
    def is_root(self) -> bool:
        """Whether this rank is the root."""
        return not self.ranks or dist.get_rank() == self.root

    def connect(self) -> dist.ProcessGroup | None:
        """Return a process group of the ranks, ready for messages between any of them. Collective."""
        if len(self.ranks) < 2:
            return None
        axes = [axis for axis, size in enumerate(self.mesh.shape) if size > 1] if self.mesh is not None else []
        key = (dist.group.WORLD, self.ranks)
        group = dist.group.WORLD if len(self.ranks) == dist.get_world_size() else _groups.get(key)
        if self.mesh is not None and len(axes) == 1:
            group = self.mesh.get_group(axes[0])
        elif group is None:
            group = _groups[key] = dist.new_group(list(self.ranks), use_local_synchronization=True)
        if dist.get_backend(group) not in BY_MESSAGES:
            # All ranks of a group must make NCCL's first operation in it, and not all send messages (torch 2.13).
            dist.all_reduce(torch.zeros(1, device=collective_device(group)), group=group)
        return group


def model_group(tensors: Iterable[Tensor], root: int | None = None) -> ModelGroup:
    """Return the ranks that hold a model's tensors; the root is by default the lowest. Local.

    Without a DTensor they are all ranks of the default group. Raises if no mesh has all ranks of the others: then ranks
    would not agree on a root.
    """
    meshes = list(dict.fromkeys(tensor.device_mesh for tensor in tensors if isinstance(tensor, DTensor)))
    if not meshes:
        return ModelGroup(tuple(range(dist.get_world_size())) if dist.is_initialized() else (), root or 0, None)
    ranks = sorted({int(rank) for mesh in meshes for rank in mesh.mesh.flatten()})
    widest = max(meshes, key=lambda mesh: mesh.size())
    if widest.size() < len(ranks):
        problem = f"has tensors on {len(meshes)} meshes of {len(ranks)} ranks, the largest of {widest.size()}"
        rule = "One mesh must have all ranks of the others, so that one rank can gather from all"
        raise ShardkitError(message("model", problem, rule, "Gather the parts of the model on each mesh by themselves"))
    return ModelGroup(tuple(ranks), ranks[0] if root is None else root, widest)


def holders(tensor: DTensor, replica: Sequence[int] | None = None) -> list[tuple[int, Box]]:
    """Return the global ranks that together hold a tensor, each with its box. Pure.

    With replicas, those of the first one, or of the one at the coordinate ``replica`` of the mesh.
    """
    at = tuple(replica or [0] * tensor.device_mesh.ndim)
    known, key = _holders.setdefault(tensor.device_mesh, {}), (tensor.placements, tensor.shape, at)
    if key not in known:
        mesh, places = tensor.device_mesh.mesh, tensor.placements
        axes = [range(mesh.size(n)) if hasattr(place, "dim") else [at[n]] for n, place in enumerate(places)]
        known[key] = [(int(mesh[each]), box_at(tensor, each)) for each in itertools.product(*axes)]
    return known[key]


def in_boxes(tensor: Tensor) -> bool:
    """Whether ranks hold boxes of a tensor: a DTensor without partial sums, ragged shards or quantized blocks."""
    if not isinstance(tensor, DTensor) or is_wrapper(local_value(tensor)):
        return False
    return all(place.is_replicate() or isinstance(getattr(place, "dim", None), int) for place in tensor.placements)


def coordinate_of(mesh: DeviceMesh, rank: int) -> tuple[int, ...]:
    """Return the coordinate of a global rank in a mesh that has it. Pure."""
    return tuple((mesh.mesh == rank).nonzero()[0].tolist())


def is_in_replica(tensor: DTensor, replica: Sequence[int], first_axis: int = 0) -> bool:
    """Whether this rank has the replica at a coordinate of the mesh, on the axes from the first one. Pure."""
    here, places = tensor.device_mesh.get_coordinate() or (), tensor.placements
    return all(hasattr(places[n], "dim") or here[n] == replica[n] for n in range(first_axis, len(places)))


def cut(full: Tensor, box: Box) -> Tensor:
    """Return the part of a full tensor at a box. A view."""
    for dim, (start, length) in enumerate(box):
        full = full.narrow(dim, start, length)
    return full


def copy_into(target: Tensor, value: Tensor) -> None:
    """Copy what has elements: FSDP2 makes the shards of a tensor without elements (0, ...), whatever its first dim."""
    if target.numel():
        target.copy_(value)


def wire_dtype(source: torch.dtype, target: torch.dtype) -> torch.dtype:
    """Return the smaller dtype, in which to send, so that nothing is rounded twice."""
    return target if target.itemsize <= source.itemsize else source


def wire_device(tensor: Tensor, group: dist.ProcessGroup | None) -> torch.device:
    """Return where parts must be to be sent: where they are, if the group can send that, else the mesh's device."""
    home = local_value(tensor).device
    if group is not None and home.type == "cpu" and (kind := collective_device(group)) != "cpu":
        return device_of(tensor.device_mesh) if isinstance(tensor, DTensor) else torch.device(kind)
    return torch.device("cpu") if group is not None and dist.get_backend(group) == "gloo" else home


class Batch:
    """Messages between pairs of ranks, by global rank, which are exchanged together.

    Both ends name views of the same shapes and dtypes in the same order. The views may have other dtypes and strides.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, device: torch.device | None = None) -> None:
        self._group, self._device = group, device  # None: the default group; the device of the views
        self._parts: dict[tuple[bool, int], list[Part]] = defaultdict(list)

    def send(self, view: Tensor, dtype: torch.dtype, to: int) -> None:
        """Send a view to a rank, converted to ``dtype``, when the batch runs."""
        self._parts[True, to].append((view, dtype))

    def receive(self, view: Tensor, dtype: torch.dtype, of: int) -> None:
        """Write into a view what a rank sends as ``dtype``, when the batch runs."""
        self._parts[False, of].append((view, dtype))

    def run(self) -> None:
        """Exchange all messages. Collective over the ranks that are named."""
        operations, received = [], []
        packed: dict[object, Tensor] = {}  # what several peers are sent is packed once
        for (is_sent, peer), parts in sorted(self._parts.items(), key=lambda item: item[0]):
            for group in _messages(parts):
                key = (is_sent, *(id(view) for view, _ in group), None if is_sent else peer)
                if key not in packed:
                    packed[key], pairs = self._packed(group)
                    received += [] if is_sent else pairs
                    for view, part in pairs if is_sent else ():
                        part.copy_(view)
                operations.append(dist.P2POp(dist.isend if is_sent else dist.irecv, packed[key], peer, self._group))
        for work in dist.batch_isend_irecv(operations) if operations else []:
            work.wait()
        for view, part in received:
            view.copy_(part)

    def _packed(self, parts: list[Part]) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """Return the bytes of a message, and views with their parts of it; none where the bytes are the view's own."""
        view, dtype = parts[0]
        device = self._device or view.device
        if len(parts) == 1 and view.dtype == dtype and view.device == device and view.is_contiguous():
            return view.view(-1).view(torch.uint8), []
        sizes = [view.numel() * dtype.itemsize for view, dtype in parts]
        data = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
        found = zip(parts, torch.split(data, sizes), strict=True)
        return data, [(view, part.view(dtype).view(view.shape)) for (view, dtype), part in found]


def _messages(parts: Iterable[Part]) -> Iterator[list[Part]]:
    """Yield large parts alone, then small ones together, the widest dtypes first, so that all are aligned."""
    small = []
    for view, dtype in parts:
        if view.numel() * dtype.itemsize >= ALONE:
            yield [(view, dtype)]
        elif view.numel():
            small.append((view, dtype))
    if small:
        yield sorted(small, key=lambda part: -part[1].itemsize)


def buckets(
    items: Iterable[tuple[Item, Tensor, torch.dtype]], group: dist.ProcessGroup | None
) -> Iterator[tuple[Batch, torch.device, list[Item]]]:
    """Yield items in buckets of at most ``BUCKET`` bytes, or one item, with a batch and its device. Local.

    Each item comes with its tensor and the dtype of the full one.
    """
    bucket, filled, home = list[Item](), 0, torch.device("cpu")
    for item, tensor, dtype in items:
        size, device = tensor.numel() * dtype.itemsize, wire_device(tensor, group)
        if bucket and (filled + size > BUCKET or device != home):
            yield Batch(group, home), home, bucket
            bucket, filled = [], 0
        bucket.append(item)
        filled, home = filled + size, device
    if bucket:
        yield Batch(group, home), home, bucket


@torch.no_grad()
def gather(
    tensors: Iterable[tuple[str, Tensor]],
    ranks: ModelGroup,
    *,
    everywhere: bool = False,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Yield full tensors by name, in new memory and in order, on the root or on all ranks. Collective.

    Every rank must pass the same names, and exhaust the iterator. Besides what was yielded it holds one bucket.

    Args:
        tensors: DTensors, and plain tensors, of which each rank gets its own.
        ranks: those that hold them, from :func:`model_group`.
        everywhere: yield on all ranks.
        dtype: of floating-point tensors; None keeps theirs. They are sent in the smaller dtype.
        device: of the result; None: where the shards are, or their mesh's device.

    Raises:
        ShardkitError: a shard is quantized, and torch cannot join such shards.
    """
    group, listed = ranks.connect(), list(tensors)
    if quantized := {n: t for n, t in listed if isinstance(t, DTensor) and is_wrapper(local_value(t))}:
        kinds = {type(local_value(tensor)).__name__ for tensor in quantized.values()}
        problem = f"is quantized ({listing(kinds)}), and cannot be gathered"
        rule, fix = "Blocks and scales are each shard's own", "Save it with save_checkpoint, or dequantize it first"
        raise ShardkitError(message(listing(quantized), problem, rule, fix))
    is_target = everywhere or ranks.is_root
    dtypes = {n: dtype if dtype is not None and t.is_floating_point() else t.dtype for n, t in listed}
    for batch, wire, bucket in buckets((((n, t), t, dtypes[n]) for n, t in listed), group):
        fulls: list[tuple[str, Tensor]] = []
        for name, like in bucket:
            sent = wire_dtype(like.dtype, dtypes[name])
            if not isinstance(like, DTensor):
                full = like.detach().to(device or like.device, dtypes[name], copy=True) if is_target else None
            elif not in_boxes(like):
                full = like.full_tensor()
            elif everywhere and wire == local_value(like).device and _has_fast_all_gather(like, group):
                full = like.to(sent).full_tensor()  # type: ignore[attr-defined]
            else:
                full = _gather_boxes(like, dtypes[name], sent, batch, wire, None if everywhere else ranks.root)
            fulls += [(name, full)] if full is not None and is_target else []
        batch.run()
        while fulls:  # none is held here once it is yielded
            name, full = fulls.pop(0)
            yield name, full.to(device or full.device, dtypes[name])
            del full


def _has_fast_all_gather(like: DTensor, group: dist.ProcessGroup | None) -> bool:
    """Whether torch's all-gather is the faster way, and exact: for strided and empty shards it is not (torch 2.13)."""
    shards = [place for place in like.placements if hasattr(place, "dim")]
    is_even_rule = len(shards) == 1 and not hasattr(shards[0], "split_factor") and like.numel() > 0
    return is_even_rule and group is not None and dist.get_backend(group) not in BY_MESSAGES


def _gather_boxes(
    like: DTensor, dtype: torch.dtype, sent: torch.dtype, batch: Batch, device: torch.device, root: int | None
) -> Tensor | None:
    """Add the messages that gather a tensor to the root, or to all (None); return the full one where it goes."""
    mesh, rank, own = like.device_mesh, dist.get_rank(), local_value(like)
    if root is not None and root not in mesh.mesh:
        return None  # a slice of a larger mesh, with values equal to those of the root's slice
    replica = coordinate_of(mesh, rank if root is None else root)
    found = holders(like, replica) if root in (None, rank) else []
    for peer in [holder for holder, _ in found] if root is None else [root] * is_in_replica(like, replica):
        if peer != rank:
            batch.send(own, sent, peer)
    full = torch.empty(like.shape, dtype=dtype, device=device) if found else None
    for holder, box in found:
        assert full is not None
        if holder == rank:
            copy_into(cut(full, box), own)
        else:
            batch.receive(cut(full, box), sent, holder)
    return full


@torch.no_grad()
def scatter(moves: Iterable[Move], ranks: ModelGroup) -> None:
    """Write full tensors that the root has into shards. In place, collective; every rank passes the same moves.

    The root sends each rank its box, and one replica broadcasts to the others. Of plain tensors, and of those on
    slices of the model's mesh, all ranks are sent the full tensor.
    """
    group, moves = ranks.connect(), list(moves)
    for batch, device, bucket in buckets(((move, move.target, move.dtype) for move in moves), group):
        replicated = []
        for move in bucket:
            like, sent = move.target, wire_dtype(move.dtype, move.target.dtype)
            if isinstance(like, DTensor) and in_boxes(like) and like.device_mesh.size() == len(ranks.ranks):
                _scatter_boxes(like, move.full, sent, batch, ranks)
                replicated.append(like)
                continue
            full = torch.empty(like.shape, dtype=sent, device=device) if move.full is None else move.full
            full = full.to(device, sent).contiguous()
            if group is not None and full.numel():
                dist.broadcast(full.view(-1).view(torch.uint8), ranks.root, group=group)
            _write(like, full)
        batch.run()
        for axis in range(max((like.device_mesh.ndim for like in replicated), default=0)):
            _broadcast_replicas([like for like in replicated if axis < like.device_mesh.ndim], axis, ranks.root, device)
    torch.autograd.graph.increment_version([move.target for move in moves])  # for autograd to see it


def _scatter_boxes(like: DTensor, full: Tensor | None, sent: torch.dtype, batch: Batch, ranks: ModelGroup) -> None:
    own, replica = local_value(like), coordinate_of(like.device_mesh, ranks.root)
    if full is None and is_in_replica(like, replica):
        batch.receive(own, sent, ranks.root)
    for holder, part in [(each, cut(full, box)) for each, box in holders(like, replica)] if full is not None else ():
        if holder == ranks.root:
            copy_into(own, part)
        else:
            batch.send(part, sent, holder)


def _broadcast_replicas(likes: Iterable[DTensor], axis: int, root: int, device: torch.device) -> None:
    """Broadcast shards along an axis of their meshes from the root's replica, all at once. Collective."""
    waiting = []
    for like in likes:
        mesh, own = like.device_mesh, local_value(like)
        replica = coordinate_of(mesh, root)
        if hasattr(like.placements[axis], "dim") or mesh.size(axis) == 1 or not own.numel():
            continue
        if is_in_replica(like, replica, axis + 1):
            sent = own.to(device).contiguous()
            data, group = sent.view(-1).view(torch.uint8), mesh.get_group(axis)
            work = dist.broadcast(data, group=group, group_src=replica[axis], async_op=True)
            waiting.append((own, sent, work))
    for own, sent, work in waiting:
        work.wait()
        if sent is not own:
            own.copy_(sent)


@torch.no_grad()
def cut_all(moves: Iterable[Move]) -> None:
    """Write this rank's part of full tensors, which every rank has, into their targets. In place, local."""
    moves = list(moves)
    for move in moves:
        _write(move.target, move.full)
    torch.autograd.graph.increment_version([move.target for move in moves])


def _write(target: Tensor, full: Tensor | None) -> None:
    assert full is not None, "a rank without the full tensor"
    copy_into(local_value(target), local_part(full, target) if isinstance(target, DTensor) else full)


def share(data: bytes, ranks: ModelGroup) -> bytes:
    """Return the root's bytes, at least one, on all ranks. Collective."""
    size = torch.tensor([len(data)])
    scatter([Move(size, size if ranks.is_root else None, size.dtype)], ranks)
    buffer = bytearray(data if ranks.is_root else int(size))
    content = torch.frombuffer(buffer, dtype=torch.uint8)
    scatter([Move(content, content if ranks.is_root else None, content.dtype)], ranks)
    return bytes(buffer)
