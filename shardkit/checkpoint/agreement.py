"""Find the process groups of a save or a load."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardkit.errors import CheckpointError, message
from shardkit.ranks import Groups


def axes_of(tensors: Iterable[Tensor]) -> Groups:
    """Return the process groups of all mesh axes of these tensors that have more than one rank. Local."""
    meshes = dict.fromkeys(tensor.device_mesh for tensor in tensors if isinstance(tensor, DTensor))
    return list(dict.fromkeys(group for mesh in meshes for group in mesh.get_all_groups() if group.size() > 1))


def spanning_axes(tensors: Iterable[Tensor]) -> Groups:
    """Return groups that reach each rank of the tensors once: the axes of a mesh with all ranks, or the world."""
    sharded = [tensor for tensor in tensors if isinstance(tensor, DTensor)]
    ranks = {rank for mesh in {each.device_mesh for each in sharded} for rank in mesh.mesh.flatten().tolist()}
    widest = max(sharded, key=lambda tensor: tensor.device_mesh.size(), default=None)
    if widest is None or widest.device_mesh.size() < len(ranks):
        return world()
    return axes_of([widest])


def world(group: dist.ProcessGroup | None = None) -> Groups:
    """Return the group that was passed, which must contain this rank, or the default group; none for one rank."""
    if not dist.is_initialized():
        return []
    if group is not None and dist.get_rank(group) < 0:
        rule = "Only the ranks of the group make this call"
        problem = f"rank {dist.get_rank()} is not in it"
        raise CheckpointError(message("group", problem, rule, "Pass each rank a group that it is in"))
    return [group] if dist.get_world_size(group) > 1 else []


@contextmanager
def connected(groups: Groups, call: str) -> Iterator[None]:
    """Raise a CheckpointError if a collective fails because a rank died or its group was destroyed."""
    try:
        yield
    except RuntimeError as error:
        if not groups:
            raise
        rule = "All ranks must stay in the call until its end"
        fix = "See the first error of the lost rank, and load again: values may be partly loaded"
        raise CheckpointError(message(call, f"the connection to a rank was lost ({error})", rule, fix)) from error
