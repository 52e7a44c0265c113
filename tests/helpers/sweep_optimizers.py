"""Step every optimizer of three packages on shards and on whole matrices, resume each from a checkpoint, and compare.

Run: ``torchrun --nproc-per-node 2 tests/helpers/sweep_optimizers.py [part of a name ...]``, with the packages
``pytorch-optimizer``, ``prodigyopt`` and ``came-pytorch``. A line for each optimizer says what became of it by
``step_on_local_shards`` and by ``step_on_whole_matrices``: the parameters after three steps are those of the unsharded
model to the bit, within rounding (how much), or wrong; or it was refused, and why. The same for two more steps after
the checkpoint was loaded into a new model on another mesh.
"""

from __future__ import annotations

import inspect
import signal
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import came_pytorch
import prodigyopt
import pytorch_optimizer
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from shardkit import load_checkpoint, save_checkpoint
from shardkit.errors import ShardkitError
from shardkit.optim import step_on_local_shards, step_on_whole_matrices

Make = Callable[[Any], Any]
DOORS = {"local": partial(step_on_local_shards, elementwise=True), "whole": step_on_whole_matrices}
SECONDS = 60  # for one optimizer


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


def optimizers() -> Iterator[tuple[str, Make]]:
    """Every optimizer by name, and what makes it for parameters."""
    yield "prodigyopt.Prodigy", lambda params: prodigyopt.Prodigy(params, d0=1e-3)
    yield "prodigyopt.Prodigy(slice_p=3)", lambda params: prodigyopt.Prodigy(params, d0=1e-3, slice_p=3)
    yield "came_pytorch.CAME", lambda params: came_pytorch.CAME(params, lr=1e-2)
    for name in ("Adafactor", "AdamW", "LBFGS", "Muon", "SGD"):
        yield f"torch.{name}", lambda params, name=name: getattr(torch.optim, name)(params, lr=1e-2)
    for name in pytorch_optimizer.get_supported_optimizers():
        made = pytorch_optimizer.load_optimizer(name)
        yield name, lambda params, made=made: made(params, lr=1e-2)


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
    try:
        net = build((2,))
        optimizer = step_on(make(list(net.parameters())))
    except ShardkitError as error:
        return f"refused: {error}"
    found = compared(train(net, optimizer, range(3)), plain[0])
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    try:
        save_checkpoint(Path(folder[0]) / "c", net, optimizer)
        other = build((2, 1))
        again = step_on(make(list(other.parameters())))
        load_checkpoint(Path(folder[0]) / "c", other, again)
    except ShardkitError as error:
        return f"{found}, checkpoint refused: {error}"
    resumed = train(other, again, range(3, 5))
    return f"{found}, resumed {min(compared(resumed, wanted) for wanted in plain[1:])}"


def both(make: Make) -> dict[str, str]:
    """What becomes of an optimizer by each door."""
    try:
        net = build(None)
        optimizer = make(list(net.parameters()))
        plain = [train(net, optimizer, range(3)), train(net, optimizer, range(3, 5)), resumed_plainly(make)]
    except Exception as error:
        return {"plain": f"fails: {type(error).__name__}: {error}"}
    found = {}
    for door, step_on in DOORS.items():
        try:
            found[door] = by_door(step_on, make, plain)
        except Exception as error:
            found[door] = f"FAILS: {type(error).__name__}: {error}"
    return found


def main() -> None:
    """Try them all, and print a line for each and the sums."""
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")

    def late(*_: object) -> None:
        raise TimeoutError(f"{SECONDS} s")

    signal.signal(signal.SIGALRM, late)
    sums: Counter[tuple[str, str]] = Counter()
    for name, make in optimizers():
        if not all(part in name for part in sys.argv[1:]):
            continue
        signal.alarm(SECONDS)
        found = both(make)
        sums.update((door, text.split(":")[0].split(" by ")[0]) for door, text in found.items())
        if dist.get_rank() == 0:
            print(f"{name:28s}", " | ".join(f"{door}: {' '.join(text.split())[:150]}" for door, text in found.items()))
            sys.stdout.flush()
    signal.alarm(0)
    if dist.get_rank() == 0:
        print(*(f"{number:4d} {door}: {text}" for (door, text), number in sorted(sums.items())), sep="\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
