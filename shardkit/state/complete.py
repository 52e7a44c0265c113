"""Quantised weights, whose scales are kept apart: a state without them is not the whole weight."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardkit import _torch
from shardkit.errors import ShardkitError, listing, message
from shardkit.state.names import ModelState, clean_name

_SCALES = ("quant_state", "SCB", "CB")  # where bitsandbytes keeps them: at the weight, and at its module
_PLAIN = (Tensor, nn.Parameter, nn.Buffer, DTensor)


def check_complete(model: nn.Module, state: ModelState) -> None:
    """Raise for parameters that are more than their data, of which the state has the data alone. Local.

    These are subclasses that torch cannot flatten, with tensors in their attributes, and weights of bitsandbytes whose
    module does not write the scales: FSDP2 shards the packed values and leaves the rest behind.
    """
    kept = {id(tensor) for tensor in state.tensors.values()}
    lost = []
    for prefix, module in model.named_modules():
        for name, param in module._parameters.items():
            fqn = clean_name(f"{prefix}.{name}" if prefix else name)
            if fqn not in state.tensors or param is None:
                continue
            attached = list(_attached(module, name, param))
            if _scales_are_gone(module, name, param) or (attached and not any(id(each) in kept for each in attached)):
                lost.append(fqn)
    if lost:
        rule = "A quantised weight is its packed values and their scales, and the model's state has the first alone"
        fix = "Save what trains with save_checkpoint(..., trainable_only=True), and quantise the base again from its "
        fix += "own files; or shard with shard_model, which keeps the scales in the state"
        raise ShardkitError(message(listing(lost), "its scales are not in state_dict()", rule, fix))


def _attached(module: nn.Module, name: str, param: Tensor) -> Iterator[Tensor]:
    """The tensors that belong to a parameter besides its own data."""
    for tensor in (param, _torch.local_tensor(param) if isinstance(param, DTensor) else param):
        # What has no memory, as a wrapper that torch cannot flatten, is refused where it would be read.
        is_own_class = type(tensor) not in _PLAIN and not _torch.is_wrapper(tensor) and tensor.data_ptr() != 0
        for key, value in vars(tensor).items():
            if (is_own_class and key != "grad") or key in _SCALES:
                yield from _tensors(value)
    if name == "weight":
        for key, value in vars(module).items():
            if key in _SCALES or _is_matmul_state(value):
                yield from _tensors(value)


def _tensors(value: object) -> Iterator[Tensor]:
    """A tensor itself, or those in the attributes of an object."""
    if isinstance(value, Tensor):
        yield value
    elif value is not None and not isinstance(value, (type, nn.Module)):
        yield from (each for each in getattr(value, "__dict__", {}).values() if isinstance(each, Tensor))


def _is_matmul_state(value: object) -> bool:
    """Whether it is what ``Linear8bitLt`` keeps of its weight: scales, and whether that is quantised."""
    return hasattr(value, "SCB") and hasattr(value, "has_fp16_weights")


def _scales_are_gone(module: nn.Module, name: str, param: Tensor) -> bool:
    """Whether a weight of ``Linear8bitLt`` was sharded without its attributes, which alone had the scales."""
    state: Any = getattr(module, "state", None)
    if name != "weight" or param.dtype != torch.int8 or not _is_matmul_state(state):
        return False
    return state.SCB is None and getattr(param, "SCB", None) is None
