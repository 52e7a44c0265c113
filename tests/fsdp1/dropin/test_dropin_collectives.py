"""The drop-in gathers and reduces as often as torch's FSDP1, in each micro-batch."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from fsdp1_models import fsdp1, quiet
from small_models import Block
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from shardkit.fsdp1 import FullyShardedDataParallel as FSDP
from shardkit.testing import comm_counts, fake_world

BF16 = MixedPrecision(torch.bfloat16, torch.float32)


def all_gathers(wrapper, strategy, **arguments):
    """All-gathers of each forward and each backward of two steps, of three micro-batches each."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")) if "HYBRID" in strategy.name else None
    net = nn.Sequential(nn.Linear(4, 4), Block(4), Block(4))
    policy = ModuleWrapPolicy({Block})
    model = wrapper(net, auto_wrap_policy=policy, sharding_strategy=strategy, device_mesh=mesh, **arguments)
    found = []
    for _ in range(2):
        for micro in range(3):
            with model.no_sync() if micro < 2 else nullcontext():
                with comm_counts() as forward:
                    loss = model(torch.ones(2, 4)).float().sum()
                with comm_counts() as backward:
                    loss.backward()
            found.append((forward.all_gathers, backward.all_gathers))
        model.zero_grad()
    return found


@pytest.mark.parametrize("precision", [None, BF16])
@pytest.mark.parametrize("strategy", list(ShardingStrategy))
def test_micro_batches_without_sync_gather_as_often_as_on_fsdp1(strategy, precision):
    with fake_world(4), quiet():
        theirs = all_gathers(fsdp1, strategy, mixed_precision=precision)
        ours = all_gathers(FSDP, strategy, mixed_precision=precision)
    assert ours == theirs
    units = 0 if strategy is ShardingStrategy.NO_SHARD else 3
    gathers_again = strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.HYBRID_SHARD)
    assert ours[:2] == [(3, 2), (3, 2)] if gathers_again else [(units, 0), (0, 0)]
