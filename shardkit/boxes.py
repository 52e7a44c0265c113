"""Move full tensors to and from shards, in buckets, by messages between the ranks that hold parts
of them.

A tensor's own mesh says which rank holds which box of it. So one rule serves FSDP, HSDP, tensor and
expert parallelism and strided shards: boxes travel straight between the rank that has the full
tensor and the ranks that hold them.
"""

from __future__ import annotations

import itertools
import pickle
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias, TypeVar
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardkit._torch import is_wrapper
from shardkit.errors import ShardkitError, listing
from shardkit.ranks import accelerator, collective_device, from_first
from shardkit.shards import Box, box_at, cut, device_of, local_part, local_value

BUCKET = 1 << 26  # bytes of full tensors that travel together
# bytes from which a view is a message of its own: packing costs a copy on both ends
ALONE = 1 << 18
# Where messages between all ranks are faster than an all-gather: gloo's is a ring, and took 1.5 to
# 2.9 times as long (4 ranks of one machine, torch 2.13). NCCL's sends what crosses nodes once, and
# not once for each rank.
BY_MESSAGES = ("gloo", "fake")

# a view to read or write, and the dtype in which it travels
Part: TypeAlias = tuple[Tensor, torch.dtype]

_holders: WeakKeyDictionary[DeviceMesh, dict[object, list[tuple[int, Box]]]] = WeakKeyDictionary()
_coordinates: WeakKeyDictionary[DeviceMesh, dict[int, tuple[int, ...]]] = WeakKeyDictionary()
# that were made, by ranks; torch holds them until ``destroy_process_group``
_groups: WeakValueDictionary[tuple[int, ...], dist.ProcessGroup] = WeakValueDictionary()


class Move(NamedTuple):
    """A full tensor to be written into the shards of another."""

    tensor: Tensor  # DTensor or plain
    full: Tensor | None  # on the ranks that have it
    dtype: torch.dtype  # of the full tensor


class _Fetch(NamedTuple):
    """A tensor to be gathered."""

    tensor: Tensor
    name: str
    dtype: torch.dtype  # of the full tensor


Item = TypeVar("Item", Move, _Fetch)


@dataclass(frozen=True)
class ModelGroup:
    """The ranks that hold a model's tensors."""

    ranks: tuple[int, ...]  # global, the root first; empty without a process group
    mesh: DeviceMesh | None  # of all the ranks; None: the default group

    @property
    def root(self) -> int:
        """The first rank, which gathers and scatters."""
        return self.ranks[0] if self.ranks else 0

    @property
    def is_root(self) -> bool:
        """Whether this rank is the root."""
        return not self.ranks or dist.get_rank() == self.root

    def connect(self) -> dist.ProcessGroup | None:
        """Return a process group of the ranks, ready for messages between any
        of them. Collective.
        """
        if len(self.ranks) < 2:
            return None
        ranks = tuple(sorted(self.ranks))
        world = dist.group.WORLD
        group = None
        for known in [world] if self.mesh is None else [world, *self.mesh.get_all_groups()]:
            if group is None and known is not None and known.size() == len(ranks):
                group = known
        group = group or _groups.get(ranks)
        if group is None:
            # After ``init_process_group(device_id=)`` torch splits NCCL's communicator of the
            # world, for which all of its ranks must be here (torch 2.11 to 2.13).
            is_split = world is not None and world.bound_device_id is not None
            group = _groups[ranks] = dist.new_group(
                list(ranks), backend="gloo" if is_split else None, use_local_synchronization=True
            )
        if dist.get_backend(group) not in BY_MESSAGES:
            # All ranks of a group must make NCCL's first operation in it, and not all send messages
            # (torch 2.13). On the mesh's device: a tensor on the CPU may go by another backend.
            device = accelerator() if self.mesh is None else device_of(self.mesh)
            dist.all_reduce(torch.zeros(1, device=device), group=group)
        return group


EACH_ALONE = ModelGroup((), None)  # each rank by itself, which has all that is written


def model_group(tensors: Iterable[Tensor]) -> ModelGroup:
    """Return the ranks that hold a model's tensors, or all; raise if no mesh has the ranks of all
    others. Local.
    """
    meshes = {tensor.device_mesh: None for tensor in tensors if isinstance(tensor, DTensor)}
    if not meshes:
        world_size = dist.get_world_size() if dist.is_initialized() else 0
        return ModelGroup(tuple(range(world_size)), None)
    ranks: set[int] = set()
    for mesh in meshes:
        ranks.update(coordinates(mesh))
    widest = max(meshes, key=lambda mesh: mesh.size())
    if widest.size() < len(ranks):
        raise ShardkitError(
            f"model has tensors on {len(meshes)} meshes of {len(ranks)} ranks, the largest of "
            f"{widest.size()}. One mesh must have all ranks of the others, so that one rank can "
            "gather from all. Gather the parts of the model on each mesh by themselves."
        )
    return ModelGroup(tuple(sorted(ranks)), widest)


# ---- which rank holds what -----------------------------------------------------------------------


def holders(tensor: DTensor, replica: Sequence[int] | None = None) -> list[tuple[int, Box]]:
    """Return the global ranks of the first replica, or of the one at a coordinate, each with its
    box. Pure.
    """
    mesh = tensor.device_mesh
    origin = tuple(replica or [0] * mesh.ndim)
    known = _holders.setdefault(mesh, {})
    key = (tensor.placements, tensor.shape, origin)
    if key not in known:
        axes = []
        for axis, place in enumerate(tensor.placements):
            is_shard = hasattr(place, "dim")
            axes.append(range(mesh.size(axis)) if is_shard else [origin[axis]])
        ranks = mesh.mesh
        known[key] = []
        for coordinate in itertools.product(*axes):
            known[key].append((int(ranks[coordinate]), box_at(tensor, coordinate)))
    return known[key]


def _is_in_replica_of(tensor: DTensor, root: int) -> bool:
    """Whether this rank is in the root's replica, without a list of all that are. Pure."""
    mesh = tensor.device_mesh
    own, of_root = coordinates(mesh)[dist.get_rank()], coordinates(mesh)[root]
    for axis, place in enumerate(tensor.placements):
        if not hasattr(place, "dim") and own[axis] != of_root[axis]:
            return False
    return True


def in_boxes(tensor: DTensor) -> bool:
    """Whether ranks hold boxes of a tensor: no partial sums, and no ragged shards."""
    return all(
        place.is_replicate() or isinstance(getattr(place, "dim", None), int)
        for place in tensor.placements
    )


def coordinates(mesh: DeviceMesh) -> dict[int, tuple[int, ...]]:
    """Return the coordinate in a mesh of each of its global ranks. Pure."""
    if mesh not in _coordinates:  # ``mesh.mesh`` makes a tensor each time, in 20 us (torch 2.13)
        places = itertools.product(*map(range, mesh.shape))
        _coordinates[mesh] = dict(zip(mesh.mesh.flatten().tolist(), places, strict=True))
    return _coordinates[mesh]


# ---- messages ------------------------------------------------------------------------------------


def copy_into(target: Tensor, value: Tensor) -> None:
    """Copy what has elements: FSDP2 makes the shards of a tensor without elements (0, ...),
    whatever its first dim.
    """
    if target.numel():
        target.copy_(value)


def wire_device(tensor: Tensor, group: dist.ProcessGroup | None) -> torch.device:
    """Return where parts must be to be sent: where they are, if the group can send that, else the
    mesh's device.
    """
    home = local_value(tensor).device
    if group is None:
        return home
    if dist.get_backend(group) == "gloo":
        return torch.device("cpu")
    kind = collective_device(group)
    if home.type != "cpu" or kind == "cpu":
        return home
    return device_of(tensor.device_mesh) if isinstance(tensor, DTensor) else torch.device(kind)


class Batch:
    """Messages between pairs of ranks, exchanged together: both name views of the same shapes in
    the same order.

    Small views share a message. Large ones are sent from their own memory, and received into it,
    where dtype, device and layout allow.
    """

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        self.device = device  # of the messages
        self._group = group
        self._sent: dict[int, list[Part]] = defaultdict(list)  # by peer
        self._received: dict[int, list[Part]] = defaultdict(list)

    def send(self, view: Tensor, dtype: torch.dtype, to: int) -> None:
        """Send a view to a rank, converted to ``dtype``, when the batch runs."""
        self._sent[to].append((view, dtype))

    def receive(self, view: Tensor, dtype: torch.dtype, of: int) -> None:
        """Write into a view what a rank sends as ``dtype``, when the batch runs."""
        self._received[of].append((view, dtype))

    @torch.no_grad()
    def run(self) -> None:
        """Exchange all messages. Collective over the ranks that are named."""
        operations: list[dist.P2POp] = []
        arriving: list[tuple[Tensor, Tensor]] = []
        for peer in sorted(self._received):
            for parts in _messages(self._received[peer]):
                data, pieces = self._buffer(parts)
                operations.append(dist.P2POp(dist.irecv, data, peer, self._group))
                arriving += pieces
        packed: dict[tuple[int, ...], Tensor] = {}  # what several peers are sent is packed once
        for peer in sorted(self._sent):
            for parts in _messages(self._sent[peer]):
                key = tuple(id(view) for view, _ in parts)
                if key not in packed:
                    packed[key], pieces = self._buffer(parts)
                    for view, piece in pieces:
                        piece.copy_(view)
                operations.append(dist.P2POp(dist.isend, packed[key], peer, self._group))
        if operations:
            for work in dist.batch_isend_irecv(operations):
                work.wait()
        for view, piece in arriving:
            view.copy_(piece)
        self._sent.clear()  # views of full tensors, which may be freed before the batch is
        self._received.clear()

    def _buffer(self, parts: list[Part]) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """Return the memory of a message, and each view with its piece of it; none where it is the
        view's own.
        """
        first, dtype = parts[0]
        is_as_sent = (first.dtype, first.device) == (dtype, self.device) and first.is_contiguous()
        if len(parts) == 1 and is_as_sent:
            return as_bytes(first), []
        sizes = [view.numel() * dtype.itemsize for view, dtype in parts]
        data = torch.empty(sum(sizes), dtype=torch.uint8, device=self.device)
        pieces = []
        for (view, dtype), piece in zip(parts, torch.split(data, sizes), strict=True):
            pieces.append((view, piece.view(dtype).view(view.shape)))
        return data, pieces


def _messages(parts: Iterable[Part]) -> Iterator[list[Part]]:
    """Yield large parts alone, then small ones together, the widest dtypes first, so that all are
    aligned.
    """
    small = []
    for view, dtype in parts:
        if view.numel() * dtype.itemsize >= ALONE:
            yield [(view, dtype)]
        elif view.numel():
            small.append((view, dtype))
    if small:
        yield sorted(small, key=lambda part: -part[1].itemsize)


def as_bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of a contiguous tensor, as a view, so that any dtype can be sent."""
    return tensor.view(-1).view(torch.uint8)


def buckets(
    items: Iterable[Item], group: dist.ProcessGroup | None, most: int = BUCKET
) -> Iterator[tuple[Batch, list[Item]]]:
    """Yield items in buckets of at most ``most`` bytes, or one item, with a batch on their device.
    Local.
    """
    bucket: list[Item] = []
    filled, home = 0, torch.device("cpu")
    for item in items:
        size, device = item.tensor.numel() * item.dtype.itemsize, wire_device(item.tensor, group)
        if bucket and (filled + size > most or device != home):
            yield Batch(group, home), bucket
            bucket, filled = [], 0
        bucket.append(item)
        filled, home = filled + size, device
    if bucket:
        yield Batch(group, home), bucket


def _smaller(one: torch.dtype, other: torch.dtype) -> torch.dtype:
    """Return the dtype in which values travel between both, so that nothing is rounded twice."""
    return other if other.itemsize < one.itemsize else one


# ---- from shards to full tensors -----------------------------------------------------------------


def gather(
    tensors: Iterable[tuple[str, Tensor]],
    ranks: ModelGroup,
    *,
    everywhere: bool = False,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    bucket_bytes: int = BUCKET,
) -> Iterator[tuple[str, Tensor]]:
    """Yield full tensors by name, in new memory and in order, on the root or everywhere.
    Collective.

    Every rank passes the same names, and exhausts the iterator. Besides what was yielded it holds
    one bucket. Of plain tensors each rank gets its own. ``dtype`` is that of floating-point
    tensors; ``device`` None is where shards are sent from. Quantized shards cannot be joined:
    call :func:`refuse_quantized` before.
    """
    group = ranks.connect()
    root = None if everywhere else ranks.root
    fetches = []
    for name, tensor in tensors:
        wanted = tensor.dtype
        if dtype is not None and tensor.is_floating_point():
            wanted = dtype
        fetches.append(_Fetch(tensor, name, wanted))
    for batch, bucket in buckets(fetches, group, bucket_bytes):
        fulls = []
        for fetch in bucket:
            full = _full_tensor(fetch, batch, root, group, device)
            # Of a plain tensor every rank has a full one, which only the root may yield.
            if full is not None and (everywhere or ranks.is_root):
                fulls.append((fetch, full))
            del full
        batch.run()
        while fulls:  # none is held here once it is yielded
            yield _named(*fulls.pop(0), device)


def _named(fetch: _Fetch, full: Tensor, device: torch.device | None) -> tuple[str, Tensor]:
    return fetch.name, full.to(device or full.device, fetch.dtype)


@torch.no_grad()
def _full_tensor(
    fetch: _Fetch,
    batch: Batch,
    root: int | None,
    group: dist.ProcessGroup | None,
    device: torch.device | None,
) -> Tensor | None:
    """Return the full tensor, which is filled when the batch has run, on the root, or on all ranks
    (None); else None.
    """
    like, dtype = fetch.tensor, fetch.dtype
    if not isinstance(like, DTensor):
        return like.detach().to(device or like.device, dtype, copy=True)
    if not in_boxes(like):
        return like.full_tensor()
    sent, own, rank = _smaller(dtype, like.dtype), local_value(like), dist.get_rank()
    mesh = like.device_mesh
    if root is None and group is not None and dist.get_backend(group) not in BY_MESSAGES:
        if own.device == batch.device and _is_chunked(like):
            return like.to(sent).full_tensor()  # type: ignore[attr-defined, no-any-return]
    if root is not None and root not in coordinates(mesh):
        return None  # the root has the values on a mesh of its own
    if root is not None and root != rank:
        if _is_in_replica_of(like, root):
            batch.send(own, sent, root)
        return None
    full = torch.empty(like.shape, dtype=dtype, device=batch.device)
    for holder, box in holders(like, coordinates(mesh)[rank]):
        if holder == rank:
            copy_into(cut(full, box), own)
            continue
        batch.receive(cut(full, box), sent, holder)
        if root is None:
            batch.send(own, sent, holder)
    return full


def _is_chunked(like: DTensor) -> bool:
    """Whether torch's all-gather is exact: not for strided and empty shards and float8 (torch
    2.13).
    """
    shards = [place for place in like.placements if hasattr(place, "dim")]
    return (
        len(shards) == 1
        and not hasattr(shards[0], "split_factor")
        and like.nbytes > like.numel() > 0
    )


def refuse_quantized(tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Raise for tensors whose shards are quantized, such as by torchao. Local."""
    names, classes = [], set()
    for name, tensor in tensors:
        if isinstance(tensor, DTensor) and is_wrapper(local_value(tensor)):
            names.append(name)
            classes.add(type(local_value(tensor)).__name__)
    if names:
        raise ShardkitError(
            f"{listing(names)} is quantized ({listing(sorted(classes))}), and cannot be gathered: "
            "blocks and scales are each shard's own. Save an optimizer's state with save_checkpoint, "
            "or each rank's state_dict() with torch.save; dequantize weights first."
        )


# ---- from full tensors to shards -----------------------------------------------------------------


@torch.no_grad()
def scatter(moves: Iterable[Move], ranks: ModelGroup) -> None:
    """Write full tensors that the root has into shards. In place, collective; every rank passes the
    same moves.

    One replica is sent boxes, and broadcasts them. Plain tensors, and those on slices of the mesh,
    are sent whole. With ``EACH_ALONE`` every rank has the full tensors, and nothing is sent.
    """
    group, moves = ranks.connect(), list(moves)
    if group is None:
        for move in moves:
            assert move.full is not None, "a rank without the full tensor"
            _write(move.tensor, move.full)
    else:
        for batch, bucket in buckets(moves, group):
            replicated: list[DTensor] = []
            for move in bucket:
                like = move.tensor
                is_on_all = isinstance(like, DTensor) and like.device_mesh.size() == group.size()
                if isinstance(like, DTensor) and is_on_all and in_boxes(like):
                    _scatter_boxes(like, move, batch, ranks.root)
                    replicated.append(like)
                else:
                    _broadcast(move, batch.device, ranks.root, group)
            batch.run()
            _broadcast_replicas(replicated, ranks.root, batch.device)
    # for autograd to see it
    torch.autograd.graph.increment_version([move.tensor for move in moves])


def _write(target: Tensor, full: Tensor) -> None:
    own = local_part(full, target) if isinstance(target, DTensor) else full
    copy_into(local_value(target), own)


def _broadcast(move: Move, device: torch.device, root: int, group: dist.ProcessGroup) -> None:
    """Send a tensor whole to all ranks, each of which keeps its part. Collective."""
    target, full, dtype = move
    sent = _smaller(target.dtype, dtype)
    if full is None:
        full = torch.empty(target.shape, dtype=sent, device=device)
    full = full.to(device, sent).contiguous()
    if full.numel():
        dist.broadcast(as_bytes(full), root, group=group)
    _write(target, full)


def _scatter_boxes(like: DTensor, move: Move, batch: Batch, root: int) -> None:
    """Add the messages from the root to its replica."""
    own, sent = local_value(like), _smaller(like.dtype, move.dtype)
    if move.full is None:
        if _is_in_replica_of(like, root):
            batch.receive(own, sent, root)
        return
    for holder, box in holders(like, coordinates(like.device_mesh)[root]):
        if holder == root:
            copy_into(own, cut(move.full, box))
        else:
            batch.send(cut(move.full, box), sent, holder)


def _broadcast_replicas(likes: Sequence[DTensor], root: int, device: torch.device) -> None:
    """Broadcast shards from the root's replica, along one axis of their meshes after the other.
    Collective.

    Before the last axis some ranks are sent what is not the root's; it is overwritten.
    """
    for axis in range(max((like.device_mesh.ndim for like in likes), default=0)):
        waiting = []
        for like in likes:
            mesh, own = like.device_mesh, local_value(like)
            if axis >= mesh.ndim or mesh.size(axis) == 1 or not own.numel():
                continue
            if like.placements[axis].is_replicate():
                sent, source = own.to(device).contiguous(), coordinates(mesh)[root][axis]
                work = dist.broadcast(
                    as_bytes(sent), group=mesh.get_group(axis), group_src=source, async_op=True
                )
                waiting.append((own, sent, work))
        for own, sent, work in waiting:
            work.wait()
            if sent is not own:
                own.copy_(sent)


def share(value: Any, ranks: ModelGroup) -> Any:
    """Return the root's value on all ranks; with ``EACH_ALONE`` each rank's own. Collective."""
    group = ranks.connect()
    if group is None:
        return value
    packed = pickle.dumps(value).hex() if ranks.is_root else ""
    root = dist.get_group_rank(group, ranks.root)
    return pickle.loads(bytes.fromhex(from_first(packed, [group], root)))
