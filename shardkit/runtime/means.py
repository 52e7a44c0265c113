"""Gradients of units that are sharded on a part of the ranks, such as experts: divided as those of
all others.

torch divides a unit's gradients by the ranks that reduce them. An expert's gradient holds the
tokens of all ranks of its expert-parallel group, so its sum over fewer ranks is that over all, and
is divided by too few. torch's own factors do not help: they need NCCL, or, where sums are forced,
divide twice on a shard axis of one rank (torch 2.13).
"""

from __future__ import annotations

import functools
import math
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from shardkit._fsdp import FSDPUnit, fsdp_units

_times: WeakKeyDictionary[Any, int] = WeakKeyDictionary()  # how often each unit is divided further


def divide_further(module: nn.Module, times: int) -> None:
    """Divide reduced gradients of the unit of ``module`` by ``times`` more than torch does. Local.

    Not where the unit has a divide factor of its own, as after
    ``set_gradient_reduction(model, "sum")``.
    """
    unit = next((unit for unit in fsdp_units(module) if module in unit.modules), None)
    if unit is not None and isinstance(module, FSDPModule):  # it has parameters
        _times[unit] = times
        module.set_all_reduce_hook(functools.partial(_divide, unit))


def reduce_groups(unit: FSDPUnit) -> list[dist.ProcessGroup]:
    """Return the groups over which a unit reduces gradients: it shards over one, replicates over
    the other, or both.
    """
    names = ("shard_process_group", "replicate_process_group")
    return [getattr(unit.mesh_info, name) for name in names if hasattr(unit.mesh_info, name)]


def reduce_size(unit: FSDPUnit) -> int:
    """Return the number of ranks over which a unit reduces gradients."""
    return math.prod(group.size() for group in reduce_groups(unit))


def divisor(unit: FSDPUnit) -> float:
    """Return the number by which the sum of a unit's gradients over the ranks is divided."""
    return unit.gradient_divide_factor or float(reduce_size(unit) * _times.get(unit, 1))


def _divide(unit: FSDPUnit, reduced: Tensor) -> None:
    """Divide the flat gradients of a unit, in the reduce dtype, after their last collective."""
    if unit.gradient_divide_factor is None:
        reduced.div_(_times[unit])
        if reduced.device.type != "cpu":
            # Allocated on torch's reduce-scatter stream, which may reuse it while this one still
            # casts it.
            reduced.record_stream(torch.accelerator.current_stream(reduced.device))
