"""Sleep and wake: move the memory of a model or an optimizer to the CPU and back, while its tensors
stay the same.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NoReturn
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, UntypedStorage, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from shardkit._fsdp import fsdp_units
from shardkit._torch.dispatch import tree_leaves
from shardkit.errors import ShardkitError, message
from shardkit.runtime.stepping import asleep, watch_gradients
from shardkit.shards import local_value


@dataclass
class _Bed:
    """What one model or optimizer has on the CPU while it is asleep, and the CPU memory that it
    uses again.
    """

    moved: list[tuple[UntypedStorage, Tensor]] = field(default_factory=list)
    hooks: list[RemovableHandle] = field(default_factory=list)
    spare: dict[int, list[Tensor]] = field(default_factory=lambda: defaultdict(list))  # by bytes


_beds: WeakKeyDictionary[nn.Module | Optimizer, _Bed] = WeakKeyDictionary()


def sleep(
    model: nn.Module | None = None, optimizer: Optimizer | Iterable[Optimizer] | None = None
) -> None:
    """Move shards, gradients, buffers and optimizer state to pinned CPU memory, and free their
    memory on the device.

    Local, in place: parameters, DTensors and state stay the same objects, so optimizers, schedulers
    and hooks stay valid, and :func:`wake` brings the values back. The CPU memory is kept for the
    next time. Until then a forward, a gather, a step, and state dicts raise; torch may end the
    process where other code reads a value. The host waits for the device once, at the end.

    What is on the device is what moves: units offloaded to the CPU stay. On a CPU mesh it does the
    same within CPU memory, so that programs can be tested. Gradients that wait for their reduction
    (``accumulate``) stay. Memory that several modules share moves with the first, except frozen
    parameters of an average, which are its model's.

    Args:
        model: sharded or plain, or an average of :func:`sharded_average`; units still gathered are
            resharded. None leaves it: ``sleep(optimizer=optimizer)`` after a step frees the state's
            memory for forward and backward.
        optimizer: one or several, also after ``step_on_local_shards``; None leaves their state.

    Examples:
        >>> sleep(model, optimizer)
        >>> rollouts = engine.generate(prompts)
        >>> wake(model, optimizer)
    """
    found = {holder: _resident(holder) for holder in _holders(model, optimizer)}
    for holder, storages in found.items():
        bed = _beds.setdefault(holder, _Bed())
        bed.moved += [(storage, _copied(storage, bed)) for storage in storages]
        bed.hooks += _guards(holder) if not bed.hooks else []
    storages = [storage for each in found.values() for storage in each]
    if any(storage.device.type != "cpu" for storage in storages):
        torch.accelerator.synchronize()
    for storage in storages:
        storage.resize_(0)


def wake(
    model: nn.Module | None = None, optimizer: Optimizer | Iterable[Optimizer] | None = None
) -> None:
    """Bring back what :func:`sleep` moved; what is awake stays as it is. Local, in place; the host
    does not wait.
    """
    for holder in _holders(model, optimizer):
        bed = _beds.get(holder, _Bed())
        for storage, host in bed.moved:
            storage.resize_(host.nbytes)
            storage.copy_(host.untyped_storage(), non_blocking=True)
            bed.spare[host.nbytes].append(host)
        for hook in bed.hooks:
            hook.remove()
        for unit in fsdp_units(holder) if bed.hooks and isinstance(holder, nn.Module) else ():
            vars(unit).pop("unshard", None)  # gone if a part slept too
        asleep.discard(holder)
        bed.moved, bed.hooks = [], []


def check_awake(holder: nn.Module | Optimizer) -> None:
    """Raise where its values are not in its tensors."""
    if holder in _beds and _beds[holder].moved:
        _refuse(holder)


def _holders(model: nn.Module | None, optimizer: Any) -> list[nn.Module | Optimizer]:
    optimizers = list(optimizer) if isinstance(optimizer, Iterable) else [optimizer]
    return [holder for holder in (model, *optimizers) if holder is not None]


def _resident(holder: nn.Module | Optimizer) -> list[UntypedStorage]:
    """Return the storages that are on the device now, each once, after resharding."""
    if isinstance(holder, nn.Module):
        for module in holder.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        borrowed = getattr(holder, "borrowed", ())
        params = [param for param in holder.parameters() if param not in borrowed]
        tensors = [*params, *holder.buffers(), *(param.grad for param in params)]
    else:
        params = [param for group in holder.param_groups for param in group["params"]]
        tensors = [leaf for entry in holder.state.values() for leaf in tree_leaves(entry)]
    types = {
        each.device_mesh.device_type if isinstance(each, DTensor) else each.device.type
        for each in params
    }
    device = next(iter(types - {"cpu"}), "cpu")
    plain = [
        part for each in tensors if isinstance(each, Tensor) for part in _parts(local_value(each))
    ]
    storages = dict.fromkeys(part.untyped_storage() for part in plain if part.device.type == device)
    moving = [each for each in storages if each.nbytes()]
    # On the CPU not those that files, numpy or other processes share.
    return [
        each for each in moving if device != "cpu" or (each.resizable() and not each.is_shared())
    ]


def _parts(tensor: Tensor) -> list[Tensor]:
    """Return the plain tensors of which a subclass, such as quantized optimizer state, is made."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return [tensor]
    return [
        part for name in tensor.__tensor_flatten__()[0] for part in _parts(getattr(tensor, name))
    ]


def _copied(storage: UntypedStorage, bed: _Bed) -> Tensor:
    size, pin = storage.nbytes(), storage.device.type not in ("cpu", "mps")
    spare = bed.spare[size]
    host = spare.pop() if spare else torch.empty(size, dtype=torch.uint8, pin_memory=pin)
    host.untyped_storage().copy_(storage, non_blocking=True)
    return host


def _guards(holder: nn.Module | Optimizer) -> list[RemovableHandle]:
    """Make what reads values raise: a kernel that reads freed memory ends the process, or worse."""
    if isinstance(holder, Optimizer):
        hooks = [holder.register_step_pre_hook(_refuse)]
    else:
        for unit in fsdp_units(holder):  # for methods that gather, and backward
            unit.unshard = functools.partial(_refuse, holder)
        entries = {
            holder,
            *(module for module in holder.modules() if isinstance(module, FSDPModule)),
        }
        hooks = [module.register_forward_pre_hook(_refuse, prepend=True) for module in entries]
        # an average, whose parameters are in no optimizer, or are its model's
        if not hasattr(holder, "borrowed"):
            asleep.add(holder)
            watch_gradients(holder)
    for each in holder.modules() if isinstance(holder, nn.Module) else [holder]:
        hooks += [
            each.register_state_dict_pre_hook(_refuse),
            each.register_load_state_dict_pre_hook(_refuse),
        ]
    return hooks


def _refuse(holder: object, *args: Any, **kwargs: Any) -> NoReturn:
    rule = "sleep() has moved its memory to the CPU"
    raise ShardkitError(
        message(type(holder).__name__, "is asleep", rule, "Call wake(model, optimizer) first")
    )
