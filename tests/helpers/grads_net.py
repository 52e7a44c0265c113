"""A small model with gradients of every awkward shape, and the exact norm of them, for the tests of
clipping.
"""

import math

import torch
import torch.distributed as dist
from meshes import mesh_of, part_of
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

MESHES = {"fsdp": (4,), "hsdp": (2, 2), "ddp-like": (4, 1)}
ORDERS = [2.0, 1.0, 0.5, 3.0, math.inf]


class Net(nn.Module):
    """Dim 0 not divisible by 4 ranks (7), smaller than 4 (3, 1), frozen, tied."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 6)
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.narrow = nn.Linear(6, 3)
        self.gain = nn.Parameter(torch.ones(1))
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = x + block(x).relu()
        return self.head(self.frozen(x) * self.gain) + self.narrow(x).sum(-1, keepdim=True)


def shard(net, shape=(), ignored=(), **arguments):
    """As by hand: blocks and the root, which is left to torch; by default on one axis
    of all ranks.
    """
    mesh, plain = (
        mesh_of(shape or (dist.get_world_size(),)),
        {net.get_parameter(name) for name in ignored},
    )
    for block in net.blocks:
        fully_shard(block, mesh=mesh, **arguments)
    return fully_shard(net, mesh=mesh, ignored_params=plain, **arguments)


def sharded_net(shape, dtype=torch.float32, offload=False, ignored=()):
    torch.manual_seed(0)
    policy = CPUOffloadPolicy(pin_memory=False) if offload else OffloadPolicy()
    return shard(Net().to(dtype), shape, ignored, offload_policy=policy)


def give_grads(net, seed=1, skip=""):
    """Set every trainable parameter's gradient, shard or plain, from one full
    tensor; return those.
    """
    generator = torch.Generator().manual_seed(seed)
    full = {}
    for name, param in net.named_parameters():
        if param.requires_grad and name != skip:
            value = torch.randn(param.shape, generator=generator)
            full[name] = value.to(param.dtype)
            param.grad = like(full[name].clone(), param)
    return full


def like(value, param):
    if not isinstance(param, DTensor):
        return value
    return distribute_tensor(value, param.device_mesh, param.placements, src_data_rank=None)


def full_grads(net):
    grads_of = {name: p.grad for name, p in net.named_parameters() if p.grad is not None}
    return {name: g.full_tensor() if isinstance(g, DTensor) else g for name, g in grads_of.items()}


def assert_grads(net, expected):
    """Gradients are the full ``expected``, to the bit; each rank looks at its own part."""
    grads = {name: param.grad for name, param in net.named_parameters() if param.grad is not None}
    assert grads.keys() == expected.keys()
    assert not [
        name for name, grad in grads.items() if not _same(grad, expected[name].to(grad.dtype))
    ]


def _same(part, full):
    if not isinstance(part, DTensor):
        return torch.equal(part, full)
    return part.shape == full.shape and torch.equal(part.to_local(), part_of(full, part))


def exact_norm(full, p):
    flat = torch.cat([g.flatten() for g in full.values()]).double()
    return torch.linalg.vector_norm(flat, p).item()


def bound(full, p):
    """Relative error allowed: one float32 rounding for each element that is added, a few more for
    the powers.

    Rounding of the sum enters the norm times 1/p, and only the local sum of one tensor is float32.
    """
    longest = max(g.numel() for g in full.values())
    return 0.0 if p == math.inf else (longest + 4) * 2**-24 * max(1.0, 1 / p)


def assert_scaled(net, before, norm, limit):
    """Every gradient is its old value times the one factor, to the bit."""
    factor = torch.clamp(limit / (norm + 1e-6), max=1.0)
    after = full_grads(net)
    assert after.keys() == before.keys()
    for name, grad in after.items():
        assert torch.equal(grad, before[name].clone().mul_(factor)), name
