"""The drop-in class beside torch's FSDP1: what programs rely on besides losses and state."""

import functools

import pytest
import torch
import torch.distributed as dist
from cpu_ranks import on_ranks
from fsdp1_models import TOKENS, ConvNet, Decoder, fsdp1, image_loss, losses, quiet, token_loss
from small_models import Block
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.fsdp.wrap import (
    ModuleWrapPolicy,
    enable_wrap,
    size_based_auto_wrap_policy,
    wrap,
)
from torch.distributed.tensor import DTensor

from shardkit import ShardkitError
from shardkit.fsdp1 import FullyShardedDataParallel as FSDP

BLOCKS = ModuleWrapPolicy({Block})
BF16 = torch.bfloat16


def trees():
    """Both kinds of wrapped decoder, with the same arguments."""
    return fsdp1(Decoder(), auto_wrap_policy=BLOCKS, use_orig_params=True), FSDP(
        Decoder(), auto_wrap_policy=BLOCKS
    )


@on_ranks(2)
def test_what_a_program_sees_of_a_wrapped_model():
    theirs, ours = trees()
    for names in ("named_parameters", "named_buffers", "named_modules"):
        expected = [name for name, _ in getattr(theirs, names)()]
        assert [name for name, _ in getattr(ours, names)()] == expected
    assert {param.ndim for param in ours.parameters()} == {1}
    assert isinstance(ours.module, Decoder)
    assert isinstance(ours.layers[1], FSDP)
    assert isinstance(ours.layers[1].module, Block)
    assert ours.embed is ours.module.embed
    assert len(FSDP.fsdp_modules(ours)) == len(TorchFSDP.fsdp_modules(theirs)) == 4
    assert FSDP.fsdp_modules(nn.Sequential(ours), root_only=True) == [ours]
    attributes = """rank world_size sharding_strategy mixed_precision cpu_offload backward_prefetch
        forward_prefetch limit_all_gathers compute_device _state_dict_type"""
    for name in attributes.split():
        assert getattr(ours, name) == getattr(theirs, name), name
    assert ours.process_group.size() == 2
    with pytest.raises(AttributeError, match="nowhere"):
        ours.nowhere  # noqa: B018
    with pytest.raises(ShardkitError, match="set_all_reduce_hook"):
        ours.register_comm_hook(None, print)
    assert ours.check_is_root()
    assert not ours.layers[0].check_is_root()
    assert ours.eval().layers[0].module.training is False


@on_ranks(2)
def test_a_model_with_a_child_named_module_and_a_wrapped_sequential():
    class Holder(nn.Module):
        def __init__(self):
            super().__init__()
            self.module = nn.Linear(3, 3)
            self.root = nn.Linear(3, 3)

        def forward(self, x):
            return self.root(self.module(x))

    holder = FSDP(Holder())
    assert isinstance(holder.module.module, nn.Linear)
    assert isinstance(holder.root, nn.Linear)
    assert holder(torch.ones(2, 3)).shape == (2, 3)
    line = FSDP(nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 5)))
    assert isinstance(line[1], nn.ReLU)
    assert [type(layer).__name__ for layer in line] == ["Linear", "ReLU", "Linear"]
    half = FSDP(nn.Linear(3, 5)).half()
    assert next(half.parameters()).dtype == torch.float16


class Subclass(FSDP):
    """As training libraries have it, with an argument of their own."""

    def __init__(self, *args, **kwargs):
        self.flag = kwargs.pop("flag", False)
        super().__init__(*args, **kwargs)


@on_ranks(2)
def test_a_subclass_that_wraps_modules_while_they_are_built():
    def build(wrap=lambda module: module):
        torch.manual_seed(0)
        return nn.Sequential(wrap(nn.Linear(3, 3)), nn.Tanh(), nn.Linear(3, 1))

    plain, world = build(), dist.group.WORLD
    with enable_wrap(wrapper_cls=Subclass, process_group=world):
        model = build(lambda module: wrap(checkpoint_wrapper(module)))
    model = Subclass(model, world, ShardingStrategy.SHARD_GRAD_OP, flag=True)
    assert model.flag
    assert {type(wrapper) for wrapper in FSDP.fsdp_modules(model)} == {Subclass}
    for either in (plain, model):
        either(torch.ones(2, 3)).sum().backward()
    wanted = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0, float("inf"))
    assert model.clip_grad_norm_(1.0, float("inf")) == wanted


@on_ranks(2)
def test_parts_that_are_wrapped_twice_in_a_model_that_is_not():
    """As open_flamingo: each part is a root of its own, and its gradients are clipped alone."""

    def trained(wrapper):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
        for number in (0, 2):
            model[number] = wrapper(
                wrapper(model[number], use_orig_params=True), use_orig_params=True
            )
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        values = []
        for step in range(3):
            loss = model(torch.ones(2, 3) * (step + dist.get_rank())).square().mean()
            loss.backward()
            for number in (0, 2):
                model[number].clip_grad_norm_(1e9)
            optimizer.step()
            optimizer.zero_grad()
            values.append(loss.item())
        return values

    assert trained(FSDP) == trained(fsdp1)


@on_ranks(2)
def test_a_network_of_convolutions_with_units_by_size():
    policy = functools.partial(size_based_auto_wrap_policy, min_num_params=30)
    models = [wrapper(ConvNet(), auto_wrap_policy=policy) for wrapper in (fsdp1, FSDP)]
    assert torch.equal(*(losses(model, image_loss) for model in models))


@on_ranks(2)
def test_apply_gets_full_parameters():
    model = FSDP(nn.Linear(3, 4))
    model.apply(lambda module: nn.init.eye_(model.module.weight))
    assert torch.equal(model.state_dict()["weight"], torch.eye(4, 3))


@on_ranks(2)
def test_summoned_parameters():
    theirs, ours = trees()
    plain = Decoder()
    full = dict(plain.named_parameters())
    with FSDP.summon_full_params(nn.Sequential(ours)):
        shown = dict(ours.named_parameters())
        assert shown.keys() == full.keys()
        for name, param in full.items():
            assert torch.equal(shown[name], param)
            assert type(shown[name]) is nn.Parameter
        ours.module.norm.bias.data.fill_(3)
        with FSDP.summon_full_params(ours):
            assert dict(ours.named_parameters()).keys() == shown.keys()
        assert ours.module.norm.bias is shown["norm.bias"]
        assert ours.state_dict()["norm.bias"][0] == 3
    assert ours.module.norm.bias.shape != full["norm.bias"].shape
    with FSDP.summon_full_params(ours, writeback=False):
        assert (ours.module.norm.bias == 3).all()
        ours.module.norm.bias.data.fill_(4)
    with FSDP.summon_full_params(nn.Sequential(ours), rank0_only=True, writeback=False):
        assert isinstance(ours.module.norm.bias, DTensor) is (dist.get_rank() != 0)
    with FSDP.summon_full_params(ours, recurse=False, writeback=False):
        assert type(ours.module.embed.weight) is nn.Parameter
        assert isinstance(ours.layers[1].module.up.weight, DTensor)
        seen = token_loss(ours, 0)
    with FSDP.summon_full_params(theirs, recurse=True):
        theirs.module.norm.bias.data.fill_(3)
    with quiet():
        assert torch.equal(seen, token_loss(theirs, 0))
    alone = FSDP(nn.Linear(3, 2), sharding_strategy=ShardingStrategy.NO_SHARD)
    with FSDP.summon_full_params(alone, writeback=False):
        alone.module.weight.data.fill_(7)
    assert (alone.module.weight == 7).all()


@on_ranks(2)
def test_summoned_gradients():
    plain, model = Decoder(), FSDP(Decoder(), auto_wrap_policy=BLOCKS)
    token_loss(plain, 0).backward()
    token_loss(model, 0).backward()
    expected = {name: param.grad for name, param in plain.named_parameters()}
    with FSDP.summon_full_params(model, with_grads=True, writeback=False):
        for name, param in model.named_parameters():
            if param.requires_grad:
                assert torch.equal(param.grad, expected[name])


@on_ranks(2)
def test_an_optimizer_built_before_wrapping():
    def trained(wrapper):
        model = Decoder()
        decay = [param for param in model.parameters() if param.requires_grad and param.ndim > 1]
        others = [param for param in model.parameters() if param.requires_grad and param.ndim == 1]
        groups = [
            {"params": decay, "weight_decay": 0.1},
            {"params": others, "lr": 1e-3},
            {"params": []},
        ]
        optimizer = torch.optim.AdamW(groups, lr=1e-2)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        model = wrapper(model, auto_wrap_policy=BLOCKS, use_orig_params=True)
        values = []
        for step in range(3):
            optimizer.zero_grad()
            loss = token_loss(model, 2 * step + dist.get_rank())
            loss.backward()
            optimizer.step()
            schedule.step()
            values.append(loss.item())
        return values

    assert trained(FSDP) == trained(fsdp1)


class Speaker(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(TOKENS, 4)
        self.block = nn.Linear(4, 4)

    def forward(self, tokens):
        return self.block(self.embed(tokens))

    def embedded(self, tokens):
        return self.embed(tokens)

    def generate(self, tokens):
        for _ in range(3):
            tokens = torch.cat([tokens, self(tokens).argmax(-1)[:, -1:]], 1)
        return tokens

    def count(self):
        return sum(param.numel() for param in self.parameters())


@on_ranks(2)
def test_methods_besides_forward():
    tokens = torch.tensor([[1, 2]])
    plain, model = Speaker(), FSDP(Speaker(), auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
    with torch.no_grad():
        assert torch.equal(model.generate(tokens), plain.generate(tokens))
        with FSDP.summon_full_params(model, writeback=False, recurse=False):
            assert torch.equal(model.generate(tokens), plain.generate(tokens))
        with FSDP.summon_full_params(model, writeback=False):
            assert torch.equal(model.embedded(tokens), plain.embedded(tokens))
    assert model.count() == plain.count() / 2
    with pytest.raises(RuntimeError, match="'weight' must be 2-D"):
        model.embedded(tokens)
    whole = FSDP(Speaker(), sharding_strategy=ShardingStrategy.NO_SHARD)
    assert whole.embed.weight.shape == (TOKENS, 4)


@on_ranks(2)
def test_parameters_are_the_sharded_ones_whenever_they_are_asked_for():
    _, model = trees()
    with torch.no_grad():
        token_loss(model, 0)
    params = list(model.parameters())
    assert all(
        one is other for one, other in zip(params, nn.Sequential(model).parameters(), strict=True)
    )
    loss = token_loss(model, 1)
    assert all(one is other for one, other in zip(params, model.parameters(), strict=True))
    loss.backward()
    norm = model.clip_grad_norm_(1e-3)
    assert type(norm) is torch.Tensor
    assert norm > 1e-3
    squares = sum((p.grad**2).sum() for p in params if p.grad is not None)
    dist.all_reduce(squares)
    assert squares.sqrt().item() == pytest.approx(1e-3, rel=1e-3)
