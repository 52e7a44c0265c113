"""What the programs share that FSDP has no part in: arguments, random batches, files."""

import argparse
import functools
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)


class Block(nn.Module):
    """A layer that mixes positions, for models of sequences."""

    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x)).cumsum(1)))


def parse(argv, **defaults):
    """The command line: a switch for each False, an option for each other default. Starts the process group."""
    parser = argparse.ArgumentParser()
    for name, default in defaults.items():
        option = f"--{name.replace('_', '-')}"
        if default is False:
            parser.add_argument(option, action="store_true")
        else:
            parser.add_argument(option, type=float if default is None else type(default), default=default)
    args = parser.parse_args(argv)
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    return args


def generator_of(step, stride=10):
    """Another batch in each step, on each rank."""
    return torch.Generator().manual_seed(stride * step + dist.get_rank())


def checkpoint_modules(model, check_fn):
    """Activation checkpointing by torch's wrappers, of the modules that ``check_fn`` chooses."""
    wrapper = functools.partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl.NO_REENTRANT)
    apply_activation_checkpointing(model, checkpoint_wrapper_fn=wrapper, check_fn=check_fn)


def class_named(model, name):
    """The class of the first module whose class has this name."""
    return next(type(module) for module in model.modules() if type(module).__name__ == name)


def hybrid_groups():
    """One group that shards all ranks, and one a rank that replicates nothing."""
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    return dist.new_group(list(range(dist.get_world_size()))), alone[dist.get_rank()]


def write(state, path):
    """One file, of rank 0."""
    if dist.get_rank() == 0:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        torch.save(state, path)
    dist.barrier()


def read(path):
    return torch.load(path, map_location="cpu", weights_only=True)


def write_own(state, folder):
    """A file a rank."""
    os.makedirs(folder, exist_ok=True)
    torch.save(state, own_path(folder))
    dist.barrier()


def read_own(folder):
    return torch.load(own_path(folder), weights_only=False)


def own_path(folder):
    return os.path.join(folder, f"rank{dist.get_rank()}.pt")


def run(main):
    print(main())
    dist.destroy_process_group()
