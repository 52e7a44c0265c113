"""What the drop-in replaces in torch from its first model on, for its own models only; ``uninstall`` restores torch's.

Static methods such as ``torch.distributed.fsdp.FullyShardedDataParallel.state_dict_type(model)`` look for modules of
torch's class. In a model of ours they find none and do nothing: ``state_dict()`` then gives DTensors where the program
saves full tensors. Libraries import torch's class, whatever the program imports. ``torch.nn.utils.clip_grad_norm_``
would clip by the norm of this rank's shards, and ``param.data = other`` would do nothing.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextlib import ExitStack
from types import FrameType
from typing import Any

from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
from torch.distributed.tensor import DTensor

from shardkit._fsdp.fsdp1 import TOTAL_NORM
from shardkit.fsdp1.dropin import optimizers, tensors

_STATICS = [name for name, value in vars(TorchFSDP).items() if isinstance(value, staticmethod) and name[0] != "_"]
GUARDED = (*_STATICS, "clip_grad_norm_", "no_sync")
_MODEL = ("module", "model", "self")  # what the model is called in their signatures

_undo = ExitStack()
_installed = False


def install(ours: type[nn.Module]) -> None:
    """Replace the functions ``GUARDED`` of torch's class, and the others that this module names. Idempotent.

    The replacements have torch's signatures and docstrings. For a model that contains a module of ``ours``, the
    drop-in's class, they call the function of the same name of ``ours``; for others, and for callers inside torch,
    which know both kinds of models, they call torch's.
    """
    global _installed
    if _installed:
        return
    _installed = True
    for name in GUARDED:
        guard = _guard(name, getattr(TorchFSDP, name), ours)
        _replace(TorchFSDP, name, staticmethod(guard) if name in _STATICS else guard)
    norm = tensors.whole_norms(nn.utils.get_total_norm)
    _replace(nn.utils.clip_grad, TOTAL_NORM, norm)
    _replace(nn.utils, "get_total_norm", norm)
    _replace(DTensor, "data", tensors.DATA)
    _undo.callback(optimizers.attend().close)


def uninstall() -> None:
    """Restore torch's functions, until the next model is wrapped."""
    global _installed
    _undo.close()
    _installed = False


def _replace(owner: Any, name: str, value: Any) -> None:
    if name in vars(owner):
        _undo.callback(setattr, owner, name, inspect.getattr_static(owner, name))
    else:
        _undo.callback(delattr, owner, name)
    setattr(owner, name, value)


def _guard(name: str, original: Callable[..., Any], ours: type[nn.Module]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        model = _model_of(signature, args, kwargs)
        if model is None or _is_torchs(inspect.currentframe()):
            return original(*args, **kwargs)
        is_ours = any(isinstance(module, ours) for module in model.modules())
        return (getattr(ours, name) if is_ours else original)(*args, **kwargs)

    return guarded


def _model_of(signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> nn.Module | None:
    """Return the model among the arguments; None where they do not match the signature, which torch will report."""
    try:
        given = signature.bind(*args, **kwargs).arguments
    except TypeError:
        return None
    found = [given[name] for name in _MODEL if isinstance(given.get(name), nn.Module)]
    return found[0] if found else None


def _is_torchs(callee: FrameType | None) -> bool:
    """Return whether the frame was called from inside torch."""
    caller = callee.f_back if callee else None
    return caller is not None and str(caller.f_globals.get("__name__")).partition(".")[0] == "torch"
