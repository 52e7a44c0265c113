"""Ranks that skip a unit take part in its collectives, with the gradients of one plain model."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from skipping_nets import Straight, batch, largest_difference, net
from torch import nn

from shardkit import ShardkitError, by_name, group, shard_model, take_part
from shardkit.testing import comm_counts, distributed, fake_world

UNITS = ("layers.*", "visual.blocks.*", "visual", "embed")
BOUND = 1e-14  # fp64: sums over ranks in another order


def step(model: nn.Module, plain: nn.Module, seed: int, pattern: int) -> tuple[int, int, int]:
    """One step in which the ranks of the bits of ``pattern`` have an image; return the number of collectives."""
    rank, world = dist.get_rank(), dist.get_world_size()
    model.zero_grad()
    plain.zero_grad()
    with comm_counts() as counts:
        model(*batch(seed, rank, bool(pattern >> rank & 1), chosen=[0, 1])).square().mean().backward()
    for other in range(world):
        found = plain(*batch(seed, other, bool(pattern >> other & 1), chosen=[0, 1]))
        (found.square().mean() / world).backward()
    assert largest_difference(model, plain) < BOUND, pattern
    return counts.all_gathers, counts.reduce_scatters, counts.all_reduces


@distributed(world_size=2)
def test_a_rank_takes_part_in_a_tower_that_it_skips():
    for frozen in ((), ("patch", "blocks"), ("patch", "blocks", "merge")):
        plain = net(Straight)
        for name in frozen:
            plain.visual.get_submodule(name).requires_grad_(False)
        model = copy.deepcopy(plain)
        shard_model(model, units=[by_name(*UNITS)])
        model.by_hand = True
        counts = {step(model, plain, pattern, pattern) for pattern in range(4)}
        assert len(counts) == 1, counts


def test_a_bad_stand_in_and_a_unit_that_reaches_outside_are_errors():
    with pytest.raises(ShardkitError, match=r"like of take_part is torch.int64"):
        take_part(nn.Linear(2, 2), torch.ones(2, dtype=torch.long))
    with fake_world(2):
        model = shard_model(net(Straight), units=[group("visual.merge", "head")])
        with pytest.raises(ShardkitError, match=r"shares a unit with 1 modules outside"):
            take_part(model.visual, torch.ones(1))
