"""What an entry of the zoo is, and data for it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

Batch = dict[str, Any]


def mean_square(model, batch):
    """A loss for any model that returns one tensor."""
    return model(**batch).float().square().mean()


@dataclass(frozen=True)
class Entry:
    """A tiny model, with random input and a loss: all that is needed to train it.

    Args:
        build: makes the model; the caller seeds, so that two calls give equal models.
        batch: keyword arguments of the forward for a seed.
        loss: the model and a batch to a tensor without dimensions.
        crossing: tensors reach blocks other than from the block before, as an encoder's output
            reaches all decoder blocks. FSDP2 adds up the gradients of each unit's input before they
            leave the unit, where the plain model adds them in another order.
        uneven: the ranks use different parameters.
    """

    build: Callable[[], nn.Module]
    batch: Callable[[int], Batch]
    loss: Callable[[nn.Module, Batch], torch.Tensor] = mean_square
    crossing: bool = False
    uneven: bool = False


def integers(seed, high, *shape):
    """Random integers from 0 to ``high`` - 1, the same for a seed."""
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(seed))


def floats(seed, *shape):
    """Normal random numbers, the same for a seed."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))
