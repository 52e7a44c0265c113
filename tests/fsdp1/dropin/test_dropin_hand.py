"""What programs do to parameters and gradients by hand, as FSDP1 let them: right, or refused."""

import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from cpu_ranks import on_ranks
from fsdp1_models import fsdp1, quiet
from torch import nn
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from shardkit import ShardkitError, TranslationError, clip_grad_norm_
from shardkit._fsdp.plain import plain_units
from shardkit.fsdp1 import FullyShardedDataParallel as FSDP
from shardkit.fsdp1 import as_dtensors
from shardkit.testing import fake_world

BF16 = torch.bfloat16


def net():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)
    )  # one rank of two has nothing of the last


def wrapped(module=None):
    policy = ModuleWrapPolicy({nn.Linear})
    return FSDP(net() if module is None else module, auto_wrap_policy=policy)


def inputs(seed):
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(seed))


def assert_norm_of_two_batches(plain, model):
    for seed in (0, 1):
        plain(inputs(seed)).sum().backward()
    wanted = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1e9)
    torch.testing.assert_close(model.clip_grad_norm_(1e9), wanted)


def begun_on_meta(module):
    module.to_empty(device=torch.device("cpu"), recurse=False).to(BF16)


def mixed_by_hand(wrapper, lr=1e-4, to=BF16):
    """bfloat16 weights, stepped as mistral-finetune does, which puts float32 copies in their place.

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
    for step in range(40):
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


@on_ranks(2)
def test_weights_are_exchanged_for_float32_copies_and_back():
    with quiet():
        ours, theirs = mixed_by_hand(FSDP), mixed_by_hand(fsdp1)
    assert ours == theirs
    assert ours[-1] != mixed_by_hand(FSDP, lr=0)[-1]
    with pytest.raises(
        TranslationError, match=r"rank 1 differs from rank 0 in dtype of 1\.0\.weight"
    ):
        mixed_by_hand(FSDP, to=torch.float64)


@on_ranks(2)
def test_values_of_another_storage_are_used_and_the_old_one_stays():
    model = wrapped()
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


@on_ranks(2)
def test_penalties_by_hand():
    plain, model = net(), wrapped()
    for either in (plain, model):
        penalty = sum(param.pow(2).sum() for param in either.parameters())
        (either(inputs(0)).square().mean() + 0.1 * penalty).backward()
    wanted = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1e9)
    torch.testing.assert_close(model.clip_grad_norm_(1e9), wanted)


def short():
    """Its last unit is one number, of which one rank of two has nothing."""
    return nn.Sequential(*net(), nn.Linear(1, 1, bias=False))


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("before", [0, 1])
@pytest.mark.parametrize("build", [net, short])
@on_ranks(2)
def test_an_optimizer_drops_what_no_sync_put_aside(set_to_none, before, build):
    gradients = []
    for drops in (True, False):
        model = wrapped(build())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(before * drops):
            model(inputs(1)).sum().backward()
        if drops:
            with model.no_sync():
                (1000 * model(inputs(2))).sum().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.zero_grad(set_to_none=set_to_none)
        model(inputs(0)).sum().backward()
        gradients.append([param.grad for param in model.parameters()])
        assert not any(param.grad.requires_grad for param in model.parameters())
    assert all(map(torch.equal, *gradients))


@pytest.mark.parametrize("build", [net, short])
@on_ranks(2)
def test_showing_what_waits_does_not_drop_it(build):
    plain, model = build(), wrapped(build())
    with model.no_sync():
        model(inputs(0)).sum().backward()
        with pytest.raises(ShardkitError, match="has a gradient that is not reduced yet"):
            model.clip_grad_norm_(1.0)
    model.state_dict()
    with FSDP.summon_full_params(model):
        pass
    model(inputs(1)).sum().backward()
    assert_norm_of_two_batches(plain, model)


def scale(param):
    param.grad.mul_(0.5)


def replace(param):
    param.grad = param.grad * 1.0


@pytest.mark.parametrize(("write", "build"), [(scale, net), (replace, net), (replace, short)])
@on_ranks(2)
def test_writing_to_what_waits_is_refused(write, build):
    model = wrapped(build())
    with model.no_sync():
        model(inputs(0)).sum().backward()
    with torch.no_grad():
        for param in model.parameters():
            write(param)
    with pytest.raises(RuntimeError, match="grad was written while its gradient waits"):
        model(inputs(1)).sum().backward()


@on_ranks(2)
def test_a_step_while_a_gradient_waits_is_refused():
    model = wrapped()
    before = [param.detach().clone() for param in model.parameters()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)  # its decay alone would change them
    other = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    with model.no_sync():
        model(inputs(0)).sum().backward()
        with pytest.raises(ShardkitError, match=r"AdamW.step.* gradients of 0.weight, 0.bias, 2"):
            optimizer.step()
        other.step()
    FSDP.optim_state_dict(model, optimizer)
    with pytest.raises(ShardkitError, match="Run the last backward outside of no_sync"):
        optimizer.step()
    assert all(map(torch.equal, before, model.parameters()))
    optimizer.zero_grad()
    optimizer.step()
    assert all(map(torch.equal, before, model.parameters()))
    with model.no_sync():
        model(inputs(0)).sum().backward()
    model(inputs(1)).sum().backward()
    optimizer.step()
    assert not torch.equal(before[0], model.module[0].weight)


@on_ranks(2)
def test_no_sync_inside_no_sync_and_of_an_inner_wrapper():
    plain, model = net(), wrapped()
    with model[0].no_sync():  # the first forward still begins at the root
        pass
    with model.no_sync():
        with model.no_sync():
            pass
        model(inputs(0)).sum().backward()
        assert not any(param.grad.any() for param in model.parameters())
    model(inputs(1)).sum().backward()
    assert_norm_of_two_batches(plain, model)


@on_ranks(2)
def test_conversions():
    model = wrapped()
    model(inputs(0)).sum().backward()
    model.to("cpu").double()
    torch.testing.assert_close(model(inputs(0).double()), net().double()(inputs(0).double()))


def doubled(param):
    param.mul_(2)


def doubled_data(param):
    param.data.mul_(2)  # which the version of the parameter does not show


@pytest.mark.parametrize("write", [doubled, doubled_data])
@pytest.mark.parametrize("strategy", [ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP])
@pytest.mark.parametrize("policy", [None, ModuleWrapPolicy({nn.Linear})])
@on_ranks(2)
def test_values_written_after_a_forward_alone_are_used(write, strategy, policy):
    plain, model = net(), FSDP(net(), sharding_strategy=strategy, auto_wrap_policy=policy)
    for either in (plain, model):
        either(inputs(0))  # which leaves what is not resharded after forward with the old values
        with torch.no_grad():
            for param in either.parameters():
                write(param)
    torch.testing.assert_close(model(inputs(0)), plain(inputs(0)))
    first = model(inputs(0)).sum()  # and two forwards before one backward are right
    (first + model(inputs(1)).sum()).backward()
    (plain(inputs(0)).sum() + plain(inputs(1)).sum()).backward()
    wanted = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1e9)
    torch.testing.assert_close(model.clip_grad_norm_(1e9), wanted)


@on_ranks(2)
def test_hooks_of_register_hook_get_and_replace_the_reduced_part():
    model, hooked = (wrapped() for _ in range(2))
    seen = {}
    for name, param in hooked.named_parameters():

        def hook(grad, name=name):
            seen[name] = grad.clone()
            return grad * 2 if name.endswith("weight") else None

        param.register_hook(hook)
    for either in (model, hooked):
        either(inputs(dist.get_rank())).sum().backward()
    for name, param in model.named_parameters():
        assert torch.equal(seen[name], param.grad)
        factor = 2 if name.endswith("weight") else 1
        assert torch.equal(hooked.get_parameter(name).grad, factor * param.grad)


class Copying:
    """The event of a gradient that is still copied to the CPU, as before torch 2.13."""

    def __init__(self, shard, seen):
        self.shard, self.seen = shard, seen

    def synchronize(self):
        self.seen.setdefault(self.shard, self.shard.plain.grad)


@on_ranks(2)
def test_a_gradient_that_is_still_copied_is_waited_for_before_it_is_used():
    model, seen = FSDP(net()), {}
    model(inputs(0)).sum().backward()
    model.zero_grad()
    shards = [shard for unit in plain_units(model) for shard in unit.fsdp_params]
    for shard in shards:
        shard.grad_offload_event = Copying(shard, seen)
    model(inputs(0)).sum().backward()
    assert seen == dict.fromkeys(shards)  # each when it had no gradient yet


@on_ranks(2)
def test_norms_of_plain_parameters_are_this_ranks():
    model = wrapped()
    model(inputs(0)).sum().backward()
    whole = model.clip_grad_norm_(1e9)
    own = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)  # as on FSDP1
    assert own < whole
    squares = own.square()
    dist.all_reduce(squares)
    torch.testing.assert_close(squares.sqrt(), whole)
    for given in (list(model.parameters()), next(model.parameters()), model):
        with pytest.raises(ShardkitError, match="plain tensors, each rank's part"):
            clip_grad_norm_(given, 1.0)
    with as_dtensors(model):
        torch.testing.assert_close(clip_grad_norm_(list(model.parameters()), 1e9), whole)


@on_ranks(2)
def test_adafactor_leaves_out_what_is_empty():
    model = wrapped()
    before = model.state_dict()
    model(inputs(0)).sum().backward()
    if dist.get_rank() == 1:  # which has nothing of the last layer
        with pytest.raises(ZeroDivisionError):
            torch.optim.Adafactor(model.parameters()).step()
    optimizer = torch.optim.Adafactor([param for param in model.parameters() if param.numel()])
    optimizer.step()
    after = model.state_dict()
    assert all(not torch.equal(before[name], after[name]) for name in before)
    with pytest.raises(ShardkitError, match="rank 1 differs from rank 0 in which tensors"):
        FSDP.optim_state_dict(model, optimizer)


@pytest.mark.parametrize("foreach", [True, False])
@on_ranks(2)
def test_state_from_before_the_wrap_does_not_fit(foreach):
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=foreach)
    model(inputs(0)).sum().backward()
    optimizer.step()
    model = FSDP(model, use_orig_params=True)
    optimizer.zero_grad()
    model(inputs(0)).sum().backward()
    with pytest.raises(RuntimeError, match="size"):
        optimizer.step()


def filled(module):
    module.to_empty(device="cpu", recurse=False)
    for param in module.parameters(recurse=False):
        nn.init.constant_(param, 0.1)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@on_ranks(2)
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
        held = [weakref.ref(part) for part in (model, model.module, *model.parameters())]
        del model
        gc.collect()
        assert not [part() for part in held if part() is not None]
