"""compare_ranks: where two ranks first differ."""

import math

import torch
import torch.distributed as dist
from torch import nn

from shardkit import shard_model
from shardkit.apply.mesh import build_mesh
from shardkit.plan import MeshSpec
from shardkit.testing import distributed
from shardkit.watching import compare_ranks
from shardkit.watching.ranks import digest, distance


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 5), nn.BatchNorm1d(5, affine=False).eval(), nn.ReLU())


def test_the_distance_is_a_lower_bound():
    for seed in range(50):
        torch.manual_seed(seed)
        a = torch.randn(7, 9)
        b = a + torch.randn(7, 9) * 10.0 ** -(seed % 7) if seed % 2 else a[:, torch.randperm(9)]
        found = distance(digest(a), digest(b))
        true = ((a - b).double().norm() / max(a.double().norm(), b.double().norm())).item()
        assert 0 < found <= true * (1 + 1e-6)
    assert distance([2, 1.0, 0.0, math.nan], [2, 1.0, 0.0, 1.0]) == math.inf


@distributed(world_size=2)
def test_ranks_that_differ_are_named():
    rank = dist.get_rank()
    model = shard_model(build(), mesh=build_mesh(MeshSpec.hybrid(2, 1)))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    assert compare_ranks(model, optimizer) is None
    with torch.no_grad():
        model[2].weight.to_local()[0] += 1e-4 * rank
    found = compare_ranks(model, optimizer)
    assert str(found).startswith("2.weight on ranks 0 and 1: at least ")
    assert 0 < found.distance < 1e-3
    with torch.no_grad():
        model[2].weight.to_local()[0] -= 1e-4 * rank
    model[3].running_mean += rank
    assert compare_ranks(model, optimizer).at == "3.running_mean"
    model[3].running_mean -= rank
    optimizer.param_groups[0]["lr"] = 0.1 * (rank + 1)
    assert compare_ranks(model, optimizer).at in ("2.weight", "group 0.lr")  # 1e-4 may leave a rounding
    assert math.isinf(compare_ranks(nn.Linear(2, 2).requires_grad_(rank == 0)).distance)


@distributed(world_size=4)
def test_a_shard_that_a_replica_lacks_is_named():
    model = shard_model(nn.Linear(8, 8), mesh=build_mesh(MeshSpec.hybrid(2, 2)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)
    model(torch.ones(2, 8)).sum().backward()
    if dist.get_rank() >= 2:
        optimizer.step()  # with a rate of 0 only its state differs
    assert compare_ranks(model, optimizer).at == "weight.step"
    if dist.get_rank() >= 2:
        model.weight.grad = None
    assert compare_ranks(model).at == "weight.grad"
