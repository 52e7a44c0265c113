"""A mixture of experts that sends tokens by all-to-all, in float64, whole or split over the axis
"ep" of a mesh.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from layouts import full
from torch import nn
from torch.distributed.nn.functional import all_to_all_single
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from shardkit import (
    by_class,
    by_name,
    clip_grad_norm_,
    global_token_count,
    plan_model,
    scale_loss,
    step_on_local_shards,
)

EXPERTS, DIM = 8, 6
TOKENS = (11, 5, 0, 7, 3, 12, 1, 2)  # of each rank


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, DIM, DIM, dtype=torch.double) / 3)
        self.bias = nn.Parameter(torch.randn(EXPERTS, DIM, dtype=torch.double))
        self.group = None

    def forward(self, x, expert):
        if self.group is None:
            return torch.einsum("td,tdf->tf", x, self.weight[expert]) + self.bias[expert]
        weight, bias = (
            p.to_local() if isinstance(p, DTensor) else p for p in (self.weight, self.bias)
        )
        ranks = self.group.size()
        order = expert.argsort(stable=True)
        counts = torch.bincount(expert, minlength=EXPERTS)
        received = torch.empty_like(counts)
        dist.all_to_all_single(received, counts, group=self.group)
        to, of = (each.view(ranks, -1).sum(1).tolist() for each in (counts, received))
        rows = all_to_all_single(x.new_empty(sum(of), DIM), x[order], of, to, self.group)
        mine = torch.arange(len(weight)).repeat(ranks).repeat_interleave(received)
        done = torch.einsum("td,tdf->tf", rows, weight[mine]) + bias[mine]
        back = all_to_all_single(torch.empty_like(x), done, to, of, self.group)
        return torch.zeros_like(x).index_copy(0, order, back)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.experts = nn.Linear(DIM, DIM, dtype=torch.double), Experts()
        # a scalar, which is replicated
        self.scale = nn.Parameter(torch.tensor(1.5, dtype=torch.double))

    def forward(self, x, expert):
        return x + self.scale * self.experts(torch.tanh(self.linear(x)), expert)


class ExpertNet(nn.Module):
    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x, expert):
        for layer in self.layers:
            x = layer(x, expert)
        return x

    def split(self, mesh):
        """Split the experts over a mesh of one axis, in place."""
        for experts in (layer.experts for layer in self.layers):
            experts.group = mesh.get_group()
            for name, param in list(experts.named_parameters()):
                part = distribute_tensor(param.data, mesh, [Shard(0)], src_data_rank=None)
                setattr(experts, name, nn.Parameter(part))
        return self


RULES = [by_name("layers.*.experts", mesh="efsdp"), by_class(Block)]


def expert_plan(model, mesh):
    return plan_model(model, mesh=mesh, units=RULES)


def batch(rank, step):
    """The tokens of one rank and the expert of each."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(TOKENS[rank], DIM, generator=generator, dtype=torch.double)
    return x, torch.randint(0, EXPERTS, (TOKENS[rank],), generator=generator)


def sharded_backward(model, step):
    x, expert = batch(dist.get_rank(), step)
    scale_loss(model(x, expert).square().sum(), global_token_count(len(x), model), model).backward()


def plain_backward(model, ranks, step):
    losses = [model(*batch(rank, step)).square().sum() for rank in range(ranks)]
    torch.stack(losses).sum().div(sum(TOKENS[:ranks])).backward()


def worst(pairs):
    """The largest difference of pairs of tensors, relative to the second's largest element."""
    return max(((full(a) - b).abs().max() / b.abs().max()).item() for a, b in pairs)


def train_both(model, plain, steps=3):
    """Train the sharded model and the plain one with clipping and AdamW; the worst relative
    difference of anything.
    """
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (model, plain)]
    step_on_local_shards(optimizers[0])
    found = []
    for step in range(steps):
        sharded_backward(model, step)
        plain_backward(plain, dist.get_world_size(), step)
        pairs = list(zip(model.parameters(), plain.parameters(), strict=True))
        found.append(worst((a.grad, b.grad) for a, b in pairs))
        norms = [clip_grad_norm_(model, 1.0), nn.utils.clip_grad_norm_(plain.parameters(), 1.0)]
        assert norms[1] > 1, "nothing to clip"
        found.append(abs(norms[0] - norms[1]).item() / norms[1].item())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        found.append(worst(pairs))
    return max(found)
