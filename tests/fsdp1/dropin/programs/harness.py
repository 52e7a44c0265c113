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
        self.norm, self.up, self.down = (
            nn.LayerNorm(width),
            nn.Linear(width, 2 * width),
            nn.Linear(2 * width, width),
        )

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x)).cumsum(1)))


def parse(argv, **defaults):
    """The command line: a switch for each False, an option for each other default."""
    parser = argparse.ArgumentParser()
    for name, default in defaults.items():
        option = f"--{name.replace('_', '-')}"
        if default is False:
            parser.add_argument(option, action="store_true")
        else:
            parser.add_argument(
                option, type=float if default is None else type(default), default=default
            )
    return parser.parse_args(argv)


class Adapted(nn.Module):
    """A frozen linear layer with a trained correction of low rank."""

    def __init__(self, base_layer, rank=2):
        super().__init__()
        self.base_layer = base_layer.requires_grad_(False)
        self.lora_A = nn.Linear(base_layer.in_features, rank, bias=False)
        self.lora_B = nn.Linear(rank, base_layer.out_features, bias=False)

    def forward(self, x):
        return self.base_layer(x) + self.lora_B(self.lora_A(x))


class Decoder(nn.Module):
    """A language model of Blocks."""

    _no_split_modules = ("Block",)

    def __init__(self, vocabulary, width, depth=2):
        super().__init__()
        self.embed, self.norm = nn.Embedding(vocabulary, width), nn.LayerNorm(width)
        self.layers = nn.ModuleList([Block(width) for _ in range(depth)])
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, input_ids):
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


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


def is_trained_leaf(module):
    """Whether a module has no children and a weight that trains, for policies that keep trained and
    frozen apart.
    """
    weight = getattr(module, "weight", None)
    return not list(module.named_children()) and weight is not None and weight.requires_grad


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
