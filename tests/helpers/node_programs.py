"""``node_programs.py FOLDER``: what the ranks of two nodes of two run; ``FOLDER`` is on the shared
disk.
"""

import itertools
import logging
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from shardkit import MeshSpec, shard_model
from shardkit.watching import watch

LIMIT = 4.0  # seconds without the other ranks, of the watch, and of the process group


def train(folder):
    """Train until the ranks of a node are lost; a file says when this rank has trained
    for a while.
    """
    model = shard_model(nn.Linear(8, 8), mesh=MeshSpec.hybrid(2, 2))
    began = time.monotonic()
    with watch(model, after=LIMIT, end=True):
        for step in itertools.count():
            loss = model(torch.ones(2, 8)).square().mean()
            loss.backward()
            model.zero_grad()
            if step > 2 and time.monotonic() > began + LIMIT / 2:
                (folder / f"is training {dist.get_rank()}").touch()


if __name__ == "__main__":
    logging.basicConfig(format="%(message)s")
    dist.init_process_group("gloo", timeout=timedelta(seconds=LIMIT))
    torch.set_num_threads(1)
    torch.manual_seed(0)
    train(Path(sys.argv[1]))
