"""The old habits of FSDP users on a sharded model: each is right, or an error names what to do instead.

The numbers are those of a survey of 63 pains of FSDP users.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from small_models import Decoder, step
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardkit import (
    MixedPrecisionPolicy,
    ShardkitError,
    by_class,
    full_state_dict,
    load_full_state_dict,
    ranks,
    shard_model,
    zero_grad,
)
from shardkit.testing import distributed, fake_world


def sharded(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    return shard_model(Decoder(), **options)


def tokens() -> Tensor:
    torch.manual_seed(1)
    return torch.randint(0, 11, (2, 5))


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Callable[[], str]:
    ranks._warned.clear()
    return lambda: caplog.text


@distributed(world_size=2)
def test_10_ranks_that_start_from_different_values():
    torch.manual_seed(dist.get_rank())
    with pytest.raises(ShardkitError, match=r"embed.weight.*sync_module_states=True"):
        shard_model(Decoder())


@distributed(world_size=2)
def test_2_5_and_6_steps_that_would_train_nothing():
    model = Decoder()
    early = torch.optim.SGD(model.parameters(), lr=1.0)
    shard_model(model)
    step(model)
    with pytest.raises(ShardkitError, match=r"holds 22 parameters that sharding has replaced: embed.weight"):
        early.step()

    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer.zero_grad()
    model.set_requires_gradient_sync(False)
    step(model)
    with pytest.raises(ShardkitError, match="while 22 gradients wait to be reduced"):
        optimizer.step()
    zero_grad(model)
    model.set_requires_gradient_sync(True)
    step(model)
    plain = Decoder()
    load_full_state_dict(plain, full_state_dict(model, rank0_only=False), src="all")
    step(plain)
    for param, other in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(other.grad.full_tensor(), param.grad, rtol=1e-4, atol=1e-7)


def test_7_half_precision_without_masters(said: Callable[[], str]) -> None:
    with fake_world(2):
        model = shard_model(Decoder().bfloat16())
        torch.optim.SGD(model.parameters(), lr=1.0).step()
    assert re.search(r"SGD trains 22 parameters in bfloat16, without float32 masters.*MixedPrecision", said())


def test_17_ignored_parameters_that_train(said: Callable[[], str]) -> None:
    with fake_world(2):
        sharded(ignored_params=["head.weight"])
        assert re.search(r"head.weight trains outside of all units.*All-reduce", said())


@distributed(world_size=2)
def test_19_31_and_55_other_ways_into_a_model():
    model, plain = sharded(), Decoder()
    load_full_state_dict(model, plain.state_dict(), src="all")
    with torch.no_grad():
        hidden = plain.embed(tokens())
        assert torch.equal(model.embed(tokens()), hidden)  # a child first
        assert torch.equal(model(tokens()), plain(tokens()))
    assert all(isinstance(param, DTensor) for param in model.parameters())


def test_22_23_and_38_torch_raises() -> None:
    """What docs/troubleshooting.md says of torch's own methods."""
    with fake_world(2):
        model = sharded()
        with pytest.raises(RuntimeError, match=r"mixed torch.Tensor and DTensor"):
            model.load_state_dict(Decoder().state_dict())
        with pytest.raises((AssertionError, NotImplementedError), match="deepcopy"):
            copy.deepcopy(model)


@distributed(world_size=2)
def test_batch_norm_under_bf16_by_the_rule_of_the_docs() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Conv2d(3, 3, 3), nn.BatchNorm2d(3), nn.ReLU()) for _ in range(2)))
    norms = MixedPrecisionPolicy(param_dtype=torch.float32, output_dtype=torch.bfloat16)
    policy, seen = MixedPrecisionPolicy(param_dtype=torch.bfloat16), list[torch.dtype]()
    shard_model(model, units=[by_class(nn.BatchNorm2d, mp_policy=norms), "*"], mp_policy=policy)
    model[0][1].register_forward_pre_hook(lambda _, args: seen.append(args[0].dtype))
    output = model(torch.randn(2, 3, 8, 8))
    output.sum().backward()
    assert (seen, output.dtype) == ([torch.float32], torch.bfloat16)
    assert model[0][1].running_mean.dtype == torch.float32 == model[0][1].weight.grad.dtype
    assert model[0][1].running_mean.any()
