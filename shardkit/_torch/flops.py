"""Count the floating-point operations of aten calls, by torch's registered formulas and three that it lacks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry


def flops_of(op: Any, args: tuple[Any, ...], kwargs: Any, result: Any) -> int:
    """Return the floating-point operations of one aten call.

    torch's public FlopCounterMode is a dispatch mode of its own that follows modules.
    """
    packet = getattr(op, "overloadpacket", None)
    if packet in _LACKING:
        return _LACKING[packet](*args)
    formula = flop_registry.get(packet)
    return int(formula(*args, **kwargs, out_val=result)) if formula else 0


def _attention(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> int:
    return 2 * query.shape[:-1].numel() * key.shape[-2] * (query.shape[-1] + value.shape[-1])


def _attention_backward(_grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> int:
    return 2 * query.shape[:-1].numel() * key.shape[-2] * (3 * query.shape[-1] + 2 * value.shape[-1])


def _grouped(left: Tensor, right: Tensor, *_: Any) -> int:
    groups = left.shape[0] if left.dim() == right.dim() == 3 else 1  # else each row is in one group
    return 2 * groups * left.shape[-2:].numel() * right.shape[-1]


# Steps are traced on fake CPU tensors, whose fused attention torch counts since 2.15 only. Its formulas for GPUs refuse
# grouped heads in torch 2.11. Two matrix products in forward, five in backward. Grouped products are those of experts.
_LACKING: dict[Any, Callable[..., int]] = {
    torch.ops.aten._grouped_mm: _grouped,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}
