"""The old habits of FSDP users on a sharded model: each is right, or one error or warning names what to do instead.

The numbers are those of a survey of 63 pains of FSDP users; these are the habits that once were silent, cryptic or
hung. ``AS_TORCH_HAS_THEM`` is the count of what is left.
"""

from __future__ import annotations

import copy
import io
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from small_models import Block, Decoder, step
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, StateDictType
from torch.distributed.tensor import DTensor, distribute_tensor

from shardkit import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    ShardkitError,
    by_class,
    full_state_dict,
    init_on_meta,
    load_full_state_dict,
    shard_model,
)
from shardkit.runtime import root
from shardkit.testing import distributed, fake_world

# What is left as torch has it: what becomes of the habit, and why shardkit does not change it.
AS_TORCH_HAS_THEM = {
    8: ("silent", "each rank's own token mean: only the program knows what its loss counts; scale_loss"),
    18: ("cryptic", "dist.all_reduce of a DTensor, in norms of one's own: torch's call; clip_grad_norm_"),
    24: ("cryptic", "DTensors with broadcast_from_rank0=True, inside of DCP; load_full_state_dict"),
    27: ("cryptic", "torch's clip_grad_norm_ over several meshes; model.clip_grad_norm_"),
    28: ("cryptic", "torch's clip_grad_norm_ over plain and sharded parameters; model.clip_grad_norm_"),
    30: ("cryptic", "dist.all_reduce of the DTensor that torch's clip_grad_norm_ returns; model.clip_grad_norm_"),
    44: ("cryptic", "p.data[:2] = x, an operation of DTensor; full_params"),
    45: ("cryptic", "an optimizer's own zeros(p.shape); step_on_local_shards. torch's Muon is right"),
    47: ("hangs", "a unit that one rank skips: only a watch over all ranks could tell"),
    48: ("hangs", "a parameter unused on one rank; set_reduce_scatter_unused_params"),
    49: ("hangs", "a call on one rank only: a warning names the call after a minute"),
    53: ("silent", "DTensor.from_local of uneven shards is called without the model; pass shape= and stride="),
}
RIGHT_OR_NAMED = {*range(1, 8), *range(10, 14), 15, 16, 17, 19, 22, 23, 29, 31, 38, 39, 40, 41, 55, 59, 62}


def test_what_is_left() -> None:
    assert len(AS_TORCH_HAS_THEM) <= 12
    assert {number for number, (how, _) in AS_TORCH_HAS_THEM.items() if how == "silent"} == {8, 53}
    assert not RIGHT_OR_NAMED & AS_TORCH_HAS_THEM.keys()
    assert len(RIGHT_OR_NAMED | AS_TORCH_HAS_THEM.keys()) == 38


def sharded(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    return shard_model(Decoder(), **options)


def tokens() -> Tensor:
    torch.manual_seed(1)
    return torch.randint(0, 11, (2, 5))


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Callable[[], str]:
    root._said.clear()
    return lambda: caplog.text


# 1: to_empty and a load.


class Rotary(nn.Module):
    """As the rotary embedding of a language model; ``mask`` and ``steps`` are buffers of other dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.register_buffer("inv_freq", torch.arange(1.0, 5.0), persistent=False)
        self.register_buffer("steps", torch.tensor(3), persistent=False)
        self.register_buffer("mask", torch.ones(4, dtype=torch.bool), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x * self.inv_freq.where(self.mask, 0)).clone()


@distributed(world_size=2)
def test_1_to_empty_and_a_load_name_the_buffers_that_nobody_wrote():
    torch.manual_seed(0)
    plain = Rotary()
    with init_on_meta():
        model = Rotary()
    shard_model(model).to_empty(device="cpu")
    load_full_state_dict(model, plain.state_dict())
    with pytest.raises(ShardkitError, match=r"inv_freq, steps, mask: has no value.*init_on_meta\(\).*materialize"):
        model(torch.ones(2, 4))
    with init_on_meta():
        model = Rotary()
    shard_model(model).to_empty(device="cpu")
    load_full_state_dict(model, plain.state_dict())
    for name, buffer in plain.named_buffers():
        model.get_buffer(name).copy_(buffer)
    assert torch.equal(model(torch.ones(2, 4)), plain(torch.ones(2, 4)))


# 3, 4, 13, 22, 23, 39, 40, 59: state.


@distributed(world_size=2)
def test_3_and_4_the_statics_of_fsdp1():
    model = sharded()
    with pytest.raises(ShardkitError, match=r"set_state_dict_type: .*full_state_dict\(model\)"):
        FullyShardedDataParallel.set_state_dict_type(model, StateDictType.FULL_STATE_DICT)
    with pytest.raises(ShardkitError, match=r"summon_full_params: .*full_params\(model, "):
        FullyShardedDataParallel.summon_full_params(model).__enter__()
    with pytest.raises(ShardkitError, match=r"summon_full_params: .*full_params\(model, "):
        FullyShardedDataParallel.summon_full_params(model, recurse=False).__enter__()


def test_13_39_and_40_files_made_of_shards(said: Callable[[], str]) -> None:
    with fake_world(2):
        model = sharded()
        get_model_state_dict(model)  # DCP's own ways say nothing
        full_state_dict(model)
        copy.deepcopy(model.head.weight)
        assert not said()
        torch.save({k: v for k, v in model.state_dict().items() if "head" in k}, io.BytesIO())
        assert re.search(
            r"model.state_dict\(\): holds this rank's shards.*safetensors.*full_state_dict\(model\)", said()
        )
        before = said()
        model.state_dict()
        assert said() == before, "once is enough"


class Stateful:
    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def state_dict(self) -> dict[str, Any]:
        return self.model.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state)


@distributed(world_size=2)
def test_40_nothing_is_said_to_dcp(tmp_path):
    root._said.clear()
    model = sharded()
    for work in (dcp.save, dcp.load):
        work({"model": Stateful(model)}, checkpoint_id=tmp_path)
    assert not root._said


def test_59_names_of_a_compiled_model(said: Callable[[], str]) -> None:
    with fake_world(2):
        assert all(name.startswith("_orig_mod.") for name in torch.compile(sharded()).state_dict())
        assert re.search(r"has names with '_orig_mod\.'.*compile=True", said())
        root._said.clear()
        shard_model(torch.compile(Decoder()), units=by_class(Block)).state_dict()
        assert said().count("has names with '_orig_mod.'") == 2


@distributed(world_size=2)
def test_22_and_23_loading_what_is_not_sharded():
    plain, model = Decoder(), sharded()
    before = full_state_dict(model)
    for options in ({}, {"assign": True}, {"strict": False}):
        with pytest.raises(ShardkitError, match=r"22 full tensors.*load_full_state_dict\(model, state_dict\)"):
            model.load_state_dict(plain.state_dict(), **options)
    after = full_state_dict(model)
    assert all(torch.equal(after[name], before[name]) for name in before)

    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, plain.state_dict() if dist.get_rank() == 0 else {}, options=options)
    set_model_state_dict(model, model.state_dict())
    model.load_state_dict(model.state_dict())
    model(tokens())  # what it leaves gathered is sharded for the names of a state dict
    with pytest.raises(ShardkitError, match="22 full tensors"):
        model.load_state_dict(plain.state_dict())


# 10, 11, 12: values.


@distributed(world_size=2)
def test_10_ranks_that_start_from_different_values():
    torch.manual_seed(dist.get_rank())
    with pytest.raises(ShardkitError, match=r"embed.weight.*sync_module_states=True"):
        shard_model(Decoder())


def test_11_and_12_initialization_after_sharding(said: Callable[[], str]) -> None:
    def init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight)

    class Own(Decoder):
        def init_weights(self) -> None:
            self.apply(init)

        def no_sync(self) -> str:
            return "own"

    with fake_world(2):
        sharded().apply(lambda module: None)
        assert not said()
        with pytest.warns(UserWarning, match="DTensor random operators"):  # torch's, where nothing of ours is called
            sharded().apply(init)
        assert re.search(r"model.apply\(\): draws random numbers.*materialize\(model, init=", said())
        with pytest.warns(UserWarning, match="DTensor random operators"):
            shard_model(Own()).init_weights()
        assert "model.init_weights(): draws" in said()
        assert shard_model(Own()).no_sync() == "own"


# 2, 5, 6, 7, 17, 45: optimizers.


@distributed(world_size=2)
def test_2_5_and_6_steps_that_would_train_nothing():
    model = Decoder()
    early = torch.optim.SGD(model.parameters(), lr=1.0)
    shard_model(model)
    step(model)
    with pytest.raises(ShardkitError, match=r"holds 22 parameters that sharding has replaced: embed.weight"):
        early.step()

    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer.zero_grad()
    model.set_requires_gradient_sync(False)
    step(model)
    with pytest.raises(ShardkitError, match="no rank has reduced yet"):
        optimizer.step()
    optimizer.zero_grad()
    model.set_requires_gradient_sync(True)
    step(model)
    plain = Decoder()
    load_full_state_dict(plain, full_state_dict(model, rank0_only=False), src="all")
    step(plain)
    for param, other in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(other.grad.full_tensor(), param.grad, rtol=1e-4, atol=1e-7)


def test_7_half_precision_without_masters(said: Callable[[], str]) -> None:
    with fake_world(2):
        model = shard_model(Decoder().bfloat16())
        torch.optim.SGD(model.parameters(), lr=1.0).step()
    assert re.search(r"SGD: 22 parameters that train in bfloat16, without float32 masters.*MixedPrecision", said())


def test_17_ignored_parameters_that_train(said: Callable[[], str]) -> None:
    with fake_world(2):
        sharded(ignored_params=["head.weight"])
        assert re.search(r"head.weight: trains outside of all units.*All-reduce", said())


@distributed(world_size=2)
def test_45_muon():
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    model = shard_model(copy.deepcopy(plain))
    for param, other in zip(plain.parameters(), model.parameters(), strict=True):
        param.grad = torch.randn(8, 8)
        other.grad = distribute_tensor(param.grad, other.device_mesh, other.placements)
    before = [param.detach().clone() for param in plain.parameters()]
    for each in (plain, model):
        torch.optim.Muon(each.parameters(), lr=0.1).step()
    for old, param, other in zip(before, plain.parameters(), model.parameters(), strict=True):
        moved = (param - old).abs().max()
        # It orthogonalizes in bfloat16, so partial sums of two ranks round otherwise.
        assert (other.full_tensor() - param).abs().max() < 2**-5 * moved


# 15, 16, 19, 31, 55: forwards.


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x * self.scale)


def test_15_buffers_are_not_cast() -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    nets = {
        "1.running_mean, 1.running_var": (nn.Linear(4, 4), nn.BatchNorm1d(4)),
        "0.scale": (Scaled(), nn.Linear(4, 4)),
    }
    with fake_world(2):
        for names, modules in nets.items():
            model = shard_model(nn.Sequential(*modules), mp_policy=policy)
            with pytest.raises(ShardkitError, match=rf"{names}: in torch.float32.*never buffers. Cast"):
                model(torch.ones(3, 4))
            for buffer in model.buffers():
                buffer.data = buffer.to(torch.bfloat16) if buffer.is_floating_point() else buffer
            assert model(torch.ones(3, 4)).dtype == torch.bfloat16
        with pytest.raises(RuntimeError, match="must have the same dtype"):  # no buffer's fault, so torch's own
            shard_model(nn.Sequential(nn.Linear(4, 4)))(torch.ones(3, 4, dtype=torch.float64))


class Flat(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x).view(-1)


@pytest.mark.skipif(torch.__version__ < "2.13", reason="torch warns since 2.13")
def test_16_a_unit_that_returns_a_view() -> None:
    with fake_world(2), pytest.warns(UserWarning, match=r"FSDPFlat\) returned a view.*`.clone\(\)`"):
        shard_model(nn.Sequential(Flat(), nn.Unflatten(0, (2, 4)), Block(4)), units=by_class(Flat))(torch.ones(2, 4))


@distributed(world_size=2)
def test_19_31_and_55_other_ways_into_a_model():
    model, plain = sharded(), Decoder()
    load_full_state_dict(model, plain.state_dict(), src="all")
    with torch.no_grad():
        hidden = plain.embed(tokens())
        assert torch.equal(model.embed(tokens()), hidden)  # a child first
        assert torch.equal(model.head(hidden), plain.head(hidden))
        assert torch.equal(model.forward(tokens()), plain(tokens()))
    assert all(isinstance(param, DTensor) for param in model.parameters())


# 29, 38, 41, 62: methods and arguments.


@distributed(world_size=2)
def test_29_methods_of_fsdp1():
    model, plain = sharded(), Decoder()
    load_full_state_dict(model, plain.state_dict(), src="all")
    with model.no_sync():
        step(model)
    step(model)
    for _ in range(2):
        step(plain)
    expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
    norm = model.clip_grad_norm_(0.1)
    assert not isinstance(norm, DTensor)
    torch.testing.assert_close(norm, expected, rtol=1e-5, atol=0)  # sums in another order
    for param, other in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(other.grad.full_tensor(), param.grad, rtol=1e-4, atol=1e-7)


def test_38_copies() -> None:
    with fake_world(2):
        model = sharded()
        for habit in (copy.deepcopy, torch.optim.swa_utils.AveragedModel):
            with pytest.raises(ShardkitError, match=r"deepcopy.*load_state_dict\(model.state_dict\(\)\)"):
                habit(model)
        other = sharded()
        other.load_state_dict(model.state_dict())
        assert type(shard_model(nn.Sequential(Block(), Block()))[:1]) is nn.Sequential


def test_41_offloaded_models_stay_on_the_cpu() -> None:
    with fake_world(2):
        model = sharded(offload_policy=CPUOffloadPolicy(pin_memory=False))
        moves = [lambda: model.to("cuda"), lambda: model.to(device=torch.device("cuda", 0)), lambda: model.cuda()]
        for move in moves:
            with pytest.raises(ShardkitError, match=r"embed.weight, .*would move to cuda.*offloaded.*Remove the call"):
                move()
        assert model.to("cpu").to(torch.float64).to(torch.float32) is model
        step(model)


FSDP1_ARGUMENTS = {
    "auto_wrap_policy": "by_class",
    "sharding_strategy": "reshard_after_forward",
}


def test_62_arguments_of_fsdp1() -> None:
    model = Decoder()
    for name, instead in FSDP1_ARGUMENTS.items():
        with pytest.raises(ShardkitError, match=rf"got FSDP1 arguments: {name}\..*{instead}.*shard_like_fsdp1"):
            shard_model(model, **{name: ShardingStrategy.FULL_SHARD})
    with pytest.raises(TypeError, match="unexpected keyword argument 'unit'"):
        shard_model(model, unit=[])
