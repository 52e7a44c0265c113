"""step_on_local_shards: the bits of the DTensor step, and nothing outside of it that looks
different.
"""

import copy
import pickle

import pytest
import torch
from cpu_ranks import on_ranks
from grads_net import MESHES, give_grads, sharded_net
from optim_nets import (
    FUSED,
    OPTIONS,
    PLAIN_ONLY,
    assert_same_parameters,
    assert_same_state,
    factory,
    local,
    trainable,
    two_nets,
)
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor

from shardkit.optim import step_on_local_shards
from shardkit.testing import fake_world

CASES = [
    (name, flags)
    for name in OPTIONS
    for flags in ({"foreach": False}, {"foreach": True}, {"fused": True})
    if (name in FUSED or "fused" not in flags) and (name, flags) not in PLAIN_ONLY
]


def run_both(ours, theirs, net, other, steps, start=0):
    for step in range(start, start + steps):
        # no gradient: no step, and no state before its first one
        skip = "gain" if step % 3 == 1 else ""
        for model, optimizer in ((net, ours), (other, theirs)):
            give_grads(model, step, skip)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)


def check_same_bits(name, flags, steps):
    net, other = two_nets()
    before = [local(param).clone() for param in net.parameters()]
    make = factory(name, **flags)
    ours, theirs = step_on_local_shards(make(trainable(net))), make(trainable(other))
    run_both(ours, theirs, net, other, steps)
    assert_same_parameters(net, other)
    assert_same_state(ours, theirs)
    moved = [
        not torch.equal(old, local(new)) for old, new in zip(before, net.parameters(), strict=True)
    ]
    trains = [param.requires_grad and local(param).numel() > 0 for param in net.parameters()]
    assert moved == trains


# In a pretended world values of a step are right, since it has no collectives.


@pytest.mark.parametrize(("name", "flags"), CASES)
def test_the_same_bits_as_the_dtensor_step(name, flags):
    for rank in (1, 3):  # the last one's parts are smaller, or empty
        with fake_world(4, rank=rank):
            check_same_bits(name, flags, steps=4)


@pytest.mark.parametrize("mesh", MESHES)
@on_ranks(4)
def test_on_every_mesh_offloaded_and_in_half_precision(mesh):
    for options in ({"offload": True}, {"dtype": torch.bfloat16}):
        net, other = two_nets(MESHES[mesh], **options)
        make = factory("AdamW", fused=True)
        ours, theirs = step_on_local_shards(make(trainable(net))), make(trainable(other))
        for step in range(3):
            for model, optimizer in ((net, ours), (other, theirs)):
                give_grads(model, seed=step)
                optimizer.step()
        assert_same_parameters(net, other)
        assert_same_state(ours, theirs)


@pytest.mark.parametrize("flags", [{"foreach": True}, {"fused": True}, {"foreach": False}])
@on_ranks(4)
def test_plain_parameters_beside_sharded_ones(flags):
    """torch's foreach and fused steps refuse such a list; one optimizer for each kind
    is the same.
    """
    (net, other), make = two_nets(ignored=("gain", "narrow.bias")), factory("AdamW", **flags)
    ours = step_on_local_shards(make(trainable(net)))
    kinds = [
        [p for p in trainable(other) if isinstance(p, DTensor) is sharded]
        for sharded in (True, False)
    ]
    theirs = [make(params) for params in kinds]
    assert all(kinds)
    for step in range(5):
        give_grads(net, step)
        give_grads(other, step)
        ours.step()
        for each in theirs:
            each.step()
    assert_same_parameters(net, other)


# What the user sees.


@fake_world(4, rank=1)
def test_groups_state_and_class_stay_what_they_were():
    net = sharded_net((4,))
    optimizer = factory("AdamW")(trainable(net))
    groups, params = optimizer.param_groups, list(optimizer.param_groups[0]["params"])
    assert step_on_local_shards(optimizer) is optimizer
    assert step_on_local_shards(optimizer) is optimizer
    give_grads(net, 0)
    optimizer.step()
    assert isinstance(optimizer, torch.optim.AdamW)
    assert type(optimizer).__name__ == "AdamW"
    assert optimizer.param_groups is groups
    assert all(a is b for a, b in zip(groups[0]["params"], params, strict=True))
    assert all(isinstance(param.grad, DTensor) for param in params)
    for param in params:
        assert isinstance(optimizer.state[param]["exp_avg"], DTensor)


@fake_world(4, rank=1)
def test_what_the_user_does_to_state_and_parameters_is_seen_by_the_next_step():
    """Replaced, edited, cleared and moved state, and a shard with other memory: nothing stale is
    updated.
    """
    net, other = two_nets()
    make = factory("Adam", foreach=True)
    ours, theirs = step_on_local_shards(make(trainable(net))), make(trainable(other))
    run_both(ours, theirs, net, other, 2)
    for model, optimizer in ((net, ours), (other, theirs)):
        first, second, third, *_ = trainable(model)
        held = optimizer.state[first]  # a reference from before is as good as a new one
        held["exp_avg"] = held["exp_avg"] * 2
        optimizer.state[second]["exp_avg_sq"].to_local().mul_(3)
        optimizer.state[third].clear()
        with torch.no_grad():
            first.add_(1)
        twin = nn.Parameter(second.detach().clone())
        torch.utils.swap_tensors(second, twin)  # the same object, on other memory
    run_both(ours, theirs, net, other, 3, start=2)
    assert_same_parameters(net, other)
    assert_same_state(ours, theirs)


@pytest.mark.parametrize("before", [True, False])
@fake_world(4, rank=1)
def test_schedulers_made_before_and_after(before):
    net, other = two_nets()
    make, schedule = factory("SGD"), torch.optim.lr_scheduler.LinearLR
    theirs = make(trainable(other))
    their_schedule = schedule(theirs, total_iters=3)
    ours = make(trainable(net))
    our_schedule = schedule(ours, total_iters=3) if before else None
    step_on_local_shards(ours)
    our_schedule = our_schedule or schedule(ours, total_iters=3)
    for step in range(4):
        for model, optimizer, scheduler in (
            (net, ours, our_schedule),
            (other, theirs, their_schedule),
        ):
            give_grads(model, step)
            optimizer.step()
            scheduler.step()  # warnings are errors: it must know that the optimizer stepped
    assert our_schedule.get_last_lr() == their_schedule.get_last_lr() != [0.05 / 3]
    assert_same_parameters(net, other)


@fake_world(4, rank=1)
def test_hooks_and_closures_see_dtensors():
    net = sharded_net((4,))
    optimizer = step_on_local_shards(factory("SGD")(trainable(net)))
    seen = []

    def look(*_):
        seen.append({type(param) for param in optimizer.param_groups[0]["params"]})

    optimizer.register_step_pre_hook(look)
    optimizer.register_step_post_hook(look)

    def closure():
        look()
        optimizer.zero_grad()
        give_grads(net, len(seen))
        return torch.tensor(3.0)

    assert optimizer.step(closure) == 3.0
    assert seen == [{DTensor}] * 3


@on_ranks(4)
def test_a_gradient_that_lies_elsewhere_is_brought_home():
    mesh = sharded_net((4,)).gain.device_mesh
    weight = nn.Parameter(distribute_tensor(torch.zeros(3), mesh, [Replicate()]))
    weight.grad = DTensor.from_local(torch.tensor([1.0, 2.0, 4.0]), mesh, [Partial()])
    optimizer = step_on_local_shards(torch.optim.SGD([weight], lr=1.0))
    optimizer.step()
    assert torch.equal(weight.to_local(), torch.tensor([-4.0, -8.0, -16.0]))


@fake_world(4, rank=1)
def test_copies_step_on_local_shards_too_and_pickles_are_refused():
    optimizer = step_on_local_shards(torch.optim.AdamW([nn.Parameter(torch.ones(3))]))
    copied = copy.deepcopy(optimizer)
    assert type(copied) is type(optimizer)
    (param,) = copied.param_groups[0]["params"]
    param.grad = torch.ones(3)
    copied.step()
    assert not torch.equal(param, torch.ones(3))
    assert torch.equal(optimizer.param_groups[0]["params"][0], torch.ones(3))
    with pytest.raises(pickle.PicklingError, match="AdamW"):
        pickle.dumps(optimizer)
