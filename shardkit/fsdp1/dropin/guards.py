"""What the drop-in replaces in the process, from its first model on: for its own models alone, and it can be undone.

``torch.distributed.fsdp.FullyShardedDataParallel.state_dict_type(model)`` and its like look for modules of torch's
class. In a model of ours they find none and do nothing: ``state_dict()`` then gives DTensors where the program saves
full tensors. Libraries import torch's class, whatever the program does. ``torch.nn.utils.clip_grad_norm_`` would clip
by the norm of this rank's shards, ``param.data = other`` do nothing, and ``Optimizer.step`` has its say in
``optimizers``.
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

from shardkit._fsdp import TOTAL_NORM
from shardkit.fsdp1.dropin import optimizers, tensors

_STATICS = [name for name, value in vars(TorchFSDP).items() if isinstance(value, staticmethod) and name[0] != "_"]
GUARDED = (*_STATICS, "clip_grad_norm_", "no_sync")
_MODEL = ("module", "model", "self")  # what the model is called in their signatures

_undo = ExitStack()
_installed = False


def install(ours: type[nn.Module]) -> None:
    """Replaces the functions ``GUARDED`` of torch's class, and what the module names besides. Idempotent.

    Every caller in the process gets the new ones, with torch's signatures and docstrings, but for callers inside of
    torch, which know both kinds of models. A model that contains a module of ``ours``, the drop-in's class, goes to the
    function of the same name of ``ours``, any other to torch's.
    """
    global _installed
    if _installed:
        return
    _installed = True
    for name in GUARDED:
        is_static = isinstance(inspect.getattr_static(TorchFSDP, name), staticmethod)
        guard = _guard(name, getattr(TorchFSDP, name), ours)
        _replace(TorchFSDP, name, staticmethod(guard) if is_static else guard)
    norm = tensors.whole_norms(nn.utils.get_total_norm)
    _replace(nn.utils.clip_grad, TOTAL_NORM, norm)
    _replace(nn.utils, "get_total_norm", norm)
    _replace(DTensor, "data", tensors.DATA)
    _undo.callback(optimizers.attend().close)


def uninstall() -> None:
    """Takes all of it back, until the next model is wrapped; ``param.data = other`` then is as for any DTensor."""
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
    """Return the model among the arguments; None where they do not fit, for torch to say so."""
    try:
        given = signature.bind(*args, **kwargs).arguments
    except TypeError:
        return None
    found = [given[name] for name in _MODEL if isinstance(given.get(name), nn.Module)]
    return found[0] if found else None


def _is_torchs(callee: FrameType | None) -> bool:
    """Return whether the frame was called from inside of torch."""
    caller = callee.f_back if callee else None
    return caller is not None and str(caller.f_globals.get("__name__")).partition(".")[0] == "torch"
