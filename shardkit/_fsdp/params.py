"""What torch keeps to itself of parameters: their hooks, and where FSDP2 registers which form of them.

Beside ``_torch`` and ``_fsdp`` a place of private torch names, each as of torch 2.11 to 2.13.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any
from weakref import ref

from torch import Tensor, nn
from torch.distributed._composable_state import _module_state_mapping

from shardkit._fsdp import states_of
from shardkit._torch import units_of


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
