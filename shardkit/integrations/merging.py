"""Refuse to merge adapters into sharded weights, where peft's merge may be lost without an error."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from shardkit.errors import ShardkitError, message

_CALLS = ("merge", "unmerge")


def refuse_merges(model: nn.Module) -> None:
    """Make adapter layers refuse to merge or unmerge while their parameters are sharded. Local, in place.

    These are modules with ``merge()``, ``unmerge()`` and ``merged``, as peft's. Some methods, such as DoRA and IA3,
    assign ``weight.data``, which torch does not carry over to the shards of a DTensor: the result is the base.
    """
    for name, module in model.named_modules():
        if all(callable(getattr(type(module), call, None)) for call in _CALLS) and hasattr(module, "merged"):
            for call in _CALLS:
                setattr(module, call, partial(_on_full, module, name, call))


def _on_full(module: nn.Module, name: str, call: str, *args: Any, **kwargs: Any) -> Any:
    if any(isinstance(param, DTensor) for param in module.parameters()):
        rule = "Merging assigns weight.data, which does not reach the shards of a DTensor"
        fix = "Call it inside `with shardkit.full_params(model, writeback=True):`, for the model or layer by layer"
        raise ShardkitError(message(f"{name}.{call}", "cannot run while its parameters are sharded", rule, fix))
    return getattr(type(module), call)(module, *args, **kwargs)
