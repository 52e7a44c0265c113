"""optimizer_in_backward: the same updates as after backward, with one unit's gradients alive at a
time.
"""

import copy
import functools
import weakref

import pytest
import torch
from cpu_ranks import on_ranks
from grads_net import MESHES, Net, sharded_net
from optim_nets import (
    assert_same_parameters,
    assert_same_state,
    factory,
    local,
    trainable,
    two_nets,
)
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor
from trees import assert_same

from shardkit.errors import ShardkitError
from shardkit.grads import clip_grad_norm_
from shardkit.optim import optimizer_in_backward, step_on_local_shards
from shardkit.optim.in_backward import _StepOne
from shardkit.state import full_optimizer_state_dict
from shardkit.testing import fake_world


def backward(model, step):
    ids = torch.arange(10).view(2, 5).add(step + torch.distributed.get_rank()) % 7
    model(ids).square().mean().backward()


def groups(make):
    """Two groups of different learning rates."""

    def build(params):
        return make(
            [
                {"params": [p for p in params if p.ndim > 1], "lr": 0.02},
                {"params": [p for p in params if p.ndim < 2], "lr": 0.03},
            ]
        )

    return build


def train(model, optimizer, steps, start=0):
    for step in range(start, start + steps):
        backward(model, step)
        optimizer.step()
        optimizer.zero_grad()


# Each pair of mesh, flags and whether parameters are offloaded.
@pytest.mark.parametrize(
    ("mesh", "flags", "offload"),
    [
        (mesh, {flag: True}, (place + other) % 2 == 1)
        for place, mesh in enumerate(MESHES)
        for other, flag in enumerate(("fused", "foreach"))
    ],
)
@on_ranks(4)
def test_the_same_bits_as_stepping_after_backward(mesh, flags, offload):
    net, other = two_nets(MESHES[mesh], offload=offload)
    before = [local(param).clone() for param in net.parameters()]
    build = groups(factory("AdamW", **flags))
    ours, theirs = optimizer_in_backward(net, build), build(trainable(other))
    schedules = [torch.optim.lr_scheduler.LinearLR(each, total_iters=3) for each in (ours, theirs)]
    for step in range(3):
        backward(net, step)
        assert all(param.grad is None for param in net.parameters())
        backward(other, step)
        for optimizer, schedule in zip((ours, theirs), schedules, strict=True):
            optimizer.step()
            schedule.step()
            optimizer.zero_grad(set_to_none=step % 2 == 0)
        for param in trainable(other):
            param.grad = None
    assert_same_parameters(net, other)
    assert_same_state(ours, theirs)
    assert schedules[0].get_last_lr() == schedules[1].get_last_lr() == [0.02, 0.03]
    moved = [
        not torch.equal(old, local(new)) for old, new in zip(before, net.parameters(), strict=True)
    ]
    assert moved == [param.requires_grad and local(param).numel() > 0 for param in net.parameters()]


@on_ranks(4)
def test_only_one_units_gradients_are_alive():
    """What adds up to 4 bytes an element after an ordinary backward never does."""
    net = sharded_net((4,))
    optimizer_in_backward(net, factory("AdamW", fused=True))
    params = trainable(net)
    buffers = []
    alive, waiting = [], []

    def watch(name, param, step_one):
        waiting.append(sum(local(p.grad).numel() for p in params if p.grad is not None))
        unit = name.split(".")[1] if name.startswith("blocks") else "root"
        buffers.append((unit, weakref.ref(local(param.grad))))
        step_one(param)
        alive.append([other for other, grad in buffers if grad() is not None and other != unit])

    for name, param in net.named_parameters():
        for key, hook in (param._post_accumulate_grad_hooks or {}).items():
            param._post_accumulate_grad_hooks[key] = functools.partial(watch, name, step_one=hook)
    backward(net, 0)
    shards = [local(param).numel() for param in params]
    assert len(waiting) == len(params) == 8
    assert max(waiting) == max(shards), "more than one parameter had a gradient"
    assert sum(shards) > max(shards) or torch.distributed.get_rank() == 3, "there is only one"
    assert alive == [[]] * len(params), "another unit's gradients are alive"
    assert all(param.grad is None for param in params)


@pytest.mark.parametrize("shape", [(4,), (2, 2)])
@on_ranks(4)
def test_plain_parameters_are_updated_by_step(shape):
    net, other = two_nets(shape, ignored=("gain",))
    build = factory("SGD", foreach=True)
    ours, theirs = optimizer_in_backward(net, build), step_on_local_shards(build(trainable(other)))
    for step in range(3):
        for model, optimizer in ((net, ours), (other, theirs)):
            backward(model, step)
            torch.distributed.all_reduce(model.gain.grad)  # the user's business, as ever
            optimizer.step()
            optimizer.zero_grad()
    assert not isinstance(net.gain, DTensor)
    assert_same_parameters(net, other)
    assert_same_state(ours, theirs)


@on_ranks(4)
def test_units_left_unsharded_and_a_parameter_that_is_not_used():
    net, other = two_nets()
    build = factory("AdamW", fused=True)
    for model in (net, other):
        model.blocks[1].requires_grad_(False)
        model.set_reshard_after_backward(False)
    ours, theirs = optimizer_in_backward(net, build), build(trainable(other))
    for model, optimizer in ((net, ours), (other, theirs)):
        for step in range(2):
            train(model, optimizer, 1, start=step)
            for module in (model, *model.blocks):
                module.reshard()
        model.blocks[1].requires_grad_(True)
        optimizer.add_param_group({"params": list(model.blocks[1].parameters())})
        train(model, optimizer, 2, start=2)
        for module in (model, *model.blocks):
            module.reshard()
    assert net.blocks[1].weight in ours.state
    assert_same_parameters(net, other)
    assert_same_state(ours, theirs)


# State.


@on_ranks(4)
def test_state_goes_out_and_in_by_torchs_functions_and_ours():
    net, other = two_nets()
    build = groups(factory("AdamW", fused=True))
    ours, theirs = optimizer_in_backward(net, build), build(trainable(other))
    train(net, ours, 2)
    train(other, theirs, 2)
    by_ours = [full_optimizer_state_dict(m, o) for m, o in ((net, ours), (other, theirs))]
    assert_same(*by_ours)
    again = sharded_net((4,))
    again.load_state_dict(net.state_dict())
    resumed = optimizer_in_backward(again, build)
    assert get_optimizer_state_dict(again, resumed)["state"], "made by a step of zeros"
    saved = copy.deepcopy(get_optimizer_state_dict(net, ours))
    set_optimizer_state_dict(again, resumed, saved)
    train(again, resumed, 2, start=2)
    train(other, theirs, 2, start=2)
    assert_same_state(resumed, theirs)
    assert_same_parameters(again, other)


# What is refused.


@on_ranks(4)
def test_a_second_backward_before_step_is_refused():
    net = sharded_net((4,))
    optimizer = optimizer_in_backward(net, factory("SGD"))
    train(net, optimizer, 2)
    sharded = list(net.named_parameters())  # the error leaves units unsharded
    backward(net, 2)
    before = [local(param).clone() for _, param in sharded]
    with pytest.raises(
        ShardkitError,
        match=r"^optimizer_in_backward got a second gradient .* cannot be accumulated",
    ):
        backward(net, 3)
    for (name, param), old in zip(sharded, before, strict=True):
        assert torch.equal(local(param), old), name


@on_ranks(4)
def test_clipping_and_scaling_are_refused():
    net = sharded_net((4,))
    optimizer_in_backward(net, factory("AdamW", fused=True))
    with pytest.raises(ShardkitError, match="are stepped in backward"):
        clip_grad_norm_(net, 1.0)
    for build in (factory("AdamW", fused=True), factory("SGD")):
        net = sharded_net((4,))
        optimizer = optimizer_in_backward(net, build)
        scaler = torch.amp.GradScaler("cpu")
        loss = net(torch.zeros(1, 5, dtype=torch.long)).square().mean()
        scaler.scale(loss).backward()
        with pytest.raises(ShardkitError, match=r"got step\(\) from a GradScaler"):
            scaler.step(optimizer)


@fake_world(4)
def test_what_is_unfrozen_later_is_stepped_or_refused():
    net = sharded_net((4,))
    net.blocks[1].requires_grad_(False)
    optimizer = optimizer_in_backward(net, factory("SGD"))
    net.blocks[0].requires_grad_(False)
    train(net, optimizer, 1)
    net.blocks[0].requires_grad_(True)
    before = local(net.blocks[0].weight).clone()
    train(net, optimizer, 1)
    assert not torch.equal(local(net.blocks[0].weight), before), "trained when it was built"
    net.blocks[1].requires_grad_(True)
    backward(net, 2)
    before = local(net.blocks[1].weight).clone()
    with pytest.raises(
        ShardkitError,
        match=r"does not step blocks\.1\.weight, blocks\.1\.bias, frozen when .*add_param_group",
    ):
        optimizer.step()
    optimizer.add_param_group({"params": list(net.blocks[1].parameters())})
    optimizer.step()
    assert not torch.equal(local(net.blocks[1].weight), before)


def hooks(model):
    hooks = []
    for param in model.parameters():
        hooks += (param._post_accumulate_grad_hooks or {}).values()
    return hooks


@fake_world(4)
def test_models_and_factories_that_are_refused():
    with pytest.raises(
        ShardkitError, match=r"^model has no sharded parameter that trains.*Shard the model first"
    ):
        optimizer_in_backward(Net(), factory("SGD"))
    net = sharded_net((4,))
    with pytest.raises(ShardkitError, match="in no optimizer"):
        optimizer_in_backward(net, lambda params: factory("SGD")(params[1:]))
    with pytest.raises(ShardkitError, match=r"Adafactor, and not one of torch's element-wise ones"):
        optimizer_in_backward(net, torch.optim.Adafactor)
    assert hooks(net) == []
    optimizer_in_backward(net, factory("SGD"))
    assert [type(hook) for hook in hooks(net)] == [_StepOne] * len(trainable(net))
    with pytest.raises(
        ShardkitError, match=r"^gain, embed.weight, .* are stepped in backward already"
    ):
        optimizer_in_backward(net, factory("SGD"))
    assert len(hooks(net)) == len(trainable(net))
