"""Optimizers of packages: the unsharded step, and the same after a checkpoint on another mesh, or a refusal.

The parameters after three steps are those of the unsharded model, to the bit or within rounding, and so are those after
two more steps once the checkpoint was loaded into a new model on another mesh.
"""

from __future__ import annotations

import inspect
import re
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from shardkit import ShardkitError, load_checkpoint, save_checkpoint
from shardkit.optim import step_on_local_shards, step_on_whole_matrices
from shardkit.testing import distributed

Make = Callable[[Any], Any]
DOORS = (partial(step_on_local_shards, elementwise=True), step_on_whole_matrices)


class Net(nn.Module):
    """Uneven matrices, vectors, and a bias of zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.up = nn.Embedding(7, 12), nn.Linear(12, 10)
        self.norm, self.down = nn.LayerNorm(10), nn.Linear(10, 7)
        nn.init.zeros_(self.up.bias)

    def forward(self, ids: Tensor) -> Tensor:
        return self.down(self.norm(torch.tanh(self.up(self.embed(ids)))))  # type: ignore[no-any-return]


def build(shape: tuple[int, ...] | None) -> Net:
    """The net in float64, sharded on a mesh of this shape."""
    torch.manual_seed(0)
    net = Net().double()
    if shape is not None:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp_replicate", "dp_shard")[-len(shape) :])
        fully_shard(net.embed, mesh=mesh)
        fully_shard(net, mesh=mesh)
    return net


def maker(name: str) -> Make:
    """What makes the optimizer of this name for parameters."""
    if name == "prodigyopt.Prodigy":
        return partial(pytest.importorskip("prodigyopt").Prodigy, d0=1e-3)
    if name == "came_pytorch.CAME":
        return partial(pytest.importorskip("came_pytorch").CAME, lr=1e-2)
    return partial(pytest.importorskip("pytorch_optimizer").load_optimizer(name), lr=1e-2)


def resumed_plainly(make: Make) -> dict[str, Tensor]:
    """What torch's own state dict makes of the last steps: it casts some state, and lacks attributes."""
    net = build(None)
    optimizer = make(list(net.parameters()))
    train(net, optimizer, range(3))
    again = make(list(net.parameters()))
    again.load_state_dict(optimizer.state_dict())
    return train(net, again, range(3, 5))


def train(net: nn.Module, optimizer: Any, steps: range) -> dict[str, Tensor]:
    """Take these steps, and return the parameters after them."""
    if callable(getattr(optimizer, "train", None)):
        optimizer.train()
    needs_closure = any(
        each.default is each.empty and each.kind is each.POSITIONAL_OR_KEYWORD
        for each in inspect.signature(optimizer.step).parameters.values()
    )
    for step in steps:
        torch.manual_seed(step)
        ids, targets = torch.randint(0, 7, (2, 6))

        def closure(ids: Tensor = ids, targets: Tensor = targets) -> Tensor:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(net(ids), targets)
            loss.backward()
            return loss

        closure()
        optimizer.step(*[closure] * needs_closure)
    params = dict(net.named_parameters())
    return {fqn: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone() for fqn, p in params.items()}


def compared(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> str:
    """Equal to the bit, within rounding, or wrong."""
    off = max(float((found[fqn] - value).abs().max()) for fqn, value in wanted.items())
    if not off < 1e-10:
        return f"wrong by {off:.0e}"
    return "bits" if off == 0 else f"within {off:.0e}"  # in this order the best is the least


def by_door(step_on: Any, make: Make, plain: list[dict[str, Tensor]]) -> str:
    """What becomes of an optimizer by one of the doors."""
    net = build((2,))
    optimizer = step_on(make(list(net.parameters())))
    found = compared(train(net, optimizer, range(3)), plain[0])
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    save_checkpoint(Path(folder[0]) / "c", net, optimizer)
    other = build((2, 1))
    again = step_on(make(list(other.parameters())))
    load_checkpoint(Path(folder[0]) / "c", other, again)
    resumed = train(other, again, range(3, 5))
    return f"{found}, resumed {min(compared(resumed, wanted) for wanted in plain[1:])}"


JOINED = r"refused: optimizer changed '\w+' in group 0 to .*"
# By name, what is expected of step_on_local_shards(elementwise=True), None where that is no promise that its user could
# make, and of step_on_whole_matrices.
PACKAGES = {
    "came_pytorch.CAME": (None, "bits, resumed bits"),
    "madgrad": ("bits, resumed bits",) * 2,  # state under a name
    "aggmo": ("bits, resumed bits",) * 2,  # state in a list
    "shampoo": (None, "bits, resumed bits"),
    # A checkpoint does not keep the memory order of its preconditioners, by which products are rounded.
    "soap": (None, "bits, resumed (bits|within .*e-1[5-9])"),
    "prodigyopt.Prodigy": (None, JOINED),
    "dadaptlion": (None, JOINED),
    "spam": (None, "bits, resumed bits"),  # makes whole masks when it is built
    "stablespam": (None, "bits, resumed bits"),  # a state_dict of its own
}


@pytest.mark.parametrize("name", PACKAGES)
@distributed(world_size=2, backend="gloo")
def test_a_packages_optimizer(name):
    make = maker(name)
    net = build(None)
    optimizer = make(list(net.parameters()))
    plain = [train(net, optimizer, range(3)), train(net, optimizer, range(3, 5)), resumed_plainly(make)]
    for step_on, wanted in zip(DOORS, PACKAGES[name], strict=True):
        if wanted is not None:
            try:
                found = by_door(step_on, make, plain)
            except ShardkitError as error:
                found = f"refused: {error}"
            assert re.fullmatch(wanted, found, re.DOTALL), found
