"""State and files on one GPU, initialization, and the FSDP1 drop-in."""

import pytest
import torch
from gpu_net import (
    DEVICE,
    HAS_GPU,
    SHAPE,
    adamw,
    assert_close,
    assert_same,
    keep_stream_busy,
    plain,
    sharded,
    tokens,
    train,
    values,
)
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import shardkit
from benchmarks.models import Block, Llama
from shardkit.fsdp1 import FullyShardedDataParallel as FSDP

pytestmark = pytest.mark.usefixtures("one_rank")


def test_an_asynchronous_save_has_the_values_of_its_call(tmp_path):
    model = sharded()
    optimizer = adamw(model.parameters())
    train(model, optimizer)
    expected = values(model)
    handle = shardkit.checkpoint.save_checkpoint(tmp_path / "saved", model, optimizer, async_=True)
    with torch.no_grad():
        for param in model.parameters():
            param.to_local().fill_(float("nan"))
    handle.wait()
    other = sharded(seed=1)
    shardkit.checkpoint.load_checkpoint(tmp_path / "saved", other, adamw(other.parameters()))
    assert_same(values(other), expected)


def test_the_random_state_of_the_device_resumes(tmp_path):
    model = sharded()
    torch.rand(3, device=DEVICE)
    shardkit.checkpoint.save_checkpoint(tmp_path / "saved", model)
    expected = torch.rand(5, device=DEVICE)
    torch.manual_seed(99)
    shardkit.checkpoint.load_checkpoint(tmp_path / "saved", model)
    assert torch.equal(torch.rand(5, device=DEVICE), expected)


@pytest.mark.parametrize("offloads", [False, True])
def test_weights_are_read_into_a_model_on_meta(tmp_path, offloads):
    model = sharded()
    shardkit.checkpoint.save_checkpoint(tmp_path / "saved", model)
    with shardkit.init_on_meta():
        other = Llama(SHAPE, 64)
    policy = CPUOffloadPolicy(pin_memory=HAS_GPU) if offloads else None
    shardkit.shard_model(other, offload_policy=policy)
    shardkit.checkpoint.load_pretrained(other, tmp_path / "saved")
    assert_same(values(other), values(model))
    other(tokens()).backward()


def test_full_state():
    model, other = sharded(), sharded(seed=2)
    shardkit.load_full_state_dict(other, shardkit.full_state_dict(model))
    assert_same(values(other), values(model))
    with shardkit.full_params(model, writeback=True):
        next(iter(model.parameters())).data.zero_()
    assert not next(iter(values(model).values())).any()


@pytest.mark.parametrize("device", ["cpu", DEVICE.type])
def test_materialized_as_constructed(device):
    torch.manual_seed(5)
    with torch.device(device):
        expected = Llama(SHAPE, 64)
    next_number = torch.rand(3, device=device)
    torch.manual_seed(5)
    with shardkit.init_on_meta():
        model = Llama(SHAPE, 64)
    shardkit.materialize(shardkit.shard_model(model), device=device)
    assert_same(values(model), values(expected))
    assert torch.equal(torch.rand(3, device=device), next_number)  # the generator goes on


def test_drop_in_trains_as_the_plain_model():
    ours, theirs = FSDP(plain(), device_id=DEVICE if HAS_GPU else None), plain()
    train(ours, adamw(ours.parameters()))
    train(theirs, adamw(theirs.parameters()))
    with FSDP.summon_full_params(ours):
        found = values(ours)
    prefix = "_fsdp_wrapped_module."
    assert_close({name.replace(prefix, ""): value for name, value in found.items()}, values(theirs))


def test_drop_in_with_a_penalty_that_is_computed_before_the_forward():
    """Autograd adds its gradient in another stream than the reduction's, which is kept busy: what
    does not wait for it is lost.
    """
    policy = ModuleWrapPolicy({Block})
    ours = FSDP(plain(), device_id=DEVICE if HAS_GPU else None, auto_wrap_policy=policy)
    theirs = plain()

    def hold_up(param):
        keep_stream_busy(50)

    for name, param in ours.named_parameters():
        if "layers.1." in name and name.endswith("down.weight"):  # before the last block's
            param.register_post_accumulate_grad_hook(hold_up)
    for model in (ours, theirs):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            penalty = sum(param.square().sum() for param in model.parameters())
            (model(tokens(step)) + 0.01 * penalty).backward()
            optimizer.step()
            optimizer.zero_grad()
    with FSDP.summon_full_params(ours):
        found = values(ours)
    prefix = "_fsdp_wrapped_module."
    assert_close({name.replace(prefix, ""): value for name, value in found.items()}, values(theirs))
