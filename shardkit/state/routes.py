"""The mesh axes along which a tensor travels between the root, the rank that has the full tensor, and all others."""

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
from shardkit.ranks import collective_device
from shardkit.shards import Box, box_at, cutting_order, device_of


@dataclass(frozen=True)
class Axis:
    """A mesh axis of more than one rank, as this rank sees it."""

    number: int  # its index in the mesh
    group: dist.ProcessGroup  # this rank's group along it
    here: int  # this rank's index in the group
    root: int  # the root's index

    @property
    def at_root(self) -> bool:
        """Whether this rank and the root have the same index on this axis."""
        return self.here == self.root


@dataclass(frozen=True)
class Route:
    """The axes along which a tensor travels."""

    cuts: tuple[Axis, ...] = ()  # those that shard it, in the order in which they cut
    copies: tuple[Axis, ...] = ()  # those along which ranks hold equal parts


@dataclass(frozen=True)
class Routes:
    """How the tensors of one model travel to and from its root."""

    root: int  # the global rank that gathers and scatters
    ranks: int  # the number of ranks that hold a part of the model
    everyone: Route  # reaches all of them, for what each holds whole
    known: dict[object, Route | None] = field(default_factory=dict, compare=False)  # by mesh and placements

    @property
    def is_root(self) -> bool:
        """Whether this rank is the root."""
        return not dist.is_initialized() or dist.get_rank() == self.root

    def of(self, tensor: DTensor) -> Route | None:
        """Return the route of a tensor between the root and all ranks, or None where torch must gather it."""
        known = [place.is_replicate() or isinstance(getattr(place, "dim", None), int) for place in tensor.placements]
        if not all(known) or _torch.has_own_dispatch(type(local_of(tensor))):  # partial sums, wrapped local tensors
            return None
        key = tensor.device_mesh, tensor.placements
        if key not in self.known:
            self.known[key] = self._route(tensor)
        return self.known[key]

    def _route(self, tensor: DTensor) -> Route | None:
        """Return the route on the tensor's mesh, or None if it does not reach all ranks.

        The mesh may be a slice of the widest one, whose other axes then hold copies: norms on ``dp`` beside weights on
        ``dp`` and ``tp``.
        """
        axes, others = _axes(tensor.device_mesh, self.root), []
        if tensor.device_mesh.size() != self.ranks:
            shared = {axis.group: axis for axis in self.everyone.copies}
            others = [axis for axis in shared.values() if axis.group not in {own.group for own in axes.values()}]
            if math.prod(axis.group.size() for axis in (*axes.values(), *others)) != self.ranks:
                return None
            axes = {number: replace(own, root=shared[own.group].root) for number, own in axes.items()}
        order = cutting_order(tensor, [n for n in axes if hasattr(tensor.placements[n], "dim")])
        copies = [axis for number, axis in axes.items() if number not in order]
        return Route(tuple(axes[number] for number in order), (*copies, *others))


def routes_of(tensors: Iterable[Tensor], root: int | None = None) -> Routes:
    """Return the routes of a model with these tensors; ``root`` is by default the lowest rank that holds a part. Local.

    Without a DTensor the root is rank 0, and all ranks of the default group hold the model. Raises if no mesh has all
    ranks of the others.
    """
    meshes = list(dict.fromkeys(tensor.device_mesh for tensor in tensors if isinstance(tensor, DTensor)))
    if not meshes:
        several = dist.is_initialized() and dist.get_world_size() > 1
        group = dist.group.WORLD if several else None
        return Routes(0, 1, Route(copies=() if group is None else (Axis(-1, group, dist.get_rank(), 0),)))
    ranks = {int(rank) for mesh in meshes for rank in mesh.mesh.flatten()}
    widest = max(meshes, key=lambda mesh: mesh.size())
    if widest.size() < len(ranks):
        problem = f"its tensors are on {len(meshes)} meshes of {len(ranks)} ranks, the largest of {widest.size()}"
        rule = "One mesh must have all ranks of the others, so that one rank can gather from all"
        raise ShardkitError(message("model", problem, rule, "Gather the parts of the model on each mesh by themselves"))
    first = min(ranks) if root is None else root
    return Routes(first, len(ranks), Route(copies=tuple(_axes(widest, first).values())))


def _axes(mesh: DeviceMesh, root: int) -> dict[int, Axis]:
    """Return the axes of a mesh with more than one rank, by number; a root outside of it counts as its first rank."""
    here = mesh.get_coordinate()
    assert here is not None, "a rank outside its parameters' mesh"
    found = (mesh.mesh == root).nonzero()
    at = found[0].tolist() if len(found) else [0] * mesh.ndim
    return {n: Axis(n, mesh.get_group(n), here[n], at[n]) for n in range(mesh.ndim) if mesh.size(n) > 1}


def box_along(like: Tensor, cuts: Iterable[Axis], peer: int | None = None) -> Box:
    """Return the part of this rank, or of ``peer`` on the last axis, were the tensor cut along ``cuts`` alone."""
    assert isinstance(like, DTensor), "plain tensors are not cut"
    cuts = list(cuts)
    coordinate = list(like.device_mesh.get_coordinate() or ())
    if peer is not None:
        coordinate[cuts[-1].number] = peer
    return box_at(like, tuple(coordinate), [axis.number for axis in cuts])


def part_of(whole: Tensor, whole_box: Box, box: Box) -> Tensor:
    """Return the part at ``box`` of a tensor at ``whole_box``, both in elements of the full tensor. A view."""
    for dim, ((start, length), (offset, _)) in enumerate(zip(box, whole_box, strict=True)):
        whole = whole.narrow(dim, start - offset, length)
    return whole


def local_of(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor, detached. A view."""
    return (_torch.local_tensor(tensor) if isinstance(tensor, DTensor) else tensor).detach()


def wire_device(tensor: Tensor, route: Route) -> torch.device:
    """Return where parts must be to be sent: where they are, if the groups can send that, else the mesh's device."""
    local, axes = local_of(tensor), route.cuts + route.copies
    if not axes:
        return local.device
    if local.device.type == "cpu" and (kind := collective_device(axes[0].group)) != "cpu":
        return device_of(tensor.device_mesh) if isinstance(tensor, DTensor) else torch.device(kind)
    return torch.device("cpu") if dist.get_backend(axes[0].group) == "gloo" else local.device
