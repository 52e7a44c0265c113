"""Whole training programs on ragged micro-batches, sharded on 2 or 4 ranks, against one plain
process in float64.

Where the arithmetic is the same, bits are compared.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from cpu_ranks import on_ranks
from fsdp1_models import TOKENS, Decoder
from meshes import mesh_of
from small_moe import MoE, on_dims
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.optim.lr_scheduler import LambdaLR

from shardkit import (
    MixedPrecisionPolicy,
    accumulate,
    apply_plan,
    check_optimizer,
    clip_grad_norm_,
    full_optimizer_state_dict,
    full_params,
    full_state_dict,
    global_token_count,
    init_on_meta,
    load_full_optimizer_state_dict,
    load_full_state_dict,
    materialize,
    plan_model,
    scale_loss,
    shard_model,
    step_on_local_shards,
)
from shardkit.checkpoint import load_checkpoint, load_pretrained, save_checkpoint

MICRO = 3
CLIP = 0.05  # below every norm that occurs, so that each step is clipped

# In float64 a sum over ranks and micro-batches in another order differs by some 2**-50 of its
# terms. One step of Adam makes at most lr / eps = 10 times that of it. What is counted once too
# often shows in the first digits.
CLOSE = {"rtol": 1e-9, "atol": 1e-11}
Run = tuple[nn.Module, Any, Any]  # with its optimizer and scheduler


def batch(step, micro, rank):
    """From 1 to 3 rows, and from 2 to 5 tokens of each that count."""
    generator = torch.Generator().manual_seed(100 * step + 10 * micro + rank)
    ids = torch.randint(0, TOKENS, (1 + (step + micro + 2 * rank) % 3, 5), generator=generator)
    labels = ids.roll(-1, 1)
    labels[:, : (micro + rank) % 4] = -100
    return ids, labels


def summed_loss(model, ids, labels):
    return F.cross_entropy(
        model(ids).flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum"
    )


def run_of(model, local=True):
    """A model with what trains it, on local shards if it is sharded."""
    trained = [param for param in model.parameters() if param.requires_grad]
    decayed, others = (
        [p for p in trained if (p.ndim > 1) is matrices] for matrices in (True, False)
    )
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.01, eps=1e-3, fused=True)
    check_optimizer(optimizer, model, low_precision=False)
    scheduler = LambdaLR(optimizer, lambda epoch: 0.8**epoch)
    return model, step_on_local_shards(optimizer) if local else optimizer, scheduler


def finish(model, optimizer, scheduler, clip=clip_grad_norm_):
    norm = clip(model if clip is clip_grad_norm_ else model.parameters(), CLIP)
    assert norm > CLIP
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    return norm


def gradients(model, step, after=None, **options):
    """Of the mean over all tokens, by micro-batches; ``after`` is called after the
    context of each.
    """
    mine = [batch(step, micro, dist.get_rank()) for micro in range(MICRO)]
    tokens = global_token_count(sum((labels != -100).sum() for _, labels in mine), model)
    for micro, (ids, labels) in enumerate(mine):
        with accumulate(model, last=micro == MICRO - 1, **options):
            scale_loss(summed_loss(model, ids, labels), tokens, model).backward()
        if after is not None:
            after(micro)


def train(run, steps, **options):
    """Train and return the norms of gradients."""
    norms = []
    for step in steps:
        gradients(run[0], step, **options)
        norms.append(finish(*run))
    return norms


def train_plain(run, steps):
    """The same training in one process, which sees the batches of all ranks at once."""
    norms = []
    for step in steps:
        batches = [
            batch(step, micro, rank)
            for micro in range(MICRO)
            for rank in range(dist.get_world_size())
        ]
        tokens = sum((labels != -100).sum() for _, labels in batches)
        (sum(summed_loss(run[0], *each) for each in batches) / tokens).backward()
        norms.append(finish(*run, clip=nn.utils.clip_grad_norm_))
    return norms


def state_of(run):
    """Copies of all tensors, model's and optimizer's, whole, on every rank. Collective."""
    tensors = {
        name: value.clone() for name, value in full_state_dict(run[0], rank0_only=False).items()
    }
    states = full_optimizer_state_dict(*run[:2], rank0_only=False)["state"]
    return tensors | {
        f"{name}.{key}": value for name, state in states.items() for key, value in state.items()
    }


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    assert [name for name, value in expected.items() if not torch.equal(found[name], value)] == []


def assert_close(found, plain, start):
    expected = state_of(plain)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name], value, msg=lambda text, name=name: f"{name}: {text}", **CLOSE
        )
    assert sum(not torch.equal(expected[name], value) for name, value in start.items()) > 10, (
        "nothing moved"
    )


def decoder():
    return Decoder().double()


def decoder_on_meta(mesh=(), seed=0, **options):
    """A Decoder that is never whole on any rank; by default on one axis of all ranks."""
    torch.manual_seed(seed)
    with init_on_meta():
        model = decoder()
    shard_model(model, mesh=mesh_of(mesh or (dist.get_world_size(),)), **options)
    return materialize(model)


@on_ranks(4)
def test_from_meta_over_an_asynchronous_save_to_another_mesh(tmp_path):
    plain = run_of(decoder(), local=False)
    run = run_of(decoder_on_meta(checkpoint_activations=True))
    norms = train(run, range(2), keep_unsharded=True)
    handle = save_checkpoint(tmp_path / "step-2", *run, extra={"step": 2}, async_=True)
    norms += train(run, range(2, 4))
    handle.wait()
    end = state_of(run)
    torch.testing.assert_close(norms, train_plain(plain, range(4)), **CLOSE)
    assert_close(end, plain, decoder().state_dict())

    resumed = run_of(decoder_on_meta(seed=1, reshard_after_forward=False))
    assert load_checkpoint(tmp_path / "step-2", *resumed) == {"step": 2}
    train(resumed, range(2, 4))
    assert_equal(state_of(resumed), end)  # whatever is gathered when, the arithmetic is the same

    other = decoder_on_meta((2, 2), seed=1)
    load_pretrained(other, tmp_path / "step-2")
    elsewhere = run_of(other)
    assert load_checkpoint(tmp_path / "step-2", *elsewhere) == {"step": 2}
    train(elsewhere, range(2, 4), shard_gradients=True)
    assert_close(state_of(elsewhere), plain, decoder().state_dict())


def read_params(run, _):
    with full_params(run[0]):
        return {
            name: param.detach().clone()
            for name, param in run[0].named_parameters(remove_duplicate=False)
        }


def read_saved(run, path):
    save_checkpoint(path / "c", *run[:2], overwrite=True)
    other = decoder()
    load_pretrained(other, path / "c")
    return other.state_dict()


@pytest.mark.parametrize("keep", [None, True])
@on_ranks(2)
def test_state_is_read_between_two_micro_batches(tmp_path, keep):
    """It is that of before the step, and the step ends as if nothing had been read."""
    plain = run_of(decoder(), local=False)
    run = run_of(decoder_on_meta(reshard_after_forward=False if keep is None else None))
    train(run, range(1))
    for step, read in enumerate((lambda run, _: state_of(run), read_params, read_saved), 1):
        before = state_of(run)

        def look(micro, before=before, read=read):
            if micro == 1:
                found = read(run, tmp_path)
                assert_equal(found, {name: before[name] for name in found})

        gradients(run[0], step, after=look, keep_unsharded=keep)
        finish(*run)
    train_plain(plain, range(4))
    assert_close(state_of(run), plain, decoder().state_dict())


# Experts on another dim than 0.


def moe():
    torch.manual_seed(0)
    return MoE(layers=2, experts=3).double()


def on_dim_1(model):
    placements = model.get_parameter("layers.0.experts.up").placements
    assert placements[-1] == Shard(1)
    assert all(each == Replicate() for each in placements[:-1])
    return model


def moe_on_dims(model, dims, **options):
    mesh = mesh_of((4,))
    return apply_plan(model, on_dims(plan_model(model, mesh=mesh, **options), dims), mesh)


@on_ranks(4)
def test_experts_train_as_in_one_process_and_their_state_moves():
    plain = run_of(moe(), local=False)
    train_plain(plain, range(3))
    run = run_of(on_dim_1(shard_model(moe(), mesh=mesh_of((2, 2)))), local=False)
    train(run, range(3))
    whole = state_of(run)
    assert_close(whole, plain, moe().state_dict())
    state, optimizer_state = full_state_dict(run[0]), full_optimizer_state_dict(*run[:2])
    experts = [f"layers.{layer}.experts.{name}" for layer in range(2) for name in ("up", "down")]
    for dims in (dict.fromkeys(experts, dim) for dim in range(3)):
        other = run_of(moe_on_dims(moe(), dims))
        load_full_state_dict(other[0], state)
        load_full_optimizer_state_dict(*other[:2], optimizer_state)
        assert_equal(state_of(other), whole)
    assert_equal(
        read_params(run, Path()), {name: whole[name] for name, _ in run[0].named_parameters()}
    )


@on_ranks(4)
def test_experts_are_initialized_and_reduced_to_the_bit():
    with init_on_meta():
        model = moe()
    materialize(on_dim_1(shard_model(model, mesh=mesh_of((4,)))))
    assert_equal(full_state_dict(model, rank0_only=False), moe().state_dict())
    found = []
    half = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    on_1 = on_dim_1(shard_model(moe().float(), mesh=mesh_of((4,)), mp_policy=half))
    for model in (on_1, moe_on_dims(moe().float(), {}, mp_policy=half)):
        gradients(model, 0)
        grads = {name: param.grad for name, param in model.named_parameters()}
        assert all(isinstance(grad, DTensor) for grad in grads.values())
        found.append({name: grad.full_tensor() for name, grad in grads.items()})
    assert_equal(*found)
    assert all(grad.any() for grad in found[0].values())
