"""What torch's meshes cannot do publicly: join axes, and keep the timeout of ``init_process_group``."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh


def flattened(mesh: DeviceMesh, replicate: tuple[str, ...], shard: tuple[str, ...]) -> DeviceMesh:
    """Return the mesh of the ``replicate`` axes and one axis of all in ``shard``. Collective when it is new.

    apply: torch has no public way to join axes that keeps the mesh they came from (torch 2.11 to 2.15), without which
    ``fully_shard`` refuses parameters that are DTensors on its other axes.
    """
    flat = mesh[shard]._flatten()
    return DeviceMesh._concatenate([mesh[replicate], flat]) if replicate else flat


def with_timeout_of_world(mesh: DeviceMesh) -> DeviceMesh:
    """Give a mesh's groups the timeout that ``init_process_group`` was given, and return the mesh. Local, in place.

    apply: torch gives them its default of 10 or 30 minutes, and can neither read nor change a timeout publicly (torch
    2.11 to 2.15).
    """
    world = dist.group.WORLD
    assert world is not None, "the mesh has groups"
    for group in mesh.get_all_groups():
        for device in group._device_types:
            chosen: Any = getattr(world._get_backend(device), "options", None)
            backend = group._get_backend(device)
            if hasattr(chosen, "_timeout") and hasattr(backend, "_set_default_timeout"):  # gloo and NCCL
                backend._set_default_timeout(chosen._timeout)
    return mesh
