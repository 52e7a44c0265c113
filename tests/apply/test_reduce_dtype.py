"""A policy's dtypes mean the same on every torch: gradients to the bit,
against plain arithmetic.
"""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from shardkit import by_class, shard_model
from shardkit.testing import distributed

COMPUTED = {"float32": None, "bfloat16": torch.bfloat16}
REDUCED = {"None": None, "float32": torch.float32, "bfloat16": torch.bfloat16}
CASES = [
    ("float32", "None"),
    ("bfloat16", "None"),
    ("bfloat16", "float32"),
    ("bfloat16", "bfloat16"),
]


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 5), nn.Tanh(), nn.Linear(5, 3))


def policy(computed, reduced):
    return MixedPrecisionPolicy(param_dtype=COMPUTED[computed], reduce_dtype=REDUCED[reduced])


@pytest.mark.parametrize(("computed", "reduced"), CASES)
@distributed(world_size=2)
def test_gradients(computed, reduced):
    dtype, sums = COMPUTED[computed] or torch.float32, REDUCED[reduced] or torch.float32
    plain, model = build(), build()
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(dist.get_rank()))
    shard_model(model, units=[by_class(nn.Linear)], mp_policy=policy(computed, reduced))
    model(x).square().sum().backward()
    alone = copy.deepcopy(plain).to(dtype)
    alone(x.to(dtype)).square().sum().backward()
    for param, sharded in zip(alone.parameters(), model.parameters(), strict=True):
        total = param.grad.to(sums)
        dist.all_reduce(total)
        assert total.any()
        assert torch.equal(sharded.grad.full_tensor(), (total / 2).float())


@distributed(world_size=2)
def test_batch_norm_under_bf16_by_the_rule_of_the_docs():
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Sequential(nn.Conv2d(3, 3, 3), nn.BatchNorm2d(3), nn.ReLU()) for _ in range(2))
    )
    norms = MixedPrecisionPolicy(param_dtype=torch.float32, output_dtype=torch.bfloat16)
    policy, seen = MixedPrecisionPolicy(param_dtype=torch.bfloat16), list[torch.dtype]()
    shard_model(model, units=[by_class(nn.BatchNorm2d, mp_policy=norms), "*"], mp_policy=policy)
    model[0][1].register_forward_pre_hook(lambda _, args: seen.append(args[0].dtype))
    output = model(torch.randn(2, 3, 8, 8))
    output.sum().backward()
    assert (seen, output.dtype) == ([torch.float32], torch.bfloat16)
    assert model[0][1].running_mean.dtype == torch.float32 == model[0][1].weight.grad.dtype
    assert model[0][1].running_mean.any()
