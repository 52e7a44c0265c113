"""Meta init on real ranks: models of the zoo on three kinds of mesh, offloading, tensor
parallelism, seeds.
"""

import pytest
import torch
import torch.distributed as dist
from meshes import mesh_of
from meta_check import build_sharded, check_same_as_ordinary, shard
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from zoo import PLAIN

from shardkit.errors import ShardkitError
from shardkit.meta import init_on_meta, materialize
from shardkit.testing import distributed

MESHES = {"fsdp": (4,), "hsdp": (2, 2), "ddp-like": (4, 1)}
# ``test_meta_zoo`` tries all, as one of three ranks.
CHOICE = ["nanogpt_tied", "resnet", "narrow", "complex"]


@pytest.mark.parametrize("shape", MESHES.values(), ids=MESHES.keys())
@distributed(world_size=4)
def test_zoo_on_four_ranks(shape):
    for name in CHOICE:
        try:
            check_same_as_ordinary(PLAIN[name].build, mesh=mesh_of(shape))
        except Exception as error:
            raise AssertionError(f"zoo model {name}") from error


def uneven():
    """Dim 0 not divisible by 4 ranks (7), smaller than 4 (3, 1)."""
    model = nn.Sequential(nn.Embedding(7, 6), nn.Linear(6, 3), nn.Linear(3, 1), nn.LayerNorm(1))
    nn.init.orthogonal_(model[1].weight)
    return model


@distributed(world_size=4)
def test_offloaded_shards():
    check_same_as_ordinary(
        uneven, mesh=mesh_of((4,)), offload_policy=CPUOffloadPolicy(pin_memory=False)
    )


@pytest.mark.parametrize("alone", [False, True])
@distributed(world_size=4)
def test_with_tensor_parallelism(alone):
    mesh = mesh_of((2, 2), "dp", "tp")
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 5))
    torch.manual_seed(0)
    with init_on_meta():
        model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 5))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    if not alone:
        fully_shard(model, mesh=mesh["dp"])
    materialize(model)
    for (name, a), b in zip(plain.named_parameters(), model.parameters(), strict=True):
        assert isinstance(b, DTensor)
        assert torch.equal(a, b.full_tensor()), name


def raises_on_all_ranks(match, model, **kwargs):
    with pytest.raises(ShardkitError, match=match):
        materialize(model, **kwargs)
    assert all(parameter.device.type == "meta" for parameter in model.parameters())
    dist.barrier()  # nobody hangs in a collective


@distributed(world_size=4)
def test_ranks_with_different_seeds():
    torch.manual_seed(dist.get_rank() // 3)
    model = build_sharded(uneven)
    raises_on_all_ranks(
        r"rank 3 differs from rank 0 in the random state .* call torch\.manual_seed", model
    )


@distributed(world_size=4)
def test_ranks_with_different_constructions():
    torch.manual_seed(0)
    std = 0.02 if dist.get_rank() else 0.03
    constant = torch.full((3,), float(dist.get_rank() == 2))
    with init_on_meta():
        by_constant = uneven()
        by_constant[1].bias.data.copy_(constant)
    with init_on_meta():
        by_argument = uneven()
        nn.init.normal_(by_argument[1].weight, std=std)
    raises_on_all_ranks(r"ranks 1, 2, 3 differ from rank 0 in the construction", shard(by_argument))
    raises_on_all_ranks(r"rank 2 differs from rank 0 in the construction", shard(by_constant))


@distributed(world_size=4)
def test_an_error_of_one_rank_is_raised_by_all():
    torch.manual_seed(0)
    with init_on_meta():
        model = uneven()
        if dist.get_rank() == 1:
            model[1].bias = nn.Parameter(torch.empty(3))
    match = (
        r"^1\.bias would stay"
        if dist.get_rank() == 1
        else r"^1 of 4 ranks failed:\n- rank 1: ShardkitError: 1\.bias would stay"
    )
    raises_on_all_ranks(match, shard(model))


@distributed(world_size=4)
def test_only_the_ranks_of_the_model_need_agree():
    """Two stages of a pipeline are two models, each on its own ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    stage = mesh["pp"].get_local_rank()
    torch.manual_seed(stage)
    plain = nn.Linear(5 + stage, 3)
    torch.manual_seed(stage)
    with init_on_meta():
        model = nn.Linear(5 + stage, 3)
    fully_shard(model, mesh=mesh["dp"])
    assert torch.equal(materialize(model).weight.full_tensor(), plain.weight)
