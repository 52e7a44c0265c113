"""The model, optimizer and scheduler that commit a27dd5d saved in
tests/checkpoint/saved_by_a27dd5d, by formula.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

PLACE = Path(__file__).parents[1] / "checkpoint" / "saved_by_a27dd5d"


class Net(nn.Module):
    """Tied weights, two dtypes, a buffer and state that is not a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 3)
        self.layer = nn.Linear(3, 5, dtype=torch.bfloat16)
        self.head = nn.Linear(3, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("count", torch.tensor(0))
        self.note: Any = {}

    def get_extra_state(self) -> Any:
        return self.note

    def set_extra_state(self, state: Any) -> None:
        self.note = state


def values(shape: torch.Size, start: float) -> torch.Tensor:
    """Numbers that every dtype holds, different in each place."""
    return (start + torch.arange(shape.numel()) / 4).view(shape)


def build(start: float | None) -> tuple[Net, torch.optim.AdamW, Any]:
    """All of it; with the saved values from ``start`` on, or fresh for None."""
    net = Net()
    params = list(net.parameters())
    groups = [{"params": params[:1], "weight_decay": 0.5}, {"params": params[1:]}]
    optimizer = torch.optim.AdamW(groups, lr=0.25 if start is not None else 0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    if start is None:
        return net, optimizer, scheduler
    net.note, net.count = {"seen": torch.ones(2), "of": 3}, torch.tensor(8)
    for number, param in enumerate(params):
        param.grad = torch.zeros_like(param)
        param.data.copy_(values(param.shape, start + number))
    optimizer.step()
    scheduler.step()
    for number, param in enumerate(params):
        param.data.copy_(values(param.shape, start + number))
        optimizer.state[param]["exp_avg"].copy_(values(param.shape, start + 10 + number))
        optimizer.state[param]["exp_avg_sq"].copy_(values(param.shape, start + 20 + number))
    return net, optimizer, scheduler
