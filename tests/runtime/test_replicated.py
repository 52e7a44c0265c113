"""What FSDP2 cannot shard, scalars and empty parameters, trains as in the plain model with no
argument.
"""

import itertools
import warnings

import pytest
import torch
import torch.distributed as dist
from cpu_ranks import on_ranks
from meshes import mesh_of
from plain_and_sharded import assert_trains_like_plain
from small_models import Decoder
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from shardkit import (
    MeshSpec,
    ShardingPlan,
    ShardkitError,
    apply_plan,
    by_class,
    init_on_meta,
    materialize,
    plan_model,
    shard_model,
)
from shardkit.checkpoint import load_checkpoint, save_checkpoint
from shardkit.grads import accumulate, clip_grad_norm_, reset_after_error
from shardkit.grads.scale import set_gradient_reduction
from shardkit.optim import check_optimizer
from shardkit.state import full_state_dict, load_full_state_dict, sharded_state_dict
from shardkit.testing import comm_counts, distributed, fake_world

WHOLE = ("scale", "none", "unused", "blocks.1.gain")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.gain = nn.Parameter(torch.tensor(1.5))

    def forward(self, x, gained=True):
        y = self.linear(x).tanh()
        return x + (y * self.gain if gained else y)


class Net(nn.Module):
    """Scalars in the root and in blocks, of which one is frozen; an empty parameter, and one that
    nobody uses.
    """

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.none = nn.Parameter(torch.zeros(0, 8))
        self.unused = nn.Parameter(torch.tensor(1.0))
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.blocks[0].gain.requires_grad_(False)
        self.head = nn.Linear(8, 3)

    def forward(self, x, gained=True):
        for block in self.blocks:
            x = block(x, gained)
        return self.head(torch.cat([x, self.none])) * self.scale.exp()

    def generate(self, x):
        return self(x)


NORMS = {"replicate": nn.LayerNorm}


def agreed(build):
    torch.manual_seed(0)
    return build()


def net():
    return agreed(Net)


def tokens(seed):
    return (torch.arange(6) + seed).view(2, 3) % 11


def batch(seed):
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))


def loss_of(model, seed, **arguments):
    return model(batch(seed), **arguments).square().mean()


def grads(model):
    full = {name: None if p.grad is None else p.grad for name, p in model.named_parameters()}
    return {
        name: grad.full_tensor() if isinstance(grad, DTensor) else grad
        for name, grad in full.items()
    }


def assert_same(found, expected):
    """Sums of two ranks' gradients: the plain model rounds them in another place, so a few units in
    the last place.
    """
    assert found.keys() == expected.keys()
    for name, grad in expected.items():
        assert (grad is None) == (found[name] is None), name
        if grad is not None:
            torch.testing.assert_close(
                found[name], grad, rtol=2e-6, atol=2e-7, msg=lambda m, name=name: f"{name}: {m}"
            )
    ranks = [torch.zeros_like(found["scale"]) for _ in range(dist.get_world_size())]
    dist.all_gather(ranks, found["scale"])
    assert all(torch.equal(each, ranks[0]) for each in ranks), "ranks apart"


def both(seeds, divisor=1, **arguments):
    """Gradients of the plain model for all of these batches, one after the other."""
    plain = net()
    for seed in seeds:
        (loss_of(plain, seed, **arguments) / divisor).backward()
    return grads(plain)


# The plan.


def test_the_plan_says_so():
    plan = plan_model(net(), mesh=MeshSpec.hybrid(2, 4))
    assert plan.replicated == ("scale", "none", "unused", "blocks.0.gain", "blocks.1.gain")
    assert "replicated, gradients reduced: scale, none, unused" in str(plan)
    assert ShardingPlan.from_dict(plan.to_dict()) == plan
    other = plan_model(net(), mesh=MeshSpec.hybrid(2, 4), ignored_params=["scale"])
    assert other.ignored == ("scale",)
    assert "scale" not in other.replicated
    assert "- replicated: ['scale', 'none'" in plan.diff(other)
    assert "scale: ignored but trained, so each rank keeps its own, unreduced gradient" in str(
        other
    )
    root = next(unit for unit in plan.units if unit.modules == ("",))
    assert "scale" not in root.params


@pytest.mark.parametrize(
    "mesh", [MeshSpec.sharded(8), MeshSpec.hybrid(2, 4), MeshSpec.hybrid(8, 1)]
)
def test_collectives_are_counted(mesh):
    options = [{}, {"keep_unsharded": True}, {"shard_gradients": True}]
    for frozen in (False, True):
        model = net()
        for param in model.parameters():
            param.requires_grad_(not (frozen and (param.dim() == 0 or param.numel() == 0)))
        with fake_world(8):
            plan = plan_model(model, mesh=mesh)
            apply_plan(model, plan)
            loss_of(model, 0).backward()
            for micro_batches, keywords in itertools.product((1, 3), options):
                with comm_counts() as counted:
                    for index in range(micro_batches):
                        with accumulate(model, last=index == micro_batches - 1, **keywords):
                            loss_of(model, index).backward()
                assert counted == plan.collectives(micro_batches, **keywords)
        ours = 0 if frozen else sum(size > 1 for size in mesh.shape)
        assert plan.collectives().all_reduces == ours + mesh.replicates * len(
            [u for u in plan.units if u.params]
        )


# Gradients.


@pytest.mark.parametrize("setting", ["mean", "sum", "recomputed", "resharded"])
@on_ranks(2)
def test_gradients_are_those_of_the_plain_model(setting):
    rank, sums = dist.get_rank(), setting == "sum"
    options = {
        "recomputed": {"checkpoint_activations": True},
        "resharded": {"reshard_after_forward": True},
    }
    model = shard_model(net(), **options.get(setting, {}))
    set_gradient_reduction(model, "sum" if sums else "mean")
    ranks = 1 if sums else 2

    loss_of(model, rank).backward()
    assert_same(grads(model), both([0, 1], ranks))
    assert model.unused.grad is None
    loss_of(model, 2 + rank).backward()  # adds to what is reduced already
    assert_same(grads(model), both([0, 1, 2, 3], ranks))
    with accumulate(model, last=False):
        loss_of(model, 4 + rank).backward()  # and again, not reduced yet
    loss_of(model, 6 + rank).backward()
    assert_same(grads(model), both([0, 1, 2, 3, 4, 5, 6, 7], ranks))

    model.zero_grad()
    (loss_of(model, rank) + loss_of(model, 2 + rank)).backward()  # two forwards, one backward
    assert_same(grads(model), both([0, 1, 2, 3], ranks))
    torch.autograd.grad(model.scale * 3, model.scale)  # leaves .grad alone
    assert_same(grads(model), both([0, 1, 2, 3], ranks))
    model.zero_grad()
    model.generate(batch(rank)).square().mean().backward()
    assert_same(grads(model), both([0, 1], ranks))
    for index in range(2):
        model.zero_grad() if not index else None
        model.set_requires_gradient_sync(bool(index))
        loss_of(model, 2 * index + rank).backward()
    assert_same(grads(model), both([0, 1, 2, 3], ranks))


@on_ranks(2)
def test_ranks_that_use_different_ones_and_errors():
    rank = dist.get_rank()
    model = shard_model(net())
    loss_of(model, rank, gained=rank == 1).backward()
    plain = net()
    (loss_of(plain, 0, gained=False) / 2).backward()
    (loss_of(plain, 1) / 2).backward()
    assert_same(grads(model), grads(plain))
    model.zero_grad()
    with pytest.raises(ZeroDivisionError), accumulate(model, last=False):
        (loss_of(model, rank).backward(), 1 / 0)
    handle = model.blocks[0].linear.register_full_backward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loss_of(model, rank).backward()
    handle.remove()
    reset_after_error(model)
    # as load_state_dict(assign=True) would
    model.scale = nn.Parameter(model.scale.detach().clone())
    for _ in range(2):
        model.zero_grad()
        loss_of(model, rank).backward()
        assert_same(grads(model), both([0, 1], 2))


@pytest.mark.parametrize("name", ["scalar", "clip", "llama"])
@on_ranks(4)
def test_on_two_axes_bit_for_bit(name):
    bfloat16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if name == "llama":
        options = {"mp_policy": bfloat16, "optimizer": "adamw on local shards", "steps": 2}
        assert_trains_like_plain(name, mesh=(2, 2), replicate=by_class("LlamaRMSNorm"), **options)
        return
    # AdamW steps on DTensors and plain scalars together in one; the other one's many DTensors would
    # take seconds.
    assert_trains_like_plain(
        name,
        mesh=(2, 2),
        steps=3,
        optimizer="adamw" if name == "scalar" else "adamw on local shards",
    )
    if name == "clip":  # the rest takes seconds, and is about the small model's scalars
        return
    assert_trains_like_plain(name, mesh=(4, 1), steps=2, optimizer="sgd")
    assert_trains_like_plain(
        name, mesh=(2, 2), steps=2, mp_policy=bfloat16, optimizer="adamw on local shards"
    )


# What works on gradients, and on state.


@on_ranks(2)
def test_ignored_ones_are_not_reduced_and_it_is_said():
    model = shard_model(net(), ignored_params=["scale"])
    loss_of(model, dist.get_rank()).backward()
    assert torch.equal(model.scale.grad, both([dist.get_rank()])["scale"])
    with pytest.warns(UserWarning, match="scale trains outside of all units"):
        check_optimizer(torch.optim.SGD(model.parameters()), model)
    whole = shard_model(net())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_optimizer(torch.optim.SGD(whole.parameters()), whole)


@on_ranks(2)
def test_meta_and_state():
    with init_on_meta():
        model = net()
    materialize(shard_model(model))
    plain = net()
    assert all(torch.equal(model.get_parameter(name), plain.get_parameter(name)) for name in WHOLE)
    loss_of(model, dist.get_rank()).backward()
    torch.optim.AdamW(model.parameters(), lr=0.1).step()
    assert not torch.equal(model.scale, plain.scale)
    state = full_state_dict(model, rank0_only=False)
    assert {name: value.shape for name, value in state.items()} == {
        n: v.shape for n, v in plain.state_dict().items()
    }
    others = [shard_model(net()) for _ in range(2)]
    load_full_state_dict(others[0], state)
    others[1].load_state_dict(sharded_state_dict(model))
    for other in others:
        found = full_state_dict(other, rank0_only=False)
        assert all(torch.equal(found[name], value) for name, value in state.items())


@on_ranks(4)
def test_modules_are_clipped_and_checkpointed_as_sharded_ones(tmp_path):
    rank, models = dist.get_rank(), {}
    for name, rules in {"sharded": {}, "replicated": NORMS}.items():
        models[name] = shard_model(agreed(Decoder), mesh=mesh_of((2, 2)), **rules)
        optimizer = torch.optim.AdamW(models[name].parameters(), lr=0.1)
        for micro in range(2):
            with accumulate(models[name], last=micro == 1):
                models[name](tokens(4 * micro + rank)).square().mean().backward()
        norm = clip_grad_norm_(models[name], 0.5)
        optimizer.step()
        save_checkpoint(tmp_path / name, models[name], optimizer)
        found = full_state_dict(models[name], rank0_only=False)
        models[name] = (models[name], optimizer, norm, found)
    (_, _, norm, whole), (_, _, other_norm, other) = models["sharded"], models["replicated"]
    torch.testing.assert_close(other_norm, norm, rtol=1e-6, atol=0)
    for name, value in whole.items():
        torch.testing.assert_close(other[name], value, rtol=1e-4, atol=1e-6)
    for into, source in (("sharded", "replicated"), ("replicated", "sharded")):
        model, optimizer, _, _ = models[into]
        load_checkpoint(tmp_path / source, model, optimizer)
        expected = models[source][3]
        assert all(
            torch.equal(value, expected[name])
            for name, value in full_state_dict(model, rank0_only=False).items()
        )


@on_ranks(2)
def test_the_torch_code_does_the_same():
    rank = dist.get_rank()
    plan = plan_model(net(), mesh=mesh_of((2,)))
    by_hand, model = net(), shard_model(net(), mesh=mesh_of((2,)))
    scope = {"model": by_hand}
    exec(plan.to_python(), scope)
    assert isinstance(by_hand, FSDPModule)
    for each in (by_hand, model):
        loss_of(each, rank, gained=rank == 1).backward()
    scope["reduce_replicated"]()
    found, expected = grads(by_hand), grads(model)
    assert_same(found, expected)
    assert all(
        torch.equal(found[name], grad) for name, grad in expected.items() if grad is not None
    )

    options = {
        "mesh": mesh_of((2,)),
        **NORMS,
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16),
    }
    plan, by_hand, model = plan_model(Decoder(), **options), *(agreed(Decoder) for _ in range(2))
    exec(plan.to_python(), scope := {"model": by_hand})
    for each in (shard_model(model, **options), by_hand):
        each(tokens(rank)).square().mean().backward()
    scope["reduce_replicated"]()
    found, expected = grads(by_hand), grads(model)
    assert all(torch.equal(found[name], grad) for name, grad in expected.items())


@distributed(world_size=2)
def test_a_loss_of_a_scalar_alone_and_gradients_that_were_zeroed_in_place():
    model, rank = shard_model(Net()), dist.get_rank()
    optimizer = torch.optim.SGD([model.scale], lr=0.1)
    loss_of(model, rank).backward()
    reduced = model.scale.grad.clone()
    (model.scale * (rank + 1)).backward()  # as a temperature's: no unit is reached, so it waits
    with pytest.raises(ShardkitError, match="wait to be reduced"):
        optimizer.step()

    model.zero_grad()
    for last in (True, False, True):
        with accumulate(model, last=last):
            loss_of(model, rank).backward()
        if not last:
            model.zero_grad(set_to_none=False)
    assert torch.equal(model.scale.grad, reduced)  # nothing that was set aside comes back
    model.zero_grad()
    loss_of(model, rank).backward()
    once = model.scale.grad.clone()
    with accumulate(model, last=False):
        loss_of(model, rank).backward()
    model.zero_grad(set_to_none=False)
    loss_of(model, rank).backward()
    assert torch.equal(model.scale.grad, once)


@distributed(world_size=2)
def test_a_gradient_of_zeros_on_one_rank_waits_on_all():
    model, rank = shard_model(net()), dist.get_rank()
    optimizer = torch.optim.SGD([model.scale], lr=0.1)
    for _ in range(2):
        with accumulate(model, last=False):
            (loss_of(model, rank) * (1 - rank)).backward()
        assert bool(model.scale.grad.any()) == (rank == 0)
        with pytest.raises(ShardkitError, match=r"SGD.step\(\) was called while 1 gradients wait"):
            optimizer.step()
        model.zero_grad(set_to_none=False)
        optimizer.step()


@distributed(world_size=2)
def test_torch_makes_optimizer_state_before_any_backward():
    model = shard_model(net())
    state = get_optimizer_state_dict(model, torch.optim.Adam(model.parameters()))["state"]
    assert state["scale"]["exp_avg"] == 0


def test_parameters_on_an_equal_mesh_that_was_made_again_are_reduced():
    with fake_world(4):
        for _ in range(2):
            model = shard_model(net(), mesh=MeshSpec.hybrid(2, 2))
            check_optimizer(torch.optim.SGD(model.parameters()), model)  # a warning is an error


@pytest.mark.parametrize("sync", [True, False])
@distributed(world_size=2)
def test_a_hook_put_on_after_the_first_backward_changes_each_later_gradient(sync):
    model, rank = shard_model(net()), dist.get_rank()
    loss_of(model, rank).backward()
    once = model.scale.grad.clone()
    model.scale.register_hook(lambda grad: grad * 4)
    with accumulate(model, last=sync):
        loss_of(model, rank).backward()
    torch.autograd.grad(loss_of(model, rank), model.scale)  # adds to no gradient
    loss_of(model, rank).backward()
    torch.testing.assert_close(model.scale.grad, 9 * once)
