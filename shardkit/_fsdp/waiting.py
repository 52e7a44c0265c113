"""Gradients that wait for their reduction, shown where ``optimizer.zero_grad()`` can drop them."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from shardkit._fsdp import not_compiled
from shardkit._fsdp.collectives import has_gradient
from shardkit._fsdp.states import (
    PLACEHOLDER,
    drop_unreduced_gradients,
    drop_unsharded_gradient,
)
from shardkit._torch import local_tensor, with_local


class WaitingUnit(FSDPParamGroup):
    """A unit in which a gradient that is not reduced yet can be cleared.

    FSDP2 keeps it aside, where no optimizer looks. Meanwhile ``.grad`` of the parameter that an
    optimizer holds is a placeholder: a negative zero. Scaling (clipping, ``unscale_``) keeps its
    sign, ``zero_()`` does not. The next backward begins by dropping what waits for the parameters
    whose ``.grad`` is gone or was zeroed.
    """

    # a parameter, its .grad at the end of a backward, and what ``was_cleared`` needs to know of it
    waiting: list[tuple[Any, Any, Any]]

    def was_cleared(self, param: Any, grad: Any, note: Any) -> bool:
        """Whether ``.grad`` is gone or was zeroed; ends the placeholder."""
        raise NotImplementedError

    @not_compiled
    def pre_backward(self, *args: Any) -> None:
        self.drop_cleared()
        super().pre_backward(*args)

    @not_compiled
    def post_backward(self, *unused: Any) -> None:
        self.drop_cleared()  # where this backward did not reach the unit
        super().post_backward()

    def drop_cleared(self) -> None:
        """Drop what waits for the parameters whose ``.grad`` the program has cleared."""
        waiting, self.waiting = self.waiting, []
        cleared = []
        for param, grad, note in waiting:
            if self.was_cleared(param, grad, note):
                cleared.append(param)
        if self._partial_reduce_output is None:
            for param in cleared:
                drop_unsharded_gradient(param)
            return

        # Reduce-scattered already: one tensor has the gradients of the whole unit.
        if 0 < len(cleared) < len(waiting):
            raise RuntimeError(
                f"Only {len(cleared)} of {len(waiting)} gradients of a unit were cleared while "
                "they wait for the all-reduce of HSDP, which has them in one tensor. Call "
                "shardkit.zero_grad(model), which drops all of them."
            )
        unit: Any = self
        if cleared:
            drop_unreduced_gradients(unit)


class ClearableUnit(WaitingUnit):
    """A unit of ``fully_shard``, whose placeholders are DTensors with one local element."""

    @not_compiled
    def post_backward(self, *unused: Any) -> None:
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
                setattr(sharded.grad, PLACEHOLDER, True)
            self.waiting.append((param, sharded.grad, is_placeholder))

    def was_cleared(self, param: Any, grad: Any, is_placeholder: bool) -> bool:
        """Whether ``.grad`` is gone or was zeroed; ends the placeholder."""
        sharded = param.sharded_param
        if sharded.grad is not grad:
            return sharded.grad is None  # else the program has replaced what was reduced before
        if not is_placeholder:
            return False
        is_zeroed = not local_tensor(grad).signbit().all()
        sharded.grad = torch.zeros_like(sharded, requires_grad=False) if is_zeroed else None
        return is_zeroed


def let_optimizers_clear(unit: Any) -> None:
    """Let ``optimizer.zero_grad()`` drop a unit's waiting gradients from now on. Local."""
    if type(unit) is FSDPParamGroup:  # the drop-in's units can do it already
        unit.__class__ = ClearableUnit
        vars(unit)["waiting"] = []
