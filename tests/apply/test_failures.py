"""Where torch cannot shard a model: one error that names the parameter, on every rank."""

from __future__ import annotations

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
    with fake_world(2), pytest.raises(PlanError, match=r"^layers.1.up.weight could not .*Whole.* build it again"):
        shard_model(model)
    with fake_world(2):
        shard_model(whole(), ignored_params=["layers.1.up.weight", "layers.2.up.weight"])


@distributed(world_size=2)
def test_a_failure_of_one_rank_is_one_of_all() -> None:
    fails = {"side_effect": RuntimeError("out of memory")} if dist.get_rank() == 1 else {"wraps": apply.fully_shard}
    with mock.patch.object(apply, "fully_shard", **fails), pytest.raises(PlanError, match="out of memory"):
        shard_model(Decoder(), units=Block)
    shard_model(Decoder(), units=Block)
