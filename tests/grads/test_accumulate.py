"""accumulate and zero_grad: gradients of one large batch, flags as they were, nothing left
over.
"""

import copy
import itertools

import pytest
import torch
import torch.distributed as dist
from accumulate_net import batches, integer_net, loss, micro_steps, one_large_batch, shard
from cpu_ranks import on_ranks
from grads_net import MESHES, Net, assert_grads, full_grads
from meshes import mesh_of
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from shardkit._fsdp import fsdp_units
from shardkit._torch import torch_version
from shardkit.errors import ShardkitError
from shardkit.grads import accumulate, clip_grad_norm_, reset_after_error, zero_grad
from shardkit.optim import optimizer_in_backward, step_on_local_shards
from shardkit.testing import fake_world

OPTIONS = [
    dict(zip(("keep_unsharded", "shard_gradients"), values, strict=True))
    for values in itertools.product([None, True, False], [False, True])
]


# Gradients.


@pytest.mark.parametrize(
    ("mesh", "reshard"), [("fsdp", None), ("fsdp", 2), ("hsdp", True), ("ddp-like", None)]
)
@on_ranks(4)
def test_integer_gradients_are_those_of_one_large_batch(mesh, reshard):
    plain, net = integer_net(), shard(integer_net(), MESHES[mesh], reshard_after_forward=reshard)
    for seed, options in enumerate(OPTIONS):
        ids = batches(seed, 3)
        expected = one_large_batch(plain, ids)
        assert all(grad.abs().max() > 3 for grad in expected.values()), "nothing to add up"
        micro_steps(net, ids, **options)
        assert all(isinstance(param, DTensor) for param in net.parameters()), "left unsharded"
        assert_grads(net, expected)
        net.zero_grad()


@pytest.mark.parametrize("settings", ["offload", "bf16"])
@on_ranks(4)
def test_offloaded_and_mixed_precision(settings):
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    arguments = {
        "offload": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
        "bf16": {"mp_policy": mixed, "reshard_after_forward": True},
    }[settings]
    net, plain = shard(integer_net(), **arguments), integer_net()
    plain.to(torch.bfloat16 if settings == "bf16" else torch.float32)
    for seed, options in enumerate(OPTIONS):
        ids = batches(seed, 3)
        expected = {}
        # each backward rounds to bf16 alone, and their sum is float32
        for mine in ids.flatten(0, 1):
            plain.zero_grad()
            loss(plain, mine).backward()
            for name, param in plain.named_parameters():
                if param.grad is not None:
                    expected[name] = expected.get(name, 0) + param.grad.float() / 4
        micro_steps(net, ids, **options)
        if settings == "bf16" and torch_version() >= (2, 15):
            # torch now adds what the two uses of a tied weight give in float32, where the plain
            # model rounds the sum.
            tied, mine = expected["embed.weight"], net.embed.weight.grad.full_tensor()
            assert ((mine - tied).abs() <= 2**-8 * 3 * tied.abs().max()).all()
            expected["embed.weight"] = mine
        assert_grads(net, expected)
        net.zero_grad()


@on_ranks(4)
def test_plain_parameters_parts_and_several_roots():
    ids = batches(1, 3)
    expected = one_large_batch(integer_net(), ids)
    net = shard(integer_net(), ignored=("gain",))
    for part in (net, net.blocks[0], nn.ModuleList([net, shard(integer_net(1))])):
        for i, mine in enumerate(ids[:, dist.get_rank()]):
            with accumulate(part, last=i == 2):
                loss(net, mine).backward()
        dist.all_reduce(net.gain.grad, dist.ReduceOp.AVG)  # which FSDP leaves to the user
        assert_grads(net, expected)
        net.zero_grad()
    plain = integer_net()  # and a model that is not sharded at all
    micro_steps(plain, ids[:, :, :, :].expand(3, 4, 2, 5))
    assert plain.gain.grad is not None


@on_ranks(4)
def test_the_next_backward_outside_reduces_what_waits():
    ids = batches(1, 3)
    net = shard(integer_net())
    first, second, third = ids[:, dist.get_rank()]
    sharded = list(net.parameters())
    with accumulate(net, last=False):
        loss(net, first).backward()
        loss(net, second).backward()
    assert not any(param.grad.to_local().any() for param in sharded if param.requires_grad)
    loss(net, third).backward()
    assert_grads(net, one_large_batch(integer_net(), ids))


@on_ranks(4)
def test_a_gradient_that_the_program_replaces_does_not_drop_what_waits():
    ids = batches(1, 3)
    net = shard(integer_net())
    first, second, third = ids[:, dist.get_rank()]
    loss(net, first).backward()
    with accumulate(net, last=False):
        loss(net, second).backward()
    for param in net.parameters():
        param.grad = param.grad.clone() if param.requires_grad else None
    loss(net, third).backward()
    assert_grads(net, one_large_batch(integer_net(), ids))


# What is left over.


class Broken(Exception):
    pass


@on_ranks(4)
def test_a_body_that_raises_leaves_no_gradient_behind():
    net = shard(integer_net(), MESHES["hsdp"])
    lost, ids = batches(1, 3), batches(2, 3)
    expected = one_large_batch(integer_net(), ids)

    def fail(i):
        if i == 1:
            raise Broken

    for options in OPTIONS:
        with pytest.raises(Broken):
            micro_steps(net, lost, after=fail, **options)
        assert all(param.grad is None for param in net.parameters())
        assert all(isinstance(param, DTensor) for param in net.parameters()), "left unsharded"
        micro_steps(net, ids, **options)
        assert_grads(net, expected)
        net.zero_grad()


@pytest.mark.parametrize(("mesh", "mixed"), [("fsdp", True), ("hsdp", False)])
@on_ranks(4)
def test_zero_grad_drops_what_waits(mesh, mixed):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    net = shard(integer_net(), MESHES[mesh], **({"mp_policy": policy} if mixed else {}))
    mine = batches(2, 1)[0, dist.get_rank()]
    loss(net, mine).backward()
    expected = full_grads(net)
    for options in OPTIONS:
        zero_grad(net)
        with accumulate(net, last=False, **options):
            loss(net, mine).backward()
        zero_grad(net)
        loss(net, mine).backward()
        assert_grads(net, expected)


# Flags.


MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


@pytest.mark.parametrize(
    ("mesh", "policy"), [("fsdp", MixedPrecisionPolicy()), ("fsdp", MIXED), ("hsdp", MIXED)]
)
@on_ranks(4)
def test_an_optimizers_zero_grad_drops_what_waits(mesh, policy):
    net = shard(integer_net(), MESHES[mesh], mp_policy=policy)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    micro_steps(net, batches(0, 2), shard_gradients=mesh == "hsdp")
    expected = full_grads(net)
    optimizer.zero_grad()
    for keep, to_none in ((None, True), (None, False), (True, False), (False, True)):
        with accumulate(
            net, last=False, keep_unsharded=keep, shard_gradients=mesh == "hsdp"
        ):  # of which a program finds that its loss is too large
            loss(net, batches(1, 1)[0, dist.get_rank()]).backward()
        clip_grad_norm_(net, 1.0)  # finds none, and marks none as cleared
        optimizer.zero_grad(set_to_none=to_none)
        micro_steps(net, batches(0, 2), shard_gradients=mesh == "hsdp")
        assert_grads(net, expected)
        optimizer.step()
        optimizer.zero_grad()


@on_ranks(4)
def test_an_optimizer_of_a_part_drops_the_gradients_of_that_part():
    net = shard(integer_net(), MESHES["fsdp"])
    optimizer = torch.optim.SGD([net.narrow.weight], lr=0.0)
    ids = batches(0, 3)
    micro_steps(net, ids)
    every = full_grads(net)
    net.zero_grad()
    micro_steps(net, ids[1:])
    later = full_grads(net)
    net.zero_grad()
    micro_steps(net, ids, lambda i: optimizer.zero_grad() if i == 0 else None)
    assert not torch.equal(every["narrow.weight"], later["narrow.weight"])
    assert_grads(net, {**every, "narrow.weight": later["narrow.weight"]})


@on_ranks(4)
def test_a_part_of_what_waits_for_one_all_reduce_cannot_be_dropped():
    net = shard(integer_net(), MESHES["hsdp"])
    optimizer = torch.optim.SGD([net.narrow.weight], lr=0.0)
    micro = batches(0, 1)[0, dist.get_rank()]
    with accumulate(net, last=False, shard_gradients=True):
        loss(net, micro).backward()
    optimizer.zero_grad()
    with pytest.raises(RuntimeError, match=r"Only 1 of \d gradients .*zero_grad\(model\)"):
        loss(net, micro).backward()


class Branches(nn.Module):
    """Micro-batches use one of two layers, in one unit."""

    def __init__(self, rows):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4, bias=False), nn.Linear(4, rows, bias=False)

    def forward(self, x, used):
        return getattr(self, used)(x)


@pytest.mark.parametrize("rows", [4, 6])
@on_ranks(4)
def test_micro_batches_that_use_different_parameters(rows):
    for mesh, used in itertools.product(("fsdp", "hsdp"), (["a", "b"], ["b", "a", "a"])):
        torch.manual_seed(0)
        plain = Branches(rows)
        net = copy.deepcopy(plain)
        fully_shard(net, mesh=mesh_of(MESHES[mesh]))
        for number, name in enumerate(used):
            x = torch.arange(16.0).view(4, 1, 4) - number
            with accumulate(net, last=number == len(used) - 1, shard_gradients=True):
                net(x[dist.get_rank()], name).sum().backward()
            (plain(x, name).sum() / 4).backward()
        assert_grads(net, {name: param.grad for name, param in plain.named_parameters()})


def flags(model):
    return [
        (
            unit.reduce_grads,
            unit.all_reduce_grads,
            unit.reshard_after_backward,
            unit.post_forward_mesh_info,
        )
        for unit in fsdp_units(model)
    ]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("last", [False, True])
def test_flags_are_put_back(last, options):
    with fake_world(8):
        net = Net()
        for block in net.blocks:
            fully_shard(block, reshard_after_forward=4)
        fully_shard(net)
        net.set_requires_gradient_sync(False)
        net.blocks[0].set_requires_all_reduce(True)
        net.blocks[1].set_reshard_after_backward(False)
        before = flags(net)
        with accumulate(net, last=last, **options):
            inside = flags(net)
            with accumulate(net, last=not last):
                assert {reduce for reduce, *_ in flags(net)} == {not last}
            assert flags(net) == inside
        assert inside != before
        assert flags(net) == before
        with pytest.raises(Broken), accumulate(net, last=last, **options):
            raise Broken
        assert flags(net) == before


def test_a_root_that_torch_decides_on_inside_stays_decided():
    with fake_world(8):
        net = fully_shard(Net())
        ids = torch.zeros(2, 5, dtype=torch.long)
        with accumulate(net, last=True, keep_unsharded=True):
            net(ids).sum().backward()
        net(ids)
        assert not isinstance(net.gain, DTensor), "resharded after forward"


def test_what_is_no_module():
    with pytest.raises(ShardkitError, match=r"^model .*list"), accumulate([], last=True):
        pass
    with pytest.raises(ShardkitError, match=r"^model .*Adam"):
        zero_grad(torch.optim.Adam([torch.zeros(1)]))


def test_another_value_of_keep_unsharded_is_refused():
    with fake_world(4):
        net = fully_shard(Net())
        before = flags(net)
        with pytest.raises(ShardkitError, match=r"^keep_unsharded .*None, .*\"frozen\".*'forzen'"):
            accumulate(net, last=False, keep_unsharded="forzen").__enter__()
        assert flags(net) == before


def test_an_optimizer_in_backward_keeps_nothing_to_add_to():
    with fake_world(4):
        net = fully_shard(Net())
        before = flags(net)
        optimizer_in_backward(net, torch.optim.SGD)
        with pytest.raises(
            ShardkitError,
            match=r"^model is stepped by optimizer_in_backward .* Use one large batch",
        ):
            accumulate(net, last=False).__enter__()
        assert flags(net) == before


# reset_after_error: the next step is that of a model that never failed.


SETTINGS = {
    "fewer ranks": {"reshard_after_forward": 2},
    "hsdp": {"shape": MESHES["hsdp"], "reshard_after_forward": True},
    "offload": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
    "bf16": {
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    },
}


FAILURES = [
    ("forward", 1, {}),
    ("backward", 1, {}),
    ("forward", 2, {"keep_unsharded": True}),
    ("backward", 2, {}),
    ("backward", 2, {"shard_gradients": True}),
]


class Raising(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor):
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx, grad):
        raise Broken


class Failing:
    """A hook on the second block, inside of FSDP's own, that raises in forward or in backward when
    it is told to.
    """

    def __init__(self):
        self.where = ""

    def __call__(self, module, args, output):
        if self.where == "forward":
            raise Broken
        return Raising.apply(output) if self.where == "backward" else output


def failing_net(settings):
    torch.manual_seed(0)
    net, failing = Net(), Failing()
    net.blocks[1].register_forward_hook(failing)
    return shard(net, **settings), failing


def step(net, optimizer, ids, **options):
    """A step of all micro-batches; returns this rank's gradients and then parameters."""
    micro_steps(net, ids, **options)
    grads = [param.grad.to_local().clone() for param in net.parameters() if param.grad is not None]
    optimizer.step()
    optimizer.zero_grad()
    return [*grads, *(param.detach().to_local().clone() for param in net.parameters())]


def fail(net, failing, where, ids, **options):
    """Raise in the last of the micro-batches, after the others have left gradients behind, or in
    the first alone.
    """
    for i, mine in enumerate(ids[:, dist.get_rank()]):
        failing.where = where if i == len(ids) - 1 else ""
        with pytest.raises(Broken) if failing.where else accumulate(net, last=False, **options):
            loss(net, mine).backward()
    failing.where = ""


@pytest.mark.parametrize("settings", SETTINGS)
@on_ranks(4)
def test_the_next_step_is_that_of_a_model_that_never_failed(settings):
    (net, failing), (twin, _) = failing_net(SETTINGS[settings]), failing_net(SETTINGS[settings])
    optimizers = [
        step_on_local_shards(torch.optim.AdamW(model.parameters(), lr=0.1)) for model in (net, twin)
    ]
    sharded = list(net.parameters())
    dirty = 0
    for seed, (where, micro_batches, options) in enumerate(FAILURES):
        fail(net, failing, where, batches(100 + seed, micro_batches), **options)
        dirty += any(param.grad is not None for param in sharded)
        dirty += any(not isinstance(param, DTensor) for param in net.parameters())
        reset_after_error(net)
        assert all(param.grad is None for param in net.parameters())
        assert all(isinstance(param, DTensor) for param in net.parameters())
        ids = batches(seed, 2)
        expected = step(twin, optimizers[1], ids, **options)
        actual = step(net, optimizers[0], ids, **options)
        assert len(actual) == len(expected)
        assert all(map(torch.equal, actual, expected)), (where, micro_batches, options)
    assert dirty >= len(FAILURES), "there was nothing to reset"


def test_several_roots_before_and_after_their_first_forward_and_plain_models():
    with fake_world(4):
        both = nn.ModuleList([Net(), Net()])
        for net in both:
            for block in net.blocks:
                fully_shard(block, reshard_after_forward=False)
            fully_shard(net)
        reset_after_error(both)
        ids = torch.zeros(2, 5, dtype=torch.long)
        for net in both:
            net(ids)
        assert not isinstance(both[1].blocks[0].weight, DTensor)
        reset_after_error(both)
        assert all(isinstance(param, DTensor) for param in both.parameters())
        both[0](ids).sum().backward()
        reset_after_error(both[0].blocks)  # and the root around them
        assert all(param.grad is None for param in both[0].parameters())
    plain = nn.Linear(2, 2)
    plain(torch.ones(1, 2)).sum().backward()
    reset_after_error(plain)
    assert plain.weight.grad is None
