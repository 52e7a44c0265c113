"""Errors for torch's FSDP1 functions on a model that shardkit sharded, where torch would silently do nothing.

Functions such as ``FullyShardedDataParallel.state_dict_type(model)`` look each module up in torch's table of states;
methods called on the class, such as ``clip_grad_norm_(model, 1.0)``, first read an attribute of FSDP1. Both raise, on
models that shardkit sharded only, and nothing in torch is replaced.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import FrameType

from torch import nn
from torch.distributed.fsdp import FSDPModule

from shardkit._fsdp.params import notify_fsdp1_lookups
from shardkit.errors import ShardkitError, message

# Without fsdp_modules, which correctly returns none, and rekey_optim_state_dict, which needs none.
REFUSED = (
    *("state_dict_type", "set_state_dict_type", "get_state_dict_type", "summon_full_params", "optim_state_dict"),
    *("full_optim_state_dict", "sharded_optim_state_dict", "optim_state_dict_to_load", "shard_full_optim_state_dict"),
    *("scatter_full_optim_state_dict", "flatten_sharded_optim_state_dict"),
)
# Called on the class, with the model as ``self``.
METHODS = (
    *("clip_grad_norm_", "no_sync", "apply", "named_parameters", "named_buffers", "check_is_root"),
    "register_comm_hook",
)
_FSDP1 = "torch.distributed.fsdp.fully_sharded_data_parallel"


def refuse_fsdp1_statics(model: nn.Module) -> None:
    """Make FSDP1's static functions raise a ShardkitError on the model, or a module around it. Local, in place."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            notify_fsdp1_lookups(module, _refuse)


class RefusedAttribute:
    """An attribute that FSDP1's methods read first, on the class of a root: reading it there raises.

    Elsewhere it is missing. An instance's own attribute of that name takes precedence, because this has no setter.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, instance: object, owner: type) -> object:
        """Raise an error for FSDP1's method, AttributeError for anyone else."""
        _refuse()
        raise AttributeError(self._name)  # nn.Module.__getattr__ is asked next


def _refuse() -> None:
    """Raise if one of FSDP1's functions is running, named as the program called it."""
    names = [frame.f_code.co_name for frame in callers() if module_of(frame) == _FSDP1]
    called = [name for name in names if name in REFUSED + METHODS]
    if called:
        from shardkit.replacements import MEMBERS

        problem = "the model is sharded by fully_shard, and no part of it by FullyShardedDataParallel"
        rule = "torch's function acts on modules of FSDP1 only, and would find none"
        raise ShardkitError(message(f"FullyShardedDataParallel.{called[-1]}", problem, rule, MEMBERS[called[-1]].fix()))


def callers() -> Iterator[FrameType]:
    """Yield the running frames, innermost first."""
    frame = inspect.currentframe()
    while frame is not None:
        yield frame
        frame = frame.f_back


def module_of(frame: FrameType) -> str:
    """Return the name of the module that a frame's code belongs to."""
    return str(frame.f_globals.get("__name__"))
