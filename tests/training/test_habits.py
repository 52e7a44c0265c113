"""Old habits of FSDP users that torch or a rule of the docs answers; other tests have those that shardkit refuses."""

from __future__ import annotations

import copy
import re

import pytest
import torch
from small_models import Decoder
from torch import nn

from shardkit import MixedPrecisionPolicy, by_class, ranks, shard_model
from shardkit.testing import distributed, fake_world


def test_ignored_parameters_that_train_are_said_to(caplog: pytest.LogCaptureFixture) -> None:
    ranks._warned.clear()
    with fake_world(2):
        shard_model(Decoder(), ignored_params=["head.weight"])
    assert re.search(r"head.weight trains outside of all units.*All-reduce", caplog.text)


def test_what_torch_itself_refuses() -> None:
    """What docs/troubleshooting.md says of torch's own methods."""
    with fake_world(2):
        model = shard_model(Decoder())
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
