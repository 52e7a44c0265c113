"""Models and a training loop that torch's own FSDP1 and its translation run side by side, on CPU
ranks.
"""

import warnings
from contextlib import contextmanager
from functools import cache

import small_models
import torch
import torch.distributed as dist
import torch.nn.functional as F
from meshes import mesh_of
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from shardkit.optim import step_on_local_shards

CPU = torch.device("cpu")
TOKENS, DIM = 11, 7  # neither divides by the number of ranks


class Decoder(small_models.Decoder):
    """Tied embedding and head, a frozen block, a frozen norm, and a buffer that forward reads."""

    def __init__(self):
        torch.manual_seed(0)
        super().__init__(3, DIM, TOKENS, tied=True)
        self.register_buffer("positions", torch.rand(5, DIM), persistent=False)
        self.layers[0].requires_grad_(False)
        self.layers[1].norm.requires_grad_(False)

    def forward(self, tokens):
        x = self.embed(tokens)
        x = x + self.positions.to(x.dtype)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x)).clone()


class ConvNet(nn.Module):
    """BatchNorm, which FSDP1 leaves in float32 under mixed precision and a policy."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Conv2d(3, 5, 3)
        self.body = nn.Sequential(
            nn.BatchNorm2d(5), nn.ReLU(), nn.Conv2d(5, 6, 3), nn.BatchNorm2d(6, affine=False)
        )
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        return self.head(self.body(self.stem(x)).mean((2, 3)))


def token_loss(model, seed):
    tokens = torch.randint(0, TOKENS, (2, 5), generator=torch.Generator().manual_seed(seed))
    return F.cross_entropy(model(tokens).float().flatten(0, 1), tokens.roll(1, 1).flatten())


def image_loss(model, seed):
    images = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(seed))
    return F.cross_entropy(model(images).float(), torch.arange(4) % 3)


def hybrid_mesh():
    return mesh_of((2, 2))


@cache
def pairs():
    """FSDP1's pair of groups for two nodes of two ranks: the one that shards, and the one that
    replicates.
    """
    return dist.new_subgroups(2)[0], dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])[0]


@contextmanager
def quiet():
    """FSDP1 warns of what it deprecates, switches and wraps."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def fsdp1(model, **arguments):
    with quiet():
        return FullyShardedDataParallel(model, device_id=CPU, **arguments)


def losses(
    model,
    loss=token_loss,
    steps=3,
    one_counts=False,
    local_step=False,
):
    """The losses of ``steps`` steps of AdamW, each rank with a batch of its own; no step of
    clipping.

    With ``one_counts`` rank t % world alone has gradients in step t, so that sums over ranks are
    exact in any order.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    optimizer = torch.optim.AdamW(
        [param for param in model.parameters() if param.requires_grad], lr=1e-2
    )
    if local_step:  # the same bits in a fifth of the time
        step_on_local_shards(optimizer)
    found = []
    for step in range(steps):
        with quiet():
            value = loss(model, step * world + rank)
            (value * float(not one_counts or rank == step % world)).backward()
        found.append(value.detach())
        optimizer.step()
        optimizer.zero_grad()
    return torch.stack(found)
