"""Methods of the wrapped model other than forward, called through the wrapper."""

from __future__ import annotations

import functools
import inspect
from typing import Any

from torch import nn

from shardkit.errors import ShardkitError, TranslationError, message
from shardkit.fsdp1.dropin.tensors import MIXED, Mixed


class NotGathered(TranslationError, RuntimeError):
    """A RuntimeError too, as torch's."""


def guarded(name: str, found: Any) -> Any:
    """``found``, the attribute of that name; a method of the user's model answers for parameters that are sharded.

    Where they compute with shards, what to do is said.
    """
    if not inspect.ismethod(found) or hasattr(nn.Module, name):
        return found

    @functools.wraps(found)
    def method(*args: Any, **kwargs: Any) -> Any:
        try:
            return found(*args, **kwargs)
        except RuntimeError as error:
            is_torchs = MIXED in str(error) and not isinstance(error, ShardkitError)
            if is_torchs or isinstance(error, (NotGathered, Mixed)):
                raise not_gathered(name, is_method=True) from error
            raise

    return method


def not_gathered(name: str, is_method: bool = False) -> NotGathered:
    """Return the error for a module, by FQN, or a method that is called on its own and meets this rank's shards."""
    rule = "Parameters are gathered for the wrapped module's forward, and anything besides it sees this rank's shards"
    before = f'call register_fsdp_forward_method(model.module, "{name}") after wrapping, on all ranks'
    fix = f"Call it in FSDP.summon_full_params(model), or {before if is_method else 'wrap it by FSDP(...) too'}"
    return NotGathered(message(name, "uses parameters that are sharded", rule, fix))
