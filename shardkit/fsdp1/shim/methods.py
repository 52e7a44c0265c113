"""Methods of the wrapped model other than forward, called through the wrapper."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.distributed.fsdp import ShardingStrategy, register_fsdp_forward_method

from shardkit.errors import ShardkitError, TranslationError, message
from shardkit.fsdp1.shim.record import record_of, sharded_of

_MIXED = "got mixed torch.Tensor and DTensor"  # torch's error where a sharded parameter is used as it is


class NotGathered(TranslationError, RuntimeError):
    """A RuntimeError too, as torch's."""


def guarded(wrapper: nn.Module, name: str, found: Any) -> Any:
    """``found``, the attribute of that name; a method of the user's model answers for parameters that are sharded.

    Under NO_SHARD FSDP1 kept parameters whole, so that methods ran: there it is called again as a forward method,
    which needs no collective. Elsewhere what to do is said.
    """
    if not inspect.ismethod(found) or hasattr(nn.Module, name):
        return found

    @functools.wraps(found)
    def method(*args: Any, **kwargs: Any) -> Any:
        try:
            return found(*args, **kwargs)
        except RuntimeError as error:
            if _MIXED not in str(error) or isinstance(error, ShardkitError):
                raise
            return _gathered(wrapper, name, error)(*args, **kwargs)

    return method


def _gathered(wrapper: nn.Module, name: str, error: RuntimeError) -> Callable[..., Any]:
    sharded = sharded_of(wrapper)
    if record_of(wrapper).strategy is not ShardingStrategy.NO_SHARD or not isinstance(sharded, nn.Module):
        rule = "Parameters are gathered for forward, and a method besides it sees this rank's shards"
        fix = (
            f'Call register_fsdp_forward_method(model.module, "{name}") after wrapping, on all ranks, or call it in '
            "FSDP.summon_full_params(model)"
        )
        raise NotGathered(message(name, "uses parameters that are sharded", rule, fix)) from error
    register_fsdp_forward_method(sharded, name)
    registered: Callable[..., Any] = getattr(sharded, name)
    return registered
