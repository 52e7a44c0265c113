"""set_reduce_precision: half the bytes of a float32 reduce-scatter, and its sum."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from accumulate_net import batches, integer_net, loss, micro_steps, one_large_batch, shard
from grads_net import MESHES, Net, full_grads
from sent_bytes import EXCHANGE, SCATTER, SentBytes
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from shardkit import by_class, shard_model
from shardkit.errors import ShardkitError
from shardkit.grads import set_gradient_reduction, set_reduce_precision
from shardkit.testing import comm_counts, distributed, fake_world

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def net_of(policy: MixedPrecisionPolicy, shape: tuple[int, ...] = (4,)) -> Net:
    torch.manual_seed(0)
    return shard(Net(), shape, mp_policy=policy)


def grads_and_bytes(net: Net, ids: torch.Tensor) -> tuple[dict[str, torch.Tensor], int]:
    with SentBytes() as sent:
        net(ids[dist.get_rank()]).square().mean().backward()
    return {name: grad.double() for name, grad in full_grads(net).items()}, sent.bytes[SCATTER] + sent.bytes[EXCHANGE]


def difference(grads: dict[str, torch.Tensor], exact: dict[str, torch.Tensor]) -> float:
    """Of all gradients as one vector, relative to the norm of the exact ones."""
    error = torch.cat([(grads[name] - exact[name]).flatten() for name in exact])
    return (error.norm() / torch.cat([grad.flatten() for grad in exact.values()]).norm()).item()


@pytest.mark.parametrize("mesh", ["fsdp", "hsdp"])
@distributed(world_size=4, backend="gloo")
def test_half_the_bytes_and_the_float32_sum_of_bf16_gradients(mesh):
    """A row of the issue's figures. What is compared: the gradients of one backward in bf16, reduced in two ways."""
    ids = batches(3, 1)[0]
    exact, full_bytes = grads_and_bytes(net_of(BF16, MESHES[mesh]), ids)
    narrow = net_of(BF16, MESHES[mesh])
    set_reduce_precision(narrow)
    grads, narrow_bytes = grads_and_bytes(narrow, ids)
    assert full_bytes == 2 * narrow_bytes > 0
    assert difference(grads, exact) <= 1e-6
    torchs, _ = grads_and_bytes(net_of(MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16), MESHES[mesh]), ids)
    assert difference(torchs, exact) > 1e-4, "adding in bf16 would do as well"


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("mesh", MESHES)
@distributed(world_size=4, backend="gloo")
def test_integers_arrive_exactly_by_every_schedule_that_sends_each_micro_batch(mesh, reduction):
    """Of every shape: rows that 4 ranks share unevenly, fewer rows than ranks, frozen and tied parameters."""
    policy = CPUOffloadPolicy(pin_memory=False) if reduction == "sum" else OffloadPolicy()
    net, ids = shard(integer_net(), MESHES[mesh], mp_policy=BF16, offload_policy=policy), batches(1, 2)
    set_reduce_precision(net)
    set_gradient_reduction(net, reduction)
    expected = {}
    plain = integer_net().to(torch.bfloat16)
    for mine in ids.flatten(0, 1):
        for name, grad in one_large_batch(plain, mine[None, None]).items():
            expected[name] = expected.get(name, 0) + grad.float() / (4 if reduction == "mean" else 1)
    for options in ({"shard_gradients": True}, {"shard_gradients": True, "keep_unsharded": True}):
        with comm_counts() as counted:
            micro_steps(net, ids, **options)
        assert counted.reduce_scatters == 0
        assert counted.all_to_alls == (0 if mesh == "ddp-like" else 6)
        grads = full_grads(net)
        assert grads.keys() == expected.keys()
        assert all(torch.equal(grad, expected[name]) for name, grad in grads.items())
        net.zero_grad()


@distributed(world_size=4, backend="gloo")
def test_what_16_bits_cannot_hold_is_rounded_once():
    """Accumulated without sync, or computed in float32: each rank's sum is rounded by 2**-8 at most, then added."""
    for policy in (BF16, MixedPrecisionPolicy()):
        torch.manual_seed(0)
        exact, net = net_of(policy), net_of(policy)
        set_reduce_precision(net)
        ids = batches(2, 3)
        dtype = torch.bfloat16 if policy is BF16 else torch.float32
        size = {}
        for rank in range(4):
            torch.manual_seed(0)
            plain = Net().to(dtype)
            total = {}
            for mine in ids[:, rank]:
                for name, grad in one_large_batch(plain, mine[None, None]).items():
                    total[name] = total.get(name, 0) + grad.float()
            for name, grad in total.items():
                size[name] = size.get(name, 0) + grad.abs() / 4
        for model in (exact, net):
            micro_steps(model, ids)
        differ = 0
        for name, grad in full_grads(net).items():
            error = (grad - full_grads(exact)[name]).abs()
            differ += bool(error.any())
            assert error.le((2**-8 + 2**-20) * size[name]).all(), name
        assert differ, "nothing was rounded"


# What is refused.


def test_a_unit_that_reduces_in_another_dtype():
    with fake_world(4):
        net = Net()
        fully_shard(net.blocks[0], mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16))
        fully_shard(net.blocks[1], mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float64))
        fully_shard(net, mp_policy=BF16)
        text = (
            r"^accumulate is torch.float32, and units reduce in another dtype: blocks\.0 in torch\.bfloat16, "
            r"blocks\.1 in torch\.float64\. .* MixedPrecisionPolicy\(\.\.\., reduce_dtype=torch\.float32\)\.$"
        )
        with pytest.raises(ShardkitError, match=text):
            set_reduce_precision(net)
        with comm_counts() as counted:
            loss(net, torch.zeros(2, 5, dtype=torch.long)).backward()
        assert counted.reduce_scatters == 3, "changed all the same"


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16)])
def test_dtypes_that_make_no_sense(dtypes):
    match = r"^wire must be bfloat16 or .* Pass wire=torch\.bfloat16, accumulate=torch\.float32\.$"
    with pytest.raises(ShardkitError, match=match):
        set_reduce_precision(nn.Linear(1, 1), wire=dtypes[0], accumulate=dtypes[1])


# A plan means the same on every torch: gradients to the bit, against plain arithmetic.


COMPUTED = {"float32": None, "bfloat16": torch.bfloat16}
REDUCED = {"None": None, "float32": torch.float32, "bfloat16": torch.bfloat16}
CASES = [("float32", "None"), ("bfloat16", "None"), ("bfloat16", "float32"), ("bfloat16", "bfloat16")]


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 5), nn.Tanh(), nn.Linear(5, 3))


def policy(computed: str, reduced: str) -> MixedPrecisionPolicy:
    return MixedPrecisionPolicy(param_dtype=COMPUTED[computed], reduce_dtype=REDUCED[reduced])


@pytest.mark.parametrize(("computed", "reduced"), CASES)
@distributed(world_size=2)
def test_gradients(computed: str, reduced: str) -> None:
    dtype, sums = COMPUTED[computed] or torch.float32, REDUCED[reduced] or torch.float32
    plain, model = build(), build()
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(dist.get_rank()))
    shard_model(model, units=[by_class(nn.Linear)], mp_policy=policy(computed, reduced))
    model(x).square().sum().backward()
    alone = copy.deepcopy(plain).to(dtype)
    alone(x.to(dtype)).square().sum().backward()
    for param, sharded in zip(alone.parameters(), model.parameters(), strict=True):
        total = param.grad.to(sums)
        dist.all_reduce(total)
        assert total.any()
        assert torch.equal(sharded.grad.full_tensor(), (total / 2).float())


@distributed(world_size=2)
def test_batch_norm_under_bf16_by_the_rule_of_the_docs() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Conv2d(3, 3, 3), nn.BatchNorm2d(3), nn.ReLU()) for _ in range(2)))
    norms = MixedPrecisionPolicy(param_dtype=torch.float32, output_dtype=torch.bfloat16)
    policy, seen = MixedPrecisionPolicy(param_dtype=torch.bfloat16), list[torch.dtype]()
    shard_model(model, units=[by_class(nn.BatchNorm2d, mp_policy=norms), "*"], mp_policy=policy)
    model[0][1].register_forward_pre_hook(lambda _, args: seen.append(args[0].dtype))
    output = model(torch.randn(2, 3, 8, 8))
    output.sum().backward()
    assert (seen, output.dtype) == ([torch.float32], torch.bfloat16)
    assert model[0][1].running_mean.dtype == torch.float32 == model[0][1].weight.grad.dtype
    assert model[0][1].running_mean.any()
