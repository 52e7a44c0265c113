"""FSDP2's private state of parameters: their hooks, and where they are registered.

Private names of torch 2.13 to 2.15, like the rest of ``_fsdp``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor


def tensor_hooks(tensor: Tensor) -> dict[int, Any]:
    """Return the hooks of ``register_hook``, which torch has no public way to list. Local, pure."""
    return tensor._backward_hooks or {}


def post_accumulate_hooks(tensor: Tensor) -> dict[int, Any] | None:
    """Return the hooks of ``register_post_accumulate_grad_hook``; None if there never was one. Local, pure."""
    return tensor._post_accumulate_grad_hooks


def set_post_accumulate_hooks(tensor: Tensor, hooks: dict[int, Any]) -> None:
    """Give a tensor the hooks of another one, in the same dict, so that their handles still remove them."""
    tensor._post_accumulate_grad_hooks = hooks


def slot_of(fsdp_param: Any) -> tuple[int, str]:
    """Return where an ``FSDPParam`` is registered: the ``id`` of its module, and its name there. Local, pure."""
    return id(fsdp_param._module_info.module), fsdp_param._module_info.param_name


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
