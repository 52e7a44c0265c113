"""Quantized optimizer state: a checkpoint holds its values, and they load as state that was never
on disk.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from meshes import mesh_of
from test_checkpoint_subclasses import parts
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from trees import assert_same

from shardkit.checkpoint import load_checkpoint, save_checkpoint
from shardkit.state import (
    full_optimizer_state_dict,
    load_full_optimizer_state_dict,
    sharded_optimizer_state_dict,
)
from shardkit.testing import distributed

pytest.importorskip("torchao", reason="optimizers with quantized state")

OPTIMIZERS = ["AdamW8bit", "AdamW4bit", "AdamWFp8"]
MESHES = {"4": (4,), "hsdp": (2, 2), "dim 1": (4,)}


def build(mesh: tuple[int, ...] | None = None, dim: int = 0) -> nn.Module:
    """Shards of the first weight have whole blocks on some ranks and layouts only; those of the
    second on all.
    """
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(192, 129), nn.ReLU(), nn.Linear(129, 512), nn.Linear(512, 256))
    if mesh is not None:
        place = (
            (lambda param: Shard(1) if param.ndim == 2 and param.shape[1] == 512 else None)
            if dim
            else None
        )
        fully_shard(net, mesh=mesh_of(mesh), shard_placement_fn=place)
    return net


def make_optimizer(name: str, net: nn.Module) -> Any:
    import torchao.optim

    return getattr(torchao.optim, name)(net.parameters(), lr=1e-2)


def step(net: nn.Module, optimizer: Any, count: int = 1) -> None:
    with torch.compiler.set_stance("force_eager"):
        for seed in range(count):
            optimizer.zero_grad()
            x = torch.randn(4, 192, generator=torch.Generator().manual_seed(seed))
            net(x).square().mean().backward()
            optimizer.step()


def held(net: nn.Module, optimizer: Any) -> dict[str, Any]:
    """Classes and inner tensors of the state on this rank."""
    state = sharded_optimizer_state_dict(net, optimizer)["state"]
    return {
        f"{fqn}/{key}": parts(value) for fqn, entry in state.items() for key, value in entry.items()
    }


@distributed(world_size=2, backend="gloo")
def save_on_2(path):
    for name in OPTIMIZERS:
        net = build((2,))
        optimizer = make_optimizer(name, net)
        step(net, optimizer, 2)
        save_checkpoint(path / name, net, optimizer)
        full = full_optimizer_state_dict(net, optimizer)
        if dist.get_rank() == 0:
            torch.save(full, path / f"{name}.pt")


def check_load(path, name, mesh=None, dim=0, used=False):
    """From disk and from memory, which other tests compare with torchao's own calls, the state is
    the same.
    """
    net = build(mesh, dim)
    optimizer, twin = make_optimizer(name, net), make_optimizer(name, net)
    if used:
        step(net, optimizer)  # state is there already
    load_checkpoint(path / name, net, optimizer)
    load_full_optimizer_state_dict(net, twin, torch.load(path / f"{name}.pt"), src="all")
    found = held(net, optimizer)
    assert_same(found, held(net, twin))
    assert len({each.get("class") for each in found.values()}) == 2, "plain and quantized ones"
    step(net, optimizer)


@distributed(world_size=4, backend="gloo")
def load_on_4(path, names, kinds):
    for name, kind in itertools.product(names, kinds):
        check_load(path, name, MESHES[kind], dim=kind == "dim 1", used=kind == "hsdp")


def test_state_of_2_ranks_goes_to_4_and_to_1(tmp_path):
    save_on_2(tmp_path)
    load_on_4(tmp_path, OPTIMIZERS[:1], MESHES)
    load_on_4(tmp_path, OPTIMIZERS[1:], ["4"])
    for name in OPTIMIZERS:
        check_load(tmp_path, name)


@pytest.mark.parametrize("format", ["safetensors"])
@distributed(world_size=2, backend="gloo")
def test_adamw_takes_the_values_in_the_same_shards_too(format, tmp_path):
    net = build((2,))
    optimizer = make_optimizer("AdamW8bit", net)
    step(net, optimizer, 2)
    save_checkpoint(tmp_path / "c", net, optimizer, async_=True).wait()
    expected = full_optimizer_state_dict(net, optimizer, rank0_only=False)["state"]
    for begun in (False, True):
        resumed = build((2,))
        adamw = torch.optim.AdamW(resumed.parameters(), lr=1e-2)
        if begun:
            step(resumed, adamw)
        load_checkpoint(tmp_path / "c", resumed, adamw)
        assert_same(full_optimizer_state_dict(resumed, adamw, rank0_only=False)["state"], expected)
        step(resumed, adamw)  # raised NotImplementedError on state of torchao's class
