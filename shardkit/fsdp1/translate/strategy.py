"""The mesh on which FSDP1 would shard, by its strategy, process groups or mesh; pure and local."""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import ShardingStrategy

from shardkit.apply.mesh import spec_of
from shardkit.errors import TranslationError, listing
from shardkit.plan import MeshSpec
from shardkit.ranks import Groups

HYBRID = ("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")
RESHARDING = ("FULL_SHARD", "HYBRID_SHARD")  # after forward, but for the root


def parse_strategy(strategy: Any) -> ShardingStrategy:
    """Return torch's enum for a strategy in any form; None is FULL_SHARD, as in FSDP1.

    It may be the enum; its name in any case, with or without the class and the underscore
    (``"ShardingStrategy.FULL_SHARD"``, ``"hybrid_shard_zero2"``); or accelerate's number.
    """
    if strategy is None:
        return ShardingStrategy.FULL_SHARD
    if isinstance(strategy, ShardingStrategy):
        return strategy
    text = str(strategy).rpartition(".")[2].strip().upper().replace("-", "_").strip("_")
    for member in ShardingStrategy:
        if text in (member.name.strip("_"), str(member.value)):
            return member
    names = listing(member.name.strip("_") for member in ShardingStrategy)
    raise TranslationError(
        f"sharding_strategy must be a ShardingStrategy, one of {names}, or accelerate's number 1 "
        f"to 5, got {strategy!r}."
    )


def mesh_of_strategy(
    strategy: ShardingStrategy, world_size: int, ranks_per_node: int | None = None
) -> MeshSpec:
    """Return the mesh of a strategy on ``world_size`` ranks.

    In a hybrid strategy ``ranks_per_node`` ranks shard together. None is torchrun's
    ``LOCAL_WORLD_SIZE``, where FSDP1 counted the devices of a node.
    """
    check_ranks("world_size", world_size)
    if strategy.name in HYBRID:
        if ranks_per_node is None:
            launched = os.environ.get("LOCAL_WORLD_SIZE", "")
            if not launched.isdecimal():
                raise TranslationError(
                    f"sharding_strategy {strategy.name} shards within a node, and the number of "
                    "ranks per node is unknown. Pass ranks_per_node=8, or start with torchrun."
                )
            ranks_per_node = int(launched)
        check_ranks("ranks_per_node", ranks_per_node)
        if world_size % ranks_per_node:
            raise TranslationError(
                f"ranks_per_node {ranks_per_node} does not divide {world_size} ranks. Use a "
                "divisor."
            )
        return MeshSpec.hybrid(world_size // ranks_per_node, ranks_per_node)
    if strategy is ShardingStrategy.NO_SHARD and world_size > 1:
        return MeshSpec.hybrid(world_size, 1)
    return MeshSpec.sharded(world_size)


def check_ranks(argument: str, value: Any) -> None:
    """Raise TranslationError unless ``value`` is a number of ranks."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise TranslationError(f"{argument} must be a number of ranks, at least 1, got {value!r}.")


def mesh_of_arguments(
    strategy: ShardingStrategy,
    process_group: Any,
    device_mesh: Any,
    ranks_per_node: int | None,
    world_size: int | None,
) -> tuple[MeshSpec, DeviceMesh | None, tuple[dist.ProcessGroup, ...]]:
    """Return the shape of the mesh on which FSDP1 would shard, and what to build it from.

    That is a mesh, the given one, if FSDP2 takes it; or else process groups that exist, one for each
    axis; or neither, for a new mesh of all ranks.
    """
    is_hybrid = strategy.name in HYBRID
    if device_mesh is not None:
        if process_group is not None:
            raise TranslationError(
                "device_mesh is given together with process_group, and each defines the mesh. "
                "Pass one."
            )
        shape = tuple(device_mesh.shape)
        if is_hybrid:
            if len(shape) != 2:
                raise TranslationError(
                    f"device_mesh has the shape {shape}, but {strategy.name} has two axes. Pass "
                    "the mesh of (nodes, ranks_per_node)."
                )
            if device_mesh.mesh_dim_names:
                return spec_of(device_mesh), device_mesh, ()
            # FSDP1 takes a mesh without axis names, which FSDP2 needs: name one of the same groups.
            return MeshSpec.hybrid(*shape), None, tuple(device_mesh.get_all_groups())
        if any(size > 1 for size in shape[1:]):
            raise TranslationError(
                f"device_mesh has the shape {shape}, but {strategy.name} shards over the first "
                "axis only. Pass the axis to shard over, as in mesh['dp'], or use HYBRID_SHARD."
            )
        if len(shape) == 1 and strategy is not ShardingStrategy.NO_SHARD:
            return spec_of(device_mesh), device_mesh, ()
        process_group = device_mesh.get_group(0)

    if process_group is None:
        size = spec_of(None).size if world_size is None else world_size
        return mesh_of_strategy(strategy, size, ranks_per_node), None, ()
    groups = process_group if isinstance(process_group, tuple) else (process_group,)
    are_groups = all(isinstance(group, dist.ProcessGroup) for group in groups)
    if not are_groups or len(groups) != (2 if is_hybrid else 1):
        kinds = ", ".join(type(group).__name__ for group in groups)
        expected = "(shard_group, replicate_group)" if is_hybrid else "one group"
        raise TranslationError(
            f"process_group is {kinds} for {strategy.name} on this rank. Pass {expected}."
        )
    if is_hybrid:
        shard, replicate = groups
        return MeshSpec.hybrid(replicate.size(), shard.size()), None, (replicate, shard)
    (group,) = groups
    spec = mesh_of_strategy(strategy, group.size())
    return spec, None, () if group == dist.group.WORLD else (group,)


def groups_to_agree(process_group: Any, device_mesh: Any) -> Groups:
    """Return groups that together reach all ranks that shard; the world if they are invalid."""
    if isinstance(device_mesh, DeviceMesh):
        return device_mesh.get_all_groups()
    groups = process_group if isinstance(process_group, tuple) else (process_group,)
    if all(isinstance(group, dist.ProcessGroup) for group in groups) and groups:
        return list(groups)
    # torch gives this in the place of a group to ranks that are not in it: they agree with nobody.
    return [] if dist.GroupMember.NON_GROUP_MEMBER in groups else [None]
