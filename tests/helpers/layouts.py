"""One small model, and its optimizer, in every layout that units may have on 4 ranks."""

import functools

import torch
from meshes import mesh_of
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from shardkit.optim import step_on_local_shards

EXPERTS = 4


class Layer(nn.Module):
    """Rows that 4 ranks share unevenly (6, 10) or not at all (1), experts, and a parameter without
    elements.
    """

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 6)
        self.experts = nn.Module()
        self.experts.w = nn.Parameter(torch.zeros(EXPERTS, 6, 2))
        self.gain = nn.Parameter(torch.zeros(1))
        self.none = nn.Parameter(torch.zeros(0, 4))


class Layered(nn.Module):
    """Two blocks between an embedding and a head that share one weight only by shape: stages could
    not be tied.
    """

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 6)
        self.blocks = nn.ModuleList(Layer() for _ in range(2))
        self.register_buffer("count", torch.arange(3))


def valued(net, seed):
    """Every element of every tensor has a value of its own, which follows from its name."""
    for name, tensor in (*net.named_parameters(), *net.named_buffers()):
        generator = torch.Generator().manual_seed(seed * 1000 + sum(map(ord, name)))
        values = torch.randn(tensor.shape, generator=generator).mul(100)
        tensor.data.copy_(values.to(tensor.dtype))
    return net


def blockwise(net, **options):
    for block in getattr(net, "blocks", ()):
        fully_shard(block, **options)
    return fully_shard(net, **options)


def plain(net):
    return net


def one_mesh(net):
    return blockwise(net, mesh=mesh_of((4,)))


def hsdp(net):
    return blockwise(net, mesh=mesh_of((2, 2)))


def tensor_parallel(net):
    """Columns and rows cut by one axis, then rows by the other: strided shards; norms on one axis
    only.
    """
    mesh = mesh_of((2, 2), "dp", "tp")
    for block in net.blocks:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return blockwise(net, mesh=mesh["dp"])


def tensor_parallel_alone(net):
    """Columns and rows cut unevenly by all ranks; the rest plain."""
    mesh = mesh_of((4,), "tp")
    for block in net.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return net


def overlapping(net):
    """Experts on slices of two ranks, each with all of them; the rest on all ranks."""
    mesh = mesh_of((2, 2), "efsdp", "ep")
    for block in net.blocks:
        fully_shard(block.experts, mesh=mesh["efsdp"])
    return blockwise(net, mesh=mesh_of((4,)))


def expert_parallel(net):
    """Each rank of ``ep`` has other experts, which ``efsdp`` shards; the rest on all ranks."""
    mesh = mesh_of((2, 2), "efsdp", "ep")
    half, at = EXPERTS // 2, mesh["ep"].get_local_rank()
    for block in net.blocks:
        own = block.experts.w.data[half * at : half * (at + 1)].clone()
        block.experts.w = nn.Parameter(DTensor.from_local(own, mesh["ep"], [Shard(0)]))
    return overlapping(net)


def columns(net):
    """Shards on the last dim where it divides."""

    def last_dim(param):
        return Shard(param.ndim - 1) if param.ndim > 1 and param.shape[-1] % 2 == 0 else Shard(0)

    return blockwise(net, mesh=mesh_of((2, 2)), shard_placement_fn=last_dim)


LAYOUTS = {
    layout.__name__: layout
    for layout in (
        plain,
        one_mesh,
        hsdp,
        tensor_parallel,
        tensor_parallel_alone,
        overlapping,
        expert_parallel,
        columns,
    )
}


def stage(net):
    """Keep this rank's stage of two, on a mesh of its own: ranks 0 and 1 the beginning, 2 and 3 the
    rest.
    """
    mesh = mesh_of((2, 2), "pp", "dp")
    number = mesh["pp"].get_local_rank()
    del net.blocks[1 - number]
    net.blocks = nn.ModuleDict({str(number): net.blocks[0]})  # names stay those of the whole model
    if number:
        del net.embed
    fully_shard(net.blocks[str(number)], mesh=mesh["dp"])
    return fully_shard(net, mesh=mesh["dp"]) if not number else net


def built(layout, seed=1):
    """The model in a layout, and AdamW that has stepped once; the same arithmetic, element by
    element, in each, and on local shards, as DTensors took half of the time.
    """
    net = layout(valued(Layered(), seed))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1, foreach=False)
    step_on_local_shards(optimizer)
    for param in net.parameters():
        param.grad = on_shards(param.detach(), lambda part: part * 0.5 + 1)
    optimizer.step()
    optimizer.zero_grad()
    return net, optimizer


def on_shards(tensor, change):
    """What ``change`` makes of the part that this rank has, as a tensor of the same layout."""
    if not isinstance(tensor, DTensor):
        return change(tensor)
    return DTensor.from_local(
        change(tensor.to_local()),
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


# what is saved and compared, and changed only in the way of ``spoiled``
kept = functools.cache(built)


def spoiled(layout):
    """``built``, at the first call of this process, with another value in every element at each
    call.
    """
    net, optimizer = kept(layout, seed=2)
    for part in parts_of(net, optimizer).values():
        part.neg_().sub_(1)
    return net, optimizer


def parts_of(net, optimizer):
    """The part that this rank has of every tensor of model and optimizer, by name."""
    found = dict(net.state_dict())
    for name, param in net.named_parameters():
        found |= {f"{name}/{key}": value for key, value in optimizer.state.get(param, {}).items()}
    return {
        name: value.detach().to_local() if isinstance(value, DTensor) else value
        for name, value in found.items()
    }


def assert_plain_values(net, optimizer, layout):
    """Compare with ``built(layout)``, whose full tensors are compared with the plain model's when
    it is saved.
    """
    assert_equal(parts_of(net, optimizer), parts_of(*kept(layout)))


def full(tensor):
    """By torch's own gather, whatever shardkit says. Collective."""
    if not tensor.numel():  # torch 2.13 cannot gather what it made the shards (0, ...) of
        return torch.empty(tensor.shape)
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def values_of(net, optimizer):
    """Every full tensor of model and optimizer, by name. Collective."""
    found = {name: full(tensor.detach()) for name, tensor in net.state_dict().items()}
    for name, param in net.named_parameters():
        found |= {
            f"{name}/{key}": full(value) for key, value in optimizer.state.get(param, {}).items()
        }
    return found


def assert_equal(found, expected, *, some=False):
    """To the bit; ``some`` of them, where a stage has no more."""
    assert found
    assert some or found.keys() == expected.keys()
    wrong = [name for name, value in found.items() if not torch.equal(value, expected[name])]
    assert not wrong
