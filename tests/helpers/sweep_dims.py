"""Everything below the plan with experts on other dims than 0, which the default chooses: 4 gloo ranks.

Run by hand, a minute: ``python tests/helpers/sweep_dims.py``. ``tests/training/test_shard_dims_ranks.py`` runs a part.
Training is in float64 against one process that sees all batches. Where the arithmetic is the same, bits are compared.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from meshes import mesh_of
from small_moe import MoE
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from shardkit import (
    CPUOffloadPolicy,
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
    step_on_local_shards,
)
from shardkit.grads import set_reduce_precision
from shardkit.testing import RankPool

# Sums over ranks and micro-batches in another order differ by some 2**-50 of their terms, and a step of Adam with this
# eps makes at most 10 times that of it.
CLOSE = {"rtol": 1e-9, "atol": 1e-11}
CLIP, STEPS, MICRO = 0.05, 3, 2
ON_DIM_0 = by_class("MoEBlock", shard_dim=0)
HALF = MixedPrecisionPolicy(torch.bfloat16, torch.float32)


def build(experts: int = 3, dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return MoE(layers=2, experts=experts).to(dtype)


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


def plain(clips: bool = True, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """The parameters after training in one process."""
    model, world = build(dtype=dtype), dist.get_world_size()
    optimizer = adam(model.parameters())
    for step in range(STEPS):
        losses = [loss_of(model, step, micro, rank) for micro in range(MICRO) for rank in range(world)]
        (sum(losses) / len(losses)).backward()  # type: ignore[union-attr]
        if clips:
            assert nn.utils.clip_grad_norm_(model.parameters(), CLIP) > CLIP
        optimizer.step()
        optimizer.zero_grad()
    return {name: param.detach() for name, param in model.named_parameters()}


def train(model: nn.Module, optimizer: Any, clips: bool = True, **options: Any) -> nn.Module:
    for step in range(STEPS):
        for micro in range(MICRO):
            with accumulate(model, last=micro == MICRO - 1, **options):
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


def trains(
    shape: tuple[int, ...] = (4,), local: bool = False, how: dict[str, Any] | None = None, **options: Any
) -> None:
    model = sharded(shape, **options)
    optimizer = adam(model.parameters())
    train(model, step_on_local_shards(optimizer) if local else optimizer, **how or {})
    assert_close(model, plain())


def alike_on_dim_0(shape: tuple[int, ...], wire: bool, **options: Any) -> None:
    """Sums of two terms, or in an order of our own, have the same bits on whatever dim."""
    found = []
    for rules in ({}, {"units": [ON_DIM_0]}):
        model = sharded(shape, dtype=torch.float32, mp_policy=HALF, **rules, **options)
        if wire:
            set_reduce_precision(model)
        train(model, torch.optim.SGD(model.parameters(), lr=0.1), clips=False)
        found.append(values(model))
    assert_same(*found)
    assert any(not torch.equal(found[0][name], value) for name, value in values(sharded(dtype=torch.float32)).items())


def meta_init() -> None:
    with init_on_meta():
        model = build()
    shard_model(model, mesh=mesh_of((4,)))
    materialize(model)
    assert_same(values(on_dim_1(model)), dict(build().named_parameters()))


def state_in_memory() -> None:
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


CASES: dict[str, Callable[[], None]] = {
    "train": trains,
    "hsdp": functools.partial(trains, (2, 2)),
    "offload": functools.partial(trains, offload_policy=CPUOffloadPolicy(pin_memory=False)),
    "local shards": functools.partial(trains, local=True),
    "shard gradients": functools.partial(trains, (2, 2), how={"shard_gradients": True}),
    "keep unsharded": functools.partial(trains, how={"keep_unsharded": True}),
    "recompute": functools.partial(trains, checkpoint_activations=True, prefetch=2),
    "keep gathered": functools.partial(trains, reshard_after_forward=False),
    "mixed precision": functools.partial(alike_on_dim_0, (2, 2), wire=False),
    "bf16 wire": functools.partial(alike_on_dim_0, (4,), wire=True),
    "bf16 wire, hsdp": functools.partial(alike_on_dim_0, (2, 2), wire=True),
    "meta": meta_init,
    "state": state_in_memory,
}


def run_case(name: str) -> None:
    CASES[name]()


def main(names: list[str]) -> None:
    """Print one line for each case."""
    with RankPool(4, timeout=300) as pool:
        for name in names or CASES:
            try:
                pool.run(run_case, name)
                print(f"{name}: exact", flush=True)
            except Exception as error:
                print(f"{name}: {str(error)[-1500:]}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
