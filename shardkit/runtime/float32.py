"""Modules that compute in float32 inside of a model that computes in bf16 or fp16."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from shardkit._torch.dispatch import tree_map


def cast_at_borders(model: nn.Module, fqns: Iterable[str]) -> None:
    """Let these modules compute in float32. In place."""
    for fqn in fqns:
        compute_in_float32(model.get_submodule(fqn))


def compute_in_float32(module: nn.Module) -> None:
    """Let a module compute in float32, and the modules around it in bf16 or fp16 as before.

    Casts the inputs that are in bf16 or fp16 to float32, and the outputs back to the dtype of the
    first of these. An ``nn.Linear``, such as a router or a head, returns float32: a softmax or a
    loss follows. In place; torch casts only at the first and the last module of a unit.
    """
    forward = module.forward

    @functools.wraps(forward)
    def in_float32(*args: Any, **kwargs: Any) -> Any:
        cast_from: list[torch.dtype] = []

        def widen(value: Any) -> Any:
            if isinstance(value, Tensor) and value.is_floating_point() and value.itemsize == 2:
                cast_from.append(value.dtype)
                return value.float()
            return value

        def narrow(value: Any) -> Any:
            if isinstance(value, Tensor) and value.is_floating_point():
                return value.to(cast_from[0])
            return value

        args, kwargs = tree_map(widen, (args, kwargs))
        output = forward(*args, **kwargs)
        if not cast_from or isinstance(module, nn.Linear):
            return output
        return tree_map(narrow, output)

    module.forward = in_float32
