"""The norm of gradients of which each rank has a part."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from shardkit._fsdp.collectives import has_gradient
from shardkit._fsdp.plain import layout_of, plain_units
from shardkit.errors import ShardkitError


def clip_grad_norm_(wrapper: nn.Module, max_norm: float, p: float) -> Tensor:
    """Scale the gradients at and below a wrapper, as FSDP1's method of that name. Collective."""
    sharded: dict[tuple[DeviceMesh, Any], list[nn.Parameter]] = {}
    others = dict.fromkeys(wrapper.parameters())
    for unit in plain_units(wrapper):
        for param in unit.fsdp_params:
            if has_gradient(param):
                raise ShardkitError(
                    f"{param.fqn} has a gradient that is not reduced yet. Clip after a backward "
                    "outside of no_sync()."
                )
            sharded.setdefault(layout_of(param), []).append(param.plain)
            others.pop(param.plain, None)

    norms = []
    for (mesh, placements), params in sharded.items():
        norm = _norm(params, p, torch.device(mesh.device_type))
        for axis, placement in enumerate(placements):
            if not hasattr(placement, "dim"):
                continue  # replicated
            if math.isinf(p):
                dist.all_reduce(norm, dist.ReduceOp.MAX, mesh.get_group(axis))
            else:
                norm = norm**p
                dist.all_reduce(norm, group=mesh.get_group(axis))
                norm = norm ** (1 / p)
        norms.append(norm)
    # The gradients of parameters that are not sharded are taken to be equal on all ranks.
    norms.append(_norm(others, p, norms[0].device if norms else torch.device("cpu")))
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms), p)

    params = [param for group in sharded.values() for param in group] + list(others)
    dtypes = [param.grad.dtype for param in params if param.grad is not None]
    if dtypes:
        nn.utils.clip_grads_with_norm_(params, max_norm, total)
        total = total.to(functools.reduce(torch.promote_types, dtypes))
    return total


def _norm(params: Any, p: float, device: torch.device) -> Tensor:
    """Return the norm of this rank's gradients, in float32 and on the device that communicates."""
    grads = [param.grad for param in params if param.grad is not None and param.grad.numel()]
    if not grads:
        return torch.zeros((), device=device)
    return nn.utils.get_total_norm(grads, p).to(device, torch.float32)
