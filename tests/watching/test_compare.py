"""record_run, compare_runs and compare_ranks: where two runs, or two ranks, first differ."""

import math

import pytest
import torch
import torch.distributed as dist
from fsdp1_models import CPU
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from shardkit import ShardkitError, shard_model
from shardkit.apply.mesh import build_mesh
from shardkit.plan import MeshSpec
from shardkit.testing import distributed
from shardkit.watching import compare_ranks, compare_runs, record_run
from shardkit.watching.runs import digest, distance


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 5), nn.BatchNorm1d(5, affine=False).eval(), nn.ReLU())


def train(model, path, rank=0, world=1, change=False, steps=3):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    batches = torch.randn(steps, 4, 6, generator=torch.Generator().manual_seed(1)).chunk(world, 1)[rank]
    with record_run(model, optimizer, path):
        for number, batch in enumerate(batches):
            if change and number == 1:
                with torch.no_grad():
                    model[2].weight[1] *= 1.01
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


@distributed(world_size=2)
def train_sharded(path, kind):
    model = build()
    if kind == "fsdp1":
        model = FullyShardedDataParallel(model, device_id=CPU, use_orig_params=True)
    else:
        model = shard_model(
            model, mesh=build_mesh(MeshSpec.hybrid(2, 1) if kind == "replicas" else MeshSpec.sharded(2))
        )
    train(model, path, dist.get_rank(), 2)


@pytest.mark.parametrize("kind", ["shards", "replicas", "fsdp1"])
def test_runs_of_other_worlds_compare(kind, tmp_path):
    train(build(), tmp_path / "plain")
    train_sharded(tmp_path / "sharded", kind)
    assert compare_runs(tmp_path / "plain", tmp_path / "sharded") is None
    assert compare_runs(tmp_path / "plain", tmp_path / "sharded", tolerance=0.0) is not None  # the order of sums


def test_the_first_difference_is_named(tmp_path):
    train(build(), tmp_path / "a")
    train(build(), tmp_path / "b", change=True)
    found = compare_runs(tmp_path / "a", tmp_path / "b")
    assert (found.step, found.at, found.what) == (2, "2", "forward")
    assert 1e-5 < found.distance < 1e-2
    assert str(found).startswith("step 2, forward of 2: at least ")
    assert compare_runs(tmp_path / "a", tmp_path / "b", tolerance=1.0) is None


def test_a_gradient_that_differs_is_named(tmp_path):
    train(build(), tmp_path / "a")
    other = build()
    other[0].weight.register_hook(lambda grad: grad * 1.5)
    train(other, tmp_path / "b")
    found = compare_runs(tmp_path / "a", tmp_path / "b")
    assert (found.step, found.at, found.what) == (1, "0.weight", "gradient")
    assert found.distance == pytest.approx(1 / 3, rel=1e-6)


def test_recomputed_forwards_are_one(tmp_path):
    train(build(), tmp_path / "a")
    train(shard_model(build(), checkpoint_activations=True), tmp_path / "b")
    dist.destroy_process_group()
    assert compare_runs(tmp_path / "a", tmp_path / "b") is None


def test_the_distance_is_a_lower_bound():
    for seed in range(50):
        torch.manual_seed(seed)
        a = torch.randn(7, 9)
        b = a + torch.randn(7, 9) * 10.0 ** -(seed % 7) if seed % 2 else a[:, torch.randperm(9)]
        found = distance(digest(a).tolist(), digest(b).tolist())
        true = ((a - b).double().norm() / max(a.double().norm(), b.double().norm())).item()
        assert 0 < found <= true * (1 + 1e-6)
    assert distance([2, 1.0, 0.0, math.nan], [2, 1.0, 0.0, 1.0]) == math.inf


def test_files_that_cannot_be_compared(tmp_path):
    (tmp_path / "a").write_text("{}\n")
    with pytest.raises(ShardkitError, match="is not a file of record_run"):
        compare_runs(tmp_path / "a", tmp_path / "a")
    for name, at in (("b", "0"), ("c", "1")):
        row = f'{{"step": 1, "at": "{at}", "what": "forward", "call": 1, "dtype": "float32", "digest": [1, 1, 1, 1]}}'
        (tmp_path / name).write_text(row + "\n")
    with pytest.raises(ShardkitError, match="finds no step and module that"):
        compare_runs(tmp_path / "b", tmp_path / "c")


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


@distributed(world_size=2)
def test_a_file_that_cannot_be_written_raises_on_every_rank():
    model = shard_model(build())
    with pytest.raises(ShardkitError, match="No such file"):  # noqa: SIM117
        with record_run(model, torch.optim.SGD(model.parameters(), lr=0.1), "/absent/run"):
            model(torch.ones(2, 6))
