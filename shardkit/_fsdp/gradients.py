"""What torch's FSDP2 keeps to itself of gradients: those that wait to be reduced, and where a backward begins and ends.

Beside ``_torch`` and ``_fsdp`` the only place of private torch names.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from shardkit._fsdp import FSDPUnit, fsdp_states
from shardkit._torch import units_of


def drop_unreduced_gradients(unit: FSDPUnit) -> None:
    """Forget the gradients of a unit that backward left aside to be reduced later."""
    for param in unit.fsdp_params:
        drop_unreduced_gradient(unit, param)


def drop_unreduced_gradient(unit: FSDPUnit, param: Any) -> None:
    """The same for one of a unit's ``fsdp_params``; of an HSDP mesh for all that was reduce-scattered with it.

    It is the unsharded parameter's, or in ``reduce_dtype`` beside it (before torch 2.15); on an HSDP mesh what was
    reduce-scattered and waits for the all-reduce, with its layout (since 2.15).
    """
    unit._partial_reduce_output = None  # type: ignore[attr-defined]
    getattr(unit, "_partial_reduce_output_layout", {}).clear()
    if "unsharded_accumulated_grad" in vars(param):
        param.unsharded_accumulated_grad = None
    if hasattr(param, "_unsharded_param"):
        param._unsharded_param.grad = None


def unreduced(unit: FSDPUnit) -> list[Any]:
    """Those of a unit's ``fsdp_params`` whose gradient waits: to be reduced, or to be seen again. Local, pure."""
    if is_reduce_scattered(unit):
        return [param for param in unit.fsdp_params if param.sharded_param.requires_grad]
    if not unit.is_sharded and unit.reduce_grads:  # gradients are sharded, while modules show whole parameters
        return [param for param in unit.fsdp_params if param.sharded_param.grad is not None]
    return [param for param in unit.fsdp_params if _has_gradient(param)]


def stand_in(param: Any) -> nn.Parameter | None:
    """The whole parameter that FSDP2 gathers into, of one of a unit's ``fsdp_params``, if it ever did. Local, pure."""
    return getattr(param, "_unsharded_param", None)


def is_reduce_scattered(unit: FSDPUnit) -> bool:
    """Whether the gradients of a unit on an HSDP mesh wait for the all-reduce, as one tensor. Local, pure."""
    return unit._partial_reduce_output is not None  # type: ignore[attr-defined]


def without_memory(cls: type[T], like: Tensor, layout: torch.layout) -> T:
    """A tensor subclass of the shape and device of a parameter, and the dtype of its gradient. Local, pure."""
    dtype = getattr(like, "grad_dtype", None) or like.dtype  # FSDP2 sets it on what it gathers into (torch 2.15)
    options: Any = {"dtype": dtype, "device": like.device, "layout": layout, "storage_size": 0}
    return Tensor._make_wrapper_subclass(cls, like.shape, **options)


NO_TORCH_FUNCTION: Any = torch._C._disabled_torch_function_impl  # as torch's documentation of tensor subclasses has it
Told = Callable[[list[FSDPUnit]], None]
T = TypeVar("T", bound=Tensor)


def around_backward(model: nn.Module, begin: Told, end: Told) -> None:
    """Call ``begin`` before, and ``end`` after each backward through the model, with all units of its root. Local.

    torch 2.11 to 2.15 queue what ends a backward by this method, which is set on the states alone.
    """
    for state in fsdp_states(model):
        state._register_root_post_backward_final_callback = partial(_queue, state, begin, end)


def before_reductions(units: list[FSDPUnit], tell: Told) -> None:
    """Call ``tell`` before each reduction of these units, also outside of any backward. Local.

    torch's pipeline stages reduce after the last micro-batch (``perform_reduce_grad``, torch 2.13).
    """
    for unit in units:
        unit.post_backward = partial(_reduce, unit, tell, unit.post_backward)


def _reduce(unit: FSDPUnit, tell: Told, original: Callable[[], None], *_: object) -> None:
    if unit.reduce_grads:
        tell([unit])
    original()


def _queue(state: Any, begin: Told, end: Told) -> None:
    if not state._state_ctx.post_backward_final_callback_queued:
        units = [unit for each in state._state_ctx.all_states for unit in units_of(each)]
        begin(units)
        type(state)._register_root_post_backward_final_callback(state)
        torch.autograd.Variable._execution_engine.queue_callback(partial(end, units))


def _has_gradient(param: Any) -> bool:
    if not hasattr(param, "_unsharded_param"):
        return False
    return param.unsharded_accumulated_grad is not None or param._unsharded_param.grad is not None
