"""What a sharded model checks before torch loads a state dict into it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch.distributed.tensor import DTensor

from shardkit.errors import ShardkitError


def refuse_other_ranks(state: Mapping[str, Any]) -> None:
    """Raise if a state dict has shards of another rank. Local.

    A file of one rank's ``state_dict()`` gives every rank that rank's shards, and torch copies them
    as if they were its own.
    """
    for name, value in state.items():
        if not isinstance(value, DTensor):
            continue
        mesh = value.device_mesh  # of a loaded DTensor with the coordinate of the rank that saved
        saved, own = mesh.get_coordinate(), (mesh.mesh == dist.get_rank()).nonzero().tolist()
        for axis, placement in enumerate(value.placements):
            if saved and own and placement.is_shard() and saved[axis] != own[0][axis]:
                raise ShardkitError(
                    f"{name} is a shard of another rank: torch.save(model.state_dict()) writes the "
                    "shards of one rank. Save with save_checkpoint on all ranks, or write "
                    "full_state_dict(model), and load it with load_full_state_dict."
                )
