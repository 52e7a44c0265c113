"""MeshSpec and DeviceMesh: the only module that builds meshes, or a process group where there is none."""

from __future__ import annotations

import atexit
import json
import logging
import os
import sys
import weakref
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardkit.errors import PlanError, listing, message
from shardkit.plan import MeshSpec
from shardkit.ranks import accelerator, all_gather_bytes, device_type

_PLACE = ("RANK", "WORLD_SIZE")  # what torchrun tells a rank of itself; some hosts set MASTER_ADDR for good
# This rank's place on its host, as torchrun, SLURM, Open MPI, Intel MPI, MVAPICH2, Cray PALS and MPICH say it.
_LOCAL_PLACE = (
    "LOCAL_RANK",
    "SLURM_LOCALID",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "MPI_LOCALRANKID",
    "MV2_COMM_WORLD_LOCAL_RANK",
    "PALS_LOCAL_RANKID",
    "PMI_LOCAL_RANK",
)
_LAUNCHER_VARIABLES = (*_PLACE, "MASTER_ADDR", "MASTER_PORT")

logger = logging.getLogger("shardkit")


def ensure_process_group() -> None:
    """Initialize torch.distributed where it is not: from torchrun's variables, or as a single process.

    Collective under torchrun: every rank must call. With an accelerator the rank's own device is selected, and
    both it and the CPU get a backend, so that offloaded shards can be reduced. The group is destroyed when the
    process ends.

    Raises:
        PlanError: some of torchrun's variables are set and some are not.
    """
    if dist.is_initialized():
        return
    launched = any(name in os.environ for name in _PLACE)
    missing = [name for name in _LAUNCHER_VARIABLES if name not in os.environ]
    if launched and missing:
        problem = f"{listing(missing)} not set, though {listing(name for name in _PLACE if name in os.environ)} is"
        rule = "A rank is told its place by all four variables, a process alone by none"
        fix = "Start with torchrun, or unset them, or call torch.distributed.init_process_group yourself"
        raise PlanError(message("process group", problem, rule, fix))
    if accelerator() != "cpu":
        torch.accelerator.set_device_index(_local_device(torch.accelerator.device_count()))
    backend = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}.get(accelerator())
    if launched:
        dist.init_process_group(backend)
    else:
        store = dist.HashStore()  # type: ignore[attr-defined]  # public, but not in __all__
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
    assert dist.group.WORLD is not None, "just made"
    atexit.register(_destroy, weakref.ref(dist.group.WORLD))
    if not launched:
        logger.warning(
            "shardkit: no process group and no torchrun, so this process trains alone (world size 1). To use another "
            "group, call init_process_group before this, or destroy_process_group() first"
        )


def _local_device(count: int) -> int:
    """The index of this rank's device among ``count`` that it sees; launchers may show each rank only its own."""
    named = next((os.environ[name] for name in _LOCAL_PLACE if name in os.environ), None)
    if count == 1:
        return 0
    return int(named) if named is not None else int(os.environ.get("RANK", 0)) % count


def _destroy(made: weakref.ref[dist.ProcessGroup]) -> None:
    """Take down all groups if the default one is still ours, and no error ends the process.

    So that NCCL's are shut down as torch asks. gloo's threads outlive it once FSDP2 has used the group, also when the
    model, the mesh infos and the mesh's own references are dropped first (torch 2.13), so that a run that is done may
    still abort ("terminate called without an active exception", pytorch#190489). After an error the other ranks may
    never come to the same point.
    """
    if dist.is_initialized() and dist.group.WORLD is made() and not hasattr(sys, "last_value"):
        dist.destroy_process_group()


def _world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", 1))


def spec_of(mesh: DeviceMesh | MeshSpec | None) -> MeshSpec:
    """The MeshSpec of what a user passed as ``mesh``; local. None is all ranks in one axis.

    Raises:
        PlanError: a mesh without names for its two axes, or with more than two, or no mesh at all.
    """
    if isinstance(mesh, MeshSpec):
        return mesh
    if mesh is None:
        return MeshSpec.sharded(_world_size())
    if not isinstance(mesh, DeviceMesh):
        fix = "Use MeshSpec.sharded(ranks) or MeshSpec.hybrid(replicate, shard)"
        rule = "It is a DeviceMesh, a MeshSpec or None for all ranks"
        raise PlanError(message("mesh", f"a {type(mesh).__name__}", rule, fix))
    names = mesh.mesh_dim_names
    if mesh.ndim > 2 or (mesh.ndim == 2 and names is None):
        problem = f"a DeviceMesh of shape {tuple(mesh.shape)} with axis names {names}"
        rule = "Data-parallel meshes have one axis, or two with names"
        fix = 'Pass mesh_dim_names=("dp_replicate", "dp_shard") to init_device_mesh, or a sub-mesh of two axes'
        raise PlanError(message("mesh", problem, rule, fix))
    return MeshSpec(tuple(mesh.shape), tuple(names) if names else ("dp_shard",))


def build_mesh(spec: MeshSpec, device: str | None = None) -> DeviceMesh:
    """The DeviceMesh over all ranks that ``spec`` describes. Collective: every rank must call."""
    return init_device_mesh(device or device_type(), spec.shape, mesh_dim_names=spec.axis_names)


def mesh_of_groups(spec: MeshSpec, groups: Sequence[dist.ProcessGroup], device: str | None = None) -> DeviceMesh:
    """The DeviceMesh of ``spec`` on process groups that exist. Collective over the groups.

    Args:
        spec: the mesh's shape, in ranks, and axis names.
        groups: one for each axis, this rank's own; for two axes also the first one alone, where the second has one
            rank only.
        device: the mesh's device type; None is the accelerator, or the CPU where only gloo could serve it.
    """
    device = device or device_type()
    if len(spec.shape) == 1:
        return DeviceMesh.from_group(groups[0], device, mesh_dim_names=spec.axis_names)
    if len(groups) == 1:  # the shard axis is this rank alone, so only this rank makes its group
        alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
        groups = [groups[0], alone]
    replicate, shard = groups
    mine = json.dumps(dist.get_process_group_ranks(shard)).encode()
    table = [json.loads(row) for row in all_gather_bytes(mine, replicate)]
    return DeviceMesh.from_group([replicate, shard], device, torch.tensor(table), mesh_dim_names=spec.axis_names)


def check_mesh(mesh: DeviceMesh | None, spec: MeshSpec) -> None:
    """Raises PlanError unless ``mesh``, or all ranks, have the shape of ``spec``, on a device there is; local."""
    world = dist.get_world_size()
    if mesh is None and spec.size != world:
        problem = f"{spec} needs {spec.size} ranks, and there are {world}"
        rule = "A plan is applied on as many ranks as it was made for"
        fix = f"Start {spec.size} processes, or make the plan with mesh=MeshSpec.sharded({world})"
    elif mesh is None:
        return
    elif not isinstance(mesh, DeviceMesh):
        problem = f"a {type(mesh).__name__}"
        rule = "A plan is applied on a DeviceMesh, or with None on all ranks"
        fix = "Leave it out, or pass the mesh to plan_model"
    elif spec_of(mesh) != spec:
        problem = f"{spec_of(mesh)} for a plan made for {spec}"
        rule = "A plan is applied on a mesh of the shape and axis names it was made for"
        fix = "Make the plan with this mesh"
    elif mesh.device_type not in ("cpu", accelerator()):
        problem = f"its device type is {mesh.device_type!r}, and this process has {accelerator()!r}"
        rule = "A mesh is on a device that every rank has"
        fix = f"Use init_device_mesh({accelerator()!r}, ...)"
    else:
        return
    raise PlanError(message("mesh", problem, rule, fix))
