"""Ranks that start from different values: one error on all ranks before any change, or the first rank's values."""

import re
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn as nn
from meshes import mesh_of
from small_models import Decoder, snapshot
from test_agree import raised_by
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from shardkit import (
    MeshSpec,
    apply_plan,
    full_state_dict,
    init_on_meta,
    materialize,
    plan_model,
    shard_like_fsdp1,
    shard_model,
)
from shardkit.testing import assert_same_on_all_ranks, distributed


class Odd(nn.Module):
    """Every kind of tensor that a sample is taken of; three tensors of it do not differ between seeds."""

    def __init__(self) -> None:
        super().__init__()
        self.ones = nn.Parameter(torch.ones(3))
        self.weight = nn.Parameter(torch.randn(40, 3).t())  # not contiguous
        self.frozen = nn.Parameter(torch.randn(7, 2).to(torch.bfloat16), requires_grad=False)
        self.register_buffer("phases", torch.randn(6, dtype=torch.complex64).conj())
        self.register_buffer("mask", torch.rand(64) > 0.5)
        self.register_buffer("count", torch.randint(2**40, ()))
        self.register_buffer("broken", torch.full((4,), torch.nan))
        self.register_buffer("wide", torch.randn(1, 3).expand(20, 3), persistent=False)
        self.register_buffer("empty", torch.randn(0, 3))


def seeded(cls: type[nn.Module], seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return cls()


@distributed(world_size=2)
def test_different_seeds_are_named_or_the_first_ranks_values_taken() -> None:
    rank = dist.get_rank()
    model, reference = seeded(Odd, rank), seeded(Odd, 0)
    before = snapshot(model)
    plan = plan_model(model)
    for call in (lambda: shard_model(model), lambda: apply_plan(model, plan), lambda: shard_like_fsdp1(model)):
        text = raised_by(call)
        assert text.startswith("weight has different values on rank 1 than on rank 0; 6 of 9 parameters and buffe")
        assert "torch.manual_seed(0)" in text
        assert "sync_module_states=True" in text
        assert snapshot(model) == before
    shard_model(model, sync_module_states=True)
    found, expected = full_state_dict(model, rank0_only=False), reference.state_dict()
    for name, value in {**expected, "wide": reference.wide}.items():
        held = model.wide if name == "wide" else found[name]
        assert torch.equal(held.nan_to_num(7), value.nan_to_num(7)), name
    apply_plan(seeded(Odd, rank), plan, sync_module_states=True)
    shard_model(seeded(Odd, 0))  # the same values need neither


@distributed(world_size=2)
def test_what_may_differ_and_what_may_not() -> None:
    rank = dist.get_rank()
    own = seeded(Odd, 0)
    own.weight.data += rank
    shard_model(own, ignored_params=[own.weight])  # each rank's own
    assert own.weight[0, 0].item() == seeded(Odd, 0).weight[0, 0].item() + rank

    more = seeded(Odd, 0)
    if rank:
        more.register_buffer("more", torch.ones(2))
    text = raised_by(lambda: shard_model(more))
    assert "differs from rank 0 in buffer more ((2,) of torch.float32 instead of null)" in text
    assert "in sync_module_states (" in raised_by(lambda: shard_model(seeded(Odd, 0), sync_module_states=rank == 1))

    with mock.patch("torch.__version__", "2.14.0" if rank else "2.13.0"):
        text = raised_by(lambda: shard_model(seeded(Odd, 0)))
    assert "rank 1 differs from rank 0 in torch (2.14.0 instead of 2.13.0)" in text

    sparse = seeded(Odd, 0)
    sparse.register_buffer("graph", torch.eye(3).to_sparse())
    assert "cannot broadcast graph" in raised_by(lambda: shard_model(sparse, sync_module_states=True))
    shard_model(sparse)


@distributed(world_size=2)
def test_meta_on_some_ranks_is_left_alone_and_cannot_be_broadcast_to() -> None:
    def build() -> nn.Module:
        if dist.get_rank() == 0:
            return seeded(Decoder, 0)
        with init_on_meta():
            return seeded(Decoder, 1)

    text = raised_by(lambda: shard_model(build(), sync_module_states=True))
    assert re.match(r"sync_module_states needs embed.weight, .* and some ranks have it on the meta device\.", text)
    model = shard_model(build())
    assert model.head.weight.is_meta == (dist.get_rank() == 1)
    torch.manual_seed(0)
    with init_on_meta():
        model = Decoder()
    materialize(shard_model(model, sync_module_states=True))  # nothing to broadcast
    assert torch.equal(model.head.weight.full_tensor(), seeded(Decoder, 0).head.weight)


@distributed(world_size=4)
def test_replicas_and_tensor_parallel_ranks() -> None:
    rank = dist.get_rank()
    for arguments in ({"mesh": MeshSpec.hybrid(2, 2)}, {"mesh": mesh_of((2, 2))}):
        text = raised_by(lambda arguments=arguments: shard_model(seeded(Decoder, rank // 2), **arguments))  # type: ignore[misc]
        assert text.startswith("embed.weight has different values on rank 2, 3 than on rank 0")
        model = shard_model(seeded(Decoder, rank), sync_module_states=True, **arguments)
        for name, param in seeded(Decoder, 0).named_parameters():
            held = model.get_parameter(name)
            assert_same_on_all_ranks(held.full_tensor())  # type: ignore[attr-defined]
            assert torch.equal(held.full_tensor(), param), name  # type: ignore[attr-defined]

    mesh = mesh_of((2, 2), "dp", "tp")

    def parallel(off: bool) -> nn.Module:
        model = seeded(Decoder, 0)
        for layer in model.layers:  # type: ignore[union-attr]
            parallelize_module(layer, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        if off:  # in its own part alone, so that the ranks of the other part see no difference themselves
            model.layers[1].up.weight.to_local().data += 1  # type: ignore[index, union-attr]
        return model

    model = parallel(off=False)
    assert isinstance(model.layers[0].up.weight, DTensor)
    shard_model(model, mesh=mesh["dp"])  # parts differ along tp, as they must
    text = raised_by(lambda: shard_model(parallel(off=rank == 3), mesh=mesh["dp"]))
    assert "layers.1.up.weight has different values on rank 3 than on rank 1; 1 of" in text
    model = shard_model(parallel(off=rank == 1), mesh=mesh["dp"], sync_module_states=True)
    theirs = 1.0 if mesh["tp"].get_local_rank() else 0.0
    whole = model.layers[1].up.weight.full_tensor()
    expected = seeded(Decoder, 0).layers[1].up.weight
    assert torch.equal(whole[8:], expected[8:] + 1) or not theirs
    assert torch.equal(whole[:8], expected[:8])
