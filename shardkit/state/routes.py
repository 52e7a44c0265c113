"""Along which mesh axes a tensor travels between the lead, the one rank that has it whole, and all others."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardkit import _torch
from shardkit.errors import ShardkitError, message
from shardkit.shards import Box, box_at, cutting_order, device_of


@dataclass(frozen=True)
class Axis:
    """A mesh axis of more than one rank, as this rank sees it; indices are ranks of its group.

    Attributes:
        number: of the axis in its mesh.
        group: this rank's group along it.
        here: this rank's index.
        root: the lead's index in its group.
    """

    number: int
    group: dist.ProcessGroup
    here: int
    root: int

    @property
    def at_root(self) -> bool:
        """Whether this rank is where the lead is, on this axis."""
        return self.here == self.root


@dataclass(frozen=True)
class Route:
    """Attributes:
    cuts: axes that shard the tensor, in the order in which they cut it.
    copies: axes along which ranks hold the same.
    """

    cuts: tuple[Axis, ...] = ()
    copies: tuple[Axis, ...] = ()

    @property
    def axes(self) -> tuple[Axis, ...]:
        """All axes."""
        return self.cuts + self.copies


@dataclass(frozen=True)
class Lead:
    """The rank that gathers to and scatters from: the lowest one that holds a part of the model.

    Attributes:
        rank: its global rank.
        ranks: how many hold a part of the model.
        everyone: the route of what all of them hold whole.
        known: routes by mesh and placements.
    """

    rank: int
    ranks: int
    everyone: Route
    known: dict[object, Route | None] = field(default_factory=dict, compare=False)

    @property
    def is_here(self) -> bool:
        """Whether this rank is the lead."""
        return not dist.is_initialized() or dist.get_rank() == self.rank

    def route(self, tensor: DTensor) -> Route | None:
        """The route of a tensor between the lead and all ranks; None where none is known, and torch must gather.

        A mesh may be a part of the one that reaches everyone: norms on ``dp`` alone beside weights on ``dp`` and
        ``tp``. The ranks beside it then hold copies.
        """
        if not travels(tensor):
            return None
        key = tensor.device_mesh, tensor.placements
        if key not in self.known:
            self.known[key] = self._route(tensor)
        return self.known[key]

    def _route(self, tensor: DTensor) -> Route | None:
        shared = {axis.group: axis for axis in self.everyone.copies}
        axes = mesh_axes(tensor.device_mesh, self.rank)
        beside = [axis for group, axis in shared.items() if group not in {own.group for own in axes.values()}]
        if tensor.device_mesh.size() == self.ranks:
            beside = []
        elif math.prod(axis.group.size() for axis in (*axes.values(), *beside)) != self.ranks:
            return None
        else:
            axes = {number: replace(own, root=shared[own.group].root) for number, own in axes.items()}
        order = cutting_order(tensor, [n for n in axes if hasattr(tensor.placements[n], "dim")])
        copies = [axis for number, axis in axes.items() if number not in order]
        return Route(tuple(axes[number] for number in order), (*copies, *beside))


def find_lead(tensors: Iterable[Tensor], rank: int | None = None) -> Lead:
    """The lead of a model with these tensors: ``rank``, or the lowest that holds a part. Local.

    Without a DTensor it is rank 0, and all ranks of the default group are taken to hold the model.

    Raises:
        ShardkitError: the tensors are on several meshes, none of which reaches all ranks of the others.
    """
    meshes = list(dict.fromkeys(tensor.device_mesh for tensor in tensors if isinstance(tensor, DTensor)))
    if not meshes:
        return Lead(0, 1, _world())
    ranks = {int(rank) for mesh in meshes for rank in mesh.mesh.flatten()}
    widest = max(meshes, key=lambda mesh: mesh.size())
    if widest.size() < len(ranks):
        problem = f"its tensors are on {len(meshes)} meshes of {len(ranks)} ranks, the largest of {widest.size()}"
        rule = "One mesh must hold all ranks that the others have, for one rank to gather from all"
        raise ShardkitError(message("model", problem, rule, "Gather the parts of the model one by one"))
    first = min(ranks) if rank is None else rank
    return Lead(first, len(ranks), Route(copies=tuple(mesh_axes(widest, first).values())))


def _world() -> Route:
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return Route()
    group = dist.group.WORLD
    assert group is not None, "an initialized world has a group"
    return Route(copies=(Axis(-1, group, dist.get_rank(), 0),))


def mesh_axes(mesh: DeviceMesh, lead: int) -> dict[int, Axis]:
    """The axes of a mesh that have more than one rank, by number; a lead outside of it counts as its first rank."""
    here = mesh.get_coordinate()
    assert here is not None, "a rank outside its parameters' mesh"
    found = (mesh.mesh == lead).nonzero()
    root = found[0].tolist() if len(found) else [0] * mesh.ndim
    wide = [number for number in range(mesh.ndim) if mesh.size(number) > 1]
    return {number: Axis(number, mesh.get_group(number), here[number], root[number]) for number in wide}


def box_along(like: Tensor, cuts: Iterable[Axis], peer: int | None = None) -> Box:
    """What a rank has while only ``cuts`` have cut the tensor: this rank, or the one at ``peer`` of the last cut."""
    assert isinstance(like, DTensor), "plain tensors are not cut"
    cuts = list(cuts)
    coordinate = list(like.device_mesh.get_coordinate() or ())
    if peer is not None:
        coordinate[cuts[-1].number] = peer
    return box_at(like, tuple(coordinate), [axis.number for axis in cuts])


def part_of(whole: Tensor, whole_box: Box, box: Box) -> Tensor:
    """The part at ``box`` of a tensor at ``whole_box``, both in elements of the full tensor. A view."""
    for dim, ((start, length), (offset, _)) in enumerate(zip(box, whole_box, strict=True)):
        whole = whole.narrow(dim, start - offset, length)
    return whole


def local_of(tensor: Tensor) -> Tensor:
    """What this rank has of a tensor, without its history. A view."""
    return (_torch.local_tensor(tensor) if isinstance(tensor, DTensor) else tensor).detach()


def travels(tensor: Tensor) -> bool:
    """Whether parts can be sent as boxes of plain memory: not of partial sums, nor of wrapped local tensors."""
    if not isinstance(tensor, DTensor):
        return True
    known = [place.is_replicate() or isinstance(getattr(place, "dim", None), int) for place in tensor.placements]
    return all(known) and not _torch.has_own_dispatch(type(local_of(tensor)))


def wire_device(tensor: Tensor, route: Route) -> torch.device:
    """Where a tensor's parts must be to be sent: where they are, if the groups can, else the mesh's device."""
    local = local_of(tensor)
    if not route.axes:
        return local.device
    backend = dist.get_backend(route.axes[0].group)
    if local.device.type == "cpu" and not any(name in backend for name in ("gloo", "fake", "mpi", "ucc")):
        return device_of(tensor.device_mesh) if isinstance(tensor, DTensor) else torch.device("cuda")
    return torch.device("cpu") if backend == "gloo" else local.device
