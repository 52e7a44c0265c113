"""Training on a pretended accelerator and on the CPU, by the same settings: what the accelerator's
tests compare.
"""

from functools import partial

import small_models
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import shardkit

STARTS = ("cpu", "meta", "device")


class Block(small_models.Block):
    def __init__(self, scalar):
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(0.5)) if scalar else 1.0
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.seen += 1
        return x + self.gain * self.down(torch.relu(self.up(self.norm(x))))


def net(scalar=False):
    return nn.Sequential(nn.Embedding(10, 8), Block(scalar), Block(scalar), nn.Linear(8, 10))


def made(start, device, build=net):
    """The model, of the same values however it starts, before it is sharded."""
    torch.manual_seed(0)
    if start == "meta":
        with shardkit.init_on_meta():
            return build()
    return build().to(device) if start == "device" else build()


def sharded(
    start,
    device,
    build=net,
    shape=(2,),
    **settings,
):
    model = made(start, device, build)
    shardkit.shard_model(model, mesh=mesh_on(device, shape), **settings)
    return shardkit.materialize(model) if start == "meta" else model


def mesh_on(device, shape=(2,)):
    return init_device_mesh(
        device, shape, mesh_dim_names=("dp_replicate", "dp_shard")[-len(shape) :]
    )


def loss_of(model, device, step=0):
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    tokens = torch.randint(10, (4, 5), generator=generator).to(device)
    logits = model(tokens)
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens.flatten())


def plain(value):
    """The CPU's copy of what this rank has."""
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    if not isinstance(value, Tensor):
        return value
    return (value.to_local() if isinstance(value, DTensor) else value).detach().cpu()


def devices(tensors):
    """The types of the devices where these lie; DTensors by what this rank has."""
    local = (each.to_local() if isinstance(each, DTensor) else each for each in tensors)
    return {each.device.type for each in local}


def check_same(one, other, case, exactly=True):
    """Exact between runs on the accelerator. It takes operators apart that the CPU fuses
    (``linear``, ``gelu``), so against the CPU values differ by float32's rounding, for which
    torch's own bound stands.
    """
    bounds = {"rtol": 0.0, "atol": 0.0} if exactly else {"rtol": 1e-5, "atol": 2e-6}
    torch.testing.assert_close(
        plain(one), plain(other), msg=lambda text: f"{case}: {text}", **bounds
    )


adamw = partial(torch.optim.AdamW, lr=0.1)
