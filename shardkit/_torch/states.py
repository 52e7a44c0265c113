"""Private names of torch for states of models: attached metadata, DTensors of a local tensor, replaced shards."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from shardkit._torch import units_of


def state_dict_metadata(state_dict: Any) -> dict[str, Any]:
    """Return the module versions that ``nn.Module.state_dict`` attaches to its result; empty if there are none."""
    return getattr(state_dict, "_metadata", None) or {}


def with_state_dict_metadata(state_dict: Any, metadata: dict[str, Any]) -> Any:
    """Attach the result of :func:`state_dict_metadata` where ``nn.Module.load_state_dict`` looks for it."""
    state_dict._metadata = OrderedDict(metadata)
    return state_dict


def with_local(like: DTensor, local: Tensor) -> DTensor:
    """Return a DTensor placed like another, with this local tensor on any device, which ``from_local`` would move."""
    return DTensor(local, like._spec, requires_grad=False)  # type: ignore[no-untyped-call]


# checkpoint: whether a tensor has ``__tensor_flatten__`` and ``__tensor_unflatten__``, as DTensors do too.
is_wrapper: Callable[[Tensor], bool] = torch.utils._python_dispatch.is_traceable_wrapper_subclass


def _fsdp_params(module: FSDPModule) -> list[Any]:
    return [param for unit in units_of(module._get_fsdp_state()) for param in unit.fsdp_params]


def offloaded_parameters(module: FSDPModule) -> list[nn.Parameter]:
    """Return the sharded parameters of this FSDP module that are offloaded to the CPU."""
    return [param.sharded_param for param in _fsdp_params(module) if param.offload_to_cpu]


def reread_sharded_parameters(module: FSDPModule) -> None:
    """Make FSDP2 use the replaced local shards of this module, as its ``_apply`` does after ``to_empty``.

    ``_apply`` itself would also rewrap every parameter, which drops attributes that users set on them.
    """
    for param in _fsdp_params(module):
        param.reset_sharded_param()
