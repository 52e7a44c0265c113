"""Assertions across ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from shardkit.errors import ShardkitError, listing, message


def assert_same_on_all_ranks(value: torch.Tensor | bytes, group: dist.ProcessGroup | None = None) -> None:
    """Fail on every rank unless all ranks of the group hold the same value, bit for bit. Collective.

    Compares dtype, shape and every byte, so NaN equals the same NaN and 0.0 differs from -0.0. Each rank needs memory
    for one copy of the value from every rank.

    Args:
        value: a plain tensor on any device, or bytes, such as a JSON-dumped object.
        group: the ranks to compare; None is all ranks.

    Raises:
        AssertionError: on every rank, naming the ranks that differ from the group's first.
        ShardkitError: ``value`` is neither a plain tensor nor bytes, or there is no process group.

    Example:
        assert_same_on_all_ranks(torch.nn.utils.get_total_norm(gradients).full_tensor())
    """
    if not dist.is_initialized():
        fix = "Call it inside @distributed, RankPool.run or a torchrun script"
        raise ShardkitError(message("assert_same_on_all_ranks", "found no process group", "", fix))
    if isinstance(value, DTensor) or not isinstance(value, (torch.Tensor, bytes)):
        problem = f"must be a plain tensor or bytes, got {type(value).__name__}"
        fix = "Pass dtensor.full_tensor(), dtensor.to_local() or pickle.dumps(value)"
        raise ShardkitError(message("value", problem, "", fix))
    given = torch.tensor(list(value), dtype=torch.uint8) if isinstance(value, bytes) else value.detach()
    kinds = [""] * dist.get_world_size(group)
    dist.all_gather_object(kinds, f"{type(value).__name__} of {given.dtype} and shape {tuple(given.shape)}", group)
    if len(set(kinds)) == 1:
        # NCCL moves tensors on its GPU only; gloo is faster on the CPU.
        flat = given.contiguous().to("cuda" if dist.get_backend() == "nccl" else "cpu").flatten().view(torch.uint8)
        rows = [torch.empty_like(flat) for _ in kinds]
        dist.all_gather(rows, flat, group=group)
        kinds = [_unlike(rows[0].view(given.dtype), row.view(given.dtype)) for row in rows]
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    different = [f"on rank {rank}: {kind}" for rank, kind in zip(ranks, kinds, strict=True) if kind != kinds[0]]
    if different:
        rule = f"All ranks must hold what rank {ranks[0]} holds{f', a {kinds[0]}' if kinds[0] else ''}"
        raise AssertionError(message("assert_same_on_all_ranks found a difference", listing(different), rule, ""))


def _unlike(first: torch.Tensor, row: torch.Tensor) -> str:
    """Return how one rank's elements differ from the first rank's, bit for bit; empty if they do not."""
    bits = [each.view(torch.uint8).view(-1, each.dtype.itemsize) for each in (first, row)]
    where = (bits[0] != bits[1]).any(dim=1).nonzero().flatten().tolist()
    if not where:
        return ""
    mine, theirs = row[where[0]].item(), first[where[0]].item()
    return f"{len(where)} of {len(row)} elements differ, the first at {where[0]}: {mine} against {theirs}"
