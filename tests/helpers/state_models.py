"""Models in every layout that state may have, beside the plain model that they were made from."""

import grads_net
import torch
import torch.distributed as dist
from layouts import blockwise, columns, hsdp, plain, tensor_parallel
from meshes import mesh_of
from small_models import Block
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

WIDTH, VOCAB = 6, 7


class Net(grads_net.Net):
    """Tied, frozen, dims that 4 ranks share unevenly (7, 6, 10) or not at all (3, 1), buffers kept
    and not, extras.

    Two ranks share 7 and 3 unevenly, and 1 not at all.
    """

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block(WIDTH, 10) for _ in range(2))
        self.batch_norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("counts", torch.arange(5, dtype=torch.int16))
        self.register_buffer("scale", torch.tensor(1.5, dtype=torch.float64))
        self.register_buffer("table", torch.ones(3), persistent=False)
        self.version = "one"

    def get_extra_state(self):
        return self.version

    def set_extra_state(self, state):
        self.version = state

    def forward(self, ids):
        x = self.embed(ids) * self.scale.float()
        for block in self.blocks:
            x = block(x)
        x = self.batch_norm(x.flatten(0, 1)).view_as(x)
        return self.head(self.frozen(x) * self.gain) + self.narrow(x).sum(-1, keepdim=True)


def seeded(build):
    torch.manual_seed(0)
    return build()


def fsdp(net):
    return blockwise(net, mesh=mesh_of((dist.get_world_size(),)))


def offloaded(net):
    return blockwise(net, mesh=mesh_of((4,)), offload_policy=CPUOffloadPolicy(pin_memory=False))


def three_axes(net):
    """Copies, shards and columns: (dp_replicate, dp_shard, tp) of 2, 1 and 2 ranks."""
    mesh = mesh_of((2, 1, 2), "dp_replicate", "dp_shard", "tp")
    for block in net.blocks:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return blockwise(net, mesh=mesh["dp_replicate", "dp_shard"])


def ignoring(net):
    return blockwise(net, mesh=mesh_of((4,)), ignored_params={net.gain, net.narrow.weight})


def wrapped(net):
    """Compiled and checkpointed by wrappers that show in names."""
    net.blocks[0] = checkpoint_wrapper(net.blocks[0])
    net.blocks[1] = torch.compile(net.blocks[1], backend="eager")
    return torch.compile(blockwise(net, mesh=mesh_of((4,))), backend="eager")


def unsharded(net):
    """As a forward leaves it: the root and all blocks hold stand-ins."""
    net = blockwise(net, mesh=mesh_of((dist.get_world_size(),)), reshard_after_forward=False)
    with torch.no_grad():
        net.eval()(torch.zeros(2, 3, dtype=torch.long))
    return net


LAYOUTS = {
    layout.__name__: layout
    for layout in (
        plain,
        fsdp,
        hsdp,
        offloaded,
        tensor_parallel,
        three_axes,
        columns,
        ignoring,
        wrapped,
        unsharded,
    )
}

# Those that ``layouts`` has not, and two of it, for models with ties, extra state and buffers.
OTHERS = [name for name in LAYOUTS if name not in ("hsdp", "columns")]


def assert_same_state(found, expected):
    """Keys in order, dtypes, values to the bit, and nothing but plain tensors."""
    assert list(found) == list(expected)
    for name, value in expected.items():
        if not isinstance(value, Tensor):
            assert found[name] == value, name
            continue
        assert type(found[name]) is Tensor, name
        assert found[name].dtype == value.dtype, name
        assert found[name].shape == value.shape, name
        assert torch.equal(as_bytes(found[name]), as_bytes(value)), name


def as_bytes(tensor):
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def two_groups(model, backwards=False):
    """Two groups with options of their own, and an empty one between them."""
    named = list(model.named_parameters())
    weights = [param for name, param in named if "bias" not in name]
    biases = [param for name, param in named if "bias" in name]
    step = -1 if backwards else 1
    return [
        {"params": weights[::step], "note": "weights"},
        {"params": []},
        {"params": biases[::step], "lr": 0.02, "weight_decay": 0.0},
    ]


def train(model, optimizer, steps):
    """Losses of steps with the same tokens on all ranks, so that the mean of two gradients is
    exactly the gradient.
    """
    losses = []
    for step in steps:
        ids = torch.randint(0, VOCAB, (4, 3), generator=torch.Generator().manual_seed(step))
        loss = model(ids).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses
