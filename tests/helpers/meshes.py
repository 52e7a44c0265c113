"""Meshes of all CPU ranks, each made once in a world: it makes process groups, and ranks with many
are replaced.

``part_of`` cuts a tensor as one of them does.
"""

from functools import cache

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

NAMES = ("dp_replicate", "dp_shard")


def mesh_of(shape, *names):
    """A mesh such as ``(4,)``, ``(2, 2)`` or ``(4, 1)``; collective when it is new."""
    return _mesh(dist.group.WORLD, shape, names or NAMES[-len(shape) :])


@cache
def _mesh(world, shape, names):
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def part_of(full, dtensor):
    """What this rank holds of ``full`` when it is sharded as ``dtensor`` is."""
    for axis, placement in enumerate(dtensor.placements):
        if placement.is_shard():
            parts = full.chunk(dtensor.device_mesh.size(axis), placement.dim)
            index = dtensor.device_mesh.get_local_rank(axis)
            full = parts[index] if index < len(parts) else full.narrow(placement.dim, 0, 0)
    return full
