"""Count the floating-point operations of a traced step, by torch's registered formulas and three
that it lacks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import flop_registry

from shardkit import ShardingPlan
from shardkit.memory.tracing import IntervalMeter, Loss, Trace, trace


@dataclass(frozen=True)
class Step:
    """A trace, and the floating-point operations of its intervals by moment and unit."""

    trace: Trace
    flops: Mapping[tuple[str, str], int]


def step_of(
    model: nn.Module,
    plan: ShardingPlan,
    batch: Any,
    loss: Loss | None = None,
) -> Step:
    """Trace a step as ``shardkit.memory.tracing`` does."""
    meters = []

    def new_meter() -> FlopMeter:
        meters.append(FlopMeter())
        return meters[-1]

    found = trace(model, plan, batch, loss=loss, new_meter=new_meter)
    return Step(found, dict(meters[-1].flops))


class FlopMeter(IntervalMeter):  # type: ignore[no-untyped-call]
    """Counts operations besides bytes: those of matrix products, convolutions and attention."""

    def __init__(self) -> None:
        self.flops: dict[tuple[str, str], int] = defaultdict(int)
        super().__init__()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run the operator, and count."""
        result = super().__torch_dispatch__(func, types, args, kwargs)
        self.flops[self.opened[:2]] += flops_of(func, args, kwargs or {}, result)
        return result


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
    return (
        2 * query.shape[:-1].numel() * key.shape[-2] * (3 * query.shape[-1] + 2 * value.shape[-1])
    )


def _grouped(left: Tensor, right: Tensor, *_: Any) -> int:
    groups = left.shape[0] if left.dim() == right.dim() == 3 else 1  # else each row is in one group
    return 2 * groups * left.shape[-2:].numel() * right.shape[-1]


# Steps are traced on fake CPU tensors, whose fused attention torch counts since 2.15 only. Its
# formulas for GPUs refuse grouped heads in torch 2.11. Two matrix products in forward, five in
# backward. Grouped products are those of experts.
_LACKING: dict[Any, Callable[..., int]] = {
    torch.ops.aten._grouped_mm: _grouped,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}
