"""The collectives of an FSDP unit without its forward, for a rank that does not call it.

Private names of torch 2.11 to 2.15, like the rest of ``_fsdp``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule


class Keep(torch.autograd.Function):
    """Return the first tensor; the others get gradients of zeros, so that backward reaches what made them."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, *others: Tensor) -> Tensor:
        """Return an alias that autograd takes for no view: FSDP2 warns of outputs that are views."""
        ctx.others = [each.new_empty(()).expand(each.shape) if type(each) is Tensor else each for each in others]
        return value.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        return gradient, *map(torch.zeros_like, ctx.others)


def keep(value: Tensor, *others: Tensor) -> Tensor:
    """Return ``value``, from which backward also reaches ``others``, with zeros. Local."""
    tracked = [each for each in others if each.requires_grad] if torch.is_grad_enabled() else []
    return Keep.apply(value, *tracked) if tracked else value  # type: ignore[no-untyped-call]


def modules_of(module: FSDPModule) -> tuple[nn.Module, ...]:
    """Return the modules of ``fully_shard([a, b])`` that ``module`` is one of. Local, pure."""
    return module._get_fsdp_state()._modules


def pass_through(module: FSDPModule, zero: Tensor, body: Callable[[Tensor], Tensor]) -> Tensor:
    """Run ``body`` as the forward of a unit: gather, reshard, and join its backward. Collective.

    torch's methods are called rather than the module, so that none of its other hooks sees the zero.
    """
    state: Any = module._get_fsdp_state()
    (zero,), _ = state._pre_forward(module, (zero,), {})
    return state._post_forward(module, (zero,), body(zero))  # type: ignore[no-any-return]
