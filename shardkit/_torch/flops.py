"""Floating-point operations of single calls, by the formulas that torch registers."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

# Steps are traced on fake CPU tensors, and before 2.15 torch has no formulas for the CPU's fused attention. The GPU's
# take the same arguments.
_attention = torch.ops.aten._scaled_dot_product_flash_attention
_attention_backward = torch.ops.aten._scaled_dot_product_flash_attention_backward
_SAME: dict[Any, Any] = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}


def flops_of(op: Any, args: tuple[Any, ...], kwargs: Any, result: Any) -> int:
    """Floating-point operations of one aten call. Local, pure.

    torch's public FlopCounterMode runs as a mode of its own and follows modules; one number per call is all we need.
    """
    packet = getattr(op, "overloadpacket", None)
    formula = flop_registry.get(_SAME.get(packet, packet))
    return int(formula(*args, **kwargs, out_val=result)) if formula else 0
