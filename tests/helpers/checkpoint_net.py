"""A small model that trains, with every awkward shape, for the tests of checkpoints; and how states
are compared.
"""

import torch
import torch.distributed as dist
from grads_net import Net
from meshes import mesh_of
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LambdaLR

from shardkit.optim import step_on_local_shards
from shardkit.state import full_optimizer_state_dict

IDS = torch.tensor([[0, 1, 2, 3, 4], [6, 5, 4, 3, 2]])


class Trained(Net):
    """Net with a parameter that never gets a gradient, a buffer that changes, and state that is no
    tensor.
    """

    def __init__(self):
        super().__init__()
        self.unused = nn.Parameter(torch.zeros(5))
        self.register_buffer("steps", torch.tensor(0))
        self.note = {"seen": 0}

    def get_extra_state(self):
        return self.note

    def set_extra_state(self, state):
        self.note = state

    def forward(self, ids):
        self.steps += 1
        self.note = {"seen": self.note["seen"] + ids.numel()}
        return super().forward(ids)


def build(shape, seed=0, lr=1e-2):
    """Model, optimizer with two groups, and scheduler; sharded on a mesh of ``shape``, plain for
    None.
    """
    torch.manual_seed(seed)
    net = Trained()
    if shape is not None:
        mesh = mesh_of(shape)
        for block in net.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(net, mesh=mesh)
    decayed = [param for param in net.parameters() if param.dim() > 1]
    others = [param for param in net.parameters() if param.dim() == 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = step_on_local_shards(torch.optim.AdamW(groups, lr=lr))
    return net, optimizer, LambdaLR(optimizer, lambda epoch: 0.9**epoch)


def train(net, optimizer, scheduler, steps=2):
    """Every rank has the same batch, and noise of the CPU generator, so that restoring it shows."""
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        noise = 1 + torch.rand(())
        loss = (net(IDS) * noise).square().mean()
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    return losses


def whole(net, optimizer, scheduler):
    """All that training goes on from, on rank 0 in full. Collective."""
    with torch.no_grad():
        tensors = {
            name: value
            for name, value in net.state_dict().items()
            if isinstance(value, torch.Tensor)
        }
        model = {
            name: value.full_tensor() if isinstance(value, DTensor) else value
            for name, value in tensors.items()
        }
    return {
        "model": {name: value.clone() for name, value in model.items()},
        "note": dict(net.note),
        "optimizer": full_optimizer_state_dict(net, optimizer),
        "scheduler": scheduler.state_dict(),
        "random": torch.get_rng_state(),
    }


def is_first():
    return not dist.is_initialized() or dist.get_rank() == 0
