"""full_params and named_full_tensors: whole parameters for a while, and one after the other."""

import pytest
import torch
import torch.distributed as dist
from cpu_ranks import on_ranks
from state_models import LAYOUTS, OTHERS, Net, assert_same_state, fsdp, hsdp, mesh_of, seeded
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from shardkit import accumulate, shard_model
from shardkit.checkpoint import named_full_tensors
from shardkit.errors import ShardkitError
from shardkit.state import full_params, full_state_dict
from shardkit.testing import comm_counts

TENSOR_PARALLEL = ("tensor_parallel", "three_axes")
IDS = torch.arange(6).view(2, 3)


def registry(model):
    return [(name, id(param)) for name, param in model.named_parameters(remove_duplicate=False)]


# full_params.


@pytest.mark.parametrize("layout", OTHERS)
@on_ranks(4)
def test_inside_they_are_the_plain_models_and_afterwards_the_same_objects(layout):
    plain = seeded(Net)
    model = LAYOUTS[layout](seeded(Net))
    full_state_dict(model)  # reshards
    before = registry(model)
    if layout == "unsharded":
        with torch.no_grad():
            model(IDS)
        assert registry(model) != before
    with full_params(model):
        found = dict(model.named_parameters())
        for (name, param), (_, expected) in zip(
            found.items(), plain.named_parameters(), strict=True
        ):
            assert type(param) is nn.Parameter, name
            assert torch.equal(param, expected), name
            assert param.requires_grad == expected.requires_grad, name
        inner = getattr(model, "_orig_mod", model)
        assert inner.head.weight is inner.embed.weight
        if layout not in TENSOR_PARALLEL:  # whose hooks make DTensors of inputs
            with torch.no_grad(), comm_counts() as counts:
                assert torch.equal(model.eval()(IDS), plain.eval()(IDS))
            assert counts.all_gathers == 0
    assert registry(model) == before
    with torch.no_grad():
        assert_same_output(layout, model.eval()(IDS), plain.eval()(IDS))


@on_ranks(2)
def test_the_first_forward_of_all_may_be_inside():
    plain = seeded(Net)
    model = shard_model(seeded(Net))
    with full_params(model), torch.no_grad():
        assert torch.equal(model(IDS), plain(IDS))
    for net in (model, plain):
        net(IDS).sum().backward()
    for (name, param), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        if param.requires_grad:
            assert torch.equal(param.grad.full_tensor(), other.grad), name


@pytest.mark.parametrize(
    ("layout", "rank0_only"),
    [
        ("fsdp", False),
        ("fsdp", True),
        ("hsdp", True),
        ("three_axes", False),
        ("columns", True),
        ("ignoring", False),
        ("unsharded", True),
    ],
)
@on_ranks(4)
def test_writeback_goes_into_the_live_shards(layout, rank0_only):
    model = LAYOUTS[layout](seeded(Net))
    full_state_dict(model)
    before = registry(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with torch.no_grad():
        model.eval()(IDS)  # the root is gathered now
    plain = seeded(Net).eval()
    with full_params(model, writeback=True, rank0_only=rank0_only), torch.no_grad():
        for param in (*model.parameters(), *plain.parameters()):
            if not isinstance(param, DTensor):  # with rank0_only the other ranks' are
                param.mul_(2)
    assert registry(model) == before
    assert_same_state(full_state_dict(model, rank0_only=False), plain.state_dict())
    own, held = model.parameters(), optimizer.param_groups[0]["params"]
    assert all(one is other for one, other in zip(own, held, strict=True))
    with torch.no_grad():
        assert_same_output(layout, model(IDS), plain(IDS))


def assert_same_output(layout, found, expected):
    """To the bit, except where tensor parallelism adds in another order."""
    bound = 1e-5 if layout in TENSOR_PARALLEL else 0
    torch.testing.assert_close(found, expected, rtol=bound, atol=bound)


def plain_state():
    return seeded(Net).state_dict()


@on_ranks(4)
def test_rank0_only_leaves_the_others_their_shards():
    model = hsdp(seeded(Net))
    with full_params(model, rank0_only=True, offload_to_cpu=True):
        assert isinstance(model.gain, DTensor) == (dist.get_rank() != 0)


@pytest.mark.parametrize("offload_to_cpu", [False, True])
@on_ranks(4)
def test_gradients_come_and_go_with_their_parameters(offload_to_cpu):
    plain, model = seeded(Net), fsdp(seeded(Net))
    for net in (plain, model):
        net(IDS).square().mean().backward()
    with full_params(model, writeback=True, with_grads=True, offload_to_cpu=offload_to_cpu):
        for param, expected in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(param.grad, expected.grad)
            if param.grad is not None:
                param.grad.fill_(3.0)
        assert model.frozen.weight.grad is None
    assert isinstance(model.gain.grad, DTensor)
    assert all((p.grad.full_tensor() == 3).all() for p in model.parameters() if p.grad is not None)
    with full_params(model):
        assert model.gain.grad is None


@on_ranks(2)
def test_gradients_that_wait_for_their_reduction_are_not_there_yet():
    model = fsdp(seeded(Net))
    with accumulate(model, last=False):
        model(IDS).square().mean().backward()
    with full_params(model, with_grads=True):
        assert all(param.grad is None for param in model.parameters())


def spoil(model, ranks=(0, 1, 2, 3)):
    with torch.no_grad():
        model.gain.zero_()
    if dist.get_rank() in ranks:
        raise ZeroDivisionError


@on_ranks(4)
def test_an_error_inside_restores_and_writes_nothing():
    model = fsdp(seeded(Net))
    before = registry(model)
    for options in ({}, {"writeback": True}):
        with pytest.raises(ZeroDivisionError), full_params(model, **options):
            spoil(model)
        assert registry(model) == before
    with (
        pytest.raises(ShardkitError, match="rank 2: ZeroDiv"),
        full_params(model, writeback=True, rank0_only=True),
    ):
        spoil(model, ranks=(2,))
    assert registry(model) == before
    assert_same_state(full_state_dict(model, rank0_only=False), plain_state())


class Half(nn.Linear):
    def encode(self, x):
        return self(x) * 2


@on_ranks(4)
def test_registered_methods_lists_and_policies_do_nothing_inside():
    def build():
        return nn.Sequential(Half(6, 6), nn.Linear(6, 6), nn.Linear(6, 5))

    plain, model = seeded(build), seeded(build)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    fully_shard(model[0], mesh=mesh_of((4,)), mp_policy=policy)
    register_fsdp_forward_method(model[0], "encode")
    fully_shard([model[1], model[2]], mesh=mesh_of((4,)), mp_policy=policy)
    fully_shard(model, mesh=mesh_of((4,)), mp_policy=policy)
    x = torch.randn(3, 6, generator=torch.Generator().manual_seed(1))
    outside = model(x)
    assert outside.dtype == torch.bfloat16
    with full_params(model), full_params(model):  # nested, it finds nothing to do
        assert torch.equal(model(x), plain(x))
        assert torch.equal(model[0].encode(x), plain[0].encode(x))
        assert torch.equal(model[2](x), plain[2](x)), "a part by itself"
        model(x).sum().backward()
        assert model[2].bias.grad is not None
    assert torch.equal(model(x), outside)
    assert all(param.grad is None for param in model.parameters())


class Summoning(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        with full_params(self):
            return self.inner(x)


@on_ranks(4)
def test_refused_in_a_forward_and_with_another_shape():
    model = fully_shard(Summoning(nn.Linear(6, 6)), mesh=mesh_of((4,)))
    with pytest.raises(ShardkitError, match="was called in a forward or backward"):
        model(torch.ones(2, 6))
    model = fsdp(seeded(Net))
    before = registry(model)
    with (
        pytest.raises(ShardkitError, match=r"gain has another shape"),
        full_params(model, writeback=True),
    ):
        model.gain = nn.Parameter(torch.ones(2))
    assert registry(model) == before
    model.gain.grad = torch.zeros_like(model.gain) if dist.get_rank() == 1 else None
    with (
        pytest.raises(ShardkitError, match="in which parameters have gradients"),
        full_params(model, with_grads=True),
    ):
        raise AssertionError("not reached")


# named_full_tensors.


@pytest.mark.parametrize("layout", ["plain", "hsdp", "tensor_parallel", "unsharded"])
@on_ranks(4)
def test_all_tensors_come_once_under_each_name(layout):
    expected = {name: value for name, value in plain_state().items() if isinstance(value, Tensor)}
    model = LAYOUTS[layout](seeded(Net))
    for rank0_only in (False, True):
        found = list(named_full_tensors(model, rank0_only=rank0_only))
        if rank0_only and dist.get_rank():
            assert found == []
            continue
        assert len(found) == len(expected)
        assert dict(found).keys() == expected.keys()
        assert all(torch.equal(value, expected[name]) for name, value in found)
