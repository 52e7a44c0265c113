"""What programs do to parameters and gradients by hand, as FSDP1 let them: right, or refused by name."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from fsdp1_models import fsdp1, quiet
from torch import nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from shardkit import ShardkitError, TranslationError
from shardkit.fsdp1 import FullyShardedDataParallel as FSDP
from shardkit.testing import distributed, fake_world

BF16 = torch.bfloat16


def net():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)
    )  # one rank of two has nothing of the last


def inputs(seed):
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(seed))


def begun_on_meta(module):
    module.to_empty(device=torch.device("cpu"), recurse=False).to(BF16)


def mixed_by_hand(wrapper, steps=40, lr=1e-4, to=BF16):
    """bfloat16 weights, stepped as mistral-finetune does: float32 copies are put in their place for the step.

    On the drop-in rank 0 has the weights, and others begin on meta, in float32.
    """
    torch.manual_seed(1)
    on_meta = wrapper is FSDP and dist.get_rank() > 0
    with torch.device("meta" if on_meta else "cpu"):
        model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4)), nn.Linear(4, 1))
    model = model if on_meta else model.to(to)
    options = {"sync_module_states": True, "param_init_fn": begun_on_meta if on_meta else None}
    policy = ModuleWrapPolicy({nn.Sequential})
    model = wrapper(
        model, auto_wrap_policy=policy, use_orig_params=False, **options if wrapper is FSDP else {}
    )
    params = list(model.parameters())
    with torch.no_grad():
        for param in params:
            param._mp_param = torch.empty_like(param, dtype=torch.float32)
            param._mp_param.copy_(param.to(torch.float32))
            param.data = param.data.to(BF16)  # they are
    optimizer, losses = torch.optim.AdamW(params, lr=lr), []
    for step in range(steps):
        loss = (model(inputs(2 * step + dist.get_rank()).to(BF16)) - 3).square().mean()
        loss.backward()
        with torch.no_grad():
            for param in params:
                param._temp = param.data
                param.data = param._mp_param
                param.grad = param.grad.to(torch.float32)
        optimizer.step()
        with torch.no_grad():
            for param in params:
                param._temp.copy_(param.data)
                param.data = param._temp
                param.grad = param.grad.to(BF16)
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@distributed(world_size=2, backend="gloo")
def test_weights_are_exchanged_for_float32_copies_and_back():
    with quiet():
        ours, theirs = mixed_by_hand(FSDP), mixed_by_hand(fsdp1)
    assert ours == theirs
    assert ours[-1] != mixed_by_hand(FSDP, lr=0)[-1]
    with pytest.raises(
        TranslationError, match=r"rank 1 differs from rank 0 in dtype of 1\.0\.weight"
    ):
        mixed_by_hand(FSDP, to=torch.float64)


@distributed(world_size=2, backend="gloo")
def test_values_of_another_storage_are_used_and_the_old_one_stays():
    model = FSDP(net(), auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
    params = list(model.parameters())
    with torch.no_grad():
        before = model(inputs(0))
        stored = [param.data for param in params]
        for param in params:
            param.data = param.data.double() * 0  # FSDP1 too casts them back
        assert not model(inputs(0)).any()
        for param, data in zip(params, stored, strict=True):
            param.data = data
        assert torch.equal(model(inputs(0)), before)
    model[0].module.weight.data = torch.zeros(4, 4)
    with pytest.raises(
        RuntimeError, match=r"weight has the shape \(4, 4\), but this rank's shard has \(8,\)"
    ):
        model(inputs(0))


@distributed(world_size=2, backend="gloo")
def test_norms_and_penalties_by_hand():
    plain, model = net(), FSDP(net(), auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
    for each in (plain, model):
        (
            each(inputs(0)).square().mean()
            + 0.1 * sum(param.pow(2).sum() for param in each.parameters())
        ).backward()
    squares = sum(param.grad.pow(2).sum() for param in model.parameters())
    dist.all_reduce(squares)
    wanted = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1e9)
    torch.testing.assert_close(squares.sqrt(), wanted)
    torch.testing.assert_close(model.clip_grad_norm_(1e9), wanted)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("before", [0, 1])
@distributed(world_size=2, backend="gloo")
def test_an_optimizer_drops_what_no_sync_put_aside(set_to_none, before):
    found = []
    for drops in (True, False):
        model = FSDP(net(), auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(before * drops):
            model(inputs(1)).sum().backward()
        if drops:
            with model.no_sync():
                (1000 * model(inputs(2))).sum().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.zero_grad(set_to_none=set_to_none)
        model(inputs(0)).sum().backward()
        found.append([param.grad for param in model.parameters()])
    assert all(map(torch.equal, *found))


@distributed(world_size=2, backend="gloo")
def test_scaling_what_waits_does_not_drop_it():
    plain, model = net(), FSDP(net(), auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
    with model.no_sync():
        model(inputs(0)).sum().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        with pytest.raises(ShardkitError, match="has a gradient that is not reduced yet"):
            model.clip_grad_norm_(1.0)
    model(inputs(1)).sum().backward()
    for seed in (0, 1):
        plain(inputs(seed)).sum().backward()
    wanted = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1e9)
    torch.testing.assert_close(model.clip_grad_norm_(1e9), wanted)


@distributed(world_size=2, backend="gloo")
def test_conversions_and_a_write_after_a_forward_alone():
    model = FSDP(net(), auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
    model(inputs(0)).sum().backward()
    model.to("cpu").double()
    plain = net().double()
    torch.testing.assert_close(model(inputs(0).double()), plain(inputs(0).double()))
    with torch.no_grad():
        for param in (*model.parameters(), *plain.parameters()):
            param.mul_(2)
    torch.testing.assert_close(model(inputs(0).double()), plain(inputs(0).double()))


def filled(module):
    module.to_empty(device="cpu", recurse=False)
    for param in module.parameters(recurse=False):
        nn.init.constant_(param, 0.1)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@distributed(world_size=2, backend="gloo")
def test_hooks_and_attributes_from_before_the_wrap_stay(device):
    calls = []
    with torch.device(device):
        model = net()
    for name, param in model.named_parameters():
        param.fqn = name
        param.register_post_accumulate_grad_hook(
            lambda param: calls.append((param.fqn, param.grad.numel()))
        )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model = FSDP(model, use_orig_params=True, param_init_fn=filled if device == "meta" else None)
    if device == "meta":  # which gets other parameters
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = [param.detach().clone() for param in model.parameters()]
    for step in range(2):
        calls.clear()
        optimizer.zero_grad()
        model(inputs(step)).sum().backward()
        assert sorted(calls) == sorted((param.fqn, param.numel()) for param in model.parameters())
        optimizer.step()
        assert FSDP.optim_state_dict(model, optimizer)["param_groups"]  # shows DTensors meanwhile
    for old, param in zip(before, model.parameters(), strict=True):
        assert not param.numel() or not torch.equal(old, param)


class Gained(nn.Linear):
    """Reads an attribute of its parameter in forward."""

    def forward(self, x):
        return super().forward(x) * self.weight.gain


def test_attributes_are_read_in_forward_after_a_conversion_too():
    with fake_world(1):
        module = Gained(4, 4)
        module.weight.gain = 2.0
        module.weight.data.fill_(1.0)
        module.bias.data.zero_()
        model = FSDP(module)
        for gain, dtype in ((2.0, torch.float32), (2.0, torch.float64), (3.0, torch.float64)):
            next(model.parameters()).gain = gain
            output = model.to(dtype)(torch.ones(1, 4, dtype=dtype))
            assert torch.equal(output, torch.full((1, 4), 4 * gain, dtype=dtype))


@pytest.mark.parametrize("is_trained", [False, True])
def test_a_model_that_nothing_holds_is_freed(is_trained):
    with fake_world(2):
        model = FSDP(net(), use_orig_params=True)
        if is_trained:
            optimizer = torch.optim.AdamW(model.parameters())
            model(inputs(0)).sum().backward()
            model.clip_grad_norm_(1.0)
            optimizer.step()
            FSDP.optim_state_dict(model, optimizer)
            del optimizer
        held = [weakref.ref(each) for each in (model, model.module, *model.parameters())]
        del model
        gc.collect()
        assert not [each() for each in held if each() is not None]
