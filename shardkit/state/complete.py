"""Detect quantized weights whose scales are not in the state dict."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardkit import _torch
from shardkit.errors import ShardkitError, listing, message
from shardkit.state.names import ModelState, clean_name

_SCALES = ("quant_state", "SCB", "CB")  # attributes of bitsandbytes' weights and of their modules
_PLAIN = (Tensor, nn.Parameter, nn.Buffer, DTensor)


def check_complete(model: nn.Module, state: ModelState) -> None:
    """Raise for quantized weights of which the state has the packed values without their scales. Local.

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
            # Linear8bitLt that was sharded without the attributes, in which alone it had the scales
            matmul: Any = getattr(module, "state", None)
            is_8bit = name == "weight" and param.dtype == torch.int8 and _is_matmul_state(matmul)
            is_gone = is_8bit and matmul.SCB is None and getattr(param, "SCB", None) is None
            if is_gone or (attached and not any(id(each) in kept for each in attached)):
                lost.append(fqn)
    if lost:
        rule = "A quantized weight is its packed values and their scales, and state_dict() has only the values"
        fix = "Save the trainable parameters with save_checkpoint(..., trainable_only=True), and quantize the base "
        fix += "again from its own files; or shard with shard_model, which keeps the scales in the state"
        raise ShardkitError(message(listing(lost), "its scales are not in state_dict()", rule, fix))


def _attached(module: nn.Module, name: str, param: Tensor) -> Iterator[Tensor]:
    """Yield the tensors that belong to a parameter besides its own data."""
    values = []
    for tensor in (param, _torch.local_tensor(param) if isinstance(param, DTensor) else param):
        # A subclass without memory, such as a wrapper that torch cannot flatten, is refused where it would be read.
        is_own_class = type(tensor) not in _PLAIN and not _torch.is_wrapper(tensor) and tensor.data_ptr() != 0
        values += [v for key, v in vars(tensor).items() if (is_own_class and key != "grad") or key in _SCALES]
    if name == "weight":
        values += [value for key, value in vars(module).items() if key in _SCALES or _is_matmul_state(value)]
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif value is not None and not isinstance(value, (type, nn.Module)):
            yield from (each for each in getattr(value, "__dict__", {}).values() if isinstance(each, Tensor))


def _is_matmul_state(value: object) -> bool:
    """Whether it is what ``Linear8bitLt`` keeps of its weight: scales, and whether that is quantized."""
    return hasattr(value, "SCB") and hasattr(value, "has_fp16_weights")
