"""Where torch cannot shard a model: one error that names the parameter, on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from small_models import Block, Decoder
from torch import Tensor, nn
from torch.utils._python_dispatch import return_and_correct_aliasing

from shardkit import PlanError, shard_model
from shardkit.apply import shard as apply
from shardkit.testing import distributed, fake_world


class Whole(torch.Tensor):
    """A tensor class without an operator that splits it, as torchao's int8 weights."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> Whole:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            raise NotImplementedError(f"Whole: {func}")
        return return_and_correct_aliasing(func, args, kwargs or {}, cls(args[0].inner))


def whole() -> nn.Module:
    model = Decoder()
    for layer in model.layers[1:]:
        layer.up.weight = nn.Parameter(Whole(layer.up.weight.detach()), requires_grad=False)
    return model


def test_a_tensor_that_cannot_be_split_is_named() -> None:
    model = whole()
    with (
        fake_world(2),
        pytest.raises(PlanError, match=r"^layers.1.up.weight could not .*Whole.* build it again"),
    ):
        shard_model(model)
    with fake_world(2):
        shard_model(whole(), ignored_params=["layers.1.up.weight", "layers.2.up.weight"])


def test_ignored_tensors_without_operators() -> None:
    model = whole()
    names = ["layers.1.up.weight", "layers.2.up.weight"]
    with fake_world(2), mock.patch.object(Whole, "__torch_dispatch__", side_effect=NotImplementedError):
        shard_model(model, ignored_params=names)
    assert isinstance(model.get_parameter(names[0]), Whole)


def failing(after: int) -> Callable[..., object]:
    """``fully_shard``, which fails in the middle of the last of this many calls."""
    calls = []

    def shard(module: nn.Module, **arguments: Any) -> object:
        calls.append(module)
        if len(calls) <= after:
            return torch.distributed.fsdp.fully_shard(module, **arguments)
        from torch.distributed.fsdp._fully_shard import _fsdp_param_group

        torchs, seen = _fsdp_param_group.FSDPParam, []

        def one(*args: Any, **kwargs: Any) -> object:
            seen.append(args)
            if len(seen) == 2 or len(args[0].shape) == 1:
                raise RuntimeError("out of memory")
            return torchs(*args, **kwargs)

        with mock.patch.object(_fsdp_param_group, "FSDPParam", one):
            return torch.distributed.fsdp.fully_shard(module, **arguments)

    return shard


@distributed(world_size=2)
def test_a_failure_of_one_rank_is_one_of_all() -> None:
    shard = failing(2) if dist.get_rank() == 1 else torch.distributed.fsdp.fully_shard
    with mock.patch.object(apply, "fully_shard", shard), pytest.raises(PlanError, match="out of memory"):
        shard_model(Decoder(), units=Block)
    shard_model(Decoder(), units=Block)
