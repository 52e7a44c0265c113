"""``param.data``: how programs reach weights, and put averages of them (EMA) in place and take them out again.

On a DTensor torch changes nothing by assigning it and says nothing: it exchanges what is below the DTensor's surface,
not the local tensor (torch 2.11 to 2.13). On FSDP1's parameters it worked.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakValueDictionary

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from shardkit._fsdp import own_parameters
from shardkit._fsdp.fsdp1 import rebind
from shardkit._torch import layout_of
from shardkit.errors import TranslationError, message
from shardkit.fsdp1.dropin.shard_grads import Sharded, ShardGrad, mark
from shardkit.state.routes import local_of

_DATA: Any = Tensor.data

# From the id of a sharded parameter to the module whose unit it was in. No weak references to parameters: one of them
# and torch.utils.swap_tensors refuses, by which ``model.half()`` changes DTensors.
_owners: WeakValueDictionary[int, nn.Module] = WeakValueDictionary()


def allow(module: FSDPModule | None) -> None:
    """Lets ``param.data`` of the unit of one module be assigned, and be this rank's shard. Local."""
    if isinstance(module, nn.Module):
        _owners.update({id(param): module for param in own_parameters(module)})


def is_ours(tensor: object) -> bool:
    """Whether it is a parameter of a drop-in model. Local, pure."""
    return _owner(tensor) is not None


DATA = property(lambda tensor: _get(tensor), lambda tensor, value: _set(tensor, value))
"""What stands for ``DTensor.data`` while there are drop-in models; other DTensors are treated as before."""


def _get(tensor: Any) -> Tensor:
    found: Tensor = _DATA.__get__(tensor)
    return mark(found, Sharded) if is_ours(tensor) else found


def _set(tensor: Any, value: Tensor) -> None:
    owner = _owner(tensor)
    if owner is None and not isinstance(tensor, ShardGrad):
        _DATA.__set__(tensor, value)
        return
    whole = layout_of(tensor).shape
    if not isinstance(value, DTensor) or (layout_of(value).shape, value.dtype) != (whole, tensor.dtype):
        problem = f"{type(value).__name__} of {value.dtype}, {tuple(value.shape)}, for {tuple(whole)}"
        rule = "A sharded parameter or gradient takes a DTensor of its own shape, dtype and placements"
        fix = "Use param.data.copy_(...), or write to the parameters in FSDP.summon_full_params(model)"
        raise TranslationError(message("param.data = ...", problem, rule, fix))
    placed = value if value.placements == tensor.placements else value.redistribute(placements=tensor.placements)
    rebind(owner, tensor, local_of(placed))


def _owner(tensor: Any) -> nn.Module | None:
    owner = _owners.get(id(tensor))
    return owner if owner is not None and any(each is tensor for each in own_parameters(owner)) else None
