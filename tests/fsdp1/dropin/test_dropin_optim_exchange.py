"""The drop-in's optimizer state beside that of torch's FSDP1, and in torch.distributed.checkpoint."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from shim_optimizers import (
    CPU,
    FULL,
    OPTIMIZERS,
    SHARDED,
    Parent,
    set_type,
    train,
    wrapped,
)
from torch import nn
from torch.distributed.checkpoint.optimizer import load_sharded_optimizer_state_dict
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
)
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
from torch.optim import Optimizer
from trees import assert_same

from shardkit.fsdp1.fully_sharded_data_parallel import FullyShardedDataParallel as FSDP
from shardkit.testing import distributed

pytestmark = pytest.mark.filterwarnings("ignore")


def torchs(use_orig_params: bool) -> nn.Module:
    """On torch's FSDP1, with no ignored module: it keeps state of those apart, and works on them on each rank."""
    net = Parent()
    own = {"use_orig_params": use_orig_params, "device_id": CPU}
    net.body.frozen, net.body.up = TorchFSDP(net.body.frozen, **own), TorchFSDP(net.body.up, **own)
    net.body = TorchFSDP(net.body, ignored_modules=[net.body.apart], **own)
    return net


@distributed(world_size=2, backend="gloo")
def test_torchs_fsdp1_and_the_drop_in_go_on_from_each_others_state(folder):
    """The files are torch.save's. With offload_to_cpu=True FSDP1 on CPU ranks writes one buffer for both moments."""
    make = OPTIMIZERS["adamw"]
    plain = Parent()
    optimizer = make(plain.parameters())
    expected, later = train(plain, optimizer, range(3)), train(plain, optimizer, range(3, 6))
    for use_orig_params in (False, True):
        theirs = torchs(use_orig_params)
        optimizer = make(list(theirs.parameters()))
        assert train(theirs, optimizer, range(3)) == expected
        weights = copy.deepcopy(theirs.state_dict())
        configs = FullStateDictConfig(), FullOptimStateDictConfig(offload_to_cpu=False)
        with TorchFSDP.state_dict_type(theirs, FULL, *configs):
            written = copy.deepcopy(TorchFSDP.optim_state_dict(theirs, optimizer))  # some of it is alive
        torch.save(written, folder / f"{dist.get_rank()}.pt")
        with TorchFSDP.state_dict_type(theirs, SHARDED):
            sharded = TorchFSDP.optim_state_dict(theirs, optimizer)

        ours = wrapped()
        own = make(ours.parameters())
        assert train(ours, own, range(3)) == expected
        full = FSDP.full_optim_state_dict(ours, own, rank0_only=False)
        assert_same(full["state"], written["state"])
        for state in (torch.load(folder / f"{dist.get_rank()}.pt"), sharded):  # of ShardedTensors
            ours = wrapped()
            ours.load_state_dict(weights)
            own = make(ours.parameters())
            own.load_state_dict(FSDP.optim_state_dict_to_load(ours, own, state))
            assert train(ours, own, range(3, 6)) == later, (use_orig_params, state is sharded)

        back = torchs(use_orig_params)
        back.load_state_dict(weights)
        optimizer = make(list(back.parameters()))
        optimizer.load_state_dict(TorchFSDP.optim_state_dict_to_load(back, optimizer, full))
        assert train(back, optimizer, range(3, 6)) == later


@distributed(world_size=2, backend="gloo")
def test_distributed_checkpoint_gets_and_sets_saves_and_loads(folder):
    make = OPTIMIZERS["adamw"]

    def fresh() -> tuple[nn.Module, Optimizer]:
        net = Parent()
        net.body = FSDP(net.body)
        model = FSDP(net)
        return model, make(model.parameters())

    model, optimizer = fresh()
    train(model, optimizer, range(3))
    weights, full = copy.deepcopy(model.state_dict()), FSDP.optim_state_dict(model, optimizer)
    options = StateDictOptions(full_state_dict=True)
    assert_same(get_optimizer_state_dict(model, optimizer, options=options)["state"], full["state"])
    states = copy.deepcopy(get_state_dict(model, optimizer))
    set_type(model, SHARDED)
    dcp.save({"model": model.state_dict(), "optim": FSDP.optim_state_dict(model, optimizer)}, checkpoint_id=folder)
    expected = train(model, optimizer, range(3, 6))

    def set_both(model: nn.Module, optimizer: Optimizer) -> None:
        set_state_dict(model, optimizer, model_state_dict=states[0], optim_state_dict=states[1])

    def set_from_rank0(model: nn.Module, optimizer: Optimizer) -> None:
        """One after the other: set_state_dict takes two empty dicts for a wish to load the optimizer alone."""
        given = copy.deepcopy((weights, full)) if dist.get_rank() == 0 else ({}, {})
        from_rank0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(model, given[0], options=from_rank0)
        set_optimizer_state_dict(model, optimizer, given[1], options=from_rank0)

    def load_as_fsdp1(model: nn.Module, optimizer: Optimizer) -> None:
        set_type(model, SHARDED)
        state = {"model": model.state_dict()}
        dcp.load(state, checkpoint_id=folder)
        model.load_state_dict(state["model"])
        found = load_sharded_optimizer_state_dict(state["model"], "optim", dcp.FileSystemReader(folder))
        optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, found["optim"]))

    def load_in_place(model: nn.Module, optimizer: Optimizer) -> None:
        set_type(model, SHARDED)
        train(model, optimizer, range(1))
        state = {"model": model.state_dict(), "optim": FSDP.optim_state_dict(model, optimizer)}
        dcp.load(state, checkpoint_id=folder)
        model.load_state_dict(state["model"])
        FSDP.optim_state_dict_to_load(model, optimizer, state["optim"], load_directly=True)

    for load in (set_both, set_from_rank0, load_as_fsdp1, load_in_place):
        model, optimizer = fresh()
        load(model, optimizer)
        assert train(model, optimizer, range(3, 6)) == expected, load.__name__


@pytest.fixture
def folder(tmp_path):
    return tmp_path
