"""Shards as FSDP1 shows them: flat parameters, of one parameter each."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardkit._fsdp import own_parameters
from shardkit._fsdp.fsdp1 import ShardParamInfo
from shardkit._torch import named_sharded_parameters
from shardkit.fsdp1.dropin.record import sharded_of, without_wrappers
from shardkit.shards import local_box
from shardkit.state.routes import local_of


def flat_params(wrapper: nn.Module) -> list[Tensor]:
    """Return a flat parameter for each parameter that a wrapper shards itself, not an inner one. Local."""
    names = {param: without_wrappers(name) for name, param in named_sharded_parameters(wrapper)}
    unit: Any = sharded_of(wrapper)
    return [flat_param(param, names[param]) for param in own_parameters(unit)] if unit is not None else []


def flat_param(param: Tensor, fqn: str) -> Tensor:
    """Return this rank's shard, and its gradient, in their own memory: what is written to them stays. Local.

    If the shard is rows of the parameter, as it is unless tensor parallelism sharded another dim, it is of one dim and
    has FSDP1's attributes ``_is_flat_param``, ``_fqns``, ``_shapes``, ``_numels`` and ``_shard_param_infos``.
    """
    (start, length), *rest = local_box(param) if isinstance(param, DTensor) else ((0, size) for size in param.shape)
    local, row = local_of(param), math.prod(param.shape[1:])
    is_flat = [size for _, size in rest] == [*param.shape[1:]] and local.is_contiguous()
    shape = (-1,) if is_flat else local.shape
    flat = nn.Parameter(local.view(shape), param.requires_grad)
    if isinstance(param.grad, DTensor):
        flat.grad = local_of(param.grad).view(shape)
    if is_flat:
        first, held = start * row, length * row
        info = ShardParamInfo(True, 0, held, first, first + held - 1) if held else ShardParamInfo(False, *[None] * 4)
        described = {"_shapes": (param.shape,), "_numels": (param.numel(),), "_shard_param_infos": (info,)}
        vars(flat).update(described, _is_flat_param=True, _fqns=(fqn,))
    return flat
