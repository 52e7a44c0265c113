"""check_optimizer: an optimizer that does not update what the model trains is named before the first step."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from shardkit.errors import ShardkitError
from shardkit.optim import check_optimizer, optimizer_in_backward
from shardkit.testing import distributed


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2), nn.Linear(2, 2).requires_grad_(False))


def sgd(*params) -> torch.optim.SGD:
    return torch.optim.SGD(list(params), lr=0.1)


def complaint(optimizer, model) -> str:
    with pytest.raises(ShardkitError) as caught:
        check_optimizer(optimizer, model)
    return str(caught.value)


@pytest.mark.parametrize("trainable_only", [True, False])
def test_frozen_parameters_may_be_in_or_out(trainable_only):
    model = net()
    check_optimizer(sgd(*(p for p in model.parameters() if p.requires_grad or not trainable_only)), model)


def test_several_optimizers_share_a_model():
    model = net()
    first, second = sgd(*model[0].parameters()), sgd(*model[2].parameters())
    check_optimizer([first, second], model)
    assert complaint(first, model).startswith("2.weight, 2.bias: 2 parameters with requires_grad=True in no")


def test_tied_parameters_are_one():
    model = nn.Sequential(nn.Embedding(4, 3), nn.Linear(3, 4, bias=False))
    model[1].weight = model[0].weight
    check_optimizer(sgd(*model.parameters()), model)


def test_a_tensor_of_no_module_is_foreign():
    model = net()
    text = complaint(sgd(*model.parameters(), nn.Parameter(torch.zeros(7))), model)
    assert text.startswith(
        "optimizer: holds 1 tensors that are in no module of the model: param_groups[0][6] of shape (7,)."
    )


def test_names_and_numbers_of_named_parameters_and_several_optimizers():
    model, other = net(), nn.Linear(9, 9)
    named = torch.optim.AdamW(other.named_parameters())
    text = complaint([sgd(*model.parameters()), named], model)
    assert "optimizer 1 param_groups[0]['weight'] of shape (9, 9)" in text


def test_everything_wrong_is_said_at_once():
    """Stale tensors, parameters that are nowhere, and foreign ones: three lines, each tensor in one."""
    model, before = net(), net()
    text = complaint(sgd(*before[0].parameters(), nn.Parameter(torch.zeros(7))), model)
    stale, missing, foreign = text.split("\n")
    assert stale.startswith("optimizer: holds 2 tensors that are not the model's")
    assert "0.weight, 0.bias, which it does not hold" in stale
    assert missing.startswith("2.weight, 2.bias: 2 parameters")
    assert foreign.startswith("optimizer: holds 1 tensors that are in no module")
    for line in (stale, missing, foreign):
        assert line.endswith(".")


@distributed(world_size=4, backend="gloo")
def test_built_before_sharding():
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    mesh = init_device_mesh("cpu", (4,))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    text = complaint(optimizer, model)
    assert text.startswith("optimizer: holds 6 tensors that are not the model's"), text
    assert "0.weight, 0.bias, 2.weight, 2.bias, 3.weight, 3.bias" in text
    assert "built before the model was sharded" in text
    assert text.endswith("Build the optimizer after shard_model and materialize.")  # and no other complaint
    check_optimizer(torch.optim.AdamW(model.parameters()), model)


@distributed(world_size=4, backend="gloo")
def test_parameters_unsharded_after_a_forward_are_recognized():
    model = net()
    fully_shard(model, mesh=init_device_mesh("cpu", (4,)))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.zeros(1, 3))
    assert model[0].weight is not optimizer.param_groups[0]["params"][0], "the root resharded after forward"
    check_optimizer(optimizer, model)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_parameters_without_float32_masters(dtype):
    model = net()
    model[0].to(dtype)
    model[3].to(dtype)  # frozen
    text = complaint(sgd(*model.parameters()), model)
    name = str(dtype).removeprefix("torch.")
    assert text.startswith(f"0.weight, 0.bias: 2 parameters that train in {name}, without float32 masters. Updates")
    assert text.endswith("low_precision=True).")
    check_optimizer(sgd(*model.parameters()), model, low_precision=True)


@pytest.mark.parametrize(("dtype", "lost"), [(torch.bfloat16, 2**-9), (torch.float16, 2**-12)])
def test_updates_that_are_lost_without_masters(dtype, lost):
    """What the message says: one is not moved by this much, and float32 is."""
    for kind, moves in ((dtype, False), (torch.float32, True)):
        weight = nn.Parameter(torch.ones(1, dtype=kind))
        weight.grad = torch.full_like(weight, -lost)
        torch.optim.SGD([weight], lr=1.0).step()
        assert (weight.item() != 1.0) is moves


def test_the_wrong_order_is_named():
    model = nn.Linear(2, 2)
    for wrong in (5, [torch.optim.SGD(model.parameters()), 5]):
        with pytest.raises(ShardkitError, match=r"^optimizer: is of type int\."):
            check_optimizer(wrong, model)
    with pytest.raises(ShardkitError, match=r"^model: is a int\."):
        optimizer_in_backward(5, torch.optim.SGD)
    with pytest.raises(ShardkitError, match=r"called with \(Linear, SGD\).*the two are swapped"):
        check_optimizer(model, torch.optim.SGD(model.parameters()))
