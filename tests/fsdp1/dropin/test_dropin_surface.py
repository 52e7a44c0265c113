"""The edges of the drop-in: what it refuses, internals, which gradients there are."""

import copy
from contextlib import nullcontext

import pytest
import torch
from cpu_ranks import on_ranks
from fsdp1_models import fsdp1, quiet
from small_models import Block
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    MixedPrecision,
    ShardingStrategy,
    _runtime_utils,
    _traversal_utils,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, always_wrap_policy
from torch.distributed.optim import _apply_optimizer_in_backward

from shardkit.errors import TranslationError
from shardkit.fsdp1 import FullyShardedDataParallel as FSDP
from shardkit.testing import comm_counts, fake_world

LINEARS = ModuleWrapPolicy({nn.Linear})
HALF = torch.float16


def chain(width=6):
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))


class Pair(nn.Module):
    """Two layers, of which the second is left out of the loss, and a parameter that is not used."""

    def __init__(self):
        super().__init__()
        self.used, self.computed = nn.Linear(4, 4), nn.Linear(4, 4)
        self.used.register_parameter("idle", nn.Parameter(torch.ones(4)))

    def forward(self, x):
        return self.used(x), self.computed(x)


@on_ranks(2)
def test_modules_with_nothing_to_shard():
    whole = FSDP(plain := chain(), ignored_modules=[plain])
    assert torch.equal(whole(torch.ones(2, 6)), plain(torch.ones(2, 6)))
    empty = FSDP(nn.Tanh())
    assert torch.equal(empty(torch.zeros(3)), torch.zeros(3))
    assert (empty.state_dict(), empty.world_size) == ({}, 2)
    every = FSDP(chain(), auto_wrap_policy=always_wrap_policy)
    assert torch.equal(every(torch.ones(2, 6)), plain(torch.ones(2, 6)))
    once = FSDP(model := chain(), ignored_states=(p for p in model[0].parameters()))  # an iterator
    assert sum(param.ndim == 2 for param in once.parameters()) == 1  # the ignored weight
    normed = FSDP(
        nn.Sequential(nn.BatchNorm1d(3)),
        auto_wrap_policy=LINEARS,
        mixed_precision=MixedPrecision(HALF),
    )
    assert normed[0].mixed_precision == MixedPrecision()
    with pytest.raises(AssertionError, match="deepcopy"):
        copy.deepcopy(every)


@on_ranks(2)
def test_internals_say_what_to_use():
    model = FSDP(chain(), auto_wrap_policy=LINEARS, use_orig_params=True)
    for name in ("_handle", "_flat_param", "_all_handles"):
        assert not hasattr(model, name)
        with pytest.raises(
            TranslationError, match=f"^{name} is an internal of FSDP1.*Use model.parameters"
        ):
            getattr(model, name)
    model.module.params = 5  # a model's own
    assert model.params == 5
    for owner, name in ((_traversal_utils, "_get_fsdp_handles"), (_runtime_utils, "_lazy_init")):
        with pytest.raises(TranslationError, match=f"^{name} is a private function .*Use "):
            getattr(owner, name)(nn.Sequential(model))
    assert _traversal_utils._get_fsdp_handles(nn.Linear(2, 2)) == []


@on_ranks(2)
def test_what_no_gradient_reached_has_none_and_what_is_beside_it_zeros():
    model = FSDP(Pair(), auto_wrap_policy=LINEARS)
    assert model.clip_grad_norm_(1.0) == 0  # of no gradients
    for _ in range(2):
        model(torch.ones(2, 4))[0].sum().backward()
        assert model.computed.weight.grad is None
        assert model.used.weight.grad is not None
        assert torch.equal(model.used.idle.grad, torch.zeros(2))


@on_ranks(2)
def test_optimizers_that_torch_steps_in_backward_are_refused():
    model = FSDP(chain(), auto_wrap_policy=LINEARS)
    _apply_optimizer_in_backward(
        torch.optim.SGD, model.parameters(), {"lr": 0.1}, register_hook=False
    )
    with pytest.raises(TranslationError, match="so nothing would train"):
        model(torch.ones(2, 6))


# Collectives.


BF16 = MixedPrecision(torch.bfloat16, torch.float32)


def all_gathers(wrapper, strategy, **arguments):
    """All-gathers of each forward and each backward of two steps, of three micro-batches each."""
    mesh = (
        init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        if "HYBRID" in strategy.name
        else None
    )
    net = nn.Sequential(nn.Linear(4, 4), Block(4), Block(4))
    policy = ModuleWrapPolicy({Block})
    model = wrapper(
        net, auto_wrap_policy=policy, sharding_strategy=strategy, device_mesh=mesh, **arguments
    )
    counts = []
    for _ in range(2):
        for micro in range(3):
            with model.no_sync() if micro < 2 else nullcontext():
                with comm_counts() as forward:
                    loss = model(torch.ones(2, 4)).float().sum()
                with comm_counts() as backward:
                    loss.backward()
            counts.append((forward.all_gathers, backward.all_gathers))
        model.zero_grad()
    return counts


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
