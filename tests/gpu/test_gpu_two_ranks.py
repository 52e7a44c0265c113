"""Two ranks on one GPU: gloo carries CUDA tensors, beside CUDA's streams."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gpu_net import BF16, DEVICE, HAS_GPU, SHAPE, plain, tokens, values
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import shardkit
from shardkit.testing import RankPool

SETTINGS: dict[str, dict[str, Any]] = {
    "float32": {},
    "kept unsharded": {"reshard_after_forward": False},
    "checkpointed": {"checkpoint_activations": True},
    "prefetch": {"prefetch": 1},
    "bf16": {"mp_policy": BF16},
}


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[RankPool]:
    with RankPool(2, timeout=120) as pool:
        yield pool


def train_on_two_ranks(name: str) -> float:
    """Return the largest difference of a parameter from one process with both batches."""
    if HAS_GPU:
        torch.cuda.set_device(DEVICE)
    # Given, because shardkit's own mesh of a group without NCCL is on the CPU.
    mesh = init_device_mesh(DEVICE.type, (2,), mesh_dim_names=("dp_shard",))
    theirs = plain()
    ours = shardkit.shard_model(copy.deepcopy(theirs), mesh=mesh, **SETTINGS[name])
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
    expected = values(theirs)
    return max(float((value - expected[key]).abs().max()) for key, value in values(ours).items())


@pytest.mark.parametrize("name", SETTINGS)
def test_trains_as_one_process_with_both_batches(two_ranks: RankPool, name: str) -> None:
    """AdamW moves a weight by about 1e-3 a step, also where a gradient is all rounding: bf16 may
    turn the sign of such a step, float32 may not for weights whose gradients are not tiny.
    """
    bound = 6e-3 if name == "bf16" else 1e-4
    assert max(two_ranks.run(train_on_two_ranks, name)) < bound


def save_and_load(folder: str) -> None:
    if HAS_GPU:
        torch.cuda.set_device(DEVICE)
    mesh = init_device_mesh(DEVICE.type, (2,), mesh_dim_names=("dp_shard",))
    model, other = (shardkit.shard_model(plain(seed), mesh=mesh) for seed in (0, 1))
    expected = values(model)
    shardkit.save_checkpoint(f"{folder}/saved", model, async_=True).wait()
    shardkit.load_checkpoint(f"{folder}/saved", other)
    found = values(other)
    assert all(torch.equal(value, found[key]) for key, value in expected.items())
    full = shardkit.full_state_dict(model)
    if dist.get_rank() == 0:
        assert full["embed.weight"].shape == (SHAPE.vocabulary, SHAPE.width)


def test_state_and_asynchronous_save(two_ranks: RankPool, tmp_path: Any) -> None:
    two_ranks.run(save_and_load, str(tmp_path))
