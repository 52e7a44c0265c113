"""A model that could not be sharded is what it was, wherever torch failed, and on every rank."""

from __future__ import annotations

import copy
import dataclasses
import gc
import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from refusals import refused
from small_models import Block, Decoder, step
from torch import Tensor, nn
from torch.utils._python_dispatch import return_and_correct_aliasing

from shardkit import MeshSpec, PlanError, ShardUnit, apply_plan, init_on_meta, plan_model, shard_model
from shardkit.apply import shard as apply
from shardkit.apply.carry import Original
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


def test_tensors_that_cannot_be_split() -> None:
    model = whole()
    names = "layers.1.up.weight, layers.2.up.weight"
    with fake_world(2), refused(model, f"{names}: a Whole cannot be split: NotImplementedError", "ignored_params"):
        shard_model(model)
    with fake_world(2):
        shard_model(model, ignored_params=names.split(", "))


def test_ignored_tensors_without_operators() -> None:
    model = whole()
    names = ["layers.1.up.weight", "layers.2.up.weight"]
    with fake_world(2), mock.patch.object(Whole, "__torch_dispatch__", side_effect=NotImplementedError):
        shard_model(model, ignored_params=names)
    assert isinstance(model.get_parameter(names[0]), Whole)


def test_released_tensors_leave_no_memory() -> None:
    """As on an accelerator, where the memory of a unit is needed as soon as it is sharded."""
    model = whole()
    gc.collect()
    gc.disable()  # nothing may need it
    plan = plan_model(model, mesh=MeshSpec.sharded(2))
    gc.enable()
    original = Original(model, plan, "cuda")
    weight = model.layers[1].up.weight
    inner = weakref.ref(weight.inner)
    model.layers[1].up.weight = None
    original.release([weight])
    del weight
    assert inner() is None
    assert not original.is_whole


def containers(root: bool) -> nn.Module:
    model = nn.ModuleDict({"actor": Decoder(), "critic": Decoder()})
    return model if root else nn.Sequential(nn.Linear(2, 2), model)


def test_containers_without_forward() -> None:
    model = containers(root=True)
    with fake_world(2), refused(model, "(root): is a ModuleDict, which has no forward", "Shard each of its modules"):
        shard_model(model)
    model = containers(root=False)
    with fake_world(2):
        plan = plan_model(model)
        unit = ShardUnit(("1",), tuple(f"1.{name}" for name, _ in model[1].named_parameters()))
    by_hand = dataclasses.replace(
        plan, units=(unit, dataclasses.replace(plan.units[-1], params=("0.weight", "0.bias")))
    )
    with fake_world(2), refused(model, "1: is a ModuleDict, which has no forward"):
        apply_plan(model, by_hand)


def test_lazy_modules() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(3), nn.LazyBatchNorm1d(affine=False))
    with fake_world(2), pytest.raises(PlanError, match=r"1, 2: is a lazy module that is not initialized.* one forward"):
        shard_model(model)
    with init_on_meta():
        recorded = nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(3))
    with fake_world(2), pytest.raises(PlanError, match=r"1: is a lazy module that is not initialized"):
        shard_model(recorded)
    model(torch.ones(4, 2))
    with fake_world(2):
        shard_model(model)


def everything(model: nn.Module) -> list[object]:
    """All that a model is, by identity: classes, attributes, registries, hooks, tensors, what tensors bear."""
    found: list[object] = []
    for module in model.modules():
        found.append(type(module))
        for name, value in vars(module).items():
            found += [name, id(value), list(value) if isinstance(value, (dict, list, set)) else None]
            found += [id(each) for each in value.values()] if isinstance(value, dict) else []
            found += [id(each) for each in value] if isinstance(value, list) else []
    for tensor in (*model.parameters(), *model.buffers()):
        found += [id(tensor), tensor.data_ptr(), tensor.stride(), tensor._version, dict(vars(tensor))]
    return found


class Held(Decoder):
    """With all that sharding changes besides."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(3))
        self.layers[0].heads = [self.layers[0].up.weight]
        self.layers[0].pair = (self.layers[0].up.weight, 1)
        self.rnn = nn.LSTM(4, 4)
        self.norm.weight.mark = "kept"
        self.head.weight.data = self.head.weight.data.t().contiguous().t()
        self.embed.register_forward_hook(lambda *_: None)

    def generate(self) -> None:
        raise NotImplementedError


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


@pytest.mark.parametrize("after", [0, 1, 2, 4, 5])
def test_a_failure_in_the_middle_is_undone(after: int) -> None:
    model = Held()
    before = everything(model)
    with fake_world(2):
        plan = plan_model(model, checkpoint_activations=True, compile=True, prefetch=1)
        assert len(plan.units) == 6
        with (
            mock.patch.object(apply, "fully_shard", failing(after)),
            pytest.raises(
                PlanError, match=r"torch could not shard it: RuntimeError: out of mem.*The model was restored"
            ),
        ):
            apply_plan(model, plan)
        assert everything(model) == before
        step(model)  # neither hooks nor recomputation are left
        apply_plan(model, plan)


@pytest.mark.parametrize("broken", ["_prefetch", "register_fsdp_forward_method"])
def test_so_is_one_after_the_last_unit(broken: str) -> None:
    model = Held()
    before = everything(model)
    with fake_world(2), mock.patch.object(apply, broken, side_effect=KeyboardInterrupt):
        with pytest.raises(KeyboardInterrupt):
            shard_model(model, prefetch=1)
        assert everything(model) == before


@distributed(world_size=2)
def test_a_failure_of_one_rank_is_one_of_all() -> None:
    torch.manual_seed(0)
    model = Held()
    plain, before = copy.deepcopy(model), everything(model)
    shard = failing(2) if dist.get_rank() == 1 else torch.distributed.fsdp.fully_shard
    with mock.patch.object(apply, "fully_shard", shard), pytest.raises(PlanError, match="out of memory"):
        shard_model(model, units=Block)
    assert everything(model) == before
    shard_model(model, units=Block)
    tokens = torch.arange(10).view(2, 5)
    plain.head.weight.data = plain.head.weight.data.contiguous()  # as it is gathered
    assert torch.equal(model(tokens), plain(tokens))
