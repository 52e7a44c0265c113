"""Meshes of all CPU ranks, each made once in a world: it makes process groups, and ranks with many are replaced."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

NAMES = ("dp_replicate", "dp_shard")


def mesh_of(shape: tuple[int, ...], *names: str) -> DeviceMesh:
    """A mesh such as ``(4,)``, ``(2, 2)`` or ``(4, 1)``; collective when it is new."""
    return _mesh(dist.group.WORLD, shape, names or NAMES[-len(shape) :])


@cache
def _mesh(world: Any, shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=names)
