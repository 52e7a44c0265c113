"""Training on one GPU: equal to the plain model and to ``fully_shard`` by hand."""

import copy
from functools import partial

import pytest
import torch
import torch.distributed as dist
from gpu_net import (
    BF16,
    DEVICE,
    HAS_GPU,
    adamw,
    assert_close,
    assert_same,
    by_hand,
    mean_difference,
    needs_gpu,
    no_host_syncs,
    plain,
    sharded,
    tokens,
    train,
    values,
)
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

import shardkit
from benchmarks.models import Llama, Shape
from shardkit.state import sharded_average
from shardkit.testing import fake_world

pytestmark = pytest.mark.usefixtures("one_rank")


def test_group_and_places():
    model = sharded()
    assert dist.get_backend() == ("cpu:gloo,cuda:nccl" if HAS_GPU else "gloo")
    assert {param.to_local().device for param in model.parameters()} == {DEVICE}
    model(tokens().cpu()).backward()  # FSDP2 moves inputs


def test_float32_trains_as_the_plain_model():
    ours, theirs = sharded(), plain()
    losses = train(ours, adamw(ours.parameters()))
    assert torch.equal(losses, train(theirs, adamw(theirs.parameters())))
    assert_same(values(ours), values(theirs))


def test_clipping_as_the_plain_model():
    """The norm adds in another order."""
    ours, theirs = sharded(), plain()
    norms = []

    def clip_plain(model):
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1))

    train(ours, adamw(ours.parameters()), clip=partial(shardkit.clip_grad_norm_, max_norm=0.1))
    train(theirs, adamw(theirs.parameters()), clip=clip_plain)
    assert min(norms) > 0.1  # it clipped
    assert_close(values(ours), values(theirs))


# The arithmetic of each is that of fully_shard by hand without it.
SAME_AS_BY_HAND = {
    "float32": {},
    "bf16": {"mp_policy": BF16},
    "checkpointed": {"checkpoint_activations": True},
    "selective": {"checkpoint_activations": "selective"},
    "prefetch": {"prefetch": 2},
    "kept unsharded": {"reshard_after_forward": False},
}


@pytest.mark.parametrize("name", SAME_AS_BY_HAND)
def test_as_fully_shard_by_hand(name):
    settings = SAME_AS_BY_HAND[name]
    by_torch = {key: value for key, value in settings.items() if key == "mp_policy"}
    ours, theirs = sharded(**settings), by_hand(**by_torch)
    losses = train(ours, adamw(ours.parameters()))
    assert torch.equal(losses, train(theirs, adamw(theirs.parameters())))
    assert_same(values(ours), values(theirs))


@needs_gpu
def test_compiled():
    """Fused kernels round in other places, and bf16 has 8 bits: a gradient near zero may have the
    other sign. Each of three steps moves a weight by about 1e-3.
    """
    ours, theirs = sharded(mp_policy=BF16, compile=True), by_hand(mp_policy=BF16)
    losses = train(ours, adamw(ours.parameters()))
    expected = train(theirs, adamw(theirs.parameters()))
    torch.testing.assert_close(losses, expected, rtol=2**-7, atol=0)
    assert mean_difference(values(ours), values(theirs)) < 3e-4


class Uneven(nn.Module):
    """A scalar, an empty parameter, sizes that 8 ranks do not divide, and a buffer."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(13, 7), nn.Linear(7, 3)
        self.gain, self.empty = nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.empty(0, 4))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        out = self.down(torch.relu(self.up(x))) * self.gain
        return out.square().mean() + self.empty.sum()


def test_scalars_and_empty_parameters():
    torch.manual_seed(0)
    theirs = Uneven().to(DEVICE)
    ours = shardkit.shard_model(copy.deepcopy(theirs))
    x = torch.randn(5, 13, device=DEVICE)
    for model in (ours, theirs):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for _ in range(3):
            model(x).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_close(values(ours), values(theirs))
    assert ours.calls.device.type == DEVICE.type


def test_empty_shards_of_the_last_rank_of_8():
    """Norms of empty lists, fused AdamW on empty tensors."""
    dist.destroy_process_group()
    with fake_world(8, rank=7):
        model = shardkit.shard_model(Uneven().to(DEVICE))
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        optimizer = shardkit.step_on_local_shards(optimizer)
        shards = [param for param in model.parameters() if hasattr(param, "to_local")]
        for norm_type in (2.0, 1.0, float("inf")):
            model(torch.randn(5, 13, device=DEVICE)).backward()
            for param in shards:
                # torch 2.11's fake reduce-scatter leaves them uninitialized
                param.grad.to_local().normal_()
            flat = torch.cat([param.grad.to_local().flatten() for param in shards])
            expected = torch.cat([flat, flat.new_zeros(1)]).norm(norm_type)
            found = shardkit.clip_grad_norm_(shards, 1e9, norm_type=norm_type)
            torch.testing.assert_close(found, expected)
            optimizer.step()
            optimizer.zero_grad()
        assert all(param.to_local().isfinite().all() for param in shards)
    shardkit.shard_model(nn.Linear(4, 4))  # a group for the fixture to destroy


# ---- optimizers and gradients

ADAMW = {
    "for loop": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}
if HAS_GPU:
    # By default torch steps plain tensors of a GPU by foreach, and DTensors one by one.
    ADAMW["capturable"] = {"capturable": True, "foreach": False}
    ADAMW["capturable foreach"] = {"capturable": True, "foreach": True}


@pytest.mark.parametrize("name", ADAMW)
def test_steps_on_local_shards(name):
    ours, theirs = sharded(), sharded()
    local = torch.optim.AdamW(ours.parameters(), lr=1e-3, **ADAMW[name])
    train(ours, shardkit.step_on_local_shards(local))
    train(theirs, torch.optim.AdamW(theirs.parameters(), lr=1e-3, **ADAMW[name]))
    assert_same(values(ours), values(theirs))


def test_optimizer_in_backward():
    ours, theirs = sharded(), sharded()
    train(ours, shardkit.optimizer_in_backward(ours, adamw))
    train(theirs, adamw(theirs.parameters()))
    assert_same(values(ours), values(theirs))


@needs_gpu
def test_optimizer_in_backward_of_offloaded_gradients():
    """Large, so that a gradient is still on its way to pinned memory when torch 2.11 calls the hook
    that steps it.
    """
    shape = Shape(width=1024, mlp=8192, layers=2, heads=8, kv_heads=8, vocabulary=32_000)
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        policy = CPUOffloadPolicy(pin_memory=True)
        with DEVICE:  # which draws values fast
            model = Llama(shape, 64)
        models.append(shardkit.shard_model(model, offload_policy=policy))
    ours, theirs = models
    sgd = partial(torch.optim.SGD, lr=1.0)
    train(ours, shardkit.optimizer_in_backward(ours, sgd), steps=2)
    train(theirs, sgd(theirs.parameters()), steps=2)
    for our, their in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(our.to_local(), their.to_local())


@needs_gpu
def test_offloaded_parameters():
    """AdamW on the CPU rounds otherwise than on the GPU."""
    ours = sharded(offload_policy=CPUOffloadPolicy(pin_memory=True))
    theirs = plain()
    assert all(param.to_local().is_pinned() for param in ours.parameters())
    train(
        ours,
        torch.optim.AdamW(ours.parameters(), lr=1e-3),
        clip=partial(shardkit.clip_grad_norm_, max_norm=1e9),
    )
    train(theirs, torch.optim.AdamW(theirs.parameters(), lr=1e-3))
    assert_close(values(ours), values(theirs))


@pytest.mark.parametrize(
    "settings", [{}, {"keep_unsharded": True}, {"shard_gradients": True}], ids=str
)
def test_accumulation(settings):
    ours, theirs = sharded(), plain()
    for step in range(3):
        (theirs(tokens(step)) / 3).backward()
        with shardkit.accumulate(ours, last=step == 2, **settings):
            (ours(tokens(step)) / 3).backward()
    for our, their in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(our.grad.full_tensor(), their.grad, rtol=1e-5, atol=1e-6)


@needs_gpu
def test_fp16_overflow_skips_the_step():
    policy = MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float32)
    model = sharded(mp_policy=policy)
    optimizer, scaler = adamw(model.parameters()), shardkit.GradScaler(init_scale=2.0**30)
    before = values(model)
    scaler.scale(model(tokens())).backward()
    scaler.unscale_(optimizer)
    shardkit.clip_grad_norm_(model, 1.0)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() < 2.0**30
    assert_same(values(model), before)


def test_muon_on_whole_matrices():
    """Its iteration in bfloat16 is run on the same full matrices."""
    ours, theirs = sharded(), plain()
    for model, wrap in ((ours, shardkit.step_on_whole_matrices), (theirs, lambda muon: muon)):
        matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "layers" in name]
        train(model, wrap(torch.optim.Muon(matrices, lr=0.02)), steps=2)
    assert_same(values(ours), values(theirs))


def test_average_in_place_of_the_model():
    model = sharded()
    average = sharded_average(model, 0.5)
    average.update_parameters(model)
    train(model, adamw(model.parameters()))
    average.update_parameters(model)
    now = values(model)
    with average.swapped(model):
        inside = values(model)
    assert any(not torch.equal(value, now[name]) for name, value in inside.items())
    assert_same(values(model), now)


# ---- the host does not wait


@needs_gpu
@pytest.mark.parametrize(
    "settings", [{}, {"mp_policy": BF16}, {"checkpoint_activations": True}], ids=str
)
def test_a_whole_step_has_no_host_sync(settings):
    for wrap in (lambda optimizer: optimizer, shardkit.step_on_local_shards):
        model = sharded(**settings)
        optimizer, x = wrap(adamw(model.parameters())), tokens()
        count = torch.tensor(128, device=DEVICE)

        def step():
            total = shardkit.global_token_count(count, model)  # noqa: B023
            shardkit.scale_loss(model(x), total, model).backward()  # noqa: B023
            shardkit.clip_grad_norm_(model, 1.0)  # noqa: B023
            optimizer.step()  # noqa: B023
            optimizer.zero_grad()  # noqa: B023

        step()
        with no_host_syncs():
            step()


@needs_gpu
@pytest.mark.parametrize("name", ["in backward", "accumulate", "count", "scale", "average"])
def test_what_else_has_no_host_sync(name):
    model, x = sharded(), tokens()
    if name == "in backward":
        optimizer = shardkit.optimizer_in_backward(model, adamw)
    else:
        optimizer = adamw(model.parameters())
    average = sharded_average(model)
    average.update_parameters(model)
    model(x).backward()
    optimizer.step()
    if name != "scale":
        optimizer.zero_grad()

    def accumulated():
        for last in (False, True):
            with shardkit.accumulate(model, last=last):
                model(x).backward()

    def step():
        model(x).backward()
        optimizer.step()

    actions = {
        "in backward": step,
        "accumulate": accumulated,
        "count": lambda: shardkit.global_token_count(20, model),
        "scale": lambda: shardkit.scale_grads_(20, model),
        "average": lambda: average.update_parameters(model),
    }
    with no_host_syncs():
        actions[name]()
