"""The norm of gradients of which each rank has a part."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from shardkit._fsdp.collectives import has_gradient
from shardkit._fsdp.plain import plain_units
from shardkit.errors import ShardkitError
from shardkit.grads.clip import Bucket, scale_to, total_norm


def clip_grad_norm_(wrapper: nn.Module, max_norm: float, p: float) -> Tensor:
    """Scale the gradients at and below a wrapper, as FSDP1's method of that name. Collective."""
    params: list[Any] = list(wrapper.parameters())
    others = dict.fromkeys(params)
    buckets: dict[Any, Bucket] = {}
    for unit in plain_units(wrapper):
        for param in unit.fsdp_params:
            if has_gradient(param):
                raise ShardkitError(
                    f"{param.fqn} has a gradient that is not reduced yet. Clip after a backward "
                    "outside of no_sync()."
                )
            layout = param.sharded_param.device_mesh, param.sharded_param.placements
            bucket = buckets.setdefault(layout, Bucket(*layout))
            if param.plain.grad is not None:
                bucket.grads.append(param.plain.grad)
            others.pop(param.plain, None)
    # The gradients of parameters that are not sharded are taken to be equal on all ranks.
    plain = [param.grad for param in others if param.grad is not None]
    norm = total_norm(params, list(buckets.values()), plain, p, None)
    scale_to(max_norm, norm, list(buckets.values()), plain)
    dtypes = [param.grad.dtype for param in params if param.grad is not None]
    return norm.to(functools.reduce(torch.promote_types, dtypes)) if dtypes else norm
