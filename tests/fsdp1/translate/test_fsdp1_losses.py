"""Training with shard_like_fsdp1 gives the losses of torch's own FSDP1, bit for bit wherever sums
have one order.

gloo adds up a ring of ranks, beginning at the owner's place, so an element's sum over more than two
ranks depends on which rank owns it. FSDP1 cuts a flat parameter and FSDP2 each parameter's rows, so
owners differ. Two ways to leave no room for that: one rank at a time has gradients (a sum of one
number and zeros is exact), or sums are of two.
"""

import functools
import itertools

import pytest
import torch
import torch.distributed as dist
from cpu_ranks import on_ranks
from fsdp1_models import ConvNet, Decoder, fsdp1, hybrid_mesh, image_loss, losses, pairs, token_loss
from small_models import Block
from torch import nn
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import CustomPolicy, ModuleWrapPolicy, size_based_auto_wrap_policy
from torch.distributed.tensor import DTensor

from shardkit._torch import torch_version
from shardkit.fsdp1 import shard_like_fsdp1

STRATEGIES = [strategy.name for strategy in ShardingStrategy]
BF16 = torch.bfloat16
PRECISIONS = {
    "float32": None,
    "bf16": MixedPrecision(BF16),
    "bf16, reduces in float32": MixedPrecision(BF16, torch.float32),
    "float32, reduces in bf16": MixedPrecision(None, BF16),
    "bf16 buffers, all inputs cast": MixedPrecision(BF16, BF16, BF16, cast_forward_inputs=True),
    "no inputs cast": MixedPrecision(None, BF16, BF16, cast_root_forward_inputs=False),
}
BLOCKS = ModuleWrapPolicy({Block})


def compare(model, loss, **arguments):
    """Both train and have equal losses.

    Since torch 2.15 FSDP2 casts each gradient of a parameter to ``reduce_dtype`` before they are
    added up, where the parameter is used several times; FSDP1 adds first. With a ``reduce_dtype``
    narrower than what is computed in, one such rounding of a gradient, 2**-8 in bf16, moves the
    losses by at most that part of what training moves them.
    """
    one_counts = arguments.pop("one_counts", False)
    theirs = losses(fsdp1(model(), **arguments), loss, one_counts=one_counts)
    sharded = shard_like_fsdp1(model(), **arguments)
    assert any(isinstance(param, DTensor) for param in sharded.parameters())
    ours = losses(sharded, loss, one_counts=one_counts, local_step=True)
    if torch_version() >= (2, 15) and _reduces_narrower(arguments.get("mixed_precision")):
        bound = 2**-8 * (theirs[0] - theirs[-1]).abs()
        assert ((ours - theirs).abs() <= bound).all(), (ours - theirs).tolist()
    else:
        assert torch.equal(ours, theirs), (ours - theirs).tolist()
    assert ours.isfinite().all()


def _reduces_narrower(precision):
    return (
        precision is not None
        and precision.param_dtype is None
        and precision.reduce_dtype is not None
    )


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(4)
def test_all_ranks_count_where_no_sum_is_of_more_than_two(strategy):
    """The groups of every strategy, each with half of the precisions."""
    half = list(PRECISIONS.values())[STRATEGIES.index(strategy) % 2 :: 2]
    hybrid = [{"device_mesh": hybrid_mesh()}, {"process_group": pairs()}]
    ranks = itertools.cycle(hybrid if "HYBRID" in strategy else [{"process_group": pairs()[0]}])
    for precision, where in zip(half, ranks, strict=False):
        compare(
            Decoder,
            token_loss,
            sharding_strategy=ShardingStrategy[strategy],
            mixed_precision=precision,
            auto_wrap_policy=BLOCKS,
            use_orig_params=True,
            **where,
        )


@on_ranks(4)
def test_batch_norm_stays_in_float32():
    policy = functools.partial(size_based_auto_wrap_policy, min_num_params=30)
    for precision in (MixedPrecision(BF16), MixedPrecision(BF16, torch.float32, BF16)):
        compare(
            ConvNet,
            image_loss,
            auto_wrap_policy=policy,
            mixed_precision=precision,
            process_group=pairs()[0],
        )


@on_ranks(4)
def test_a_custom_policy_gives_units_arguments_of_their_own():
    def policy(module):
        if isinstance(module, nn.LayerNorm):
            return {"mixed_precision": MixedPrecision(torch.float32, cast_forward_inputs=True)}
        return (
            {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP}
            if isinstance(module, Block)
            else False
        )

    precision = MixedPrecision(BF16)
    compare(
        CastingDecoder,
        token_loss,
        auto_wrap_policy=CustomPolicy(policy),
        mixed_precision=precision,
        use_orig_params=True,
        process_group=pairs()[0],
    )


@on_ranks(4)
def test_ranks_may_use_different_parameters():
    for arguments in ({}, {"process_group": pairs()[0]}):
        counts = {"one_counts": not arguments}
        compare(
            SometimesScaled,
            token_loss,
            auto_wrap_policy=BLOCKS,
            use_orig_params=True,
            **arguments,
            **counts,
        )
    model = shard_like_fsdp1(SometimesScaled(), process_group=pairs()[0])
    token_loss(model, 0).backward()
    assert (model.unused.grad.full_tensor() == 0).all()  # as FSDP1, so that weight decay reaches it


class SometimesScaled(Decoder):
    """Half of the ranks use ``scale``, and none uses ``unused``."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.full((3,), 1.5))
        self.unused = nn.Parameter(torch.ones(5))

    def forward(self, tokens):
        logits = super().forward(tokens)
        return logits * self.scale.sum() if dist.get_rank() % 2 else logits


class CastingDecoder(Decoder):
    """What a norm in float32 returns is cast by the model, since FSDP1 casts no inputs but the
    root's.
    """

    def __init__(self):
        super().__init__()
        for module in (self.head, *(layer.up for layer in self.layers)):
            module.register_forward_pre_hook(
                lambda module, args: (args[0].to(module.weight.dtype),)
            )
