"""The mesh of ranks that share sequences."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardkit.apply.mesh import build_mesh, ensure_process_group
from shardkit.errors import PlanError
from shardkit.plan import MeshSpec


def training_mesh(*, sp: int = 1, device: str | None = None) -> DeviceMesh:
    """Build the mesh of all ranks with one axis for each way to divide the work: ``("dp", "sp")``.

    Ranks along "dp" have batches of their own; adjacent ranks along "sp" share a batch, each with a
    part of every sequence (``shardkit.sequence``). Parameters are sharded over both: call
    ``shard_model`` without ``mesh``.

    **Collective**: every rank must call. The process group is made if there is none, as by
    ``shard_model``.

    Args:
        sp: ranks that share a sequence; a divisor of the number of ranks.
        device: the mesh's device type; None is the accelerator, or the CPU if only gloo could serve
            it.

    Raises:
        PlanError: ``sp`` does not divide the number of ranks.

    Examples:
        >>> mesh = training_mesh(sp=2)
        >>> sampler = DistributedSampler(data, mesh["dp"].size(), mesh["dp"].get_local_rank())
    """
    ensure_process_group()
    world = dist.get_world_size()
    if not isinstance(sp, int) or sp < 1 or world % sp:
        raise PlanError(f"sp must divide the number of ranks, {world}, got {sp}. Pass a divisor.")
    return build_mesh(MeshSpec((world // sp, sp), ("dp", "sp")), device)
