"""What a wrapper answers to names that it does not define: FSDP1's own, internal or not, and those of the model."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.distributed.fsdp import CPUOffload, MixedPrecision

from shardkit.errors import message
from shardkit.fsdp1.dropin.errors import Unavailable, UnavailableAttribute
from shardkit.fsdp1.dropin.record import Record, in_full_precision, record_of
from shardkit.replacements import ATTRIBUTES
from shardkit.shards import device_of

_MIXED = "got mixed torch.Tensor and DTensor"  # torch's error where a sharded parameter meets a plain tensor

# FSDP1's settings, which are never None.
_OF_RECORD: dict[str, Callable[[Record], Any]] = {
    "process_group": lambda record: record.process_group,
    "rank": lambda record: record.process_group.rank(),
    "world_size": lambda record: record.process_group.size(),
    "sharding_strategy": lambda record: record.strategy,
    "cpu_offload": lambda record: record.given.cpu_offload or CPUOffload(),
    "backward_prefetch": lambda record: record.given.backward_prefetch,
    "forward_prefetch": lambda record: bool(record.given.forward_prefetch),
    "limit_all_gathers": lambda record: bool(record.given.limit_all_gathers),
    "compute_device": lambda record: device_of(record.mesh),
    "_use_orig_params": lambda record: bool(record.given.use_orig_params),
}


def attribute(wrapper: nn.Module, module: object, name: str) -> Any:
    """Return FSDP1's attribute of that name, or the wrapped module's.

    Raises:
        AttributeError: there is none; also a TranslationError where FSDP1's wrapper had one.
    """
    record = record_of(wrapper)
    if name in _OF_RECORD:
        return _OF_RECORD[name](record)
    if name == "mixed_precision":
        return MixedPrecision() if in_full_precision(wrapper) else record.mixed_precision
    try:
        found = getattr(module, name)
    except AttributeError:
        if name not in ATTRIBUTES:
            raise
        rule = "FSDP2 has no flat parameters and no handles: each parameter is a DTensor of its own"
        text = message(name, "is an internal of FSDP1", rule, ATTRIBUTES[name].fix())
        raise UnavailableAttribute(text) from None
    return _method(name, found) if inspect.ismethod(found) and not hasattr(nn.Module, name) else found


def _method(name: str, found: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method of the user's model that says what to do where it computes with sharded parameters."""

    @functools.wraps(found)
    def method(*args: Any, **kwargs: Any) -> Any:
        try:
            return found(*args, **kwargs)
        except RuntimeError as error:
            if _MIXED not in str(error) or isinstance(error, Unavailable):
                raise
            rule = "Parameters are gathered for the wrapped module's forward; other code sees this rank's shards"
            fix = "Call it in FSDP.summon_full_params(model), or call "
            fix += f'register_fsdp_forward_method(model.module, "{name}") after wrapping, on all ranks'
            raise Unavailable(message(name, "uses parameters that are sharded", rule, fix)) from error

    return method
