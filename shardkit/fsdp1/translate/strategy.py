"""Resolve FSDP1's strategies, process groups and meshes to a MeshSpec; pure and local."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import ShardingStrategy

from shardkit.apply.mesh import spec_of
from shardkit.errors import TranslationError, listing, message
from shardkit.plan import MeshSpec
from shardkit.ranks import Groups

HYBRID = ("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")
RESHARDING = ("FULL_SHARD", "HYBRID_SHARD")  # after forward, but for the root


class Resolved(NamedTuple):
    """A strategy on a number of ranks.

    Attributes:
        mesh: one axis, or two that replicate and shard; in ranks.
        reshard_after_forward: for all units but the root, which FSDP1 never reshards.
    """

    mesh: MeshSpec
    reshard_after_forward: bool


def parse_strategy(given: Any) -> ShardingStrategy:
    """Return torch's enum for a strategy in any form; None is FULL_SHARD, as in FSDP1.

    Args:
        given: the enum; its name in any case, with or without the class and the underscore
            (``"ShardingStrategy.FULL_SHARD"``, ``"hybrid_shard_zero2"``); accelerate's number.

    Raises:
        TranslationError: ``given`` is none of these.
    """
    if given is None:
        return ShardingStrategy.FULL_SHARD
    if isinstance(given, ShardingStrategy):
        return given
    text = str(given).rpartition(".")[2].strip().upper().replace("-", "_").strip("_")
    for strategy in ShardingStrategy:
        if text in (strategy.name.strip("_"), str(strategy.value)) and given is not True:
            return strategy
    names = listing(strategy.name.strip("_") for strategy in ShardingStrategy)
    problem = f"must be a ShardingStrategy, one of {names}, or accelerate's number 1 to 5"
    raise _error("sharding_strategy", f"{problem}, got {given!r}")


def resolve_strategy(given: Any, world_size: int, ranks_per_node: int | None = None) -> Resolved:
    """Return the mesh and ``reshard_after_forward`` of a strategy on ``world_size`` ranks; pure.

    Args:
        given: as for ``parse_strategy``.
        world_size: ranks in all.
        ranks_per_node: ranks that shard together in a hybrid strategy, ignored by others. None is
            torchrun's ``LOCAL_WORLD_SIZE``; FSDP1 counted the devices of a node.

    Raises:
        TranslationError: unknown strategy, or a hybrid one whose node size is unknown or does not
            divide the ranks.

    Examples:
        >>> resolve_strategy("hybrid_shard", 16, ranks_per_node=8).mesh
        MeshSpec(shape=(2, 8), axis_names=('dp_replicate', 'dp_shard'))
    """
    strategy = parse_strategy(given)
    check_ranks("world_size", world_size)
    mesh = MeshSpec.sharded(world_size)
    if strategy.name in HYBRID:
        if ranks_per_node is None:
            ranks_per_node = _ranks_of_this_node(strategy)
        check_ranks("ranks_per_node", ranks_per_node)
        if world_size % ranks_per_node:
            problem = f"{ranks_per_node} does not divide {world_size} ranks"
            raise _error("ranks_per_node", problem, "Use a divisor")
        mesh = MeshSpec.hybrid(world_size // ranks_per_node, ranks_per_node)
    elif strategy is ShardingStrategy.NO_SHARD and world_size > 1:
        mesh = MeshSpec.hybrid(world_size, 1)
    return Resolved(mesh, strategy.name in RESHARDING)


def check_ranks(argument: str, value: Any) -> None:
    """Raise TranslationError unless ``value`` is a number of ranks."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise _error(argument, f"must be a number of ranks, at least 1, got {value!r}")


def _ranks_of_this_node(strategy: ShardingStrategy) -> int:
    launched = os.environ.get("LOCAL_WORLD_SIZE", "")
    if not launched.isdecimal():
        problem = (
            f"{strategy.name} shards within a node, and the number of ranks per node is unknown"
        )
        fix = "Pass ranks_per_node=8, or start with torchrun"
        raise _error("sharding_strategy", problem, fix)
    return int(launched)


class Place(NamedTuple):
    """The mesh of a translation: its shape; the given mesh, if FSDP2 takes it; else its groups."""

    spec: MeshSpec
    device_mesh: DeviceMesh | None = None
    groups: tuple[dist.ProcessGroup, ...] = ()


def place_of(
    strategy: ShardingStrategy,
    process_group: Any,
    device_mesh: Any,
    ranks_per_node: int | None,
    world_size: int | None,
) -> Place:
    """Return the mesh on which FSDP1 would shard."""
    if process_group is not None and device_mesh is not None:
        problem = "is given together with process_group, and each defines the mesh"
        raise _error("device_mesh", problem, "Pass one")
    if device_mesh is not None:
        return _of_mesh(strategy, device_mesh)
    if process_group is not None:
        return _of_groups(strategy, process_group)
    size = spec_of(None).size if world_size is None else world_size
    return Place(resolve_strategy(strategy, size, ranks_per_node).mesh)


def groups_to_agree(process_group: Any, device_mesh: Any) -> Groups:
    """Return groups that together reach all ranks that shard; the world if they are invalid."""
    if isinstance(device_mesh, DeviceMesh):
        return device_mesh.get_all_groups()
    groups = process_group if isinstance(process_group, tuple) else (process_group,)
    if all(isinstance(group, dist.ProcessGroup) for group in groups) and groups:
        return list(groups)
    return [] if dist.GroupMember.NON_GROUP_MEMBER in groups else [None]


def _of_mesh(strategy: ShardingStrategy, mesh: DeviceMesh) -> Place:
    shape = f"has the shape {tuple(mesh.shape)}"
    if strategy.name in HYBRID:
        if mesh.ndim != 2:
            problem = f"{shape}, but {strategy.name} has two axes"
            raise _error("device_mesh", problem, "Pass the mesh of (nodes, ranks_per_node)")
        if mesh.mesh_dim_names:
            return Place(spec_of(mesh), mesh)
        # FSDP1 takes a mesh without axis names, which FSDP2 needs: name a mesh of the same groups.
        return Place(MeshSpec.hybrid(*mesh.shape), groups=tuple(mesh.get_all_groups()))
    if any(size > 1 for size in mesh.shape[1:]):
        problem = f"{shape}, but {strategy.name} shards over the first axis only"
        fix = "Pass the axis to shard over, as in mesh['dp'], or use HYBRID_SHARD"
        raise _error("device_mesh", problem, fix)
    if mesh.ndim == 1 and strategy is not ShardingStrategy.NO_SHARD:
        return Place(spec_of(mesh), mesh)
    return _of_group(strategy, mesh.get_group(0))


def _of_groups(strategy: ShardingStrategy, given: Any) -> Place:
    groups = given if isinstance(given, tuple) else (given,)
    wanted = "(shard_group, replicate_group)" if strategy.name in HYBRID else "one group"
    are_groups = all(isinstance(group, dist.ProcessGroup) for group in groups)
    if not are_groups or len(groups) != (2 if strategy.name in HYBRID else 1):
        kinds = ", ".join(type(group).__name__ for group in groups)
        problem = f"is {kinds} for {strategy.name} on this rank"
        raise _error("process_group", problem, f"Pass {wanted}")
    if len(groups) == 1:
        return _of_group(strategy, groups[0])
    shard, replicate = groups
    return Place(MeshSpec.hybrid(replicate.size(), shard.size()), groups=(replicate, shard))


def _of_group(strategy: ShardingStrategy, group: dist.ProcessGroup) -> Place:
    """Return the mesh of one group; NO_SHARD adds a shard axis of size 1."""
    spec = resolve_strategy(strategy, group.size()).mesh
    return Place(spec) if group == dist.group.WORLD else Place(spec, groups=(group,))


def _error(argument: str, problem: str, fix: str = "") -> TranslationError:
    return TranslationError(message(argument, problem, "", fix))
