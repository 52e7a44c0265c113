"""torch's FSDP1 functions on a model that shardkit sharded: one error each, where they would do nothing without a word.

``FullyShardedDataParallel.state_dict_type(model)`` and its like walk the model for modules of FSDP1. Of each module
they first ask its registry of composable functions for ``"replicate"``; here the registry answers by raising. So only
models that shardkit sharded refuse, whoever calls, and nothing in torch is replaced.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from types import FrameType
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from shardkit._fsdp import REGISTRY_KEY
from shardkit.errors import ShardkitError, message

# fsdp_modules answers truly that there are none; rekey_optim_state_dict needs none. What is not a static, such as
# no_sync, fails by itself, since FSDP1's attributes are missing.
REFUSED = (
    *("state_dict_type", "set_state_dict_type", "get_state_dict_type", "summon_full_params", "optim_state_dict"),
    *("full_optim_state_dict", "sharded_optim_state_dict", "optim_state_dict_to_load", "shard_full_optim_state_dict"),
    *("scatter_full_optim_state_dict", "flatten_sharded_optim_state_dict"),
)
_ASKED_FOR = "replicate"  # by torch.distributed.fsdp._traversal_utils._composable, torch 2.11 to 2.15
_FSDP1 = "torch.distributed.fsdp.fully_sharded_data_parallel"


def refuse_fsdp1_statics(model: nn.Module) -> None:
    """Makes FSDP1's static functions raise a ShardkitError on the model, or any around its units. Local, in place."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            vars(module)[REGISTRY_KEY] = _Registry(vars(module)[REGISTRY_KEY])


class _Registry(OrderedDict[str, Any]):
    """What torch notes of composable functions that a module was given to."""

    def __contains__(self, name: object) -> bool:
        if name == _ASKED_FOR:
            _refuse(inspect.currentframe())
        return super().__contains__(name)


def _refuse(frame: FrameType | None) -> None:
    """Raise where one of FSDP1's statics is asking, named as the program called it."""
    called = None
    while frame is not None:
        name = frame.f_code.co_name
        called = name if name in REFUSED and frame.f_globals.get("__name__") == _FSDP1 else called
        frame = frame.f_back
    if called is not None:
        from shardkit.fsdp1.instead import MEMBERS

        problem = "the model is sharded by fully_shard, and no part of it by FullyShardedDataParallel"
        rule = "torch's function would find nothing to act on, and say nothing"
        raise ShardkitError(message(f"FullyShardedDataParallel.{called}", problem, rule, MEMBERS[called].fix()))
