"""The ranks of a save or a load: their process groups, and what they tell each other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from shardkit.errors import CheckpointError, message
from shardkit.ranks import Groups, gather_by_rank, raise_together


def world(group: dist.ProcessGroup | None = None) -> Groups:
    """Return the group that was passed, which must contain this rank, or the default group; none for one rank."""
    if not dist.is_initialized():
        return []
    if group is not None and dist.get_rank(group) < 0:
        problem = f"does not have rank {dist.get_rank()}, which makes the call"
        raise CheckpointError(message("group", problem, "", "Pass each rank a group that it is in"))
    return [group] if dist.get_world_size(group) > 1 else []


def own_rank() -> int:
    """Return this process's global rank."""
    return dist.get_rank() if dist.is_initialized() else 0


def ranks_of(groups: Groups) -> list[int]:
    """Return the global ranks of the one group, ascending, or this rank alone. Local."""
    return sorted(dist.get_process_group_ranks(groups[0])) if groups else [own_rank()]


def on_each(body: Callable[[], Any], groups: Groups) -> dict[int, Any]:
    """Run a local body, and return its JSON-ready results on all ranks, by global rank. Collective over ``groups``.

    Raises:
        CheckpointError: on every rank, if the body fails on any, with the reasons.
    """
    if not groups:
        return {own_rank(): body()}
    own, problem = None, None
    try:
        own = body()
    except Exception as error:  # whatever it is, the other ranks must not wait for this one
        problem = error
    found = gather_by_rank([problem is not None, own], groups)
    if any(failed for failed, _ in found.values()):
        raise_together(problem, groups, CheckpointError)
    return {rank: own for rank, (_, own) in found.items()}
