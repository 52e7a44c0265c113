"""clip_grad_norm_ of a wrapped model: what FSDP1 returned and said besides."""

from __future__ import annotations

import functools
import warnings

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardkit import grads


def clip_grad_norm_(model: nn.Module, max_norm: float | int, norm_type: float | int) -> Tensor:
    """``shardkit.clip_grad_norm_``, with FSDP1's warning where there is nothing to clip. In place. Collective.

    Returns:
        The norm of all gradients as one vector, 0-d, in the dtype that those of the gradients promote to.
    """
    dtypes = [param.grad.dtype for param in model.parameters() if param.grad is not None]
    if not dtypes:
        text = "no gradients -- returning the total norm in the default dtype torch.float32"
        warnings.warn(f"Called FSDP.clip_grad_norm_() on rank {dist.get_rank()} with {text}", stacklevel=3)
    norm = grads.clip_grad_norm_(model.parameters(), float(max_norm), float(norm_type))
    return norm.to(functools.reduce(torch.promote_types, dtypes)) if dtypes else norm
