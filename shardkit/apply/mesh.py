"""The process group and the mesh of a plan, made if there is none."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import time
import weakref

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardkit._torch import flattened, with_timeout_of_world
from shardkit.errors import PlanError
from shardkit.plan import MeshSpec, ShardingPlan
from shardkit.ranks import accelerator, device_type

# This rank's index on its host: torchrun, SLURM, Open MPI, MPICH.
_LOCAL_RANKS = ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK", "PMI_LOCAL_RANK")
# How many processes a launcher started. A shell of salloc has SLURM_NTASKS too, so that one says
# nothing.
_WORLD_SIZES = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")

logger = logging.getLogger("shardkit")


def ensure_process_group() -> None:
    """Initialize torch.distributed unless it is already: from torchrun's variables, or as a single
    process.

    Collective under torchrun: every rank must call. With an accelerator this selects the rank's own
    device, also in a group that the program made, unless it has selected one. The CPU gets a
    backend too, so that offloaded shards can be reduced. The group is destroyed when the process
    ends.
    """
    if dist.is_initialized():
        _select_device(dist.get_rank())
        return
    backend = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}.get(accelerator())
    # some hosts always set MASTER_ADDR
    if "RANK" in os.environ or "WORLD_SIZE" in os.environ:
        _select_device(int(os.environ.get("RANK", 0)))
        dist.init_process_group(backend)
    else:
        _refuse_other_launchers()
        _select_device(0)
        store = dist.HashStore()  # type: ignore[attr-defined]  # public, but not in __all__
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
        logger.warning(
            "shardkit: no process group and no torchrun, so this process trains alone (world size "
            "1). To use another group, call init_process_group before this, or "
            "destroy_process_group() first"
        )
    assert dist.group.WORLD is not None
    atexit.register(_destroy, weakref.ref(dist.group.WORLD))


def _select_device(rank: int) -> None:
    """Select the rank's own device, unless the program has selected another than the first.

    A DeviceMesh does so only where no tensor was made on the device before.
    """
    if device_type() == "cpu":
        return
    count = torch.accelerator.device_count()
    # This starts CUDA. Where nothing has, a DeviceMesh warns, or selects LOCAL_RANK, which fails if
    # the launcher shows each rank its own device only (torch 2.11 to 2.15).
    index = torch.accelerator.current_device_index()
    if count > 1 and index == 0:
        local_rank = rank % count
        for name in reversed(_LOCAL_RANKS):
            local_rank = int(os.environ.get(name, local_rank))
        torch.accelerator.set_device_index(local_rank)


def _refuse_other_launchers() -> None:
    """Raise PlanError if the process is one of several, which would each train alone."""
    for name in _WORLD_SIZES:
        value = os.environ.get(name, "")
        if value.isdigit() and int(value) > 1:
            raise PlanError(
                f"{name} is {value}, so this is one of several processes, but RANK and WORLD_SIZE "
                "are not set: each would train alone. Start one torchrun on each node, as by "
                "`srun --ntasks-per-node=1 torchrun ...`, or set RANK, WORLD_SIZE, LOCAL_RANK, "
                f"MASTER_ADDR and MASTER_PORT. Unset {name} if each is to train alone."
            )


def _destroy(world: weakref.ref[dist.ProcessGroup]) -> None:
    """Destroy all groups if the default is still ours, unless an error ends the process: others may
    not get here.
    """
    if dist.is_initialized() and dist.group.WORLD is world() and not hasattr(sys, "last_value"):
        dist.destroy_process_group()
        if accelerator() == "cpu":
            # Gloo's threads free the last collective's tensors, which aborts once Python ends
            # (pytorch#190489).
            time.sleep(0.1)


def spec_of(mesh: DeviceMesh | MeshSpec | None) -> MeshSpec:
    """Return the MeshSpec of what a user passed as ``mesh``; local. None is all ranks
    in one axis.
    """
    if isinstance(mesh, MeshSpec):
        return mesh
    if mesh is None:
        world = (
            dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", 1))
        )
        return MeshSpec.sharded(world)
    if not isinstance(mesh, DeviceMesh):
        raise PlanError(
            f"mesh must be a DeviceMesh, a MeshSpec or None, got {type(mesh).__name__}. None is "
            "all ranks in one axis. Use MeshSpec.sharded(ranks) or MeshSpec.hybrid(replicate, "
            "shard)."
        )
    return MeshSpec(tuple(mesh.shape), mesh.mesh_dim_names or ("dp_shard",))


def build_mesh(spec: MeshSpec, device: str | None = None) -> DeviceMesh:
    """Build the DeviceMesh over all ranks that ``spec`` describes. Collective: every rank must
    call.
    """
    mesh = init_device_mesh(device or device_type(), spec.shape, mesh_dim_names=spec.axis_names)
    return with_timeout_of_world(mesh)


def unit_meshes(mesh: DeviceMesh, plan: ShardingPlan) -> dict[str | None, DeviceMesh]:
    """Return the mesh for each ``ShardUnit.mesh`` of the plan, and for None. Collective when axes
    are joined first.
    """
    spec = plan.mesh
    cut = len(spec.shape) - spec.shard_axes
    replicate, shard = spec.axis_names[:cut], spec.axis_names[cut:]
    joined = mesh if len(shard) == 1 else with_timeout_of_world(flattened(mesh, replicate, shard))
    meshes: dict[str | None, DeviceMesh] = {None: joined}
    for axis in dict.fromkeys(unit.mesh for unit in plan.units if unit.mesh is not None):
        meshes[axis] = mesh[(*replicate, axis)]
    return meshes


def check_mesh(mesh: DeviceMesh | None, spec: MeshSpec) -> None:
    """Raise PlanError unless ``mesh`` has the shape of ``spec``, on a usable device; local.

    None is all ranks.
    """
    if mesh is None:
        world = dist.get_world_size()
        if spec.size != world:
            raise PlanError(
                f"mesh {spec} needs {spec.size} ranks, and there are {world}. Start {spec.size} "
                f"processes, or make the plan with mesh=MeshSpec.sharded({world})."
            )
        return
    if not isinstance(mesh, DeviceMesh):
        raise PlanError(
            f"mesh must be a DeviceMesh or None, got {type(mesh).__name__}. Leave it out, or pass "
            "the mesh to plan_model."
        )
    given = spec_of(mesh)
    if given.shape != spec.shape or given.axis_names != spec.axis_names:
        raise PlanError(
            f"mesh is {given}, and the plan was made for {spec}. Make the plan with this mesh."
        )
