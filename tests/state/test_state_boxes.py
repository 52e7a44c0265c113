"""Full tensors gathered and scattered by boxes, on every kind of mesh, to the bit; and which
messages that takes.
"""

import gc
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from cpu_ranks import on_ranks
from meshes import mesh_of
from state_models import LAYOUTS, Net, as_bytes, fsdp, hsdp, seeded
from torch import nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from shardkit import boxes
from shardkit.boxes import EACH_ALONE, ModelGroup, Move, gather, model_group, scatter
from shardkit.shards import local_value
from shardkit.testing import comm_counts, fake_world

MESHES = {(4,): ["dp"], (2, 2): ["dp", "tp"], (2, 1, 2): ["dp", "cp", "tp"]}
PLACEMENTS = [
    ((4,), [Shard(0)]),
    ((4,), [Shard(1)]),
    ((4,), [Replicate()]),
    ((2, 2), [Replicate(), Shard(0)]),
    ((2, 2), [Shard(1), Replicate()]),
    ((2, 2), [Shard(0), Shard(1)]),
    ((2, 1, 2), [Replicate(), Shard(0), Replicate()]),
]
# the last travels alone, also in parts that are not contiguous
SHAPES = [(7, 5), (1, 3), (4, 0), (300, 301)]


def values(shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def placed(shape, placements, number, dtype=torch.float32):
    full, mesh = values((*SHAPES[number],), dtype), mesh_of(shape, *MESHES[shape])
    return distribute_tensor(full, mesh, placements, src_data_rank=None)


def equal(one, other):
    return one.dtype == other.dtype and torch.equal(as_bytes(one), as_bytes(other))


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.bool]
)
@on_ranks(4)
def test_gathered_and_scattered_they_are_the_same(dtype):
    tensors = {
        f"{mesh} {places} {number}": (
            placed(mesh, places, number, dtype),
            values(SHAPES[number], dtype),
        )
        for mesh, places in PLACEMENTS
        for number in range(len(SHAPES))
    }
    likes = {name: like for name, (like, _) in tensors.items()}
    ranks, rank = model_group(likes.values()), dist.get_rank()
    assert ranks.ranks == (0, 1, 2, 3)
    for everywhere in (False, True):
        found = dict(gather(likes.items(), ranks, everywhere=everywhere))
        assert list(found) == (list(likes) if everywhere or rank == 0 else [])
        assert all(equal(full, tensors[name][1]) for name, full in found.items())
    for like in likes.values():
        like.to_local().zero_()
    scatter((Move(t, v if ranks.is_root else None, dtype) for t, v in tensors.values()), ranks)
    assert all(
        equal(full, tensors[name][1])
        for name, full in gather(likes.items(), ranks, everywhere=True)
    )


@pytest.mark.parametrize(
    "layout", ["plain", "fsdp", "hsdp", "tensor_parallel", "three_axes", "columns"]
)
@on_ranks(4)
def test_a_scatter_converts_once_and_counts_as_a_write(layout):
    state = {
        n: t for n, t in LAYOUTS[layout](seeded(Net)).state_dict().items() if getattr(t, "ndim", 0)
    }
    ranks, before = (
        model_group(state.values()),
        {name: tensor._version for name, tensor in state.items()},
    )
    for dtype in (torch.float64, torch.bfloat16):
        fulls = {name: values(tuple(tensor.shape), dtype) for name, tensor in state.items()}
        moves = [Move(tensor, fulls[name], dtype) for name, tensor in state.items()]
        scatter([move if ranks.is_root else move._replace(full=None) for move in moves], ranks)
        assert all(tensor._version > before[name] for name, tensor in state.items())
        parts = {name: local_value(tensor).clone() for name, tensor in state.items()}
        scatter(moves, EACH_ALONE)
        assert all(equal(local_value(tensor), parts[name]) for name, tensor in state.items())
        for name, tensor in gather(state.items(), ranks, dtype=dtype, everywhere=True):
            expected = fulls[name].to(state[name].dtype)
            assert equal(
                tensor, expected.to(dtype) if expected.is_floating_point() else expected
            ), name


@on_ranks(4)
def test_the_all_gather_of_other_backends_gives_the_same():
    tensors = {f"{m} {p} {n}": placed(m, p, n) for m, p in PLACEMENTS for n in range(len(SHAPES))}
    ranks = model_group(tensors.values())
    expected = dict(gather(tensors.items(), ranks, everywhere=True, dtype=torch.bfloat16))
    with mock.patch.object(boxes, "BY_MESSAGES", ()), comm_counts() as counts:
        found = dict(gather(tensors.items(), ranks, everywhere=True, dtype=torch.bfloat16))
    assert counts.all_gathers > len(SHAPES)
    assert all(equal(found[name], value) for name, value in expected.items())


# Which messages travel.


def large(width=256):
    return nn.Sequential(
        *(nn.Linear(width, 4 * width, bias=False) for _ in range(3)), nn.Linear(4 * width, 8)
    )


def count_of(model, **options):
    tensors = dict(model.named_parameters())
    with comm_counts() as counts:
        dict(gather(tensors.items(), model_group(tensors.values()), **options))
    assert not counts.all_gathers
    return counts.other


@on_ranks(4)
def test_small_tensors_share_a_message_and_large_ones_go_alone_from_one_replica():
    rank, big = dist.get_rank(), fsdp(large())
    assert big[0].weight.to_local().nbytes >= boxes.ALONE
    assert count_of(fsdp(seeded(Net))) == ({"send": 1} if rank else {"recv_": 3})
    assert count_of(big) == ({"send": 4} if rank else {"recv_": 12})
    assert count_of(big, everywhere=True) == {"send": 12, "recv_": 12}
    assert count_of(hsdp(seeded(Net))) == [{"recv_": 1}, {"send": 1}, {}, {}][rank]


def test_a_group_of_some_ranks_needs_no_others_and_ends_with_the_world():
    for bound, backend in ((None, None), (torch.device("cuda", 0), "gloo")):
        with fake_world(4):
            made = dist.new_group([0, 1])
            with (
                mock.patch.object(dist, "new_group", return_value=made) as new_group,
                mock.patch.object(type(dist.group.WORLD), "bound_device_id", bound),
            ):
                for _ in range(2):
                    assert ModelGroup((0, 1), None).connect() is made
            new_group.assert_called_once_with(
                [0, 1], backend=backend, use_local_synchronization=True
            )
        del made, new_group
        gc.collect()
        assert not boxes._groups
