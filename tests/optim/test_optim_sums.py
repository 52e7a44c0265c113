"""step_on_whole_matrices of optimizers that join parameters by sums and norms: on shards, over all ranks."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from meshes import mesh_of
from test_optim_whole import Net, build, full, give_grads
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from shardkit import (
    full_optimizer_state_dict,
    load_checkpoint,
    load_full_optimizer_state_dict,
    load_full_state_dict,
    save_checkpoint,
    step_on_whole_matrices,
)
from shardkit.errors import ShardkitError
from shardkit.testing import comm_counts, distributed, fake_world

# Sums of some hundred float64 in another order, relative.
CLOSE = {"rtol": 1e-12, "atol": 1e-14}
REDUCTIONS = {
    "sum": lambda p, g: p.abs().sum(),
    "dot": lambda p, g: torch.dot(p.flatten(), g.flatten()),
    "mean": lambda p, g: (p - g).mean(),
    "norm": lambda p, g: p.norm(),
    "norm_1": lambda p, g: torch.linalg.vector_norm(g, 1),
    "norm_3": lambda p, g: (p - g).norm(3),
    "norm_inf": lambda p, g: g.norm(float("inf")),
    "norm_0": lambda p, g: torch.norm(g.clamp(min=0), 0),
    "keepdim": lambda p, g: torch.linalg.vector_norm(g, dim=tuple(range(g.ndim)), keepdim=True).reshape(()),
    "foreach_norm": lambda p, g: torch.stack(torch._foreach_norm([p, g])).sum(),
    "max": lambda p, g: g.max(),
    "amax": lambda p, g: p.abs().amax(),
    "min": lambda p, g: g.min(),
    "any": lambda p, g: (g > 2).any().double() + (p > 100).any().double(),
    "all": lambda p, g: (p.abs() > 0).all().double() + (g > 0).all().double(),
    "count": lambda p, g: torch.count_nonzero(g > 0.5).double(),
}


class Joined(torch.optim.Optimizer):
    """Every update depends on one reduction of all parameters; state as a vector, of the shape, and a number."""

    def __init__(self, params, reduction):
        super().__init__(params, {"lr": 0.01})
        self.reduction = reduction

    @torch.no_grad()
    def step(self, closure=None):
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        joined = 0.0
        for p in params:
            state = self.state[p]
            if not state:
                state |= {"s": torch.zeros_like(p.flatten()), "mean": torch.zeros_like(p), "step": 0}
            state["step"] += 1
            state["s"].mul_(0.5).add_(p.grad.flatten())
            state["mean"].lerp_(p.grad, 0.5)
            joined += REDUCTIONS[self.reduction](p + state["mean"], p.grad + state["s"].view_as(p)).item()
        for p in params:
            p.sub_(self.state[p]["mean"] + joined, alpha=self.param_groups[0]["lr"])
        self.param_groups[0]["joined"] = joined


def params_of(net: Net) -> list[torch.nn.Parameter]:
    return [*net.layers.parameters(), net.experts, net.norm]


@pytest.mark.parametrize("reduction", REDUCTIONS)
@distributed(world_size=4, backend="gloo")
def test_reductions_are_those_of_whole_parameters(reduction):
    plain = build(None)
    theirs = Joined(params_of(plain), reduction)
    runs = []
    for shape in ((4,), (2, 2)):
        net = build(shape)
        runs.append((net, step_on_whole_matrices(Joined(params_of(net), reduction))))
    for step in range(2):
        for net, optimizer in [*runs, (plain, theirs)]:
            give_grads(net, step)
            optimizer.step()
        for net, optimizer in runs:
            assert optimizer.param_groups[0]["joined"] == pytest.approx(theirs.param_groups[0]["joined"], rel=1e-12)
            assert all(torch.allclose(full(net)[fqn], value, **CLOSE) for fqn, value in plain.state_dict().items())
    assert abs(theirs.param_groups[0]["joined"]) > 0.5


@distributed(world_size=2, backend="gloo")
def test_sums_of_half_precision_are_rounded_once():
    """Rounded on each rank first, the sum would be 2048."""
    param = nn.Parameter(torch.full((2048,), 1.0, dtype=torch.bfloat16))
    block = nn.Sequential(nn.Identity())
    block.register_parameter("only", param)
    fully_shard(block, mesh=mesh_of((2,)))
    for name, wanted in (("sum", 2064.0), ("norm_3", 2683 ** (1 / 3)), ("mean", 2059 / 2048)):
        seen = []

        class Seen(Joined):
            def step(self, closure=None, name=name, seen=seen):
                for p in self.param_groups[0]["params"]:
                    seen.append(REDUCTIONS[name](p, torch.zeros_like(p)).float().item())
                super().step()

        optimizer = step_on_whole_matrices(Seen(block.parameters(), "sum"))
        with torch.no_grad():
            block.only.to_local().fill_(1.0)[0] = (5.0, 8.0)[dist.get_rank()]
        block.only.grad = torch.zeros_like(block.only)
        seen.clear()
        optimizer.step()
        assert seen == [torch.tensor(wanted, dtype=torch.bfloat16).item()]


@distributed(world_size=4, backend="gloo")
def test_extremes_of_not_a_number_and_of_empty_shards():
    for reduction in ("max", "min", "norm_inf"):
        net = build((4,))
        optimizer = step_on_whole_matrices(Joined(params_of(net), reduction))
        give_grads(net, 0)
        small = net.layers[3].weight  # two rows: two ranks have none
        small.grad = torch.full_like(small, float("nan")) if dist.get_rank() == 1 else torch.zeros_like(small)
        optimizer.step()
        assert optimizer.param_groups[0]["joined"] != optimizer.param_groups[0]["joined"], reduction


@fake_world(4)
def test_slices_are_of_whole_matrices_only():
    with pytest.raises(ShardkitError, match="joins parameters by sums, and slices=True is given"):
        step_on_whole_matrices(Joined([nn.Parameter(torch.ones(4, 4))], "norm"), slices=True)


@distributed(world_size=4, backend="gloo")
def test_state_is_sharded_and_goes_to_other_meshes_and_to_the_plain_optimizer(tmp_path):
    net, plain = build((4,)), build(None)
    ours, theirs = step_on_whole_matrices(Joined(params_of(net), "norm")), Joined(params_of(plain), "norm")
    for step in range(2):
        for each, optimizer in ((net, ours), (plain, theirs)):
            give_grads(each, step)
            optimizer.step()
    assert all(
        isinstance(value, DTensor) and value.placements == param.placements
        for param in ours.state
        for value in ours.state[param].values()
        if isinstance(value, Tensor)
    )
    state = full_optimizer_state_dict(net, ours, rank0_only=False)
    for fqn, param in plain.named_parameters():
        if param in theirs.state:
            assert {key: getattr(value, "shape", None) for key, value in state["state"][fqn].items()} == {
                key: getattr(value, "shape", None) for key, value in theirs.state[param].items()
            }
    save_checkpoint(tmp_path / "c", net, ours)
    values = full(net)
    give_grads(net, 2)
    ours.step()
    by_checkpoint, by_dict, unsharded = build((2, 2)), build((2, 2)), build(None)
    for other in (by_checkpoint, by_dict, unsharded):
        optimizer = Joined(params_of(other), "norm")
        optimizer = optimizer if other is unsharded else step_on_whole_matrices(optimizer)
        if other is by_checkpoint:
            load_checkpoint(tmp_path / "c", other, optimizer)
        else:
            load_full_state_dict(other, values, src="all")
            load_full_optimizer_state_dict(other, optimizer, state, src="all")
        give_grads(other, 2)
        optimizer.step()
        assert all(torch.allclose(full(other)[fqn], value, **CLOSE) for fqn, value in full(net).items())


@distributed(world_size=2, backend="gloo")
def test_a_mean_of_nan_is_nan():
    net = build((2,))
    optimizer = step_on_whole_matrices(Joined(params_of(net), "mean"))
    give_grads(net, 0)
    if dist.get_rank() == 0:
        net.norm.grad.to_local()[0] = float("nan")
    optimizer.step()
    assert math.isnan(optimizer.param_groups[0]["joined"])


class JoinedLists(torch.optim.Optimizer):
    """Every update depends on norms and sums of lists of all parameters."""

    @torch.no_grad()
    def step(self, closure=None):
        params = self.param_groups[0]["params"]
        grads = torch._foreach_mul([p.grad for p in params], 2.0)
        joined = torch.stack(torch._foreach_norm(grads)).norm() + sum(grad.abs().sum() for grad in grads)
        torch._foreach_add_(params, grads, alpha=-1e-3 * joined.item())


@distributed(world_size=2, backend="gloo")
def test_lists_hold_shards_beside_plain_parameters():
    net, plain = build(None), build(None)
    fully_shard(net, mesh=mesh_of((2,)), ignored_params={net.layers[0].weight, net.norm})
    ours = step_on_whole_matrices(JoinedLists(params_of(net), {}))
    for each, optimizer in ((net, ours), (plain, JoinedLists(params_of(plain), {}))):
        give_grads(each, 0)
        optimizer.step()
    assert all(torch.allclose(full(net)[fqn], value, **CLOSE) for fqn, value in plain.state_dict().items())


@distributed(world_size=2, backend="gloo")
def test_only_the_sums_are_sent():
    net = build((2,))
    optimizer = step_on_whole_matrices(Joined(params_of(net), "norm"))
    give_grads(net, 0)
    with comm_counts() as counts:
        optimizer.step()
    assert (counts.all_gathers, counts.reduce_scatters) == (0, 0)
    assert counts.all_reduces >= len(params_of(net))
