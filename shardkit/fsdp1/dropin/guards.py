"""What the drop-in replaces in torch from its first model on, for its own models only; ``uninstall`` restores torch's.

Static methods such as ``torch.distributed.fsdp.FullyShardedDataParallel.state_dict_type(model)`` look for modules of
torch's class. In a model of ours they find none and do nothing: ``state_dict()`` then gives DTensors where the program
saves full tensors. Libraries import torch's class, whatever the program imports. Some of torch's private functions
return nothing in the same way.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from contextlib import ExitStack
from types import FrameType
from typing import Any

from torch import nn
from torch.distributed.checkpoint import state_dict as checkpoint
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP

from shardkit.fsdp1.dropin.record import Unavailable, is_wrapper, wrappers_of

_STATICS = [name for name, value in vars(TorchFSDP).items() if isinstance(value, staticmethod) and name[0] != "_"]
GUARDED = (*_STATICS, "clip_grad_norm_", "no_sync")
PRIVATE = {  # functions that programs call on a model, by the module of torch.distributed.fsdp
    "_traversal_utils": ("_get_fsdp_states", "_get_fsdp_handles"),
    "_runtime_utils": ("_get_fsdp_root_states", "_lazy_init", "_reshard", "_unshard"),
}
_MODEL = ("module", "model", "self", "root_module")  # what the model is called in their signatures

_undo = ExitStack()
_installed = False


def install(ours: type[nn.Module]) -> None:
    """Replace the functions ``GUARDED`` of torch's class, and the others that this module names. Idempotent.

    The replacements have torch's signatures and docstrings. For a model that contains a module of ``ours``, the
    drop-in's class, they call the function of the same name of ``ours``, or raise where it is private; for others, and
    for callers inside torch, which know both kinds of models, they call torch's.
    """
    global _installed
    if _installed:
        return
    _installed = True
    for name in GUARDED:
        guard = _guard(getattr(TorchFSDP, name), getattr(ours, name))
        _replace(TorchFSDP, name, staticmethod(guard) if name in _STATICS else guard)
    state_of = checkpoint._get_module_fsdp_state_if_fully_sharded_module
    _replace(checkpoint, state_of.__name__, lambda module: is_wrapper(module) or state_of(module))
    for where, names in PRIVATE.items():
        module = importlib.import_module(f"torch.distributed.fsdp.{where}")
        for name in names:
            _replace(module, name, _guard(getattr(module, name), functools.partial(_refuse, name)))


def uninstall() -> None:
    """Restore torch's functions, until the next model is wrapped."""
    global _installed
    _undo.close()
    _installed = False


def _replace(owner: Any, name: str, value: Any) -> None:
    _undo.callback(setattr, owner, name, inspect.getattr_static(owner, name))
    setattr(owner, name, value)


def _guard(original: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        model = _model_of(signature, args, kwargs)
        if model is None or _is_torchs(inspect.currentframe()) or not wrappers_of(model):
            return original(*args, **kwargs)
        return ours(*args, **kwargs)

    return guarded


def _refuse(name: str, *args: Any, **kwargs: Any) -> None:
    raise Unavailable(
        f"{name} is a private function of torch's FSDP1, for flat parameters and their handles, which "
        "FSDP2 does not have. Use model.parameters(), or reshard() and unshard() of model.module."
    )


def _model_of(signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> nn.Module | None:
    """Return the model among the arguments; None where they do not match the signature, which torch will report."""
    try:
        given = signature.bind(*args, **kwargs).arguments
    except TypeError:
        return None
    found = [given[name] for name in (*_MODEL, "state") if isinstance(given.get(name), nn.Module)]
    return found[0] if found else None


def _is_torchs(callee: FrameType | None) -> bool:
    """Return whether the frame was called from inside torch, but for ``torch.distributed.checkpoint``.

    That one treats models with FSDP1's modules by FSDP1's functions, which are ours for ours.
    """
    caller = callee.f_back if callee else None
    name = str(caller.f_globals.get("__name__")) if caller is not None else ""
    return name.partition(".")[0] == "torch" and not name.startswith("torch.distributed.checkpoint.")
