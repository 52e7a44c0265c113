"""check_optimizer: an optimizer that does not update what the model trains is named before the first step."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from shardkit.errors import ShardkitError
from shardkit.optim import check_optimizer
from shardkit.testing import distributed


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2), nn.Linear(2, 2).requires_grad_(False))


def sgd(*params) -> torch.optim.SGD:
    return torch.optim.SGD(list(params), lr=0.1)


def complaint(optimizer, model) -> str:
    with pytest.raises(ShardkitError) as caught:
        check_optimizer(optimizer, model)
    return str(caught.value)


def test_optimizers_of_exactly_what_trains_pass():
    model = net()
    model[2].weight = model[0].weight  # tied parameters are one
    check_optimizer(sgd(*model.parameters()), model)  # frozen ones may be in it
    check_optimizer(sgd(*(param for param in model.parameters() if param.requires_grad)), model)
    first, second = sgd(*model[0].parameters()), sgd(model[2].bias)
    check_optimizer([first, second], model)
    assert complaint(first, model).startswith("2.bias have requires_grad=True and are in no optimizer")


def test_everything_wrong_is_said_at_once():
    model, before = net(), net()
    foreign, missing = complaint(sgd(*before[0].parameters()), model).split("\n")
    assert foreign.startswith("optimizer holds 2 tensors that are not parameters of the model, of shapes (")
    assert missing.startswith("0.weight, 0.bias, 2.weight, 2.bias have requires_grad=True")


@distributed(world_size=2, backend="gloo")
def test_built_before_sharding_or_of_gathered_parameters():
    model = net()
    early = torch.optim.AdamW(model.parameters())
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.zeros(1, 3))
    assert model[0].weight is not optimizer.param_groups[0]["params"][0], "the root resharded after forward"
    check_optimizer(optimizer, model)
    for stale in (early, torch.optim.AdamW(model.parameters())):
        assert "built before the model was sharded or materialized, between forward" in complaint(stale, model)


@pytest.mark.parametrize(("dtype", "lost"), [(torch.bfloat16, 2**-9), (torch.float16, 2**-12)])
def test_parameters_without_float32_masters(dtype, lost):
    model = net()
    model[0].to(dtype)
    model[3].to(dtype)  # frozen
    assert "0.weight, 0.bias" in (text := complaint(sgd(*model.parameters()), model))
    assert text.endswith("low_precision=True).")
    check_optimizer(sgd(*model.parameters()), model, low_precision=True)
    for kind, moves in ((dtype, False), (torch.float32, True)):  # what the docstring says
        weight = nn.Parameter(torch.ones(1, dtype=kind))
        weight.grad = torch.full_like(weight, -lost)
        torch.optim.SGD([weight], lr=1.0).step()
        assert (weight.item() != 1.0) is moves
