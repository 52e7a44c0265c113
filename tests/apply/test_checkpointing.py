"""Checkpointed blocks advance buffers once, and compute exact gradients."""

from __future__ import annotations

import copy
import functools
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardkit import ShardkitError, shard_model
from shardkit.testing import distributed


class Changing(nn.Module):
    """Changes buffers in forward, and computes with one that stays."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("average", torch.zeros(4))
        self.register_buffer("constant", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        with torch.no_grad():
            self.average.lerp_(x.mean(0), 0.1)
        return x + self.down(F.relu(self.norm(self.up(x * self.constant))))


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Changing() for _ in range(2))
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor, twice: bool = False) -> Tensor:
        for layer in self.layers:
            x = layer(layer(x)) if twice else layer(x)
        return self.head(x).clone()


def trained(model: nn.Module) -> list[Tensor]:
    """Losses and buffers over steps that call blocks once, twice, and keep the graph for a second backward."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    found = []
    for number in range(4):
        x = torch.arange(24.0).view(6, 4).sin() + number
        loss = model(x, twice=number == 1).square().mean()
        loss.backward(retain_graph=number == 2)
        if number == 2:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
    return [*found, *model.buffers()]


@distributed(world_size=2)
def test_what_forward_changes_is_changed_once() -> None:
    torch.manual_seed(0)
    model = Blocks()
    expected = trained(copy.deepcopy(model))
    shard_model(model, checkpoint_activations=True)
    found = trained(model)
    assert len(found) == len(expected) > 12
    assert all(map(torch.equal, found, expected))
    assert model.layers[0].count == 5


@distributed(world_size=2)
def test_compiled_blocks_with_running_statistics() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    plain = copy.deepcopy(model)
    eager = functools.partial(torch.compile, backend="aot_eager")  # it is tracing that counts, not the kernels
    with mock.patch.object(torch, "compile", eager):
        shard_model(model, checkpoint_activations=True, compile=True)
    x = torch.arange(24.0).view(6, 4).sin()
    for each in (model, plain):
        each(x).square().mean().backward()
    assert plain[0][1].num_batches_tracked == model[0][1].num_batches_tracked == 1
    assert torch.equal(model[0][1].running_var, plain[0][1].running_var)
    assert torch.equal(model[0][0].weight.grad.full_tensor(), plain[0][0].weight.grad)


@distributed(world_size=2)
def test_a_cache_is_refused_where_it_is_passed() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "vocab_size": 11}
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, **sizes))
    assert model.config.use_cache
    shard_model(model, checkpoint_activations=True)
    tokens = torch.arange(10).view(2, 5)
    model(tokens, labels=tokens, use_cache=False).loss.backward()
    with torch.no_grad():
        model(tokens)
    with pytest.raises(ShardkitError, match=r"model\.layers\.0 is checkpointed.* called with a Dynamic.*use_cache"):
        model(tokens)
