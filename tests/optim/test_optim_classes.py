"""Which optimizers step_on_local_shards takes; check_optimizer."""

import inspect

import pytest
import torch
from cpu_ranks import on_ranks
from grads_net import give_grads, sharded_net
from optim_nets import OPTIONS, PLAIN_ONLY, factory, local, trainable
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from shardkit.errors import ShardkitError
from shardkit.optim import check_optimizer, step_on_local_shards, step_on_whole_matrices
from shardkit.testing import fake_world


def params():
    return [nn.Parameter(torch.ones(4, 4))]


class Overriding(torch.optim.AdamW):
    def step(self, closure=None):
        return super().step(closure)


class Lookahead(torch.optim.Optimizer):
    """Delegates to another optimizer, as timm's: its groups and state are the inner one's."""

    def __init__(self, inner):
        self.inner, self.param_groups, self.state, self.defaults = inner, inner.param_groups, {}, {}

    def step(self, closure=None):
        return self.inner.step(closure)


@pytest.mark.parametrize("name", sorted(OPTIONS))
def test_torchs_elementwise_classes_and_their_subclasses_are_taken(name):
    kind = getattr(torch.optim, name)
    for make in (kind, type("Mine", (kind,), {})):
        assert isinstance(step_on_local_shards(make(params())), kind)
    # the order of the lists that torch collects
    _, group, first, second, *_ = inspect.signature(kind._init_group).parameters
    assert (group, second) == ("group", "grads")
    assert first in ("params", "params_with_grad")


def test_every_class_of_torch_is_listed_or_refused():
    names = {
        name for name in torch.optim.__all__ if inspect.isclass(getattr(torch.optim, name))
    } - {"Optimizer"}
    assert names - OPTIONS.keys() == {"Adafactor", "LBFGS", "Muon", "SparseAdam"}


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: torch.optim.Muon(params()), r"Muon, and not one of .*step_on_whole_matrices"),
        (lambda: torch.optim.LBFGS(params()), r"LBFGS, and not one of .*step_on_whole_matrices"),
        (
            lambda: torch.optim.Adafactor(params()),
            r"Adafactor, and .*Step it on DTensors, as it is",
        ),
        (lambda: Overriding(params()), r"Overriding, and not one of"),
        (lambda: torch.optim.Adam(params(), differentiable=True), "has differentiable=True"),
        (
            lambda: torch.optim.lr_scheduler.LinearLR(factory("SGD")(params())),
            "optimizer must be a .*Optimizer, got LinearLR",
        ),
        (
            lambda: Lookahead(factory("AdamW")(params())),
            r"wraps another.*Lookahead\(step_on_local_shards\(AdamW\(\.\.\.\)\)\)",
        ),
        (
            lambda: step_on_whole_matrices(torch.optim.Muon(params())),
            "was already given to step_on_whole_matrices",
        ),
    ],
)
def test_what_is_refused(make, text):
    optimizer = make()
    before, names = type(optimizer), dict(vars(optimizer))
    with pytest.raises(ShardkitError, match=text):
        step_on_local_shards(optimizer)
    assert type(optimizer) is before
    assert vars(optimizer) == names


def test_a_step_that_somebody_replaced_is_refused():
    optimizer = factory("SGD")(params())
    optimizer.step = lambda: None
    with pytest.raises(
        ShardkitError,
        match=r"^optimizer.step was replaced by <function .*Call step_on_local_shards before",
    ):
        step_on_local_shards(optimizer)


# What torch has for plain tensors only: the shards as plain tensors say what is right.


@pytest.mark.parametrize("make", [factory(name, **flags) for name, flags in PLAIN_ONLY])
@fake_world(4, rank=2)
def test_steps_like_on_plain_tensors(make):
    net = sharded_net((4,))
    shards = [nn.Parameter(local(param).clone()) for param in trainable(net)]
    ours, plain = step_on_local_shards(make(trainable(net))), make(shards)
    for step in range(3):
        give_grads(net, step)
        for shard, param in zip(shards, trainable(net), strict=True):
            shard.grad = local(param.grad).clone()
        ours.step()
        plain.step()
    for shard, param in zip(shards, trainable(net), strict=True):
        assert torch.equal(shard, local(param))
        assert plain.state[shard].keys() == ours.state[param].keys()
        for key, value in plain.state[shard].items():
            mine = ours.state[param][key]
            if isinstance(value, torch.Tensor) and value.ndim:
                assert type(mine) is (DTensor if isinstance(param, DTensor) else torch.Tensor)
                assert (mine.shape, mine.dtype) == (param.shape, value.dtype)
                assert torch.equal(local(mine), value)
            else:
                assert local(mine) == value if isinstance(value, torch.Tensor) else mine == value


@fake_world(4, rank=1)
def test_state_that_does_not_lie_like_its_parameter_is_refused():
    mesh = init_device_mesh("cpu", (4,))
    weight = nn.Parameter(distribute_tensor(torch.ones(8, 2), mesh, [Shard(0)], src_data_rank=None))
    weight.grad = weight.detach().clone()
    optimizer = step_on_local_shards(factory("AdamW")([weight]))
    optimizer.step()
    optimizer.state[weight]["exp_avg"] = distribute_tensor(
        torch.ones(8, 2), mesh, [Replicate()], src_data_rank=None
    )
    before = weight.to_local().clone()
    with pytest.raises(
        ShardkitError,
        match=r"^optimizer.state holds a DTensor of shape \(8, 2\) with placements \(R",
    ):
        optimizer.step()
    assert torch.equal(weight.to_local(), before)
    assert optimizer.param_groups[0]["params"][0] is weight


# check_optimizer.


def net():
    return nn.Sequential(
        nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2), nn.Linear(2, 2).requires_grad_(False)
    )


def sgd(*params):
    return torch.optim.SGD(list(params), lr=0.1)


def complaint(optimizer, model):
    with pytest.raises(ShardkitError) as caught:
        check_optimizer(optimizer, model)
    return str(caught.value)


def test_optimizers_of_exactly_what_trains_pass():
    model = net()
    model[2].weight = model[0].weight  # tied parameters are one
    check_optimizer(sgd(*model.parameters()), model)  # frozen ones may be in it
    check_optimizer(sgd(*(param for param in model.parameters() if param.requires_grad)), model)
    first, second = sgd(*model[0].parameters()), sgd(model[2].bias)
    check_optimizer([first, second], model)
    assert complaint(first, model).startswith(
        "2.bias have requires_grad=True and are in no optimizer"
    )


def test_everything_wrong_is_said_at_once():
    model, before = net(), net()
    foreign, missing = complaint(sgd(*before[0].parameters()), model).split("\n")
    assert foreign.startswith(
        "optimizer holds 2 tensors that are not parameters of the model, of shapes ("
    )
    assert missing.startswith("0.weight, 0.bias, 2.weight, 2.bias have requires_grad=True")


@on_ranks(2)
def test_built_before_sharding_or_of_gathered_parameters():
    model = net()
    early = torch.optim.AdamW(model.parameters())
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.zeros(1, 3))
    assert model[0].weight is not optimizer.param_groups[0]["params"][0], (
        "the root resharded after forward"
    )
    check_optimizer(optimizer, model)
    for stale in (early, torch.optim.AdamW(model.parameters())):
        assert "built before the model was sharded or materialized, between forward" in complaint(
            stale, model
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_parameters_without_float32_masters(dtype):
    model = net()
    model[0].to(dtype)
    model[3].to(dtype)  # frozen
    assert "0.weight, 0.bias" in (text := complaint(sgd(*model.parameters()), model))
    assert text.endswith("low_precision=True).")
    check_optimizer(sgd(*model.parameters()), model, low_precision=True)
