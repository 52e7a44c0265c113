"""Private names of torch, each with its reason: here those of the path of ``shard_model``, of
models, and versions.

The other files of this package are for what imports them: ``dispatch`` and ``steps``. What reads or
sets the state of FSDP2's objects, or derives from its classes, is in ``_fsdp``; all else is here.
No other module of shardkit uses a torch name with an underscore (``tests/house/test_layers.py``).
When a new torch breaks shardkit, look in these two packages first.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Iterable
from typing import Any

with warnings.catch_warnings():
    # On import torch warns where numpy is missing, which neither torch nor shardkit needs.
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
    import torch

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakIdKeyDictionary

from shardkit.errors import ShardkitError

MINIMUM_TORCH = (2, 11)
NEWEST_TESTED = (2, 15)


def torch_version() -> tuple[int, int]:
    """Return the major and minor version of torch, such as ``(2, 13)``."""
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


if torch_version() < MINIMUM_TORCH:
    raise ImportError(
        f"torch: version {torch.__version__} is too old. shardkit needs torch >= "
        f"{'.'.join(map(str, MINIMUM_TORCH))}. Upgrade with: pip install --upgrade torch."
    )


def require_names(owner: object, class_name: str, names: Iterable[str]) -> None:
    """Raise for a private name that an object of this torch does not have. Local, pure.

    Setting such an attribute would do nothing, without an error.
    """
    for name in names:
        if not hasattr(owner, name):
            tested = "{}.{} to {}.{}".format(*MINIMUM_TORCH, *NEWEST_TESTED)
            raise ShardkitError(
                f"{class_name}.{name} is not in torch {torch.__version__}. shardkit is tested with "
                f"torch {tested}. Use one of these, or a newer shardkit."
            )


def named_sharded_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return ``model.named_parameters()``, with each unsharded parameter replaced by its sharded
    one. Local.

    While a unit is unsharded FSDP2 registers unsharded parameters, but gradients and the optimizer's
    state stay with the sharded ones, which torch has no public way to reach (2.11 to 2.15).
    """
    sharded: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        if not isinstance(module, FSDPModule):
            continue
        for unit in units_of(module._get_fsdp_state()):
            if getattr(unit, "shows_plain", False):
                raise is_wrapped()
            if not unit.is_sharded:
                for param in unit.fsdp_params:
                    info = param._module_info
                    sharded[getattr(info.module, info.param_name)] = param.sharded_param
    return [(name, sharded.get(param, param)) for name, param in model.named_parameters()]


def sharded_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return those parameters without names. Local."""
    return [param for _, param in named_sharded_parameters(model)]


# The plain tensors that the drop-in for FSDP1's class shows in the place of DTensors.
plain_shards: Any = WeakIdKeyDictionary()


def is_wrapped() -> ShardkitError:
    return ShardkitError(
        "The model is wrapped by FullyShardedDataParallel, whose parameters are plain tensors, "
        "each rank's part. Use its own methods, or shardkit.fsdp1.as_dtensors(model) around "
        "functions of shardkit."
    )


def units_of(state: Any) -> list[Any]:
    """Return the ``FSDPParamGroup`` objects of an FSDP module's state: several since torch 2.12,
    before one or none.
    """
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [state._fsdp_param_group] if state._fsdp_param_group else []


# apply: there is no public way to suspend FakeTensorMode (torch 2.13 to 2.15).
real_tensors = torch._subclasses.fake_tensor.unset_fake_temporarily


def has_own_dispatch(cls: type) -> bool:
    """Return whether a tensor class wraps other tensors (DTensor, quantized weights) instead of its
    own storage.
    """
    return getattr(cls, "__torch_dispatch__", None) != Tensor.__torch_dispatch__


FakeTensor = torch._subclasses.fake_tensor.FakeTensor

# optim, grads: reading an attribute of a DTensor such as .grad or .dtype asks __torch_function__
# first, which costs more than the attribute: 0.5 us against 0.05 (torch 2.13). This context avoids
# that; modes stay active.
plain_attributes = torch._C.DisableTorchFunctionSubclass

# optim, grads: ``to_local()`` makes an autograd node, 10 us; the attribute that it reads costs
# 0.03. FSDP2 itself sets it (torch 2.13 to 2.15). The result of a redistribution may still be in
# flight: call ``to_local()`` there.
local_tensor: Callable[[DTensor], Tensor] = operator.attrgetter("_local_tensor")


def flattened(mesh: DeviceMesh, replicate: tuple[str, ...], shard: tuple[str, ...]) -> DeviceMesh:
    """Return the mesh of the ``replicate`` axes and one axis of all in ``shard``. Collective when
    it is new.

    apply: torch has no public way to join axes of a mesh so that ``fully_shard`` takes DTensors on
    its other axes.
    """
    flat = mesh[shard]._flatten()
    return DeviceMesh._concatenate([mesh[replicate], flat]) if replicate else flat


# apply: public from torch 2.12 on.
DataParallelMeshDims: Any = getattr(torch.distributed.fsdp, "DataParallelMeshDims", None)

# apply: public from torch 2.14 on.
set_timeout: Any = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout


def with_timeout_of_world(mesh: DeviceMesh) -> DeviceMesh:
    """Give a mesh's groups the timeout that ``init_process_group`` was given, and return the mesh.
    Local, in place.

    apply: torch gives them 10 or 30 minutes, and has no public way to read a timeout (2.13 to
    2.15).
    """
    world = dist.group.WORLD
    assert world is not None, "the mesh has groups"
    options: Any = getattr(world._get_backend(torch.device(mesh.device_type)), "options", None)
    for group in mesh.get_all_groups() if hasattr(options, "_timeout") else ():  # gloo and NCCL
        set_timeout(options._timeout, group)
    return mesh


def with_local(like: DTensor, local: Tensor) -> DTensor:
    """Return a DTensor placed like another, with this local tensor on any device, which
    ``from_local`` would move.
    """
    return DTensor(local, like._spec, requires_grad=False)  # type: ignore[no-untyped-call]


# checkpoint: whether a tensor has ``__tensor_flatten__`` and ``__tensor_unflatten__``, as DTensors
# do too.
is_wrapper: Callable[[Tensor], bool] = torch.utils._python_dispatch.is_traceable_wrapper_subclass
