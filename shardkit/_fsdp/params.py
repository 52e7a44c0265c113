"""What torch keeps to itself of parameters: their hooks, where FSDP2 registers which form of them, gradients that wait.

Beside ``_torch`` and ``_fsdp`` a place of private torch names, each as of torch 2.11 to 2.15.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar
from weakref import ref

import torch
from torch import Tensor, nn
from torch.distributed._composable_state import _module_state_mapping

from shardkit._fsdp import FSDPUnit, fsdp_states, states_of
from shardkit._torch import units_of

NO_TORCH_FUNCTION: Any = torch._C._disabled_torch_function_impl  # as torch's documentation of tensor subclasses has it
Told = Callable[[list[FSDPUnit]], None]
T = TypeVar("T", bound=Tensor)


def tensor_hooks(tensor: Tensor) -> dict[int, Any]:
    """The hooks of ``register_hook``, which torch only adds and removes in public. Local, pure."""
    return tensor._backward_hooks or {}


def post_accumulate_hooks(tensor: Tensor) -> dict[int, Any] | None:
    """The hooks of ``register_post_accumulate_grad_hook``; None where there never was one. Likewise."""
    return tensor._post_accumulate_grad_hooks


def set_post_accumulate_hooks(tensor: Tensor, hooks: dict[int, Any]) -> None:
    """Give a tensor the hooks of another one; the same dict, so that handles still remove them."""
    tensor._post_accumulate_grad_hooks = hooks


def forward_pre_hooks(module: nn.Module) -> list[Any]:
    """The hooks of ``register_forward_pre_hook``, in order; torch has no public way to list them."""
    return list(module._forward_pre_hooks.values())


def slot_of(fsdp_param: Any) -> tuple[int, str]:
    """Where an ``FSDPParam`` is registered: the ``id`` of its module, and its name there. Local, pure."""
    return id(fsdp_param._module_info.module), fsdp_param._module_info.param_name


def own_slots(root: nn.Module) -> dict[nn.Module, list[Any]]:
    """The ``FSDPParam`` of each parameter of the unit of ``root``, by the module below it that registers it. Local."""
    found: dict[nn.Module, list[Any]] = {}
    for unit in (unit for state in states_of([root]) for unit in units_of(state)):
        for fsdp_param in unit.fsdp_params:
            info = fsdp_param._module_info
            for module in (info.module, *info.shared_modules):
                if isinstance(module, nn.Module) and module is not root:
                    found.setdefault(module, []).append(fsdp_param)
    return found


def is_gathered(fsdp_param: Any) -> bool:
    """Whether something else than its shard is registered in a parameter's place. Local, pure."""
    info = fsdp_param._module_info
    return getattr(info.module, info.param_name) is not fsdp_param.sharded_param


def follow(fsdp_param: Any, registered: Callable[[Tensor], None]) -> None:
    """Call ``registered`` with each tensor that FSDP2 puts into the parameter's place: sharded, gathered, resharded.

    It sets it on the modules that share the parameter too, and by ``setattr`` on those that define their own.
    """
    fsdp_param._module_info.shared_modules.append(_Follower(registered))
    fsdp_param._module_info.shared_param_names.append("param")


class _Follower:
    _registered: Callable[[Tensor], None]

    def __init__(self, registered: Callable[[Tensor], None]) -> None:
        vars(self)["_registered"] = registered

    def __setattr__(self, name: str, value: Tensor) -> None:
        self._registered(value)


def forget(module: nn.Module) -> None:
    """Drop what ``fully_shard`` keeps of a module outside of it, so that it can be sharded again. Local.

    torch refuses a module that is in this table: "Inserting ... more than once".
    """
    _module_state_mapping.pop(module, None)


# What FSDP1's methods read of ``self`` first: clip_grad_norm_, no_sync, apply; named_parameters; register_comm_hook.
FSDP1_READS = ("_is_root", "training_state", "check_is_root")
_FSDP1_ASKS = "torch.distributed.fsdp._common_utils"  # its function that looks a module up (torch 2.11 to 2.15)


def notify_fsdp1_lookups(module: nn.Module, asked: Callable[[], None]) -> None:
    """Call ``asked`` whenever one of FSDP1's functions looks up what FSDP1 knows of a module. Local; in place.

    They share FSDP2's table, and what they find there is not theirs: they go on without a word.
    """
    entry = _Entry(_module_state_mapping[module]())
    entry.asked = asked
    _module_state_mapping[module] = entry


class _Entry(ref[Any]):
    """An entry of that table, called by torch's ``_get_module_state``, which both FSDP1 and FSDP2 call."""

    __slots__ = ("asked",)
    asked: Callable[[], None]

    def __call__(self) -> Any:
        if sys._getframe(2).f_globals.get("__name__") == _FSDP1_ASKS:
            self.asked()
        return super().__call__()


# Gradients that wait to be reduced, and where a backward begins and ends.


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
    return [param for param in unit.fsdp_params if has_gradient(param)]


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
        # Once each: before torch 2.13 the modules of one call, fully_shard([a, b]), list their state once for each.
        units = list(dict.fromkeys(unit for each in state._state_ctx.all_states for unit in units_of(each)))
        begin(units)
        type(state)._register_root_post_backward_final_callback(state)
        torch.autograd.Variable._execution_engine.queue_callback(partial(end, units))


def has_gradient(param: Any) -> bool:
    """Whether one of a unit's ``fsdp_params`` has a gradient that is not reduced. Local, pure."""
    if not hasattr(param, "_unsharded_param"):
        return False
    return param.unsharded_accumulated_grad is not None or param._unsharded_param.grad is not None
