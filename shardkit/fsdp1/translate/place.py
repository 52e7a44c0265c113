"""Where FSDP1 would have sharded: its process groups or mesh, as a MeshSpec and what builds the mesh from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import ShardingStrategy

from shardkit.apply.mesh import spec_of
from shardkit.errors import TranslationError, message
from shardkit.fsdp1.translate.strategy import HYBRID, check_ranks, resolve_strategy
from shardkit.plan import MeshSpec
from shardkit.ranks import Groups


@dataclass(frozen=True)
class Place:
    """The mesh of a translation.

    Attributes:
        spec: shape, in ranks, and axis names.
        device_mesh: the given one, where FSDP2 takes it as it is.
        groups: for a mesh that is made of process groups, as for ``Translation.process_groups``.
    """

    spec: MeshSpec
    device_mesh: DeviceMesh | None = None
    groups: tuple[dist.ProcessGroup, ...] = ()


def place_of(
    strategy: ShardingStrategy,
    process_group: Any = None,
    device_mesh: Any = None,
    ranks_per_node: int | None = None,
    world_size: int | None = None,
) -> Place:
    """The mesh on which FSDP1 would have sharded; local.

    Raises:
        TranslationError: they contradict each other or the strategy, or this rank is in none of them.
    """
    if process_group is not None and device_mesh is not None:
        raise _error("device_mesh", "given together with process_group", "Both say the same", "Pass one of them")
    if device_mesh is not None:
        place = _of_mesh(strategy, device_mesh)
    elif process_group is not None:
        place = _of_groups(strategy, process_group)
    else:
        size = spec_of(None).size if world_size is None else world_size
        return Place(resolve_strategy(strategy, size, ranks_per_node).mesh)
    _check_sizes(strategy, place.spec, ranks_per_node, world_size)
    return place


def groups_to_agree(process_group: Any, device_mesh: Any) -> Groups:
    """The groups that reach all ranks which shard together; the world where the arguments are not what they must be.

    Raises:
        TranslationError: this rank is in none of them, so that no other rank waits for it.
    """
    if isinstance(device_mesh, DeviceMesh):
        _check_member("device_mesh", device_mesh.get_coordinate() is not None)
        return device_mesh.get_all_groups()
    groups = process_group if isinstance(process_group, (tuple, list)) else (process_group,)
    if all(isinstance(group, dist.ProcessGroup) for group in groups) and groups:
        _check_member("process_group", all(dist.get_rank(group) >= 0 for group in groups))
        return list(groups)
    return [None]


def _of_mesh(strategy: ShardingStrategy, mesh: Any) -> Place:
    if not isinstance(mesh, DeviceMesh):
        raise _error("device_mesh", f"a {type(mesh).__name__}", "It is a DeviceMesh", "Use init_device_mesh")
    _check_member("device_mesh", mesh.get_coordinate() is not None)
    if strategy.name in HYBRID:
        return _hybrid_of_mesh(strategy, mesh)
    if any(size > 1 for size in mesh.shape[1:]):
        raise _error(
            "device_mesh",
            f"shape {tuple(mesh.shape)} for {strategy.name}",
            "FSDP1 sharded over the first axis, and let the ranks along the others train apart",
            "Pass the one axis that shards, as in mesh['dp'], or use HYBRID_SHARD",
        )
    if strategy is ShardingStrategy.NO_SHARD:
        return _of_group(strategy, mesh.get_group(0))
    return Place(spec_of(mesh), mesh) if mesh.ndim == 1 else _of_group(strategy, mesh.get_group(0))


def _hybrid_of_mesh(strategy: ShardingStrategy, mesh: DeviceMesh) -> Place:
    if mesh.ndim != 2:
        raise _error(
            "device_mesh",
            f"shape {tuple(mesh.shape)} for {strategy.name}",
            "It has two axes, which replicate and shard",
            "Use init_device_mesh(device, (nodes, ranks_per_node))",
        )
    if mesh.mesh_dim_names:
        return Place(spec_of(mesh), mesh)
    # FSDP1 took a mesh without names, and torch can add none: the same groups in a mesh that has them.
    return Place(MeshSpec.hybrid(*mesh.shape), groups=(mesh.get_group(0), mesh.get_group(1)))


def _of_groups(strategy: ShardingStrategy, given: Any) -> Place:
    groups = given if isinstance(given, tuple) else (given,)
    hybrid = strategy.name in HYBRID
    if len(groups) != 1 + hybrid or not all(isinstance(group, dist.ProcessGroup) for group in groups):
        raise _error(
            "process_group",
            f"{'a tuple of ' if isinstance(given, tuple) else ''}{', '.join(type(each).__name__ for each in groups)} "
            f"for {strategy.name}",
            "Expected process_group to be passed in as either None or "
            + ("Tuple[dist.ProcessGroup, dist.ProcessGroup]" if hybrid else "one dist.ProcessGroup of this rank"),
            "Pass (shard_group, replicate_group)" if hybrid else "Pass one of them",
        )
    _check_member("process_group", all(dist.get_rank(group) >= 0 for group in groups))
    if not hybrid:
        return _of_group(strategy, groups[0])
    shard, replicate = groups
    shared = set(dist.get_process_group_ranks(shard)) & set(dist.get_process_group_ranks(replicate))
    if shared != {dist.get_rank()}:
        raise _error(
            "process_group",
            f"the groups that shard and replicate share ranks {sorted(shared)}",
            "A row and a column of a table of ranks share one, this rank",
            "Make them as dist.new_subgroups does, or pass a device_mesh",
        )
    return Place(MeshSpec.hybrid(replicate.size(), shard.size()), groups=(replicate, shard))


def _of_group(strategy: ShardingStrategy, group: dist.ProcessGroup) -> Place:
    """One group is all of the mesh; NO_SHARD adds a shard axis of this rank alone."""
    spec = resolve_strategy(strategy, group.size()).mesh
    return Place(spec) if group == dist.group.WORLD else Place(spec, groups=(group,))


def _check_sizes(strategy: ShardingStrategy, spec: MeshSpec, per_node: int | None, world_size: int | None) -> None:
    for name, given, found in (("ranks_per_node", per_node, spec.shard_size), ("world_size", world_size, spec.size)):
        matters = name == "world_size" or strategy.name in HYBRID
        if given is not None:
            check_ranks(name, given)
        if given is not None and matters and given != found:
            raise _error(
                name,
                f"{given}, and the mesh or process group has {found}",
                "They say how many ranks there are",
                "Leave it out",
            )


def _check_member(argument: str, inside: bool) -> None:
    if not inside:
        raise _error(
            argument,
            f"rank {dist.get_rank()} is not in it",
            "Every rank that shards is in it",
            "Shard on its ranks only",
        )


def _error(argument: str, problem: str, rule: str, fix: str) -> TranslationError:
    return TranslationError(message(argument, problem, rule, fix))
