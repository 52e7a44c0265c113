"""Small plain models for tests of planning; ``tests/helpers/zoo.py`` holds the ones that train."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import CheckpointPolicy

from shardkit import init_on_meta, materialize, shard_model


def keep_all(context, op, *args, **kwargs):
    """A policy of selective checkpointing."""
    return CheckpointPolicy.MUST_SAVE


class Block(nn.Module):
    def __init__(self, dim=8, inner=None):
        super().__init__()
        inner = inner or 2 * dim
        self.norm = nn.LayerNorm(dim)
        self.up, self.down = nn.Linear(dim, inner), nn.Linear(inner, dim)

    def forward(self, x):
        return x + self.down(F.relu(self.up(self.norm(x))))


class Decoder(nn.Module):
    """Embedding, blocks, norm and head, as language models have them; 11 tokens, so that 4 ranks
    share unevenly.
    """

    def __init__(self, layers=3, dim=8, vocabulary=11, tied=False):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, dim)
        self.layers = nn.ModuleList(Block(dim) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocabulary, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x)).clone()  # torch 2.13 warns of modules that return a view


def sharded(build, meta=False, **options):
    """What ``build`` makes, sharded, and with ``meta`` initialized on meta."""
    if not meta:
        return shard_model(build(), **options)
    with init_on_meta():
        model = build()
    return materialize(shard_model(model, **options))


def step(model, batch=2):
    """One forward and backward of a Decoder."""
    torch.manual_seed(0)
    model(torch.randint(0, 11, (batch, 5))).square().mean().backward()


def snapshot(model):
    """What sharding would change in a model, to show that nothing has."""
    modules = [(name, type(module), id(module)) for name, module in model.named_modules()]
    hooks = [
        len(module._forward_pre_hooks) + len(module._forward_hooks) for module in model.modules()
    ]
    values = [
        (name, id(param), param.stride(), param._version)
        for name, param in model.named_parameters()
    ]
    return [modules, hooks, values, ["forward" in vars(module) for module in model.modules()]]
