"""``param.data = other``: how averages of weights (EMA) are often put in place and taken out again.

On a DTensor torch changes nothing by it and says nothing: it exchanges what is below the DTensor's surface, not the
local tensor (torch 2.11 to 2.13). On FSDP1's parameters it worked.
"""

from __future__ import annotations

from typing import Any
from weakref import ref

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from shardkit._fsdp import own_parameters, rebind
from shardkit.errors import TranslationError, message
from shardkit.fsdp1.shim.shard_grads import ShardGrad
from shardkit.state_dict.routes import local_of

_DATA: Any = vars(DTensor).get("data", Tensor.data)

# From the id of a sharded parameter to the module whose unit it was in. No weak references to parameters: one of them
# and torch.utils.swap_tensors refuses, by which ``model.half()`` changes DTensors.
_owners: dict[int, ref[nn.Module]] = {}


def allow(module: FSDPModule | None) -> None:
    """Lets the parameters of the unit of one module be assigned, and their gradients. Local.

    Replaces the property ``data`` of ``torch.distributed.tensor.DTensor``: any other DTensor is treated as before.
    """
    if isinstance(module, nn.Module):
        for param in own_parameters(module):
            _owners[id(param)] = ref(module)
        DTensor.data = property(_get, _set)


def _get(tensor: Any) -> Tensor:
    found: Tensor = _DATA.__get__(tensor)
    return found


def _set(tensor: Any, value: Tensor) -> None:
    owner = _owner(tensor)
    if owner is None and not isinstance(tensor, ShardGrad):
        _DATA.__set__(tensor, value)
        return
    if not isinstance(value, DTensor) or (value.shape, value.dtype) != (tensor.shape, tensor.dtype):
        problem = f"{type(value).__name__} of {value.dtype}, {tuple(value.shape)}, for {tuple(tensor.shape)}"
        rule = "A sharded parameter or gradient takes a DTensor of its own shape, dtype and placements"
        fix = "Use param.data.copy_(...), or write to the parameters in FSDP.summon_full_params(model)"
        raise TranslationError(message("param.data = ...", problem, rule, fix))
    placed = value if value.placements == tensor.placements else value.redistribute(placements=tensor.placements)
    rebind(owner, tensor, local_of(placed))


def _owner(tensor: Any) -> nn.Module | None:
    owner = _owners[id(tensor)]() if id(tensor) in _owners else None
    return owner if owner is not None and any(each is tensor for each in own_parameters(owner)) else None
