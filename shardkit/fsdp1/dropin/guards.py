"""What the drop-in replaces in torch from its first model on, for its own models only.

Static methods such as ``torch.distributed.fsdp.FullyShardedDataParallel.state_dict_type(model)``
look
for modules of torch's class. In a model of ours they find none and do nothing: ``state_dict()`` is
then of another type than the program asked for. Libraries import torch's class, whatever the
program imports, and ``torch.distributed.checkpoint`` does. Some private functions return nothing in
this way.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint import state_dict as checkpoint
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shardkit._fsdp.fsdp1 import STATE_OF
from shardkit._fsdp.plain import waiting_gradients
from shardkit.errors import ShardkitError, listing
from shardkit.fsdp1.dropin.record import (
    Unavailable,
    is_wrapper,
    without_wrappers,
    wrappers_of,
)

STATICS = []
for _name, _value in vars(TorchFSDP).items():
    if isinstance(_value, staticmethod) and not _name.startswith("_"):
        STATICS.append(_name)
METHODS = ("clip_grad_norm_", "no_sync")
PRIVATE = {  # functions that programs call on a model, by the module of torch.distributed.fsdp
    "_traversal_utils": ("_get_fsdp_states", "_get_fsdp_handles"),
    "_runtime_utils": ("_get_fsdp_root_states", "_lazy_init", "_reshard", "_unshard"),
}

_undo = ExitStack()
_installed = False


def install(ours: type[nn.Module]) -> None:
    """Replace the functions that this module names. Idempotent.

    For a model that contains a module of ``ours``, the drop-in's class, the replacements call the
    function of the same name of ``ours``, or raise where it is private; for others they call
    torch's.
    """
    global _installed
    if _installed:
        return
    _installed = True
    for name in STATICS:
        _replace(
            TorchFSDP, name, staticmethod(_guard(getattr(TorchFSDP, name), getattr(ours, name)))
        )
    for name in METHODS:
        _replace(TorchFSDP, name, _guard(getattr(TorchFSDP, name), getattr(ours, name)))
    for where, names in PRIVATE.items():
        module = importlib.import_module(f"torch.distributed.fsdp.{where}")
        for name in names:
            refuse = functools.partial(_refuse, name)
            _replace(module, name, _guard(getattr(module, name), refuse))
    # torch.distributed.checkpoint asks for the state of each of FSDP.fsdp_modules(model).
    state_of = getattr(checkpoint, STATE_OF)
    _replace(checkpoint, STATE_OF, lambda module: is_wrapper(module) or state_of(module))
    _undo.callback(register_optimizer_step_pre_hook(_before_step).remove)


def uninstall() -> None:
    """Restore torch's functions, until the next model is wrapped."""
    global _installed
    _undo.close()
    _installed = False


def _replace(owner: Any, name: str, value: Any) -> None:
    _undo.callback(setattr, owner, name, inspect.getattr_static(owner, name))
    setattr(owner, name, value)


def _guard(original: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        # Where torch itself is the caller, as FSDP2 is of some, it gets its own function, except in
        # torch.distributed.checkpoint, which calls these for FSDP1's models, and so for ours.
        frame: Any = inspect.currentframe()
        caller = frame.f_back.f_globals.get("__name__", "")
        if not caller.startswith("torch.") or caller == checkpoint.__name__:
            for value in (*args, *kwargs.values()):
                if isinstance(value, nn.Module) and wrappers_of(value):
                    return ours(*args, **kwargs)
        return original(*args, **kwargs)

    return guarded


def _refuse(name: str, *args: Any, **kwargs: Any) -> None:
    raise Unavailable(
        f"{name} is a private function of torch's FSDP1, for flat parameters and handles, which "
        "FSDP2 does not have. Use model.parameters(), model.clip_grad_norm_(), or reshard() and "
        "unshard() of model.module."
    )


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if torch.compiler.is_compiling() or not waiting_gradients:
        return
    names = []
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param.grad is not None and param.grad in waiting_gradients:
                names.append(without_wrappers(waiting_gradients[param.grad]))
    if names:
        raise ShardkitError(
            f"{type(optimizer).__name__}.step() was called while gradients of {listing(names, 6)} "
            "wait to be reduced: after a backward under no_sync() p.grad is zeros. Run the last "
            "backward outside of no_sync(), or drop them by optimizer.zero_grad()."
        )
