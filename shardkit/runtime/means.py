"""Gradients of units that are sharded on a part of the ranks, such as experts: divided as those of all others.

torch divides a unit's gradients by the ranks that reduce them. An expert's gradient holds the tokens of all ranks of
its expert-parallel group, so its sum over fewer ranks is that over all, and is divided by too few. torch's own factors
do not help: they need NCCL, or, where sums are forced, divide twice on a shard axis of one rank (torch 2.13).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from shardkit._fsdp import FSDPUnit, fsdp_units
from shardkit._fsdp.accumulation import all_reduce_hook


def divide_further(module: nn.Module, times: int) -> None:
    """Divide reduced gradients of the unit of ``module`` by ``times`` more than torch does. Local.

    Not where the unit has a divide factor of its own, as after ``set_gradient_reduction(model, "sum")``.
    """
    unit = next((unit for unit in fsdp_units(module) if module in unit.modules), None)
    if unit is not None and isinstance(module, FSDPModule):  # it has parameters
        module.set_all_reduce_hook(_Division(unit, times))


def reduce_groups(unit: FSDPUnit) -> list[dist.ProcessGroup]:
    """Return the groups over which a unit reduces gradients: it shards over one, replicates over the other, or both."""
    names = ("shard_process_group", "replicate_process_group")
    return [getattr(unit.mesh_info, name) for name in names if hasattr(unit.mesh_info, name)]


def reduce_size(unit: FSDPUnit) -> int:
    """Return the number of ranks over which a unit reduces gradients."""
    return math.prod(group.size() for group in reduce_groups(unit))


def divisor(unit: FSDPUnit) -> float:
    """Return the number by which the sum of a unit's gradients over the ranks is divided."""
    hook = all_reduce_hook(unit)
    return unit.gradient_divide_factor or float(reduce_size(unit) * (hook.times if isinstance(hook, _Division) else 1))


@dataclass(eq=False)
class _Division:
    """torch calls it with the flat gradients of the unit, in the reduce dtype, after their last collective."""

    unit: FSDPUnit
    times: int

    def __call__(self, reduced: Tensor) -> None:
        if self.unit.gradient_divide_factor is None:
            reduced.div_(self.times)
            if reduced.device.type != "cpu":
                # Allocated on torch's reduce-scatter stream, which may reuse it while this one still casts it.
                reduced.record_stream(torch.accelerator.current_stream(reduced.device))
