"""Shards as FSDP1 shows them: flat parameters, of one parameter each, and handles."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardkit._fsdp import own_parameters
from shardkit._fsdp.fsdp1 import ShardParamInfo, rebind
from shardkit._torch import named_sharded_parameters
from shardkit.errors import message
from shardkit.fsdp1.dropin.errors import UnavailableAttribute
from shardkit.fsdp1.dropin.record import record_of, sharded_of, without_wrappers, wrappers_of
from shardkit.shards import local_box
from shardkit.state.routes import local_of


class Handle:
    """What programs use of FSDP1's handles: of a wrapper, or of one parameter that it shards.

    Raises:
        AttributeError: on reading anything else; also a TranslationError.
    """

    def __init__(self, wrapper: nn.Module, param: Tensor | None = None, flat: Tensor | None = None) -> None:
        self._unit: Any = sharded_of(wrapper)
        self._param = param
        offload = record_of(wrapper).given.cpu_offload
        self._offload_params = offload is not None and offload.offload_params
        if flat is not None:
            self.flat_param = flat

    def __getattr__(self, name: str) -> Any:
        if name == "flat_param":
            rule = "Each parameter of FSDP2 is a DTensor of its own, so a wrapper has no flat parameter for all of them"
            fix = "Use wrapper.params, or wrapper._all_handles, one for each parameter"
        else:
            rule = "A handle has reshard, flat_param and flat_param_to"
            fix = "Use a public method of FSDPModule, such as wrapper.module.unshard()"
        raise UnavailableAttribute(message(f"_handle.{name}", "has no counterpart in FSDP2", rule, fix))

    def reshard(self, free_unsharded_flat_param: bool) -> None:
        """Free the full parameters of the wrapper, such as a root's after a forward without backward. Local."""
        if free_unsharded_flat_param:
            self._unit.reshard()

    def flat_param_to(self, *args: Any, **kwargs: Any) -> None:
        """Move this rank's shard, as ``Tensor.to``. Local; the next forward needs it on the mesh's device."""
        before = self.flat_param.data
        self.flat_param.data = before.to(*args, **kwargs)
        if before.device.type != "cpu" and self.flat_param.device.type == "cpu":
            torch.accelerator.synchronize()  # FSDP2 pads uneven shards, and reads the copy for it
        if isinstance(self._param, DTensor):
            rebind(self._unit, self._param, self.flat_param.data.view(local_of(self._param).shape))


def unit_handle(wrapper: nn.Module) -> Handle | None:
    """Return the handle of a wrapper; None where it shards no parameter itself, as in FSDP1. Local."""
    unit: Any = sharded_of(wrapper)
    own = own_parameters(unit) if unit is not None else []
    return Handle(wrapper, *(_flattened(wrapper)[0] if len(own) == 1 else ())) if own else None


def handles(module: nn.Module) -> list[Handle]:
    """Return a handle for each parameter that wrappers at and below ``module`` shard. Local."""
    return [Handle(each, param, flat) for each in wrappers_of(module) for param, flat in _flattened(each)]


def flat_params(wrapper: nn.Module) -> list[Tensor]:
    """Return a flat parameter for each parameter that a wrapper shards itself, not an inner one. Local."""
    return [flat for _, flat in _flattened(wrapper)]


def _flattened(wrapper: nn.Module) -> list[tuple[Tensor, Tensor]]:
    names = {param: without_wrappers(name) for name, param in named_sharded_parameters(wrapper)}
    unit: Any = sharded_of(wrapper)
    return [(param, flat_param(param, names[param])) for param in own_parameters(unit)] if unit is not None else []


def flat_param(param: Tensor, fqn: str) -> Tensor:
    """Return this rank's shard, and its gradient, in their own memory: what is written to them stays. Local.

    If the shard is rows of the parameter, as it is unless tensor parallelism sharded another dim, it is of one dim and
    has FSDP1's attributes ``_is_flat_param``, ``_fqns``, ``_shapes``, ``_numels``, ``_shard_param_infos`` and
    ``_local_shard``.
    """
    (start, length), *rest = local_box(param) if isinstance(param, DTensor) else ((0, size) for size in param.shape)
    local, row = local_of(param), math.prod(param.shape[1:])
    is_flat = [size for _, size in rest] == [*param.shape[1:]] and local.is_contiguous()
    shape = (-1,) if is_flat else local.shape
    flat = nn.Parameter(local.view(shape), param.requires_grad)
    if isinstance(param.grad, DTensor):
        flat.grad = local_of(param.grad).view(shape)
    if is_flat:
        first, held = start * row, length * row
        info = ShardParamInfo(True, 0, held, first, first + held - 1) if held else ShardParamInfo(False, *[None] * 4)
        described = {"_shapes": (param.shape,), "_numels": (param.numel(),), "_shard_param_infos": (info,)}
        vars(flat).update(described, _is_flat_param=True, _fqns=(fqn,), _local_shard=flat.data)
    return flat
