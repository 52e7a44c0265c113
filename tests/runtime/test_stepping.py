"""What optimizers are told of sharding: replaced parameters, gradients that wait, low precision."""

from __future__ import annotations

import contextlib
import copy
import gc
import logging
import weakref

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.optim import SGD, AdamW

from shardkit import GradScaler, ShardkitError, check_optimizer, clip_grad_norm_, shard_model
from shardkit._fsdp import fsdp_units
from shardkit._torch import local_tensor
from shardkit.grads import accumulate, no_sync
from shardkit.plan import MeshSpec
from shardkit.runtime.stepping import WaitingGradient
from shardkit.state import full_params
from shardkit.testing import distributed, fake_world

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


@pytest.fixture
def world():
    with fake_world(1):
        yield


def net(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 3)).to(dtype)


def backward(model, seed=1):
    x = torch.rand(5, 4, generator=torch.Generator().manual_seed(seed))  # rounded: torch 2.11 draws others in bfloat16
    model(x.to(next(model.parameters()).dtype)).float().square().sum().backward()


def grads(model):
    return {fqn: None if p.grad is None else p.grad.full_tensor().clone() for fqn, p in model.named_parameters()}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def waits(param):
    return isinstance(param, DTensor) and isinstance(local_tensor(param.grad), WaitingGradient)


# An optimizer built before sharding.


@pytest.mark.parametrize("number", [1, 2], ids=["all", "one"])
def test_a_step_of_replaced_parameters_raises(world, number):
    model = net()
    optimizer = SGD(model.parameters() if number == 1 else [model[2].weight], lr=0.1)
    shard_model(model)
    backward(model)
    for _ in range(2):
        with pytest.raises(ShardkitError, match=r"SGD: holds \d parameters that sharding has replaced: .*2\.weight"):
            optimizer.step()
    optimizer.param_groups[0]["params"] = list(model.parameters())
    optimizer.step()


def test_a_group_added_later_is_looked_at(world):
    model = net()
    old = model[0].weight
    optimizer = SGD(shard_model(model).parameters(), lr=0.1)
    backward(model)
    optimizer.step()
    optimizer.add_param_group({"params": [old]})
    with pytest.raises(ShardkitError, match=r"replaced: 0\.weight"):
        optimizer.step()


def test_replaced_parameters_are_not_kept_alive(world):
    model = net()
    old = [weakref.ref(param) for param in model.parameters()]
    shard_model(model)
    gc.collect()
    assert [ref() for ref in old] == [None] * 4


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


def test_a_step_of_gathered_copies_raises(world):
    model = shard_model(net(), reshard_after_forward=False)
    model(torch.rand(2, 4))
    whole = [param for param in model.parameters() if type(param) is nn.Parameter]
    assert whole, "nothing is gathered"
    optimizer = SGD(whole, lr=0.1)
    with pytest.raises(ShardkitError, match=r"SGD: holds \d gathered copies of parameters, of shapes \("):
        optimizer.step()


# Gradients that wait to be reduced.


@pytest.mark.parametrize("context", [no_sync, lambda model: accumulate(model, last=False, keep_unsharded=True)])
@pytest.mark.parametrize("precision", [MixedPrecisionPolicy(), BF16], ids=["fp32", "bf16"])
def test_a_step_while_gradients_wait_raises(world, context, precision):
    model = shard_model(net(), mp_policy=precision)
    optimizer, other = AdamW(model.parameters()), AdamW(shard_model(net()).parameters())
    for _ in range(2):
        with context(model):
            backward(model)
    with pytest.raises(ShardkitError, match=r"AdamW\.step\(\): uses gradients of 4 parameters.*no rank has reduced"):
        optimizer.step()
    assert not optimizer.state
    other.step()  # of another model
    with pytest.raises(ShardkitError, match="no rank has reduced"):
        torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 1.0)
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
    optimizers = [torch.optim.SGD([model.scale], lr=0.1), torch.optim.SGD(model.inner.parameters(), lr=0.1)]
    for _ in range(2):
        with no_sync(model):
            backward(model)
        with pytest.raises(ShardkitError, match=r"SGD.step\(\): uses gradients of 1 parameters, of shapes \(\), "):
            optimizers[0].step()
        if frozen:
            optimizers[1].step()  # holds none of them
        model.zero_grad(set_to_none=to_none)
        optimizers[0].step()
        with no_sync(model):
            backward(model)
        backward(model)
        optimizers[0].step()
        optimizers[0].zero_grad()
        optimizers[1].zero_grad()


def by_optimizer(model, optimizer, to_none):
    optimizer.zero_grad(set_to_none=to_none)


def by_model(model, optimizer, to_none):
    model.zero_grad(set_to_none=to_none)


def by_wrapper(model, optimizer, to_none):
    nn.ModuleList([model, nn.Linear(1, 1)]).zero_grad(set_to_none=to_none)


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("clear", [by_optimizer, by_model, by_wrapper])
@pytest.mark.parametrize("precision", [MixedPrecisionPolicy(), BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("keep", [None, True, False, "torch"])
def test_zero_grad_drops_gradients_that_wait(world, clear, to_none, precision, keep):
    """Before any step of the optimizer too; what waited does not come back in the next reduction."""
    model = shard_model(net(), mp_policy=precision)
    backward(model, seed=2)
    expected = grads(model)
    model.zero_grad(set_to_none=to_none)
    optimizer = SGD(model.parameters(), lr=0.1)
    if keep == "torch":
        model.set_requires_gradient_sync(False)
        backward(model, seed=1)
        model.set_requires_gradient_sync(True)
    else:
        with accumulate(model, last=False, keep_unsharded=keep):
            backward(model, seed=1)
    clear(model, optimizer, to_none)
    if to_none or keep is not True:  # zeros, where the user sees the sum itself, still wait to be reduced
        optimizer.step()
    backward(model, seed=2)
    assert same(grads(model), expected)


def test_what_waits_is_added_up_without_zero_grad(world):
    model = shard_model(net())
    backward(model, seed=1)
    backward(model, seed=2)
    expected = grads(model)
    model.zero_grad()
    with no_sync(model):
        backward(model, seed=1)
    assert any(waits(param) for param in model.parameters())
    backward(model, seed=2)
    assert same(grads(model), expected)


def test_only_the_cleared_ones_are_dropped(world):
    """One of two optimizers of a model starts anew."""
    model = shard_model(net(), units=[])
    first, second = (list(model[i].parameters()) for i in (0, 2))
    with no_sync(model):
        backward(model, seed=1)
    SGD(first, lr=0.1).zero_grad()
    backward(model, seed=2)
    got = grads(model)
    model.zero_grad()
    backward(model, seed=2)
    alone = grads(model)
    assert all(torch.equal(got[fqn], alone[fqn]) == fqn.startswith("0") for fqn in got)
    assert len(first) == len(second) == 2


USES = {
    "to_local": lambda model, grad: grad.to_local(),
    "full_tensor": lambda model, grad: grad.full_tensor(),
    "data": lambda model, grad: grad.data,
    "product": lambda model, grad: 2 * grad,
    "item": lambda model, grad: grad.sum().item(),
    "sum": lambda model, grad: grad.add_(torch.ones_like(grad)),
    "clip_grad_norm_": lambda model, grad: clip_grad_norm_(model, 1.0),
    "clip_grad_value_": lambda model, grad: torch.nn.utils.clip_grad_value_(model.parameters(), 1.0),
    "scaler": lambda model, grad: scaled(torch.amp.GradScaler, model),
    "our scaler": lambda model, grad: scaled(GradScaler, model),
    "full_params": lambda model, grad: full_params(model, with_grads=True).__enter__(),
}


def scaled(scaler, model):
    scaler = scaler("cpu")
    scaler.scale(torch.ones(()))
    scaler.unscale_(SGD(model.parameters()))


def test_gradients_that_are_reduced_already_come_back(world):
    model, other = shard_model(net()), shard_model(net())
    backward(model, seed=1)
    first = grads(model)
    before = [param.grad for param in model.parameters()]
    for each in (model, other):
        with no_sync(each):
            backward(each, seed=2)
    with pytest.raises(ShardkitError, match="no rank has reduced"):
        clip_grad_norm_(model, 1.0)
    for each in (model, other):
        backward(each, seed=3)
    assert all(param.grad is grad for param, grad in zip(model.parameters(), before, strict=True))
    assert same(grads(model), {fqn: first[fqn] + grad for fqn, grad in grads(other).items()})


@pytest.mark.parametrize("use", USES)
def test_a_gradient_that_waits_has_no_value(world, use):
    model = shard_model(net(), units=[], reshard_after_forward=True)
    with accumulate(model, last=False, keep_unsharded=False):
        backward(model, seed=1)
    assert all(map(waits, model.parameters()))
    with pytest.raises(ShardkitError, match=r"no rank has reduced yet\. Only a backward with gradient sync"):
        USES[use](model, model[0].weight.grad)
    backward(model, seed=2)
    expected = shard_model(net())
    for seed in (1, 2):
        backward(expected, seed)
    assert same(grads(model), grads(expected))


def test_a_reduction_outside_of_any_backward(world):
    """As in torch.distributed.pipelining's ``perform_reduce_grad``."""
    model, expected = shard_model(net()), shard_model(net())
    model.set_requires_gradient_sync(False)
    for seed in (1, 2):
        backward(model, seed)
        backward(expected, seed)
    model.set_requires_gradient_sync(True)
    for unit in fsdp_units(model):
        unit.post_backward()
        unit.finalize_backward()
    assert same(grads(model), grads(expected))
    SGD(model.parameters()).step()


def test_a_penalty_on_what_is_kept_gathered(world):
    """Autograd adds it to the gradient before FSDP2 knows of the backward."""

    def step(model, context):
        with context:
            loss = model(torch.ones(2, 4)).float().square().sum()
            (loss + model[2].weight.float().square().sum()).backward()

    options = {"mp_policy": BF16, "reshard_after_forward": False}
    model, expected = shard_model(net(), **options), shard_model(net(), **options)
    for last in (False, True):
        step(model, accumulate(model, last=last, keep_unsharded=True))
        step(expected, contextlib.nullcontext())
    assert same(grads(model), grads(expected))


def test_a_model_is_freed_while_gradients_wait(world):
    model = shard_model(net())
    with no_sync(model):
        backward(model)
    kept = [weakref.ref(param) for param in model.parameters()]
    del model
    gc.collect()
    assert [each() for each in kept] == [None] * 4


def test_a_compiled_step(world):
    model = shard_model(net())
    optimizer = SGD(model.parameters(), lr=0.1)
    backward(model)
    before = model[0].weight.full_tensor().clone()
    torch.compile(optimizer.step, backend="eager")()
    assert not torch.equal(model[0].weight.full_tensor(), before)


@distributed(world_size=4, backend="gloo")
def test_what_hsdp_reduce_scattered_is_dropped_too():
    model = shard_model(net(), mesh=MeshSpec.hybrid(2, 2), units=[])
    backward(model, seed=2)
    expected = grads(model)
    model.zero_grad()
    optimizer = SGD(model.parameters(), lr=0.1)
    with accumulate(model, last=False, shard_gradients=True):
        backward(model, seed=1)
    with pytest.raises(ShardkitError, match="no rank has reduced"):
        optimizer.step()
    optimizer.zero_grad()
    optimizer.step()
    backward(model, seed=2)
    assert same(grads(model), expected)
    with accumulate(model, last=False, shard_gradients=True):
        backward(model, seed=1)
    model.zero_grad()
    with accumulate(model, last=False, shard_gradients=True):
        backward(model, seed=1)
    model[0].weight.grad = None
    with pytest.raises(ShardkitError, match="cleared the gradients of 1 of the 4 parameters of one unit"):
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
    assert message.startswith("SGD: 4 parameters that train in bfloat16, without float32 masters")
