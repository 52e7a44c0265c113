"""Optimizers of packages: the parameters after four steps are those of the unsharded model, to the bit."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from shardkit.optim import step_on_local_shards, step_on_whole_matrices
from shardkit.testing import distributed

Make = Callable[[Any], Any]


class Net(nn.Module):
    """Uneven matrices, vectors, and a bias of zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.up = nn.Embedding(7, 12), nn.Linear(12, 10)
        self.norm, self.down = nn.LayerNorm(10), nn.Linear(10, 7)
        nn.init.zeros_(self.up.bias)

    def forward(self, ids: Tensor) -> Tensor:
        return self.down(self.norm(torch.tanh(self.up(self.embed(ids)))))  # type: ignore[no-any-return]


def build(shape: tuple[int, ...] | None) -> Net:
    """The net in float64, sharded on a mesh of this shape."""
    torch.manual_seed(0)
    net = Net().double()
    if shape is not None:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp_replicate", "dp_shard")[-len(shape) :])
        fully_shard(net.embed, mesh=mesh)
        fully_shard(net, mesh=mesh)
    return net


def maker(name: str) -> Make:
    """What makes the optimizer of this name for parameters."""
    if name == "came_pytorch.CAME":
        return partial(pytest.importorskip("came_pytorch").CAME, lr=1e-2)
    return partial(pytest.importorskip("pytorch_optimizer").load_optimizer(name), lr=1e-2)


def train(net: nn.Module, optimizer: Any, steps: range) -> dict[str, Tensor]:
    """Take these steps, and return the parameters after them."""
    if callable(getattr(optimizer, "train", None)):
        optimizer.train()
    needs_closure = any(
        each.default is each.empty and each.kind is each.POSITIONAL_OR_KEYWORD
        for each in inspect.signature(optimizer.step).parameters.values()
    )
    for step in steps:
        torch.manual_seed(step)
        ids, targets = torch.randint(0, 7, (2, 6))
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(ids), targets).backward()
        optimizer.step(*[lambda: None] * needs_closure)
    params = dict(net.named_parameters())
    return {fqn: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone() for fqn, p in params.items()}


# By name: whether it is element-wise, so that step_on_local_shards takes it too.
PACKAGES = {
    "came_pytorch.CAME": False,
    "madgrad": True,  # state under a name
    "aggmo": True,  # state in a list
    "shampoo": False,
    "soap": False,
    "spam": False,  # makes whole masks when it is built
    "stablespam": False,
}


@pytest.mark.parametrize("name", PACKAGES)
@distributed(world_size=2, backend="gloo")
def test_a_packages_optimizer(name):
    make = maker(name)
    net = build(None)
    expected = train(net, make(list(net.parameters())), range(4))
    for step_on in (step_on_whole_matrices, partial(step_on_local_shards, elementwise=True))[: 1 + PACKAGES[name]]:
        sharded = build((2,))
        optimizer = step_on(make(list(sharded.parameters())))
        found = train(sharded, optimizer, range(4))
        assert all(torch.equal(found[fqn], value) for fqn, value in expected.items())
