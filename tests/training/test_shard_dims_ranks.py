"""Experts on another dim than 0 train like one process, and save, load and initialize to the bit: 4 gloo ranks.

Training is in float64. Where the arithmetic is the same, bits are compared.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from meshes import mesh_of
from small_moe import MoE
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from shardkit import (
    MixedPrecisionPolicy,
    accumulate,
    by_class,
    clip_grad_norm_,
    full_optimizer_state_dict,
    full_params,
    full_state_dict,
    init_on_meta,
    load_full_optimizer_state_dict,
    load_full_state_dict,
    materialize,
    shard_model,
)
from shardkit.grads import set_reduce_precision
from shardkit.testing import distributed

# Sums over ranks and micro-batches in another order differ by some 2**-50 of their terms, and a step of Adam with this
# eps makes at most 10 times that of it.
CLOSE = {"rtol": 1e-9, "atol": 1e-11}
CLIP, STEPS, MICRO = 0.05, 3, 2
ON_DIM_0 = by_class("MoEBlock", shard_dim=0)
on_4 = distributed(world_size=4, backend="gloo")
HALF = MixedPrecisionPolicy(torch.bfloat16, torch.float32)


def build(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return MoE(layers=2, experts=3).to(dtype)


def sharded(shape: tuple[int, ...] = (4,), dtype: torch.dtype = torch.float64, **options: Any) -> nn.Module:
    """On ``shape``; the experts are on dim 1 unless rules say otherwise."""
    return on_dim_1(shard_model(build(dtype=dtype), mesh=mesh_of(shape), **options), "units" not in options)


def on_dim_1(model: nn.Module, expected: bool = True) -> nn.Module:
    placements = model.get_parameter("layers.0.experts.up").placements
    assert (placements[-1] == Shard(1)) is expected, placements
    assert all(each == Replicate() for each in placements[:-1])
    return model


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01, eps=1e-3)


def loss_of(model: nn.Module, step: int, micro: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + 10 * micro + rank)
    return model(torch.randint(0, 11, (2, 5), generator=generator)).double().square().mean()


def plain() -> dict[str, Tensor]:
    """The parameters after training in one process."""
    model, world = build(), dist.get_world_size()
    optimizer = adam(model.parameters())
    for step in range(STEPS):
        losses = [loss_of(model, step, micro, rank) for micro in range(MICRO) for rank in range(world)]
        (sum(losses) / len(losses)).backward()  # type: ignore[union-attr]
        assert nn.utils.clip_grad_norm_(model.parameters(), CLIP) > CLIP
        optimizer.step()
        optimizer.zero_grad()
    return {name: param.detach() for name, param in model.named_parameters()}


def train(model: nn.Module, optimizer: Any, clips: bool = True) -> nn.Module:
    for step in range(STEPS):
        for micro in range(MICRO):
            with accumulate(model, last=micro == MICRO - 1):
                (loss_of(model, step, micro, dist.get_rank()) / MICRO).backward()
        if clips:
            assert clip_grad_norm_(model, CLIP) > CLIP
        optimizer.step()
        optimizer.zero_grad()
    return model


def values(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: param.full_tensor().detach() if isinstance(param, DTensor) else param.detach()
        for name, param in model.named_parameters()
    }


def assert_close(model: nn.Module, expected: dict[str, Tensor]) -> None:
    for name, value in values(model).items():
        torch.testing.assert_close(value, expected[name], msg=lambda text, name=name: f"{name}: {text}", **CLOSE)


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name, value in expected.items() if not torch.equal(found[name], value)] == []


@on_4
def test_reducing_in_bf16_gives_the_bits_of_dim_0():
    found = []
    for rules in ({}, {"units": [ON_DIM_0]}):
        model = sharded(dtype=torch.float32, mp_policy=HALF, **rules)
        set_reduce_precision(model)
        train(model, torch.optim.SGD(model.parameters(), lr=0.1), clips=False)
        found.append(values(model))
    assert_same(*found)
    assert any(not torch.equal(found[0][name], value) for name, value in values(sharded(dtype=torch.float32)).items())


@on_4
def test_meta_init():
    with init_on_meta():
        model = build()
    shard_model(model, mesh=mesh_of((4,)))
    materialize(model)
    assert_same(values(on_dim_1(model)), dict(build().named_parameters()))


@on_4
def test_training_is_that_of_one_process():
    model = sharded((2, 2))
    assert_close(train(model, adam(model.parameters())), plain())


@on_4
def test_state_in_memory():
    model = sharded()
    optimizer = adam(model.parameters())
    train(model, optimizer)
    whole = full_state_dict(model, rank0_only=False)
    assert_same(whole, values(model))
    states = full_optimizer_state_dict(model, optimizer, rank0_only=False)
    for shape, rules in (
        ((2, 2), {}),
        ((4,), {"units": [ON_DIM_0]}),
        ((4,), {"units": [by_class("MoEBlock", shard_dim=2)]}),
    ):
        other = shard_model(build(), mesh=mesh_of(shape), **rules)
        its = adam(other.parameters())
        load_full_state_dict(other, whole, src="all")
        load_full_optimizer_state_dict(other, its, states, src="all")
        assert_same(values(other), whole)
        again = full_optimizer_state_dict(other, its, rank0_only=False)["state"]
        for name, state in states["state"].items():
            assert_same(again[name], state)
    with full_params(model):
        assert_same({name: param.detach() for name, param in model.named_parameters()}, whole)
