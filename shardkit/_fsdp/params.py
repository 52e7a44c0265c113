"""FSDP2's private state of parameters: their hooks, where they are registered, gradients that are not reduced yet.

Private names of torch 2.11 to 2.15, like the rest of ``_fsdp``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, TypeVar
from weakref import ref

import torch
from torch import Tensor, nn
from torch.distributed._composable_state import _module_state_mapping

from shardkit._fsdp import FSDPUnit, fsdp_states, states_of
from shardkit._torch import units_of

NO_TORCH_FUNCTION: Any = torch._C._disabled_torch_function_impl  # as torch's documentation of tensor subclasses has it
UnitsCallback = Callable[[list[FSDPUnit]], None]
T = TypeVar("T", bound=Tensor)


def tensor_hooks(tensor: Tensor) -> dict[int, Any]:
    """Return the hooks of ``register_hook``, which torch has no public way to list. Local, pure."""
    return tensor._backward_hooks or {}


def post_accumulate_hooks(tensor: Tensor) -> dict[int, Any] | None:
    """Return the hooks of ``register_post_accumulate_grad_hook``; None if there never was one. Local, pure."""
    return tensor._post_accumulate_grad_hooks


def set_post_accumulate_hooks(tensor: Tensor, hooks: dict[int, Any]) -> None:
    """Give a tensor the hooks of another one, in the same dict, so that their handles still remove them."""
    tensor._post_accumulate_grad_hooks = hooks


def forward_pre_hooks(module: nn.Module) -> list[Any]:
    """Return the hooks of ``register_forward_pre_hook``, in order. Local, pure."""
    return list(module._forward_pre_hooks.values())


def forward_hooks(module: nn.Module) -> list[Any]:
    """Return the hooks of ``register_forward_hook``, in order. Local, pure."""
    return list(module._forward_hooks.values())


def slot_of(fsdp_param: Any) -> tuple[int, str]:
    """Return where an ``FSDPParam`` is registered: the ``id`` of its module, and its name there. Local, pure."""
    return id(fsdp_param._module_info.module), fsdp_param._module_info.param_name


def own_slots(root: nn.Module) -> dict[nn.Module, list[Any]]:
    """Return the ``FSDPParam`` objects of the unit of ``root`` by the module below it that registers them. Local."""
    found: dict[nn.Module, list[Any]] = {}
    for unit in (unit for state in states_of([root]) for unit in units_of(state)):
        for fsdp_param in unit.fsdp_params:
            info = fsdp_param._module_info
            for module in (info.module, *info.shared_modules):
                if isinstance(module, nn.Module) and module is not root:
                    found.setdefault(module, []).append(fsdp_param)
    return found


def is_gathered(fsdp_param: Any) -> bool:
    """Return whether a module has something else than the shard in a parameter's place. Local, pure."""
    info = fsdp_param._module_info
    return getattr(info.module, info.param_name) is not fsdp_param.sharded_param


def follow(fsdp_param: Any, registered: Callable[[Tensor], None]) -> None:
    """Call ``registered`` with each tensor that FSDP2 puts into the parameter's place: sharded, gathered, resharded.

    FSDP2 also sets it on the modules that share the parameter, with ``setattr`` where a module overrides that.
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
    """Drop the state of ``fully_shard`` for a module, so that it can be sharded again. Local.

    torch refuses a module that is in this table: "Inserting ... more than once".
    """
    _module_state_mapping.pop(module, None)


# Attributes that FSDP1's methods read first: clip_grad_norm_, no_sync, apply; named_parameters; register_comm_hook.
FSDP1_READS = ("_is_root", "training_state", "check_is_root")
_FSDP1_ASKS = "torch.distributed.fsdp._common_utils"  # its function that looks a module up (torch 2.11 to 2.15)


def notify_fsdp1_lookups(module: nn.Module, asked: Callable[[], None]) -> None:
    """Call ``asked`` whenever one of FSDP1's functions looks up the state of a module. Local; in place.

    FSDP1 and FSDP2 share one table, and FSDP1's functions silently skip an entry of FSDP2.
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


# Gradients that are not reduced yet, and where a backward begins and ends.


def drop_unreduced_gradients(unit: FSDPUnit, params: Iterable[Any] | None = None) -> None:
    """Drop the gradients of a unit, or of some of its ``fsdp_params``, that backward kept to be reduced later.

    They are on the unsharded parameter, or in ``reduce_dtype`` beside it (before torch 2.15); on an HSDP mesh what was
    reduce-scattered for the whole unit before the all-reduce, with its layout (since 2.15).
    """
    for param in unit.fsdp_params if params is None else params:
        unit._partial_reduce_output = None  # type: ignore[attr-defined]
        getattr(unit, "_partial_reduce_output_layout", {}).clear()
        if "unsharded_accumulated_grad" in vars(param):
            param.unsharded_accumulated_grad = None
        if hasattr(param, "_unsharded_param"):
            param._unsharded_param.grad = None


def unreduced(unit: FSDPUnit) -> list[Any]:
    """Return those of a unit's ``fsdp_params`` whose gradient is not reduced, or not visible. Local, pure."""
    if is_reduce_scattered(unit):
        return [param for param in unit.fsdp_params if param.sharded_param.requires_grad]
    if not unit.is_sharded and unit.reduce_grads:  # gradients are sharded, while modules show unsharded parameters
        return [param for param in unit.fsdp_params if param.sharded_param.grad is not None]
    return [param for param in unit.fsdp_params if has_gradient(param)]


def unsharded_parameter(param: Any) -> nn.Parameter | None:
    """Return the parameter that FSDP2 gathers one of a unit's ``fsdp_params`` into, if it ever did. Local, pure."""
    return getattr(param, "_unsharded_param", None)


def gathered_parameters(units: Iterable[FSDPUnit]) -> dict[Tensor, nn.Parameter]:
    """Return the sharded parameter of each one that FSDP2 gathers into, registered now or not. Local, pure."""
    pairs = ((unsharded_parameter(param), param.sharded_param) for unit in units for param in unit.fsdp_params)
    return {unsharded: sharded for unsharded, sharded in pairs if unsharded is not None}


def is_reduce_scattered(unit: FSDPUnit) -> bool:
    """Return whether the gradients of a unit on an HSDP mesh wait for the all-reduce, as one tensor. Local, pure."""
    return unit._partial_reduce_output is not None  # type: ignore[attr-defined]


def without_memory(cls: type[T], like: Tensor, layout: torch.layout) -> T:
    """Return a tensor subclass of the shape and device of a parameter, and the dtype of its gradient. Local, pure."""
    dtype = getattr(like, "grad_dtype", None) or like.dtype  # FSDP2 sets it on what it gathers into (torch 2.15)
    options: Any = {"dtype": dtype, "device": like.device, "layout": layout, "storage_size": 0}
    return Tensor._make_wrapper_subclass(cls, like.shape, **options)


def around_backward(model: nn.Module, begin: UnitsCallback, end: UnitsCallback) -> None:
    """Call ``begin`` before, and ``end`` after each backward through the model, with all units of its root. Local.

    torch 2.11 to 2.15 queue the end of a backward in this method, which is replaced on the state objects only.
    """
    for state in fsdp_states(model):
        state._register_root_post_backward_final_callback = partial(_queue, state, begin, end)


def before_reductions(units: list[FSDPUnit], callback: UnitsCallback) -> None:
    """Call ``callback`` before each reduction of these units, also outside of any backward. Local.

    torch's pipeline stages reduce after the last micro-batch (``perform_reduce_grad``, torch 2.13).
    """
    for unit in units:
        unit.post_backward = partial(_reduce, unit, callback, unit.post_backward)


def _reduce(unit: FSDPUnit, callback: UnitsCallback, original: Callable[[], None], *_: object) -> None:
    if unit.reduce_grads:
        callback([unit])
    original()


def _queue(state: Any, begin: UnitsCallback, end: UnitsCallback) -> None:
    if not state._state_ctx.post_backward_final_callback_queued:
        # Each once: before torch 2.13 the state of fully_shard([a, b]) is listed once for each module.
        units = list(dict.fromkeys(unit for each in state._state_ctx.all_states for unit in units_of(each)))
        begin(units)
        type(state)._register_root_post_backward_final_callback(state)
        torch.autograd.Variable._execution_engine.queue_callback(partial(end, units))


def has_gradient(param: Any) -> bool:
    """Return whether one of a unit's ``fsdp_params`` has a gradient that is not reduced. Local, pure."""
    if not hasattr(param, "_unsharded_param"):
        return False
    return param.unsharded_accumulated_grad is not None or param._unsharded_param.grad is not None
