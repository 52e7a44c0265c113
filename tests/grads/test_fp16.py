"""GradScaler: an inf on one rank is one on all of them, whatever the meshes, devices and
optimizers.
"""

import math

import pytest
import torch
import torch.distributed as dist
from accumulate_net import batches, integer_net, loss, one_large_batch, shard
from cpu_ranks import on_ranks
from grads_net import MESHES, full_grads, give_grads, sharded_net
from meshes import mesh_of
from safetensors_kinds import tp_and_fsdp
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from shardkit import by_name, shard_model
from shardkit.errors import ShardkitError
from shardkit.grads import GradScaler, accumulate, clip_grad_norm_
from shardkit.optim import step_on_local_shards
from shardkit.testing import assert_same_on_all_ranks, comm_counts

FP16 = MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float32)


def model(case):
    if case == "tp":
        net = tp_and_fsdp()
        for param in net.parameters():
            param.grad = torch.ones_like(param)
        return net
    ignored = ("gain", "narrow.bias") if case == "plain" else ()
    net = sharded_net(MESHES.get(case, (4,)), offload=case == "offload", ignored=ignored)
    give_grads(net)
    return net


def spoil(net, case, value):
    """One element of the gradients of rank 2; of both its replicas on an HSDP mesh, as after an
    all-reduce.
    """
    if dist.get_rank() == 2 or (case == "hsdp" and dist.get_rank() == 0):
        weight = {"tp": "up.weight", "plain": "narrow.bias"}.get(case, "blocks.0.weight")
        grad = net.get_parameter(weight).grad
        (grad.to_local() if isinstance(grad, DTensor) else grad).flatten()[0] = value


def local(tensor):
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().clone()


@pytest.mark.parametrize(
    ("case", "kind"),
    [
        ("fsdp", "fused"),
        ("hsdp", "foreach"),
        ("offload", "fused"),
        ("plain", "fused"),
        ("tp", "foreach"),
    ],
)
@on_ranks(4)
def test_an_inf_on_one_rank_skips_the_step_on_all(case, kind):
    for value in (math.inf, math.nan, None):
        for clipped in (False, True):
            net = model(case)
            params = [param for param in net.parameters() if param.requires_grad]
            before = [local(param) for param in params]
            optimizer = torch.optim.AdamW(params, lr=0.1, **{kind: True})
            if case == "plain":  # torch's kernels take no plain tensor beside DTensors
                step_on_local_shards(optimizer)
            scaler = GradScaler("cpu", init_scale=4.0)
            scaler.scale(torch.ones(()))
            if value is not None:
                spoil(net, case, value)
            if clipped:
                scaler.unscale_(optimizer)
                clip_grad_norm_(net, 1.0)
            scaler.step(optimizer)
            scaler.update()
            moved = [
                not torch.equal(local(param), old)
                for param, old in zip(params, before, strict=True)
            ]
            assert scaler.get_scale() == (4.0 if value is None else 2.0)
            assert any(moved) == (value is None)
            assert_same_on_all_ranks(torch.tensor(scaler.get_scale()))


@on_ranks(4)
def test_a_rank_without_gradients_joins():
    net = sharded_net((4,))
    give_grads(net)
    spoil(net, "fsdp", math.inf)
    if dist.get_rank() == 3:
        net.zero_grad()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    with comm_counts() as counted:
        scaler.step(optimizer)
    scaler.update()
    assert (counted.all_reduces, scaler.get_scale()) == (1, 2.0)


@pytest.mark.parametrize("shape", [None, (4,), (2, 2)])
@on_ranks(4)
def test_training_in_fp16_finds_its_scale_and_the_gradients_of_float32(shape):
    """Integers: what fits into fp16 is exact there, and the scale is a power of two, so not a bit
    may differ.
    """
    net, plain = integer_net(), integer_net()
    if shape is None:
        shard(net, mp_policy=FP16)
    else:
        rule = by_name("blocks.*", "narrow", "frozen")
        shard_model(net, mesh=mesh_of(shape), replicate=rule, mp_policy=FP16)
    optimizer = torch.optim.SGD(net.parameters(), lr=2.0**-6)
    reference = torch.optim.SGD(plain.parameters(), lr=2.0**-6)
    scaler, skipped = GradScaler("cpu", init_scale=2.0**13), 0
    ids = batches(1, 2)
    for _ in range(20):
        for i, mine in enumerate(ids[:, dist.get_rank()]):
            with accumulate(net, last=i == 1, shard_gradients=True):
                scaler.scale(loss(net, mine)).backward()
        scaler.unscale_(optimizer)
        finite = all(grad.isfinite().all() for grad in full_grads(net).values())
        if finite:
            expected = one_large_batch(plain, ids)
            assert all(torch.equal(grad, expected[name]) for name, grad in full_grads(net).items())
            reference.step()
        skipped += not finite
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        for name, param in net.named_parameters():
            whole = param.full_tensor() if isinstance(param, DTensor) else param
            assert torch.equal(whole, plain.get_parameter(name)), name
        if finite:
            break
    assert finite
    assert skipped > 0, "the first scale was low enough"
    assert scaler.get_scale() == 2.0 ** (13 - skipped)


def test_gradients_in_float16_are_refused():
    weight = nn.Parameter(torch.ones(2, dtype=torch.float16))
    weight.grad = torch.ones_like(weight)
    scaler = GradScaler("cpu")
    scaler.scale(torch.ones(()))
    with pytest.raises(ShardkitError, match=r"^optimizer has gradients in float16\."):
        scaler.unscale_(torch.optim.SGD([weight], lr=0.1))
