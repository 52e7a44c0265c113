"""step_on_whole_matrices: the bits of the step on the unsharded model, in any world, and state that
any world loads.
"""

import copy

import pytest
import torch
from cpu_ranks import on_ranks
from grads_net import give_grads
from meshes import mesh_of
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from trees import assert_same

from shardkit import full_optimizer_state_dict, full_state_dict, step_on_whole_matrices
from shardkit.checkpoint import load_checkpoint, save_checkpoint
from shardkit.errors import ShardkitError
from shardkit.shards import as_sharded, local_box
from shardkit.testing import fake_world


class Net(nn.Module):
    """Matrices of several shapes, uneven over 4 ranks, one sharded on dim 1, and experts of three
    dims.
    """

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Linear(a, b, bias=False) for a, b in ((8, 6), (5, 7), (12, 8), (3, 2))
        )
        self.experts = nn.Parameter(torch.randn(3, 8, 6))
        self.wide = nn.Parameter(torch.randn(2, 6, 8))
        self.norm = nn.Parameter(torch.ones(9))


def build(shape, dtype=torch.float64):
    torch.manual_seed(0)
    net = Net().to(dtype)
    if shape is not None:
        across = {net.layers[2].weight: Shard(1), net.wide: Shard(2)}
        fully_shard(net, mesh=mesh_of(shape), shard_placement_fn=across.get)
    return net


class PerTensor(torch.optim.Optimizer):
    """Scales by the norms of the whole tensor; state of its shape, of other shapes, in a list, and
    a number.
    """

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state |= {
                        "step": 0,
                        "mean": torch.zeros_like(p),
                        "factors": [p.new_zeros(n) for n in p.shape],
                    }
                state["step"] += 1
                state["mean"].lerp_(p.grad, 0.5)
                for dim, factor in enumerate(state["factors"]):
                    factor.add_(
                        p.grad.square().transpose(0, dim).flatten(1).sum(1)
                        if p.ndim > 1
                        else p.grad.square()
                    )
                p.add_(state["mean"] / state["mean"].norm(), alpha=-group["lr"] / state["step"])


def muon(net):
    optimizer = torch.optim.Muon([layer.weight for layer in net.layers], lr=0.02, weight_decay=0.1)
    optimizer.add_param_group({"params": [net.experts, net.wide], "lr": 0.05})
    return optimizer


def muon_by_hand(net):
    """The same on the plain net, whose experts are matrices of their own."""
    optimizer = torch.optim.Muon([layer.weight for layer in net.layers], lr=0.02, weight_decay=0.1)
    # views
    slices = [nn.Parameter(each) for stack in (net.experts, net.wide) for each in stack.detach()]
    optimizer.add_param_group({"params": slices, "lr": 0.05})
    return optimizer


MAKE = {
    "Muon": (muon, muon_by_hand),
    "Adafactor": (lambda net: torch.optim.Adafactor(net.parameters(), lr=0.05),) * 2,
    "PerTensor": (lambda net: PerTensor(net.parameters()),) * 2,
}


def run(net, optimizer, steps):
    for step in steps:
        net.zero_grad()
        give_grads(net, step, skip="layers.3.weight" if step == 1 else "")
        for group in optimizer.param_groups[1:]:
            if group["params"][0].ndim == 2:  # the slices of ``muon_by_hand``
                grads = [*net.experts.grad, *net.wide.grad]
                for matrix, grad in zip(group["params"], grads, strict=True):
                    matrix.grad = grad
        optimizer.step()


def full(net):
    return full_state_dict(net, rank0_only=False)


@pytest.mark.parametrize("name", MAKE)
@on_ranks(4)
def test_the_bits_of_the_unsharded_step(name):
    for shape in ((4,), (2, 2)):
        net, plain = build(shape), build(None)
        ours, theirs = (
            step_on_whole_matrices(MAKE[name][0](net), slices=name == "Muon"),
            MAKE[name][1](plain),
        )
        before = full(net)
        run(net, ours, range(4))
        run(plain, theirs, range(4))
        found = full(net)
        for fqn, value in plain.state_dict().items():
            assert torch.equal(found[fqn], value), fqn
            assert (name == "Muon" and fqn == "norm") or not torch.equal(value, before[fqn]), fqn
        state = full_optimizer_state_dict(net, ours, rank0_only=False)["state"]
        for fqn, param in plain.named_parameters():
            if param in theirs.state:
                assert_same(state[fqn], theirs.state[param], fqn)


@pytest.mark.parametrize("name", MAKE)
@on_ranks(4)
def test_saved_and_resumed_on_other_meshes(name, tmp_path):
    net = build((4,))
    ours = step_on_whole_matrices(MAKE[name][0](net), slices=name == "Muon")
    run(net, ours, range(2))
    save_checkpoint(tmp_path / "c", net, ours)
    run(net, ours, range(2, 4))
    for shape in ((2, 2), None):
        other = build(shape)
        resumed = step_on_whole_matrices(MAKE[name][0](other), slices=name == "Muon")
        load_checkpoint(tmp_path / "c", other, resumed)
        run(other, resumed, range(2, 4))
        assert_same(full(other), full(net))
        states = [
            full_optimizer_state_dict(*of, rank0_only=False)["state"]
            for of in ((net, ours), (other, resumed))
        ]
        assert_same(*states)


# The last one steps on shards too. Others' roots and powers round by the place of an element in a
# vector.
PACKAGES = ["CAME", "madgrad", "shampoo", "soap", "spam", "stablespam", "aggmo"]


@pytest.mark.parametrize("name", PACKAGES)
@on_ranks(2)
def test_a_packages_optimizer(name):
    if name == "CAME":
        kind = pytest.importorskip("came_pytorch").CAME
    else:
        kind = pytest.importorskip("pytorch_optimizer").load_optimizer(name)
    nets = net, plain = build((2,)), build(None)
    ours, theirs = (kind([*each.layers.parameters(), each.norm], lr=1e-2) for each in nets)
    for step in (0, 2, 3, 4):
        for each, optimizer in ((net, step_on_whole_matrices(ours)), (plain, theirs)):
            give_grads(each, step)
            optimizer.step()
    assert_same(full(net), plain.state_dict())


@on_ranks(4)
def test_each_rank_works_on_its_share_and_errors_are_everyones():
    worked = []

    class Noting(PerTensor):
        def step(self, closure=None):
            worked.extend(p.shape for group in self.param_groups for p in group["params"])
            if len(worked) > 1000:
                raise RuntimeError("one owner fails")
            super().step()

    net = nn.ParameterList(nn.Parameter(torch.randn(8, 8)) for _ in range(8))
    block = nn.Sequential(nn.Identity())
    block.params = net
    fully_shard(block, mesh=mesh_of((4,)))
    optimizer = step_on_whole_matrices(Noting(block.parameters()))
    worked.clear()
    give_grads(block, 0)
    optimizer.step()
    assert worked == [(8, 8)] * 2
    if torch.distributed.get_rank() == 2:
        worked.extend([()] * 1000)
    before = full(block)
    with pytest.raises(
        ShardkitError if torch.distributed.get_rank() != 2 else Exception, match="one owner fails"
    ):
        optimizer.step()
    assert_same(full(block), before)


class Counting(PerTensor):
    """Counts its steps wherever optimizers do: in groups, as numbers and tensors, in an attribute,
    in the state.
    """

    def __init__(self, params):
        super().__init__(params)
        self.calls = 0

    @torch.no_grad()
    def step(self, closure=None):
        super().step()
        self.calls += 1
        self.state.setdefault("k", torch.zeros((), dtype=torch.long)).add_(1)
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            group.setdefault("weight", torch.ones(1)).mul_(0.5)
            counts = group["step"] * group["weight"].item() * self.calls * self.state["k"].item()
            for p in group["params"]:
                if p.grad is not None:
                    p.mul_(1 - 0.01 * counts)

    def counts(self):
        groups = [(group["step"], group["weight"], group["lr"]) for group in self.param_groups]
        return self.calls, self.state["k"], groups


def counting(net):
    optimizer = Counting(net.layers.parameters())
    optimizer.add_param_group({"params": [net.norm], "lr": 0.2})
    optimizer.add_param_group({"params": [net.experts, net.wide], "lr": 0.3})
    return optimizer


@on_ranks(4)
def test_counts_of_steps_change_once_a_step():
    net, plain = build((4,)), build(None)
    ours, theirs = step_on_whole_matrices(counting(net)), counting(plain)
    with pytest.MonkeyPatch.context() as patch:
        # several buckets, in which most ranks own nothing
        patch.setattr("shardkit.optim.whole.BUCKET_BYTES", 64)
        for step in range(3):
            for each, optimizer in ((net, ours), (plain, theirs)):
                give_grads(each, step)
                if step == 2:
                    each.norm.grad = None  # its group counts nevertheless
                optimizer.step()
            assert_same(ours.counts(), theirs.counts())
            assert [group["step"] for group in ours.param_groups] == [step + 1] * 3
    found = full(net)
    assert all(torch.equal(found[fqn], value) for fqn, value in plain.state_dict().items())


@on_ranks(4)
def test_a_number_that_depends_on_the_parameters_is_refused_on_every_rank():
    class Largest(PerTensor):
        def step(self, closure=None):
            super().step()
            for group in self.param_groups:
                group["largest"] = max((p.numel() for p in group["params"]), default=0)

    net = build((4,))
    optimizer = step_on_whole_matrices(Largest(net.layers.parameters()))
    give_grads(net, 0)
    before = full(net)
    with pytest.raises(
        ShardkitError, match=r"changed 'largest' in group 0 to \d+ for some parameters, to \d+ for"
    ):
        optimizer.step()
    assert_same(full(net), before)
    assert "largest" not in optimizer.param_groups[0]


@fake_world(4)
def test_copies_step_on_whole_matrices_too():
    optimizer = step_on_whole_matrices(
        torch.optim.Muon([nn.Parameter(torch.ones(4, 4))], lr=0.1), slices=True
    )
    assert type(copy.deepcopy(optimizer)) is type(optimizer)
    assert copy.deepcopy(optimizer).slices is True


@on_ranks(2)
def test_state_of_tensor_subclasses_is_refused_on_every_rank():
    torchao = pytest.importorskip("torchao.optim")
    net = fully_shard(nn.Sequential(nn.Linear(128, 64)), mesh=mesh_of((2,)))
    optimizer = step_on_whole_matrices(torchao.AdamW8bit(net.parameters()))
    give_grads(net, 0)
    before = full(net)
    with (
        torch.compiler.set_stance("force_eager"),
        pytest.raises(ShardkitError, match="has state of OptimState8bit"),
    ):
        optimizer.step()
    assert_same(full(net), before)


@on_ranks(4)
def test_tensor_parallel_parameters():
    """Sharded on both axes of a mesh, also with strided shards, beside those of one axis."""
    mesh = mesh_of((2, 2), "dp", "tp")
    nets = [
        nn.Sequential(
            nn.Linear(6, 10, bias=False), nn.Linear(10, 6, bias=False), nn.Linear(6, 5, bias=False)
        )
    ]
    nets.append(copy.deepcopy(nets[0]))
    sharded, plain = nets
    parallelize_module(sharded, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(sharded, mesh=mesh["dp"])
    optimizers = [
        step_on_whole_matrices(torch.optim.Adafactor(sharded.parameters())),
        torch.optim.Adafactor(plain.parameters()),
    ]
    for step in range(3):
        for number, (param, like) in enumerate(
            zip(plain.parameters(), sharded.parameters(), strict=True)
        ):
            param.grad = torch.randn(
                param.shape, generator=torch.Generator().manual_seed(10 * step + number)
            )
            part = param.grad.clone()
            for dim, (start, length) in enumerate(local_box(like)):
                part = part.narrow(dim, start, length)
            like.grad = as_sharded(part.contiguous(), like)
        for optimizer in optimizers:
            optimizer.step()
    for param, expected in zip(full(sharded).values(), plain.parameters(), strict=True):
        assert torch.equal(param, expected)
