"""``node_programs.py PROGRAM FOLDER``: what the ranks of two nodes of two run; ``FOLDER`` is on the
shared disk.
"""

from __future__ import annotations

import itertools
import json
import logging
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from shardkit import MeshSpec, full_optimizer_state_dict, full_state_dict, shard_model
from shardkit.checkpoint import load_checkpoint, save_checkpoint
from shardkit.watching import watch

KINDS = {
    "by node": {"mesh": MeshSpec.hybrid(2, 2)},
    "resharded in a node": {"reshard_after_forward": 2},
}
ON_ONE_NODE = {"by node": {"mesh": MeshSpec.sharded(2)}, "resharded in a node": {}}
STEPS = 3  # before the checkpoint, and after it
LIMIT = 4.0  # seconds without the other ranks, of the watch, and of the process group
Trained = tuple[nn.Module, torch.optim.Optimizer]


def build(**settings) -> Trained:
    """Return the model, sharded in a process group, and its optimizer."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1)
    )
    if dist.is_initialized():
        shard_model(model, **settings)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def step(trained: Trained, number: int) -> float:
    """Train on this rank's share of a step's 8 samples; return the mean loss over all ranks."""
    model, optimizer = trained
    drawn = torch.Generator().manual_seed(number)
    ranks, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    inputs, targets = (torch.randn(8, size, generator=drawn)[rank::ranks] for size in (8, 1))
    loss = F.mse_loss(model(inputs), targets)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    mean = loss.detach() / ranks
    if dist.is_initialized():
        dist.all_reduce(mean)
    return mean.item()


def full_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return all parameters and all tensors of the optimizer, on rank 0."""
    states = full_optimizer_state_dict(model, optimizer).get("state", {})
    parts = {
        f"{name}.{key}": value for name, state in states.items() for key, value in state.items()
    }
    return full_state_dict(model) | parts


def train(folder: Path) -> None:
    """Train both kinds, save them, and write down what they did."""
    for kind, settings in KINDS.items():
        trained = build(**settings)
        losses = [step(trained, number) for number in range(STEPS)]
        state = full_state(*trained)
        save_checkpoint(folder / kind / "checkpoint", *trained)
        if dist.get_rank() == 0:
            torch.save(state, folder / kind / "state")
            (folder / kind / "losses").write_text(json.dumps([losses, None]))


def resume(folder: Path) -> None:
    """Load both checkpoints on other ranks, write down the state, and train on."""
    for kind, settings in ON_ONE_NODE.items():
        trained = build(**settings)
        load_checkpoint(folder / kind / "checkpoint", *trained)
        state = full_state(*trained)
        losses = [step(trained, number) for number in range(STEPS, 2 * STEPS)]
        if dist.get_rank() == 0:
            torch.save(state, folder / kind / "resumed")
            (folder / kind / "later").write_text(json.dumps(losses))


def endless(folder: Path) -> None:
    """Train until the ranks of a node are lost; a file says when this rank has trained
    for a while.
    """
    logging.basicConfig(format="%(message)s")
    trained, began = build(mesh=MeshSpec.hybrid(2, 2)), time.monotonic()
    with watch(trained[0], after=LIMIT, end=True):
        for number in itertools.count():
            step(trained, number)
            if time.monotonic() > began + LIMIT / 2:
                (folder / f"is training {dist.get_rank()}").touch()


if __name__ == "__main__":
    program, directory = sys.argv[1], Path(sys.argv[2])
    timeout = LIMIT if program == "endless" else 60.0
    dist.init_process_group("gloo", timeout=timedelta(seconds=timeout))
    torch.set_num_threads(1)
    if program == "train":
        train(directory)
    elif program == "resume":
        resume(directory)
    else:
        endless(directory)
    dist.destroy_process_group()
