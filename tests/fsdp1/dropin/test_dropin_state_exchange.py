"""The drop-in's model state in FSDP1, in torch.distributed.checkpoint, in shardkit's functions."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.state_dict as dsd
from cpu_ranks import on_ranks
from fsdp1_models import fsdp1, quiet
from shim_states import BLOCKS, FULL, SHARDED, Around, batch, is_same, net, ours, theirs, wiped
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
from torch.distributed.tensor import DTensor

import shardkit
from shardkit._fsdp.plain import as_dtensors
from shardkit.fsdp1.dropin.module import FullyShardedDataParallel as FSDP


@on_ranks(2)
def test_sharded_files_go_both_ways_between_fsdp1_and_the_drop_in(tmp_path):
    wanted = net(1).state_dict()
    with quiet():
        for writes, reads, name in (
            (theirs, ours, "theirs"),
            (ours, theirs, "ours"),
            (ours, ours, "both"),
        ):
            source, target = writes(1), reads(2)
            for model, kind in (
                (source, TorchFSDP if writes is theirs else FSDP),
                (target, TorchFSDP if reads is theirs else FSDP),
            ):
                kind.set_state_dict_type(model, SHARDED)
            dcp.save({"model": _tensors(source)}, checkpoint_id=tmp_path / name)
            state = {"model": _tensors(target)}
            dcp.load(state, checkpoint_id=tmp_path / name)
            target.load_state_dict(state["model"], strict=False)
            kind.set_state_dict_type(target, FULL)
            loaded = target.state_dict()
            assert is_same(
                {name: loaded[name] for name in _tensors(source)},
                {n: wanted[n] for n in _tensors(source)},
            )


def _tensors(model):
    return {name: value for name, value in model.state_dict().items() if "_extra_state" not in name}


@on_ranks(2)
def test_get_and_set_state_dict_of_torch_checkpoint():
    rank, options = dist.get_rank(), dsd.StateDictOptions

    def broadcastable(seed):  # gloo has no broadcast of int16
        model = net(seed)
        model.counts = model.counts.long()
        return model

    wanted = broadcastable(1).state_dict()
    source = FSDP(broadcastable(1), auto_wrap_policy=BLOCKS)
    for model in (source, Around(source)):
        prefix = "" if model is source else "inner."
        sharded = dsd.get_model_state_dict(model)
        assert isinstance(sharded[f"{prefix}embed.weight"], DTensor)
        assert is_same(
            {
                name.removeprefix(prefix): v
                for name, v in sharded.items()
                if name.startswith(prefix)
            },
            wanted,
        )
    assert is_same(dsd.get_model_state_dict(source, options=options(full_state_dict=True)), wanted)
    on_first = dsd.get_model_state_dict(
        source, options=options(full_state_dict=True, cpu_offload=True)
    )
    assert is_same(on_first, wanted if rank == 0 else {})
    assert "frozen.weight" not in dsd.get_model_state_dict(
        source, options=options(ignore_frozen_params=True)
    )
    model = FSDP(broadcastable(0), auto_wrap_policy=BLOCKS)
    given = [
        (dsd.get_model_state_dict(source), {}),
        (dict(wanted), {"full_state_dict": True}),
        (
            dict(wanted) if rank == 0 else {},
            {"full_state_dict": True, "broadcast_from_rank0": True},
        ),
    ]
    for state, asked in given:
        keys = dsd.set_model_state_dict(wiped(model), state, options=options(**asked))
        assert not any(keys)
        assert is_same(model.state_dict(), wanted)
        model.module.version = "another"
    optimizer = torch.optim.AdamW([param for param in source.parameters() if param.requires_grad])
    with quiet():
        source(batch()).sum().backward()
    optimizer.step()
    for asked in ({}, {"full_state_dict": True}, {"flatten_optimizer_state_dict": True}):
        state, optim_state = dsd.get_state_dict(source, optimizer, options=options(**asked))
        model = FSDP(broadcastable(0), auto_wrap_policy=BLOCKS)
        fresh = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad])
        arguments = {
            "model_state_dict": state,
            "optim_state_dict": optim_state,
            "options": options(**asked),
        }
        dsd.set_state_dict(model, fresh, **arguments)
        assert is_same(model.state_dict(), source.state_dict())
        moments = [
            [optim.state[param]["exp_avg"] for param in optim.param_groups[0]["params"]]
            for optim in (optimizer, fresh)
        ]
        assert any(moment.any() for moment in moments[0])
        assert all(map(torch.equal, *moments))
    checkpointed = FSDP(checkpoint_wrapper(net(1)))
    assert list(dsd.get_model_state_dict(checkpointed)) == list(wanted)
    outer = nn.Linear(2, 2)
    outer.module = FSDP(nn.Linear(2, 2))  # a name that FSDP1's wrapper has too
    assert list(dsd.get_model_state_dict(FSDP(outer))) == [
        "weight",
        "bias",
        "module.weight",
        "module.bias",
    ]


@on_ranks(2)
def test_names_under_activation_checkpoints_and_compile_are_fsdp1s():
    def around_inner(kind):
        model = net()
        model.blocks[0] = kind(checkpoint_wrapper(model.blocks[0]))
        model.blocks[1] = kind(torch.compile(model.blocks[1], backend="eager"))
        return kind(model)

    with quiet():
        model, expected = (
            around_inner(FSDP),
            around_inner(lambda module: fsdp1(module, use_orig_params=True)),
        )
        assert is_same(
            model.state_dict(), net().state_dict()
        )  # where FSDP1 has blocks.1._orig_mod.up.weight
        apply_activation_checkpointing(
            expected, check_fn=lambda module: isinstance(module, nn.Linear)
        )
        apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, nn.Linear))
        state = expected.state_dict()
        assert "blocks.1._orig_mod.up.weight" in state
        wiped(model).load_state_dict(state)
        assert is_same(model.state_dict(), net().state_dict())
        with FSDP.state_dict_type(model, SHARDED):
            assert is_same(model.state_dict(), net().state_dict())
        outer = torch.compile(ours(), backend="eager")
        assert list(outer.state_dict()) == [f"_orig_mod.{name}" for name in net().state_dict()]
        assert not any(outer.load_state_dict(outer.state_dict()))


@on_ranks(2)
def test_shardkits_own_functions_take_wrapped_models(tmp_path):
    wanted, model = net(1).state_dict(), ours(1)
    with pytest.raises(shardkit.ShardkitError, match=r"shardkit\.fsdp1\.as_dtensors\(model\)"):
        shardkit.full_state_dict(model)
    with as_dtensors(model):
        assert is_same(shardkit.full_state_dict(model, rank0_only=False), wanted)
        shardkit.checkpoint.save_checkpoint(tmp_path / "saved", model)
    wiped(model)
    with as_dtensors(model):
        shardkit.checkpoint.load_checkpoint(tmp_path / "saved", model)
    assert is_same(model.state_dict(), wanted)
