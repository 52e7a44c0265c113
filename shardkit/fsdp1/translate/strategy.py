"""FSDP1's sharding strategies, in whatever form they are written, as a mesh and ``reshard_after_forward``."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

from torch.distributed.fsdp import ShardingStrategy

from shardkit.errors import TranslationError, listing, message
from shardkit.plan import MeshSpec

HYBRID = ("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")


class Resolved(NamedTuple):
    """A strategy on a number of ranks.

    Attributes:
        mesh: one axis, or two that replicate and shard; in ranks.
        reshard_after_forward: of all units but the root, which FSDP1 never reshards after forward.
    """

    mesh: MeshSpec
    reshard_after_forward: bool


def parse_strategy(given: Any) -> ShardingStrategy:
    """torch's enum for any way to write a strategy; None is FULL_SHARD, as in FSDP1.

    Args:
        given: torch's enum; its name in any case, with or without the class and the leading underscore
            (``"ShardingStrategy.FULL_SHARD"``, ``"hybrid_shard_zero2"``); accelerate's number, 1 to 5, also as text.

    Raises:
        TranslationError: it is none of these.
    """
    if given is None:
        return ShardingStrategy.FULL_SHARD
    if isinstance(given, ShardingStrategy):
        return given
    by_name = {strategy.name.strip("_"): strategy for strategy in ShardingStrategy}
    by_number = {str(strategy.value): strategy for strategy in ShardingStrategy}
    text = str(given).strip() if isinstance(given, (str, int)) else ""
    found = by_number.get(text) or by_name.get(text.rpartition(".")[2].upper().replace("-", "_").strip("_"))
    if found is None:
        raise TranslationError(
            message(
                "sharding_strategy",
                repr(given),
                f"It is a ShardingStrategy, the name of one ({listing(by_name)}), or accelerate's number 1 to 5",
                "Use ShardingStrategy.FULL_SHARD",
            )
        )
    return found


def resolve_strategy(given: Any, world_size: int, ranks_per_node: int | None = None) -> Resolved:
    """The mesh and ``reshard_after_forward`` of a strategy on ``world_size`` ranks; pure.

    Args:
        given: as for ``parse_strategy``.
        world_size: ranks in all.
        ranks_per_node: ranks that shard together in a hybrid strategy; others do not look at it. None is
            torchrun's ``LOCAL_WORLD_SIZE``, which is also what FSDP1 took it to be: the devices of a node.

    Raises:
        TranslationError: no such strategy, or a hybrid one whose node size is unknown or does not divide the ranks.

    Example:
        >>> resolve_strategy("hybrid_shard", 16, ranks_per_node=8)
        Resolved(mesh=MeshSpec(shape=(2, 8), axis_names=('dp_replicate', 'dp_shard')), reshard_after_forward=True)
    """
    strategy = parse_strategy(given)
    check_ranks("world_size", world_size)
    reshard = strategy.name in ("FULL_SHARD", "HYBRID_SHARD")
    if strategy.name in HYBRID:
        per_node = _node_size(strategy, world_size, ranks_per_node)
        return Resolved(MeshSpec.hybrid(world_size // per_node, per_node), reshard)
    if strategy is ShardingStrategy.NO_SHARD and world_size > 1:
        return Resolved(MeshSpec.hybrid(world_size, 1), reshard)
    return Resolved(MeshSpec.sharded(world_size), reshard)


def check_ranks(argument: str, value: Any) -> None:
    """Raises TranslationError unless ``value`` is a number of ranks."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise TranslationError(message(argument, repr(value), "It is a number of ranks, at least 1", "Use an int"))


def _node_size(strategy: ShardingStrategy, world_size: int, ranks_per_node: int | None) -> int:
    launched = os.environ.get("LOCAL_WORLD_SIZE", "")
    if ranks_per_node is None and launched.isdecimal():
        ranks_per_node = int(launched)
    if ranks_per_node is None:
        raise TranslationError(
            message(
                "sharding_strategy",
                f"{strategy.name} on {world_size} ranks, and nothing says how many share a node",
                "It shards inside of a node and replicates across nodes; FSDP1 counted this node's devices",
                "Pass ranks_per_node=8, a device_mesh or the pair of process groups, or start with torchrun",
            )
        )
    check_ranks("ranks_per_node", ranks_per_node)
    if world_size % ranks_per_node:
        raise TranslationError(
            message(
                "ranks_per_node",
                f"{ranks_per_node} does not divide {world_size} ranks",
                f"{strategy.name} shards over the ranks of a node, as many on each",
                f"Use a divisor of {world_size}",
            )
        )
    return ranks_per_node
