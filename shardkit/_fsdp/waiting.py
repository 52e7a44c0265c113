"""Gradients that wait for their reduction, shown where ``optimizer.zero_grad()`` can drop them."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from shardkit._fsdp import not_compiled
from shardkit._fsdp.collectives import has_gradient
from shardkit._fsdp.states import drop_unreduced_gradients
from shardkit._torch import local_tensor, with_local


def let_optimizers_clear(unit: Any) -> None:
    """Let a unit's gradients that wait be dropped by ``optimizer.zero_grad()`` from now on. Local."""
    if type(unit) is FSDPParamGroup:  # the drop-in's have a class of their own
        unit.__class__, vars(unit)["shown"] = ClearableUnit, []


class ClearableUnit(FSDPParamGroup):
    """A unit in which a gradient that is not reduced yet can be cleared.

    FSDP2 keeps it aside, where no optimizer looks. Until the next backward ``.grad`` of the sharded
    parameter is a placeholder: a DTensor with one local element, to take no memory. It is a
    negative zero: scaling (clipping, ``unscale_``) keeps its sign, ``zero_()`` does not.
    """

    shown: list[tuple[Any, Any, bool]]  # a parameter, its .grad, whether that is a placeholder

    @not_compiled
    def pre_backward(self, *args: Any) -> None:
        self.drop_cleared()
        super().pre_backward(*args)

    @not_compiled
    def post_backward(self, *unused: Any) -> None:
        self.drop_cleared()  # where this backward did not reach the unit
        super().post_backward()
        for param in self.fsdp_params:
            sharded: Any = param.sharded_param
            is_reduced = self._partial_reduce_output is not None and sharded.requires_grad
            if not (is_reduced or has_gradient(param)):
                continue
            is_placeholder = sharded.grad is None and sharded.is_floating_point()
            if is_placeholder:
                local = local_tensor(sharded).detach()
                sharded.grad = with_local(sharded, local.new_full((1,) * local.ndim, -0.0))
            self.shown.append((param, sharded.grad, is_placeholder))

    def drop_cleared(self) -> None:
        cleared = []
        for param, grad, is_placeholder in self.shown:
            sharded = param.sharded_param
            if sharded.grad is not grad:
                cleared.append(param)
            elif is_placeholder and not local_tensor(grad).signbit().all():
                cleared.append(param)
                sharded.grad = torch.zeros_like(sharded, requires_grad=False)
            elif is_placeholder:
                sharded.grad = None
        if self._partial_reduce_output is not None and 0 < len(cleared) < len(self.shown):
            raise RuntimeError(
                f"Only {len(cleared)} of {len(self.shown)} gradients of a unit were cleared while "
                "they wait for the all-reduce of HSDP, which has them in one tensor. Call "
                "shardkit.zero_grad(model), which drops all of them."
            )
        self.shown.clear()
        if cleared:
            unit: Any = self
            drop_unreduced_gradients(unit, cleared)
