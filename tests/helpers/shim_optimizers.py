"""A model and a training loop for the tests of the drop-in's optimizer state."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
)
from torch.distributed.fsdp.fully_sharded_data_parallel import OptimStateKeyType
from torch.optim import Optimizer

from shardkit.fsdp1.fully_sharded_data_parallel import FullyShardedDataParallel as FSDP

FULL, SHARDED = StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT
NAME = OptimStateKeyType.PARAM_NAME
CPU = torch.device("cpu")


class Body(nn.Module):
    """Tied, frozen, and an inner module that the tests let FSDP ignore; 7 and 5 do not divide by 2.

    Rows of 32, so that vectors of 8 or 16 cover shards and full tensors alike: what is left over is rounded otherwise.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 32)
        self.up, self.down = nn.Linear(32, 5), nn.Linear(5, 32)
        self.frozen = nn.Linear(32, 32).requires_grad_(False)
        self.apart = nn.Linear(32, 32)
        self.head = nn.Linear(32, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        return self.head(self.apart(self.frozen(x + self.down(self.up(x).relu()))))


class Parent(nn.Module):
    """Has a parameter that is not wrapped."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.shift = nn.Parameter(torch.ones(7))
        self.body = Body()

    def forward(self, ids: Tensor) -> Tensor:
        return self.body(ids) + self.shift


def wrapped(whole: bool = False) -> nn.Module:
    """Frozen and trained parameters are apart, as use_orig_params=False needs it. ``whole``: all of it is wrapped."""
    net = Parent()
    net.body.frozen, net.body.up = FSDP(net.body.frozen), FSDP(net.body.up)
    if whole:
        return FSDP(net)
    net.body = FSDP(net.body, ignored_modules=[net.body.apart])
    return net


def two_groups(model: nn.Module, backwards: bool = False) -> list[dict[str, Any]]:
    """Two groups with options of their own, and an empty one between them."""
    named = list(model.named_parameters())
    weights = [param for name, param in named if "bias" not in name]
    biases = [param for name, param in named if "bias" in name]
    step = -1 if backwards else 1
    return [
        {"params": weights[::step], "note": "weights"},
        {"params": []},
        {"params": biases[::step], "lr": 0.02, "weight_decay": 0.0},
    ]


OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.01),
    "adam_fused": lambda groups: torch.optim.Adam(groups, lr=0.01, fused=True),
    "adamw_foreach": lambda groups: torch.optim.AdamW(groups, lr=0.01, foreach=True, amsgrad=True),
    "momentum": lambda groups: torch.optim.SGD(groups, lr=0.01, momentum=0.9),
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.01),
    "adagrad": lambda groups: torch.optim.Adagrad(groups, lr=0.01),
}


def train(model: nn.Module, optimizer: Optimizer, steps: range) -> list[float]:
    """Losses of steps with the same tokens on all ranks, so that the mean of two gradients is exactly the gradient."""
    losses = []
    for step in steps:
        ids = torch.randint(0, 7, (4, 3), generator=torch.Generator().manual_seed(step))
        loss = model(ids).square().mean()
        loss.backward()
        optimizer.step()
        model.zero_grad()
        losses.append(loss.item())
    return losses


def set_type(model: nn.Module, kind: StateDictType, **options: Any) -> None:
    configs = {
        FULL: (FullStateDictConfig, FullOptimStateDictConfig),
        SHARDED: (ShardedStateDictConfig, ShardedOptimStateDictConfig),
        StateDictType.LOCAL_STATE_DICT: (LocalStateDictConfig, LocalOptimStateDictConfig),
    }[kind]
    FSDP.set_state_dict_type(model, kind, configs[0](), configs[1](**options))
