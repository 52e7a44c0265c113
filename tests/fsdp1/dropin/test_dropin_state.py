"""The drop-in's model state beside torch's FSDP1 and the plain model: saved, loaded, set."""

import contextlib
from collections import OrderedDict

import pytest
import torch
import torch.distributed as dist
from cpu_ranks import on_ranks
from fsdp1_models import hybrid_mesh, quiet
from shim_states import BF16, FULL, LOCAL, SHARDED, Around, batch, is_same, net, ours, theirs, wiped
from state_models import VOCAB
from torch import nn
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    MixedPrecision,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictSettings,
)
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
from torch.distributed.tensor import DTensor

from shardkit import shard_model
from shardkit.errors import TranslationError
from shardkit.fsdp1.dropin.module import FullyShardedDataParallel as FSDP


@on_ranks(2)
def test_state_is_full_from_the_start_and_equal_to_fsdp1s():
    plain, model = net().state_dict(), ours()
    with quiet():
        assert is_same(model.state_dict(), theirs().state_dict())
    state = model.state_dict()
    assert is_same(state, plain)
    assert all(type(value) in (torch.Tensor, str) for value in state.values())
    assert state._metadata == plain._metadata
    assert (
        state["embed.weight"].data_ptr() != state["head.weight"].data_ptr()
    )  # as in FSDP1; safetensors refuses ties
    state["embed.weight"].zero_()
    assert is_same(model.state_dict(), plain)

    assert is_same(model.blocks[1].state_dict(), net().blocks[1].state_dict())
    into = OrderedDict(before=1)
    assert model.blocks[1].state_dict(destination=into, prefix="x.") is into
    assert list(into)[:2] == ["before", "x.norm.weight"]
    assert "y.norm.bias" in model.blocks[0].state_dict(OrderedDict(), "y.")
    parent, plain_parent = Around(model), Around(net())
    plain_parent.own = parent.own
    assert is_same(parent.state_dict(), plain_parent.state_dict())
    assert parent.state_dict()._metadata == plain_parent.state_dict()._metadata
    assert parent.state_dict(prefix="p.", keep_vars=True)["p.own.weight"] is parent.own.weight

    with FSDP.summon_full_params(model):
        assert is_same(model.state_dict(), plain)


@on_ranks(2)
def test_every_type_and_config():
    plain, model, rank = net().state_dict(), ours(), dist.get_rank()
    parent = Around(model)
    with FSDP.state_dict_type(
        parent, FULL, FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
    ):
        assert is_same(model.state_dict(), plain if rank == 0 else {})
        assert ("inner.counts" in parent.state_dict()) is (rank == 0)
        assert "own.weight" in parent.state_dict()
    with FSDP.state_dict_type(model, SHARDED):
        first = model.state_dict()
        assert isinstance(first["embed.weight"], DTensor)
        assert first._metadata == plain._metadata
        assert is_same(first, plain)
        with torch.no_grad():
            model.embed.weight.mul_(2)
        assert is_same(first, plain)  # a copy, as in FSDP1
        model.load_state_dict(first)
    assert is_same(model.state_dict(), plain)
    with FSDP.state_dict_type(model, SHARDED, ShardedStateDictConfig(offload_to_cpu=True)):
        assert model.state_dict()["embed.weight"].to_local().device.type == "cpu"
    with FSDP.state_dict_type(model, LOCAL):
        shared = model.state_dict()  # in the parameters' memory, as in FSDP1
        kept = {
            name: value.clone() if torch.is_tensor(value) else value
            for name, value in shared.items()
        }
        shared["embed.weight"].copy_(kept["embed.weight"] * 2)
        assert torch.equal(
            model.state_dict()["embed.weight"].full_tensor(), plain["embed.weight"] * 2
        )
        model.load_state_dict(kept)
        assert is_same(model.state_dict(), plain)

    alone = ours(sharding_strategy=ShardingStrategy.NO_SHARD)
    with FSDP.state_dict_type(alone, SHARDED):
        state = alone.state_dict()
    assert type(state["embed.weight"]) is torch.Tensor
    assert is_same(state, plain)

    half = MixedPrecision(param_dtype=BF16, buffer_dtype=BF16)
    both = ours(mixed_precision=half), theirs(mixed_precision=half)
    for model in both:
        with quiet(), torch.no_grad():
            model.eval()(batch())
    assert both[0].scale.dtype == BF16
    with quiet():
        assert is_same(both[0].state_dict(), both[1].state_dict())
    with FSDP.state_dict_type(both[0], SHARDED):
        assert both[0].state_dict()["scale"].dtype == torch.float64
    both[0].load_state_dict(plain)
    assert both[0].scale.dtype == BF16


@on_ranks(2)
def test_settings():
    model = ours()
    parent = Around(model)
    start = StateDictSettings(FULL, FullStateDictConfig(), FullOptimStateDictConfig())
    wanted = StateDictSettings(
        SHARDED, ShardedStateDictConfig(True), ShardedOptimStateDictConfig(False)
    )
    assert FSDP.get_state_dict_type(parent) == start
    assert (
        FSDP.set_state_dict_type(
            parent, SHARDED, wanted.state_dict_config, wanted.optim_state_dict_config
        )
        == start
    )
    assert FSDP.get_state_dict_type(model) == FSDP.get_state_dict_type(model.blocks[0]) == wanted
    with contextlib.suppress(KeyError), model.state_dict_type(model, FULL):
        assert FSDP.get_state_dict_type(model) == start
        raise KeyError
    assert FSDP.get_state_dict_type(model) == wanted
    plain = nn.Linear(2, 2)
    with FSDP.state_dict_type(plain, SHARDED):
        assert FSDP.get_state_dict_type(plain) is None
    for call in (
        FSDP.get_state_dict_type,
        lambda model: FSDP.summon_full_params(model).__enter__(),
    ):
        with pytest.raises(
            TranslationError, match=r"^FSDP\.\w+ was called on a model that is sharded by"
        ):
            call(shard_model(nn.Linear(2, 2)))


@on_ranks(2)
def test_loading():
    wanted = net(1).state_dict()
    model = ours()
    parameters = list(model.parameters())
    assert not any(model.load_state_dict(state_dict=wanted, strict=True))
    assert is_same(model.state_dict(), wanted)
    assert all(before is now for before, now in zip(parameters, model.parameters(), strict=True))
    parent, plain_parent = Around(wiped(model)), Around(net(1))
    assert not any(parent.load_state_dict(plain_parent.state_dict()))
    assert is_same(parent.state_dict(), plain_parent.state_dict())

    with quiet(), TorchFSDP.state_dict_type(source := theirs(1), SHARDED):
        sharded = source.state_dict()
    assert type(sharded["embed.weight"]).__name__ == "ShardedTensor"
    for inner in (model, parent):
        wiped(model)
        given = (
            sharded
            if inner is model
            else {f"inner.{name}": value for name, value in sharded.items()}
        )
        inner.load_state_dict(given, strict=inner is model)
        assert is_same(model.state_dict(), wanted)

    other = dist.device_mesh.init_device_mesh("cpu", (1, 2))
    placed = [dist.tensor.Replicate(), dist.tensor.Shard(0)]
    other_layout = {
        name: dist.tensor.distribute_tensor(v, other, placed)
        if getattr(v, "ndim", 0) and name != "counts"
        else v
        for name, v in wanted.items()
    }
    wiped(model).load_state_dict(other_layout)
    assert is_same(model.state_dict(), wanted)

    with quiet():
        wiped(model)(batch()).sum()  # leaves the root gathered
    model.load_state_dict(wanted)
    assert is_same(model.state_dict(), wanted)


@on_ranks(2)
def test_what_cannot_be_loaded_is_said_on_every_rank():
    model, other = ours(), net(1).state_dict()
    bad = {name: value for name, value in other.items() if name != "blocks.0.up.weight"}
    bad |= {"blocks.1.odd": torch.ones(2), "narrow.weight": torch.ones(VOCAB, 2)}
    with pytest.raises(
        RuntimeError,
        match=r'(?s)Missing.*"blocks\.0\.up\.weight".*"blocks\.1\.odd".*size mismatch for',
    ):
        model.load_state_dict(bad)
    keys = model.load_state_dict(
        {name: value for name, value in bad.items() if name != "narrow.weight"}, strict=False
    )
    assert keys.missing_keys == ["blocks.0.up.weight", "narrow.weight"]
    assert keys.unexpected_keys == ["blocks.1.odd"]


@on_ranks(4)
def test_rank0_only_is_the_lowest_rank():
    wanted = net().state_dict()
    model = ours(device_mesh=hybrid_mesh(), sharding_strategy=ShardingStrategy.HYBRID_SHARD)
    with FSDP.state_dict_type(
        model, FULL, FullStateDictConfig(rank0_only=True, offload_to_cpu=True)
    ):
        assert is_same(model.state_dict(), wanted if dist.get_rank() == 0 else {})
    assert is_same(model.state_dict(), wanted)
    with FSDP.state_dict_type(model, SHARDED):
        assert len(model.state_dict()["embed.weight"].placements) == 2
    wiped(model).load_state_dict(wanted)
    assert is_same(model.state_dict(), wanted)
