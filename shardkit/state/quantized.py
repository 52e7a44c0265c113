"""Optimizer state that is quantized in blocks, such as torchao's: its values, and quantizing values.

Its classes turn into values by ``dequantize()``, and quantize what ``copy_`` writes into them. Which state is
quantized, and in which blocks, the optimizer decides for each shard.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardkit import _torch
from shardkit.shards import as_sharded
from shardkit.state.routes import local_of

VALUES = torch.float32  # the dtype of values on all ranks; a plain shard of the same state may have another


def is_quantized(value: object) -> bool:
    """Whether this rank's part of a tensor is of a subclass that turns into values. Local."""
    if not isinstance(value, Tensor):
        return False
    local = local_of(value)
    return _torch.is_wrapper(local) and turns_into_values(type(local))


def turns_into_values(cls: type[Tensor]) -> bool:
    """Whether a subclass has a ``dequantize()`` of its own."""
    return cls.dequantize is not Tensor.dequantize


@torch.no_grad()
def values_of(tensor: Tensor) -> Tensor:
    """Return a tensor's values in new memory, or a DTensor of them. Local."""
    local = local_of(tensor)
    values = (local.dequantize() if is_quantized(local) else local).to(VALUES)
    return as_sharded(values, tensor) if isinstance(tensor, DTensor) else values


@torch.no_grad()
def written(values: Any, into: Any) -> Any:
    """Quantise values into a tensor, and return it; return the values if it is not quantized on this rank. Local."""
    if not is_quantized(into):
        return values
    local_of(into).copy_(local_of(values))
    return into
