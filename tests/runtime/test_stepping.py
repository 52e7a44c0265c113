"""What optimizers are told of sharding: replaced parameters, gradients that wait, low precision."""

import copy
import gc
import logging
import re
import weakref

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.optim import SGD, AdamW

from shardkit import MeshSpec, ShardkitError, check_optimizer, ranks, shard_model, zero_grad
from shardkit.grads import accumulate
from shardkit.optim import step_on_local_shards
from shardkit.testing import distributed, fake_world

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


@pytest.fixture
def world():
    with fake_world(1):
        yield


def net(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 3)).to(dtype)


def backward(model):
    x = torch.rand(5, 4)
    model(x.to(next(model.parameters()).dtype)).float().square().sum().backward()


# An optimizer built before sharding.


@pytest.mark.parametrize("number", [1, 2], ids=["all", "one"])
def test_a_step_of_replaced_parameters_raises(world, number):
    model = net()
    optimizer = SGD(model.parameters() if number == 1 else [model[2].weight], lr=0.1)
    shard_model(model)
    backward(model)
    for _ in range(2):
        with pytest.raises(
            ShardkitError, match=r"SGD holds \d parameters that sharding has replaced: .*2\.weight"
        ):
            optimizer.step()
    optimizer.param_groups[0]["params"] = list(model.parameters())
    optimizer.step()


def test_a_step_of_replaced_parameters_raises_where_another_model_was_freed(world):
    """As in a notebook: as many units are alive as in the optimizer's last step."""
    other, model = shard_model(net()), net()
    optimizer = SGD(model.parameters(), lr=0.1)
    optimizer.step()
    del other
    gc.collect()
    shard_model(model)
    backward(model)
    with pytest.raises(ShardkitError, match="SGD holds 4 parameters that sharding has replaced"):
        optimizer.step()


def test_other_optimizers_step(world):
    """Copies made before, ignored parameters, and models that nobody shards."""
    model = net()
    other = copy.deepcopy(model)
    optimizers = [SGD(other.parameters(), lr=0.1), SGD([model[0].bias], lr=0.1)]
    shard_model(model, ignored_params=["0.bias"])
    backward(model)
    backward(other)
    for optimizer in optimizers:
        optimizer.step()


def test_a_step_of_unsharded_copies_raises(world):
    model = shard_model(net(), reshard_after_forward=False)
    model(torch.rand(2, 4))
    copies = [param for param in model.parameters() if type(param) is nn.Parameter]
    assert copies, "nothing is unsharded"
    with pytest.raises(
        ShardkitError, match=r"SGD holds \d unsharded copies of parameters: .*weight"
    ):
        SGD(copies, lr=0.1).step()


# A forward between backward and step, as for an accuracy in the log.


def losses(model, between):
    optimizer = AdamW(model.parameters(), lr=0.1)
    if isinstance(model, FSDPModule):
        step_on_local_shards(optimizer)
    found = []
    for number in range(4):
        x = torch.rand(5, 4, generator=torch.Generator().manual_seed(number))
        loss = model(x).square().sum()
        loss.backward()
        between(model, x)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def fails(model, x):
    model(x)
    handle = model[2].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(x)
    handle.remove()


BETWEEN = {
    "whole": lambda model, x: model(x),
    "part": lambda model, x: model[2](torch.rand(2, 4)),
    "fails": fails,
    "prefetched": lambda model, x: model[2].unshard(async_op=True),
}


@pytest.mark.parametrize("between", BETWEEN)
@distributed(world_size=2)
def test_a_forward_between_backward_and_step_keeps_no_old_values(between):
    expected = losses(net(), lambda *_: None)
    model = shard_model(net(), units=nn.Linear, reshard_after_forward=False)
    assert losses(model, BETWEEN[between]) == expected


def test_the_step_of_another_model_leaves_units_unsharded(world):
    model, other = (shard_model(net(), reshard_after_forward=False) for _ in range(2))
    optimizers = [AdamW(each.parameters()) for each in (other, model)]
    backward(other)
    model(torch.rand(2, 4))
    optimizers[0].step()
    assert not isinstance(model[0].weight, DTensor)
    optimizers[1].step()
    assert isinstance(model[0].weight, DTensor)


# Gradients that wait to be reduced.


@pytest.mark.parametrize(
    "options", [{}, {"keep_unsharded": True}], ids=["resharded", "kept unsharded"]
)
@pytest.mark.parametrize("precision", [MixedPrecisionPolicy(), BF16], ids=["fp32", "bf16"])
def test_a_step_while_gradients_wait_raises(world, options, precision):
    model = shard_model(net(), mp_policy=precision)
    optimizer, other = AdamW(model.parameters()), AdamW(shard_model(net()).parameters())
    for _ in range(2):
        with accumulate(model, last=False, **options):
            backward(model)
    with pytest.raises(
        ShardkitError,
        match=r"AdamW\.step\(\) was called while 4 gradients wait .*: 0\.bias, 0\.weight, 2\.",
    ):
        optimizer.step()
    assert not optimizer.state
    other.step()  # of another model
    backward(model)
    optimizer.step()
    optimizer.zero_grad()
    optimizer.step()


class Scaled(nn.Module):
    """With a scalar, which is replicated."""

    def __init__(self):
        super().__init__()
        self.inner, self.scale = nn.Linear(4, 4), nn.Parameter(torch.tensor(2.0))

    def forward(self, x):
        return self.inner(x) * self.scale


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("frozen", [True, False], ids=["scalars alone", "mixed"])
def test_a_step_while_gradients_of_replicated_parameters_wait_raises(world, frozen, to_none):
    model = Scaled()
    model.inner.requires_grad_(not frozen)
    shard_model(model, units=nn.Linear)
    optimizers = [
        torch.optim.SGD([model.scale], lr=0.1),
        torch.optim.SGD(model.inner.parameters(), lr=0.1),
    ]
    for _ in range(2):
        with accumulate(model, last=False):
            backward(model)
        with pytest.raises(
            ShardkitError, match=r"SGD.step\(\) was called while 1 gradients wait .*of shape \(\)"
        ):
            optimizers[0].step()
        if frozen:
            optimizers[1].step()  # holds none of them
        model.zero_grad(set_to_none=to_none)
        optimizers[0].step()
        with accumulate(model, last=False):
            backward(model)
        backward(model)
        optimizers[0].step()
        optimizers[0].zero_grad()
        optimizers[1].zero_grad()


@pytest.mark.parametrize("build", [net, Scaled])
def test_a_model_is_freed_while_gradients_wait(world, build):
    model = shard_model(build())
    with accumulate(model, last=False):
        backward(model)
    kept = [weakref.ref(model), *(weakref.ref(param) for param in model.parameters())]
    del model
    gc.collect()
    assert not any(each() is not None for each in kept)


def test_a_compiled_step(world):
    model = shard_model(net())
    optimizer = SGD(model.parameters(), lr=0.1)
    backward(model)
    before = model[0].weight.full_tensor().clone()
    torch.compile(optimizer.step, backend="eager")()
    assert not torch.equal(model[0].weight.full_tensor(), before)


def test_a_step_while_what_hsdp_reduce_scattered_waits_raises():
    with fake_world(4):
        model = shard_model(net(), mesh=MeshSpec.hybrid(2, 2))
        optimizer = SGD(model.parameters(), lr=0.1)
        with accumulate(model, last=False, shard_gradients=True):
            backward(model)
        with pytest.raises(ShardkitError, match="while 4 gradients wait"):
            optimizer.step()
        zero_grad(model)
        optimizer.step()


# Low precision.


def test_low_precision_is_a_warning_once(world, caplog):
    def trained(dtype, vouched=False, policy=BF16):
        model = shard_model(net(dtype), mp_policy=policy)
        optimizer = SGD(model.parameters(), lr=0.1)
        if vouched:
            check_optimizer(optimizer, model, low_precision=True)
        for _ in range(2):
            backward(model)
            optimizer.step()
        return [record.message for record in caplog.records]

    with caplog.at_level(logging.WARNING, "shardkit"):
        assert trained(torch.float32, policy=BF16) == []
        assert trained(torch.bfloat16, vouched=True) == []
        (message,) = trained(torch.bfloat16)
    assert message.startswith("SGD trains 4 parameters in bfloat16, without float32 masters")


# What no one would notice.


WARNINGS = {
    "hook": r"AdamW\.step\(\) found hooks of register_hook on 2\.weight",
    "head": "AdamW trains 2 parameters that were added after sharding: 2.weight, 2.bias",
    "layer": "AdamW trains 2 parameters that were added after sharding: 1.weight, 1.bias",
    "forward": r"AdamW\.step\(\) found changes of 2\.weight that are lost",
    "program": r"AdamW\.step\(\) found changes of 2\.weight that are lost",
    "data": r"AdamW\.step\(\) found changes of 2\.weight .* ignores param\.data = value",
}


@pytest.mark.parametrize(
    ("lost", "steps_before"),
    [(lost, False) for lost in WARNINGS if lost != "data"]
    + [(lost, True) for lost in ("hook", "program", "data")],
)
def test_a_warning_once_of_what_is_lost(caplog, lost, steps_before):
    ranks._warned.clear()
    with fake_world(2), caplog.at_level(logging.WARNING, "shardkit"):
        model = shard_model(net(), ignored_params=["0.bias"], reshard_after_forward=False)
        caplog.clear()
        if lost in ("head", "layer"):
            model[2 if lost == "head" else 1] = nn.Linear(4, 4)
        optimizers = [AdamW(model.parameters()) for _ in range(2)]
        if steps_before:
            backward(model)
            for optimizer in optimizers:
                optimizer.step()
            assert caplog.messages == []
        if lost == "hook":
            model[2].weight.register_hook(lambda grad: grad.clamp(-1, 1))
        elif lost == "forward":
            model[2].register_forward_pre_hook(
                lambda module, _: nn.init.ones_(module.weight).sum() and None
            )
        elif lost == "program":
            model(torch.rand(2, 4))  # as an evaluation with grad, which leaves the root unsharded
            nn.init.ones_(model[2].weight)
        elif lost == "data":  # as SAM and the swap of an average do
            model[2].weight.data = model[2].weight.data * 2
        for optimizer in optimizers * 2:
            backward(model)
            optimizer.step()
    (text,) = caplog.messages
    assert re.match(WARNINGS[lost], text)


def test_no_warning_of_parameters_that_were_there_before_by_another_name_or_as_another_tensor(
    caplog,
):
    ranks._warned.clear()
    with fake_world(2), caplog.at_level(logging.WARNING, "shardkit"):
        model = shard_model(net(), ignored_params=["0.bias", "2.bias"])
        caplog.clear()
        model[0] = checkpoint_wrapper(model[0])
        model[2].bias = nn.Parameter(torch.zeros(4))
        AdamW(model.parameters()).step()
    assert caplog.messages == []


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x, used):
        return sum(self.experts[each](x) for each in used)


@pytest.mark.parametrize(
    ("steps", "warns"),
    [
        ([[0, 1, 2], [0, 2]], True),
        ([[0, 1], [0, 2]], True),
        ([[0, 1]] * 2, False),
        ([[0, 1, 2]] * 2, False),
    ],
)
def test_a_warning_once_where_parts_of_a_unit_get_gradients_in_some_steps_only(
    world, caplog, steps, warns
):
    ranks._warned.clear()
    model = shard_model(Experts())
    params = list(model.parameters())
    optimizers = [AdamW(params[:2]), AdamW(params[2:])]  # each has its own pattern
    with caplog.at_level(logging.WARNING, "shardkit"):
        for used in [*steps, *steps]:
            model(torch.ones(2, 4), used).sum().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    assert [
        "Where ranks use different ones, such as experts" in text for text in caplog.messages
    ] == [True] * warns
