"""Meta init, on one rank of a fake world: what stays the same object, initializers, errors that
change nothing.
"""

import copy
import weakref

import pytest
import torch
from meta_check import build_sharded, check_same_as_ordinary, differences, net, shard
from torch import nn
from torch.distributed.fsdp import fully_shard

from shardkit.errors import ShardkitError
from shardkit.meta import init_on_meta, materialize
from shardkit.testing import fake_world


@pytest.fixture(autouse=True)
def world(request):
    size, rank = getattr(request, "param", (3, 1))
    with fake_world(size, rank=rank):
        yield


# ---- identity, mixtures --------------------------------------------------------------------------


def test_objects_attributes_and_optimizers_stay():
    with init_on_meta():
        model = net()
        model[0].bias.note = "kept"
    shard(model)
    model[0].weight.decay = 0.5
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    held = list(model.parameters())
    materialize(model)
    assert all(a is b for a, b in zip(held, model.parameters(), strict=True))
    assert model[0].weight.decay == 0.5
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = [parameter.to_local().clone() for parameter in held]
    optimizer.step()
    for old, parameter in zip(before, model.parameters(), strict=True):
        torch.testing.assert_close(parameter.to_local(), old - 1, rtol=0, atol=0)


def test_real_parameters_are_left_alone():
    torch.manual_seed(7)
    plain = net()
    torch.manual_seed(7)
    with init_on_meta():
        model = net()
    adapter = nn.Linear(2, 2)
    expected = nn.Sequential(plain, copy.deepcopy(adapter))
    model = shard(nn.Sequential(model, adapter))
    materialize(model)
    assert differences(expected, model) == []


def test_casts_after_the_context_are_followed():
    torch.manual_seed(7)
    plain = net().to(torch.bfloat16)
    torch.manual_seed(7)
    with init_on_meta():
        model = net()
    assert differences(plain, materialize(shard(model.to(torch.bfloat16)))) == []


# ---- errors --------------------------------------------------------------------------------------


def meta_state(model):
    return [(id(t), t.device.type, type(t)) for t in (*model.parameters(), *model.buffers())]


def refused(model, match, **kwargs):
    before = meta_state(model)
    state = torch.get_rng_state()
    with pytest.raises(ShardkitError, match=match):
        materialize(model, **kwargs)
    assert meta_state(model) == before
    assert torch.equal(state, torch.get_rng_state())


def test_what_is_not_sharded_or_not_on_meta():
    with init_on_meta():
        model = net()
    refused(model, r"^model is not sharded\. .* Call shard_model\(model\) or fully_shard first\.$")
    materialize(shard(model))
    refused(
        model,
        r"^model has no parameters or buffers on the meta device\. materialize is called once",
    )
    refused(fully_shard(net()), r"has no parameters or buffers on the meta device")
    with pytest.raises(ShardkitError, match=r"nn\.Module"):
        materialize({})


class Garbage(nn.Module):
    def __init__(self):
        super().__init__()
        self.good = nn.Linear(3, 3)
        self.never = nn.Parameter(torch.empty(4, 2))
        self.partly = nn.Parameter(torch.empty(4, 2))
        self.partly.data[:2] = 1
        self.derived = nn.Parameter(self.never.data * 2)
        self.register_buffer("table", torch.empty(5), persistent=False)
        self.masked = nn.Parameter(torch.empty(4))
        self.masked.data[torch.ones(4, dtype=torch.bool)] = 0.0


def test_what_nothing_writes_is_listed():
    with init_on_meta():
        model = Garbage()
    refused(
        shard(model), r"^never, table would stay uninitialized.* Initialize it inside init_on_meta"
    )


def test_what_was_made_elsewhere_is_listed():
    with torch.device("meta"):
        model = net()
    refused(
        shard(model),
        r"^0.weight, 0.bias, 1.weight, 1.bias was made on the meta device outside init_on_meta",
    )


def test_a_partly_written_parameter_keeps_what_was_written():
    """The rest is undefined, as in ordinary construction."""
    with init_on_meta():
        model = nn.Module()
        model.partly = nn.Parameter(torch.empty(6, 2))
        model.partly.data[2] = 1
        model.partly.data[torch.tensor([3, 5])] = 2.0
    materialize(fully_shard(model))
    assert model.partly.to_local().tolist() == [[1, 1], [2, 2]]  # rank 1 of 3


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_layers_without_elements_need_no_values():
    check_same_as_ordinary(lambda: nn.Sequential(nn.Linear(8, 0), nn.Linear(2, 3)))


class NestedLists(nn.Module):
    """torch 2.13 takes such an index for a tuple and warns; newer ones take it for a tensor."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(6, 4))
        self.w.data[[[0, 5], [1, 2]]] = 7.0


class LegacyConstructor(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(2))
        self.w.data.mul_(self.w.new([1, 2]))


READ_UNSEEN = r"^a meta tensor is read in init_on_meta\(\), which did not see it being made"


@pytest.mark.filterwarnings("ignore:Using a non-tuple sequence")
@pytest.mark.parametrize("build", [NestedLists, LegacyConstructor])
def test_values_that_were_not_seen_are_never_read(build):
    with pytest.raises(ShardkitError, match=READ_UNSEEN), init_on_meta():
        build()


def test_a_meta_tensor_from_outside_has_a_value_once_it_is_written():
    outside = torch.ones(5, device="meta")
    for read in (torch.Tensor.tolist, torch.Tensor.clone, torch.Tensor.sqrt_):
        with pytest.raises(ShardkitError, match=READ_UNSEEN), init_on_meta():
            read(outside)
    with init_on_meta():
        model = net()
        outside.fill_(3)
        model[1].weight.data.copy_(outside)
    assert materialize(fully_shard(model))[1].weight.to_local().eq(3).all()


def test_ties_and_shapes_made_afterwards():
    with init_on_meta():
        model, other = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), net()
    model[1].weight = model[0].weight
    refused(fully_shard(model), r"^0\.weight, 1\.weight became one tensor after init_on_meta")
    with torch.device("meta"):
        other[0].bias = nn.Parameter(torch.zeros(7))
    refused(shard(other), r"^0\.bias has another shape than was recorded")


def test_hooks_and_weak_references():
    model = build_sharded(net)
    reference = weakref.ref(model[0].bias)
    model[1].weight.register_post_accumulate_grad_hook(lambda parameter: None)
    model[1].bias.register_hook(lambda grad: None)
    refused(
        model, r"^0\.bias, 1\.bias has a hook of register_hook, or a weak reference to it exists"
    )
    assert reference() is model[0].bias


def test_sharding_inside_the_context():
    with (
        pytest.raises(ShardkitError, match=r"^a DTensor is used inside init_on_meta"),
        init_on_meta(),
    ):
        shard(net())
