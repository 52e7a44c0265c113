"""Two ranks on one GPU: gloo carries CUDA tensors, beside CUDA's streams."""

import copy

import pytest
import torch
import torch.distributed as dist
from gpu_net import (
    BF16,
    DEVICE,
    HAS_GPU,
    SHAPE,
    assert_same,
    keep_stream_busy,
    mean_difference,
    needs_gpu,
    plain,
    tokens,
    values,
)
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import shardkit
from shardkit.shards import local_part
from shardkit.state import sleep, wake
from shardkit.testing import RankPool

SETTINGS = {
    "float32": {},
    "kept unsharded": {"reshard_after_forward": False},
    "checkpointed": {"checkpoint_activations": True},
    "prefetch": {"prefetch": 1},
    "bf16": {"mp_policy": BF16},
}


@pytest.fixture(scope="module")
def two_ranks():
    with RankPool(2, timeout=120) as pool:
        yield pool


def sharded(model, **settings):
    """Shard on a mesh that is given: shardkit's own mesh of a group without NCCL is on the CPU."""
    if HAS_GPU:
        torch.cuda.set_device(DEVICE)
    mesh = init_device_mesh(DEVICE.type, (2,), mesh_dim_names=("dp_shard",))
    return shardkit.shard_model(model, mesh=mesh, **settings)


def shards(model):
    """Copies of this rank's shards. gloo's all-gather for ``full_tensor`` takes no CUDA tensors."""
    return {name: param.to_local().cpu().clone() for name, param in model.named_parameters()}


def train_on_two_ranks(name):
    """Return the largest and the mean difference of this rank's shards from one process with both
    batches.
    """
    theirs = plain()
    ours = sharded(copy.deepcopy(theirs), **SETTINGS[name])
    ours_adamw = torch.optim.AdamW(ours.parameters(), lr=1e-3)
    theirs_adamw = torch.optim.AdamW(theirs.parameters(), lr=1e-3)
    for step in range(3):
        both = theirs(tokens(2 * step)) + theirs(tokens(2 * step + 1))
        (both / 2).backward()
        nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
        theirs_adamw.step()
        theirs_adamw.zero_grad()
        ours(tokens(2 * step + dist.get_rank())).backward()
        shardkit.clip_grad_norm_(ours, 1.0)
        ours_adamw.step()
        ours_adamw.zero_grad()
    full = values(theirs)
    expected = {key: local_part(full[key], param) for key, param in ours.named_parameters()}
    found = shards(ours)
    largest = max(float((value - expected[key]).abs().max()) for key, value in found.items())
    return largest, mean_difference(found, expected)


@pytest.mark.parametrize("name", SETTINGS)
def test_trains_as_one_process_with_both_batches(two_ranks, name):
    """AdamW moves a weight by about 1e-3 a step, also where a gradient is all rounding: bf16 turns
    the sign of some such steps, so the mean counts there.
    """
    for largest, mean in two_ranks.run(train_on_two_ranks, name):
        assert mean < (3e-4 if name == "bf16" else 1e-6)
        assert largest < (6e-3 if name == "bf16" else 1e-4)


def save_and_load(folder):
    model, other = sharded(plain(0)), sharded(plain(1))
    shardkit.checkpoint.save_checkpoint(f"{folder}/saved", model, async_=True).wait()
    shardkit.checkpoint.load_checkpoint(f"{folder}/saved", other)
    assert_same(shards(other), shards(model))
    full = shardkit.full_state_dict(model)
    if dist.get_rank() == 0:
        assert full["embed.weight"].shape == (SHAPE.vocabulary, SHAPE.width)


def test_state_and_asynchronous_save(two_ranks, tmp_path):
    two_ranks.run(save_and_load, str(tmp_path))


# The host does not wait for the copies of wake(), so the first all-gather must, on its own streams.
# A group of one rank has no all-gather.


def forward_right_after_wake():
    model = sharded(plain())
    expected = model(tokens()).detach().clone()
    sleep(model)
    keep_stream_busy(300)
    wake(model)
    assert torch.equal(model(tokens()).detach(), expected)


def wake_on_another_stream():
    model = sharded(plain())
    expected = model(tokens()).detach().clone()
    sleep(model)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        keep_stream_busy(300)
        wake(model)
        found = model(tokens()).detach().clone()
    stream.synchronize()
    assert torch.equal(found, expected)


def wake_after_the_event_of_a_step():
    """With ``set_post_optim_event`` the first all-gather waits for that event only."""
    model = sharded(plain())
    expected = model(tokens()).detach().clone()
    model.set_post_optim_event(torch.cuda.current_stream().record_event())
    sleep(model)
    keep_stream_busy(300)
    wake(model)
    assert torch.equal(model(tokens()).detach(), expected)


@needs_gpu
@pytest.mark.parametrize(
    "check", [forward_right_after_wake, wake_on_another_stream, wake_after_the_event_of_a_step]
)
def test_the_first_forward_waits_for_wake(two_ranks, check):
    two_ranks.run(check)
