"""Quantized optimizer state: saved as its values, and quantized once, by the optimizer's own class, where loaded."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from meshes import mesh_of
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from shardkit.checkpoint import load_checkpoint, save_checkpoint
from shardkit.state import (
    sharded_optimizer_state_dict,
)
from shardkit.testing import distributed

pytest.importorskip("torchao", reason="optimizers with quantized state")

OPTIMIZERS = ["AdamW8bit", "AdamW4bit", "AdamWFp8"]
MESHES = {"4": (4,), "hsdp": (2, 2), "dim 1": (4,)}


def build(mesh: tuple[int, ...] | None = None, dim: int = 0) -> nn.Module:
    """Shards of the first weight have whole blocks on some ranks and layouts only; those of the second on all."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(192, 129), nn.ReLU(), nn.Linear(129, 512), nn.Linear(512, 256))
    if mesh is not None:
        place = (lambda param: Shard(1) if param.ndim == 2 and param.shape[1] == 512 else None) if dim else None
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


def local(tensor: Tensor) -> Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def parts(tensor: Tensor) -> dict[str, Any]:
    tensor = local(tensor)
    names = tensor.__tensor_flatten__()[0] if hasattr(tensor, "__tensor_flatten__") else []
    return {"class": type(tensor).__name__, "dtype": tensor.dtype} | (
        {name: getattr(tensor, name).clone() for name in names} if names else {"": tensor.clone()}
    )


def values(tensor: Tensor) -> Tensor:
    """The full float32 values of sharded or plain state, gathered by torch."""
    shard = local(tensor)
    plain = (shard.dequantize() if hasattr(shard, "__tensor_flatten__") else shard).float()
    if not isinstance(tensor, DTensor):
        return plain
    like = (tensor.device_mesh, tensor.placements)
    return DTensor.from_local(plain, *like, shape=tensor.shape, stride=tensor.stride()).full_tensor()


def as_made_here(optimizer: Any, param: Tensor, key: str, full: Tensor) -> dict[str, Any]:
    """What the optimizer holds of these values, by torchao's own calls."""
    made = optimizer._new_buffer(param.detach(), key == "exp_avg")
    if isinstance(param, DTensor):
        full = distribute_tensor(full, param.device_mesh, param.placements)
    local(made).copy_(local(full))
    return parts(made)


def assert_equal(found: dict[str, Any], expected: dict[str, Any], name: str) -> None:
    assert found.keys() == expected.keys(), name
    for key, value in found.items():
        same = torch.equal(value, expected[key]) if isinstance(value, Tensor) else value == expected[key]
        assert same, (name, key)


def check(net: nn.Module, optimizer: Any, saved: dict[str, Tensor]) -> set[str]:
    """Compare all state with the saved values, quantized once; return the classes that were met."""
    state, met = sharded_optimizer_state_dict(net, optimizer)["state"], set()
    for fqn, param in net.named_parameters():
        assert state[fqn]["step"] == 2
        for key in ("exp_avg", "exp_avg_sq"):
            found = parts(state[fqn][key])
            assert_equal(found, as_made_here(optimizer, param, key, saved[f"{fqn}/{key}"]), f"{fqn} {key}")
            met.add(found["class"])
    return met


@distributed(world_size=2, backend="gloo")
def save_on_2(path, names):
    for name in names:
        net = build((2,))
        optimizer = make_optimizer(name, net)
        step(net, optimizer, 2)
        save_checkpoint(path / name, net, optimizer)
        keep(path / f"{name}.pt", saved_values(net, optimizer))


def keep(file, saved: dict[str, Tensor]) -> None:
    if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        torch.save(saved, file)


def saved_values(net: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    state = sharded_optimizer_state_dict(net, optimizer)["state"]
    return {f"{fqn}/{key}": values(entry[key]) for fqn, entry in state.items() for key in ("exp_avg", "exp_avg_sq")}


@distributed(world_size=4, backend="gloo")
def load_on_4(path, names, kinds):
    for name, kind in itertools.product(names, kinds):
        expected, mesh = torch.load(path / f"{name}.pt"), MESHES[kind]
        net = build(mesh, dim=1 if kind == "dim 1" else 0)
        optimizer = make_optimizer(name, net)
        if kind == "hsdp":
            step(net, optimizer)  # state is there already
        load_checkpoint(path / name, net, optimizer)
        met = check(net, optimizer, expected)
        assert met == {"Tensor", next(iter(met - {"Tensor"}))}, met  # plain and quantized ones
        step(net, optimizer)


def test_state_of_2_ranks_goes_to_4_and_to_1(tmp_path):
    save_on_2(tmp_path, OPTIMIZERS)
    load_on_4(tmp_path, OPTIMIZERS[:1], MESHES)
    load_on_4(tmp_path, OPTIMIZERS[1:], ["4"])
    for name in OPTIMIZERS:
        net = build()
        optimizer = make_optimizer(name, net)
        load_checkpoint(tmp_path / name, net, optimizer)
        check(net, optimizer, torch.load(tmp_path / f"{name}.pt"))


@pytest.mark.parametrize("format", ["safetensors", "dcp"])
@distributed(world_size=2, backend="gloo")
def test_adamw_takes_the_values_in_the_same_shards_too(format, tmp_path):
    net = build((2,))
    optimizer = make_optimizer("AdamW8bit", net)
    step(net, optimizer, 2)
    save_checkpoint(tmp_path / "c", net, optimizer, format=format, async_=True).wait()
    for begun in (False, True):
        resumed = build((2,))
        adamw = torch.optim.AdamW(resumed.parameters(), lr=1e-2)
        if begun:
            step(resumed, adamw)
        load_checkpoint(tmp_path / "c", resumed, adamw)
        for path, expected in saved_values(net, optimizer).items():
            fqn, key = path.split("/")
            found = adamw.state[resumed.get_parameter(fqn)][key]
            assert type(local(found)) is Tensor
            assert torch.equal(found.full_tensor(), expected), path
        step(resumed, adamw)  # raised NotImplementedError on state of torchao's class
