"""Optimizer state that torchao quantizes: given as its values, and quantized again by the optimizer
that takes them.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from meshes import mesh_of
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor

from shardkit._torch import is_wrapper
from shardkit.shards import local_value
from shardkit.state import (
    full_optimizer_state_dict,
    load_full_optimizer_state_dict,
    load_sharded_optimizer_state_dict,
    sharded_optimizer_state_dict,
)
from shardkit.testing import distributed

torchao = pytest.importorskip("torchao.optim", reason="optimizers with quantized state")
MOMENTS = ("exp_avg", "exp_avg_sq")


def build(mesh: tuple[int, ...]) -> nn.Module:
    """On 2 ranks the first weight has whole blocks on the second one only, and the
    others on both.
    """
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(192, 129), nn.ReLU(), nn.Linear(129, 512), nn.Linear(512, 256))
    return fully_shard(net, mesh=mesh_of(mesh))


def step(net: nn.Module, *optimizers: Any) -> None:
    net.zero_grad()
    net(torch.randn(4, 192, generator=torch.Generator().manual_seed(1))).square().mean().backward()
    with torch.compiler.set_stance("force_eager"):
        for each in optimizers:
            each.step()


def values(tensor: Tensor) -> Tensor:
    local = local_value(tensor)
    return local.dequantize() if is_wrapper(local) else local.float()


@pytest.mark.parametrize("kind", ["AdamW8bit", "AdamW4bit", "AdamWFp8"])
@distributed(world_size=4, backend="gloo")
def test_values_go_to_fresh_and_used_optimizers_of_other_meshes_and_to_adamw(kind):
    net = build((2, 2))
    optimizer = getattr(torchao, kind)(net.parameters(), lr=1e-2)
    step(net, optimizer)
    full = full_optimizer_state_dict(net, optimizer, rank0_only=False)
    for name, param in net.named_parameters():
        for key in MOMENTS:
            found, own = full["state"][name][key], optimizer.state[param][key]
            assert (type(found), found.dtype) == (Tensor, torch.float32)
            assert torch.equal(
                local_value(distribute_tensor(found, own.device_mesh, own.placements)), values(own)
            )
    ways = (((4,), kind, False), ((2, 2), kind, True), ((4,), "adamw", False))
    for mesh, made, used in ways if kind == "AdamW8bit" else ways[:1]:
        other = build(mesh)
        makes = torch.optim.AdamW if made == "adamw" else getattr(torchao, kind)
        resumed, own = (makes(other.parameters(), lr=1e-2) for _ in range(2))
        step(other, *[resumed] * used, own)
        load_full_optimizer_state_dict(other, resumed, full if dist.get_rank() == 0 else {})
        kinds = set()
        for name, param in other.named_parameters():
            for key in MOMENTS:
                found, like = resumed.state[param][key], own.state[param][key]
                local_value(like).copy_(
                    local_value(
                        distribute_tensor(
                            full["state"][name][key], like.device_mesh, like.placements
                        )
                    )
                )
                assert type(local_value(found)) is type(local_value(like))
                assert torch.equal(values(found), values(like)), (name, key)
                kinds.add(type(local_value(found)))
        assert len(kinds) == (1 if made == "adamw" else 2), "plain shards and quantized ones"
        step(other, resumed)


@distributed(world_size=2, backend="gloo")
def test_sharded_state_is_live_and_an_optimizer_beside_takes_no_step():
    net = build((2,))

    def optimizers() -> list[torch.optim.Optimizer]:
        return [
            torchao.AdamW8bit(net[2].parameters()),
            torch.optim.SGD(net[3].parameters(), lr=0.1, momentum=0.9),
        ]

    both = optimizers()
    step(net, *both)
    with mock.patch.object(torch.optim.SGD, "step", None):  # as LBFGS's, which needs a closure
        full = full_optimizer_state_dict(net, both, rank0_only=False)
        load_full_optimizer_state_dict(net, optimizers(), full, src="all")
        load_full_optimizer_state_dict(net, both, full, src="all")
    sharded = sharded_optimizer_state_dict(net, both)
    assert sharded["state"]["2.weight"]["exp_avg"] is both[0].state[net[2].weight]["exp_avg"]
    load_sharded_optimizer_state_dict(net, both, sharded)
    again = full_optimizer_state_dict(net, both, rank0_only=False)
    assert torch.equal(
        again["state"]["3.weight"]["momentum_buffer"], full["state"]["3.weight"]["momentum_buffer"]
    )
