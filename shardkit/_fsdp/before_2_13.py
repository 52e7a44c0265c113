"""What FSDP2 of torch 2.11 and 2.12 lacks of 2.13's, added to its classes: for those torches alone,
on import.

Zeros for unused parameters, which are off by default, and recovery from errors. Nothing that is
there changes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from shardkit._torch import units_of

_Unit: Any = FSDPParamGroup
_Module: Any = FSDPModule


def _filling(original: Callable[..., None]) -> Callable[..., None]:
    @torch._compile._disable_dynamo
    @wraps(original)
    def post_backward(self: Any, *unused: Any) -> None:
        if self.reduce_scatter_unused_params and self.reduce_grads:
            for param in (
                param for param in self.fsdp_params if hasattr(param, "_unsharded_param")
            ):
                gathered = param._unsharded_param
                if (
                    gathered.requires_grad
                    and gathered.grad is None
                    and param.unsharded_accumulated_grad is None
                ):
                    gathered.grad = torch.zeros_like(gathered)
        original(self, *unused)

    return post_backward


def _set_reduce_scatter_unused_params(
    self: nn.Module, reduce_scatter_unused_params: bool, *, recurse: bool = True
) -> None:
    """Reduce zeros for parameters that received no gradient in a backward."""
    for module in self.modules() if recurse else [self]:
        for unit in units_of(module._get_fsdp_state()) if isinstance(module, FSDPModule) else ():
            unit.reduce_scatter_unused_params = reduce_scatter_unused_params


def _reset_iter_state(self: Any) -> None:
    """Abandon the forward or backward under way: wait for collectives, reshard, and clear what
    belongs to it.
    """
    state = self._get_fsdp_state()
    shared: Any = state._comm_ctx
    # fully_shard([a, b]) is listed for each module
    states = list(dict.fromkeys(state._state_ctx.all_states))
    units = [unit for each in states for unit in units_of(each)]
    several = getattr(shared, "reduce_scatter_states", [])  # since torch 2.12
    pending = [shared.all_gather_state, getattr(shared, "reduce_scatter_state", None), *several]
    events = [
        each.event
        for each in (*pending, *(unit._all_reduce_state for unit in units))
        if each is not None
    ]
    events += [unit._post_reduce_event for unit in units]
    for result in (
        unit._all_gather_result for unit in units if unit._all_gather_result is not None
    ):
        events.append(result.all_gather_event)
        if result.all_gather_work is not None:
            result.all_gather_work.wait()
    for event in events:
        if event is not None:
            state._device_handle.current_stream().wait_event(event)
    several.clear()
    shared.all_gather_state = shared.reduce_scatter_state = None
    shared.post_forward_order.clear()
    for each in states:
        each._modules_to_run_forward.clear()
        each._training_state = type(each._training_state).IDLE
    for unit in units:
        unit._all_gather_result = unit._post_reduce_event = unit._all_reduce_state = None
        unit._reshard_after_forward_event = unit._partial_reduce_output = None
        unit._post_forward_indices.clear()
        unit._training_state = type(unit._training_state).IDLE
        unit._to_sharded()
    state._state_ctx.iter_forward_root = None
    state._state_ctx.post_backward_final_callback_queued = False


_Unit.reduce_scatter_unused_params = False
_Unit.post_backward = _filling(_Unit.post_backward)
_Module.set_reduce_scatter_unused_params = _set_reduce_scatter_unused_params
_Module.reset_iter_state = _reset_iter_state
