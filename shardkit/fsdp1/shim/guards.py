"""torch's own FSDP1 functions, made to act on models that they would otherwise pass over without a word.

``torch.distributed.fsdp.FullyShardedDataParallel.state_dict_type(model)`` and its like look for modules of torch's
class. In a model of ours, or one of plain ``fully_shard``, they find none and do nothing: ``state_dict()`` then gives
DTensors where the program saves full tensors. Libraries import torch's class, whatever the program does.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import FrameType
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP

from shardkit.errors import ShardkitError, message

_STATE = "Use shardkit.full_state_dict(model), or shardkit.sharded_state_dict(model)"
_PARAMS = "Use shardkit.full_params(model), or param.full_tensor() for one parameter"
_OPTIM = "Use shardkit.full_optimizer_state_dict(model, optimizer), or sharded_optimizer_state_dict"
_LOAD = "Use shardkit.load_full_optimizer_state_dict(model, optimizer, state), or load_sharded_optimizer_state_dict"

# What to do for a model of plain fully_shard, by name. fsdp_modules answers truly that there are none, and
# rekey_optim_state_dict needs no FSDP module.
_INSTEAD = {
    "state_dict_type": _STATE,
    "set_state_dict_type": _STATE,
    "get_state_dict_type": _STATE,
    "summon_full_params": _PARAMS,
    "optim_state_dict": _OPTIM,
    "full_optim_state_dict": _OPTIM,
    "sharded_optim_state_dict": _OPTIM,
    "optim_state_dict_to_load": _LOAD,
    "shard_full_optim_state_dict": _LOAD,
    "scatter_full_optim_state_dict": _LOAD,
    "flatten_sharded_optim_state_dict": _LOAD,
    "clip_grad_norm_": "Use shardkit.clip_grad_norm_(model, max_norm)",
    "no_sync": "Use shardkit.no_sync(model), or shardkit.accumulate",
}
GUARDED = (*_INSTEAD, "fsdp_modules", "rekey_optim_state_dict")
_MODEL = ("module", "model", "self")  # what the model is called in their signatures

_originals: dict[str, Any] = {}


def install(ours: type[nn.Module]) -> None:
    """Replaces the functions ``GUARDED`` of torch's class by ones that look at the model first. Idempotent.

    They are public attributes of ``torch.distributed.fsdp.FullyShardedDataParallel``, so every caller in the process
    gets the new ones, with the signatures and docstrings of the old, but for callers inside of torch, which know both
    kinds of models. A model that contains a module of ``ours`` goes to the function of the same name of ``ours``; one
    of plain ``fully_shard`` to a ShardkitError that names shardkit's function; any other to torch's.

    Args:
        ours: the drop-in's class.
    """
    for name in GUARDED if not _originals else ():
        _originals[name] = original = inspect.getattr_static(TorchFSDP, name)
        is_static = isinstance(original, staticmethod)
        guard = _guard(name, getattr(TorchFSDP, name), ours)
        setattr(TorchFSDP, name, staticmethod(guard) if is_static else guard)


def uninstall() -> None:
    """Gives torch's class its own functions back."""
    while _originals:
        setattr(TorchFSDP, *_originals.popitem())


def _guard(name: str, original: Callable[..., Any], ours: type[nn.Module]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        model = _model_of(signature, args, kwargs)
        if model is None or _is_torchs(inspect.currentframe()):
            return original(*args, **kwargs)
        if _contains(model, ours):
            return getattr(ours, name)(*args, **kwargs)
        if name in _INSTEAD and _contains(model, FSDPModule) and not _contains(model, TorchFSDP):
            raise _acts_on_nothing(name)
        return original(*args, **kwargs)

    return guarded


def _model_of(signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> nn.Module | None:
    """The model among the arguments; None where they do not fit, for torch to say so."""
    try:
        given = signature.bind(*args, **kwargs).arguments
    except TypeError:
        return None
    found = [given[name] for name in _MODEL if isinstance(given.get(name), nn.Module)]
    return found[0] if found else None


def _contains(model: nn.Module, kind: type) -> bool:
    return any(isinstance(module, kind) for module in model.modules())


def _is_torchs(callee: FrameType | None) -> bool:
    """Whether the frame was called from inside of torch."""
    caller = callee.f_back if callee else None
    return caller is not None and str(caller.f_globals.get("__name__")).partition(".")[0] == "torch"


def _acts_on_nothing(name: str) -> ShardkitError:
    problem = "the model is sharded by fully_shard, and no part of it by FullyShardedDataParallel"
    rule = "torch's function would find nothing to act on, and say nothing"
    return ShardkitError(message(f"FullyShardedDataParallel.{name}", problem, rule, _INSTEAD[name]))
