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
        problem, fix = "there is no process group", "Call it inside @distributed, RankPool.run or a torchrun script"
        raise ShardkitError(message("assert_same_on_all_ranks", problem, "It compares ranks", fix))
    if isinstance(value, bytes):
        tensor = torch.frombuffer(bytearray(value), dtype=torch.uint8) if value else torch.empty(0)
    elif isinstance(value, torch.Tensor) and not isinstance(value, DTensor):
        tensor = value.detach().contiguous()
    else:
        rule = "It must be a plain tensor or bytes; the shards of a DTensor differ by design"
        fix = "Pass dtensor.full_tensor(), dtensor.to_local() or pickle.dumps(value)"
        raise ShardkitError(message("value", f"is a {type(value).__name__}", rule, fix))
    # NCCL moves tensors on its GPU only; gloo is faster on the CPU.
    tensor = tensor.cuda() if dist.get_backend() == "nccl" else tensor.cpu()
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    kind = f"{len(value)} bytes" if isinstance(value, bytes) else f"{value.dtype} of shape {tuple(value.shape)}"
    kinds = [""] * len(ranks)
    dist.all_gather_object(kinds, kind, group)
    _raise_unless_same(ranks, [f"it is {kind}" for kind in kinds], kinds[0])
    flat = tensor.flatten().view(torch.uint8)
    rows = [torch.empty_like(flat) for _ in ranks]
    dist.all_gather(rows, flat, group=group)
    differences = [_difference(rows[0].cpu(), row.cpu(), tensor.dtype) for row in rows]
    _raise_unless_same(ranks, differences, kinds[0])


def _difference(first: torch.Tensor, row: torch.Tensor, dtype: torch.dtype) -> str:
    """Return how one rank's bytes differ from the first rank's; empty if they do not."""
    if torch.equal(first, row):
        return ""
    width = dtype.itemsize
    where = (first.view(-1, width) != row.view(-1, width)).any(dim=1).nonzero().flatten()
    mine, theirs = row.view(dtype)[where[0]].item(), first.view(dtype)[where[0]].item()
    return f"{len(where)} of {len(row) // width} elements differ, the first at {where[0]}: {mine} against {theirs}"


def _raise_unless_same(ranks: list[int], states: list[str], kind: str) -> None:
    by_rank = zip(ranks, states, strict=True)
    different = [f"on rank {rank} {state}" for rank, state in by_rank if state != states[0]]
    if different:
        rule = f"All ranks must hold what rank {ranks[0]} holds, {kind}"
        raise AssertionError(message("assert_same_on_all_ranks", listing(different), rule, ""))
