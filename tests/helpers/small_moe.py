"""A decoder with fewer experts than ranks, which hold their weights in one parameter, as in
transformers 5.
"""

from dataclasses import replace

import torch
from small_models import Block, Decoder
from torch import nn


class Experts(nn.Module):
    def __init__(self, experts, dim):
        super().__init__()
        self.up = nn.Parameter(torch.randn(experts, dim, 4 * dim) / dim)
        self.bias = nn.Parameter(torch.randn(experts, 4 * dim))
        self.down = nn.Parameter(torch.randn(experts, 4 * dim, dim) / dim)

    def forward(self, x, weights):
        hidden = torch.relu(torch.einsum("...d,edf->...ef", x, self.up) + self.bias)
        return torch.einsum("...ef,efd,...e->...d", hidden, self.down, weights)


class MoEBlock(Block):
    def __init__(self, dim, experts):
        super().__init__(dim)
        self.router = nn.Linear(dim, experts, bias=False)
        self.experts = Experts(experts, dim)

    def forward(self, x):
        x = super().forward(x)
        return x + self.experts(x, self.router(x).softmax(-1))


class MoE(Decoder):
    """Its experts are 90 % of it, at 2 of them; their sizes are multiples of 8."""

    def __init__(self, layers=3, dim=8, experts=2):
        super().__init__(0, dim)
        self.layers.extend(MoEBlock(dim, experts) for _ in range(layers))


def dims_of(plan):
    """The dims other than 0, by FQN."""
    return {fqn: dim for unit in plan.units for fqn, dim in unit.shard_dims}


def on_dims(plan, dims):
    """The plan with these dims, and dim 0 for all other parameters."""
    units = []
    for unit in plan.units:
        own = tuple((fqn, dim) for fqn, dim in dims.items() if fqn in unit.params)
        units.append(replace(unit, shard_dims=own))
    return replace(plan, units=tuple(units))
