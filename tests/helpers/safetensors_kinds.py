"""Tensors of every kind that a checkpoint may hold, whole and as the parts of 4 ranks."""

import torch
from meshes import mesh_of
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from shardkit.checkpoint.byte_ranges import header_parts, write_parts
from shardkit.checkpoint.format import DTYPES, Spec, plan_files
from shardkit.checkpoint.save import check_savable, parts_to_write
from shardkit.ranks import one_group, own_rank, sum_over_ranks
from shardkit.shards import local_part

# Dim 0 not divisible by 4 ranks, smaller than 4, 1, 0; scalars; more dims than one is sharded on.
SHAPES = [(7, 6), (3, 5), (1, 4), (0, 3), (8, 3, 2), (5,), (13, 1)]
# A page is 4096 bytes: rows that are longer and shorter, so that a shard on dim 1 is read both
# ways.
WIDE = [(5, 6000), (1030, 5)]
SHARDED = {
    "fsdp": ((4,), (Shard(0),)),
    "dim 1": ((4,), (Shard(1),)),
    "hsdp": ((2, 2), (Replicate(), Shard(0))),
    "2-D": ((2, 2), (Shard(0), Shard(1))),
    "twice": ((2, 2), (Shard(0), Shard(0))),
    "replicated": ((4,), (Replicate(),)),
}


def value(shape, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randint(0, 100, shape, generator=generator)
    return (numbers % 2 == 0) if dtype == torch.bool else numbers.to(torch.float32).to(dtype)


def whole_tensors():
    """Every dtype in some shape, and every shape in some dtype."""
    tensors = {
        f"{name}.{shape}": value(shape, dtype, n)
        for n, (name, dtype) in enumerate(DTYPES.items())
        for shape in SHAPES[n % 3 :: 3]
    }
    tensors |= {f"wide.{shape}": value(shape, torch.bfloat16, 5) for shape in WIDE}
    tensors["scalar"] = torch.tensor(3, dtype=torch.int64)
    tensors["strided"] = value((4, 3, 5, 5), torch.float32, 1).to(memory_format=torch.channels_last)
    tensors["transposed"] = value((6, 4), torch.bfloat16, 2).t()
    tensors["conj"] = (value((3, 2), torch.complex64, 3) * 1j).conj()
    return tensors


def sharded(whole, how):
    """The same as DTensors where their dims allow, and plain."""
    shape, placements = SHARDED[how]
    mesh = mesh_of(shape)
    dims = max(
        (placement.dim for placement in placements if isinstance(placement, Shard)), default=-1
    )
    return {
        name: dtensor(each, mesh, placements) if each.dim() > dims else each
        for name, each in whole.items()
    }


def dtensor(whole, mesh, placements):
    """As distribute_tensor, without communication, which has no words for some dtypes."""
    meta = distribute_tensor(whole.to("meta"), mesh, placements, src_data_rank=None)
    local = local_part(whole, meta)
    return DTensor.from_local(
        local,
        mesh,
        placements,
        run_check=False,
        shape=whole.shape,
        stride=whole.contiguous().stride(),
    )


def zeros_like(tensor):
    if not isinstance(tensor, DTensor):
        return torch.zeros(tensor.shape, dtype=tensor.dtype)
    local = torch.zeros(tensor.to_local().shape, dtype=tensor.dtype)
    mesh, placements = tensor.device_mesh, tensor.placements
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


class TpBlock(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.LayerNorm(6)
        self.up = torch.nn.Linear(6, 10)
        self.down = torch.nn.Linear(10, 6)


def tp_and_fsdp(block=None):
    """A block under tensor parallelism and then FSDP2, whose shards are strided; the norm is on one
    axis only.
    """
    torch.manual_seed(0)
    mesh = mesh_of((2, 2), "dp", "tp")
    block = block or TpBlock()
    parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return fully_shard(block, mesh=mesh["dp"])


def same(a, b):
    """Equal in dtype, shape and every bit."""
    a, b = (
        each.detach().resolve_conj().contiguous().reshape(-1).view(torch.uint8) for each in (a, b)
    )
    return torch.equal(a, b)


def assert_holds(tensors, whole):
    """Each tensor is this rank's part of the whole one."""
    assert tensors.keys() == whole.keys()
    for name, tensor in tensors.items():
        expected = local_part(whole[name], tensor) if isinstance(tensor, DTensor) else whole[name]
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        assert local.dtype == expected.dtype, name
        assert local.shape == expected.shape, name
        assert same(local, expected), name


def write_tensors(directory, tensors):
    """Write ``model.safetensors`` from all ranks, each its own bytes, as save_checkpoint does."""
    check_savable(tensors)
    groups, _ = one_group()
    files, entries = plan_files(
        directory, "model", {n: Spec(t.dtype, t.shape) for n, t in tensors.items()}
    )
    parts = list(parts_to_write(tensors, entries, dict.fromkeys(tensors, 0)))
    if own_rank() == 0:
        parts += header_parts(files)
    written = write_parts(files, parts)
    assert sum_over_ranks([count for count, _ in written.values()], groups) == [
        file.size for file in files
    ]
    return files
