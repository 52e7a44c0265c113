"""Weights whose scales are kept beside them, as bitsandbytes': saved whole, or refused before anything is written."""

from __future__ import annotations

import pytest
import torch
from meshes import mesh_of
from torch import nn
from torch.distributed.fsdp import fully_shard
from trees import assert_same

from shardkit import shard_model
from shardkit.checkpoint import load_checkpoint, save_checkpoint
from shardkit.errors import ShardkitError
from shardkit.state import full_state_dict
from shardkit.testing import distributed


class Adapted(nn.Module):
    """A quantized base that is frozen, and an adapter that trains."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base, self.adapter = base, nn.Linear(64, 8)


def quantized(kind: str, seed: int = 0) -> Adapted:
    bnb = pytest.importorskip("bitsandbytes")
    torch.manual_seed(seed)
    base = bnb.nn.Linear4bit(64, 64) if kind == "4bit" else bnb.nn.Linear8bitLt(64, 64, has_fp16_weights=False)
    return Adapted(base.requires_grad_(False)).to("cpu")


@distributed(world_size=2, backend="gloo")
def saves_by_fully_shard(kind, folder):
    model = quantized(kind)
    fully_shard(model.base, mesh=mesh_of((2,)))
    fully_shard(model, mesh=mesh_of((2,)))
    with pytest.raises(ShardkitError, match=r"base\.weight has no scales in state_dict"):
        save_checkpoint(folder / "whole", model)
    with pytest.raises(ShardkitError, match=r"base\.weight has no scales in state_dict"):
        full_state_dict(model)
    before = model.adapter.weight.to_local().detach().clone()
    save_checkpoint(folder / "adapter", model, trainable_only=True)
    with torch.no_grad():
        model.adapter.weight.zero_()
    load_checkpoint(folder / "adapter", model)
    assert torch.equal(model.adapter.weight.to_local(), before)


@pytest.mark.parametrize("kind", ["4bit", "8bit"])
def test_without_its_scales_a_weight_is_refused_and_the_adapter_is_saved(kind, tmp_path):
    saves_by_fully_shard(kind, tmp_path)
    assert [each.name for each in tmp_path.iterdir()] == ["adapter"]


@distributed(world_size=2, backend="gloo")
def saves_by_shard_model(kind, folder):
    model = quantized(kind)
    plain = model.state_dict()
    shard_model(model, mesh=mesh_of((2,)))
    assert_same(dict(full_state_dict(model, rank0_only=False)), dict(plain))
    save_checkpoint(folder / "c", model)


@pytest.mark.parametrize("kind", ["4bit", "8bit"])
def test_with_its_scales_in_the_state_a_weight_is_saved_and_loads(kind, tmp_path):
    saves_by_shard_model(kind, tmp_path)
    saved, fresh = quantized(kind), quantized(kind)
    with torch.no_grad():
        for tensor in fresh.state_dict().values():
            tensor.zero_()
    load_checkpoint(tmp_path / "c", fresh)
    assert_same(dict(fresh.state_dict()), dict(saved.state_dict()))
