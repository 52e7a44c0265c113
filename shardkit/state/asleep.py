"""Sleep and wake: move the memory of a model or an optimizer to the CPU and back, while its tensors
stay the same.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, UntypedStorage, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from shardkit._fsdp import FSDPUnit
from shardkit._torch.dispatch import tree_leaves
from shardkit.runtime.stepping import asleep, refuse_asleep, watch_gradients, watched_units
from shardkit.shards import local_value
from shardkit.state.model import refuse_meta

BLOCK = 1 << 25  # bytes of CPU memory that are allocated together


@dataclass
class _Bed:
    """What one model or optimizer has on the CPU while it is asleep."""

    moved: list[tuple[UntypedStorage, list[Tensor]]] = field(default_factory=list)  # and its bytes
    hooks: list[RemovableHandle] = field(default_factory=list)
    units: list[FSDPUnit] = field(default_factory=list)  # whose ``unshard`` raises
    blocks: list[Tensor] = field(default_factory=list)  # of ``BLOCK`` bytes, kept for the next time
    used: int = 0  # bytes of the blocks

    def save(self, storage: UntypedStorage) -> None:
        """Copy a storage to the CPU. In blocks: torch rounds pinned memory up to powers of two."""
        source, start, parts = _bytes_of(storage), 0, []
        while start < len(source):
            number, filled = divmod(self.used, BLOCK)
            if number == len(self.blocks):
                pin = source.device.type not in ("cpu", "mps")
                self.blocks.append(torch.empty(BLOCK, dtype=torch.uint8, pin_memory=pin))
            size = min(len(source) - start, BLOCK - filled)
            part = self.blocks[number][filled : filled + size]
            parts.append(part.copy_(source[start : start + size], non_blocking=True))
            start += size
            self.used += size
        self.moved.append((storage, parts))

    def restore(self) -> None:
        """Copy everything back."""
        for storage, parts in self.moved:
            sizes = [len(part) for part in parts]
            storage.resize_(sum(sizes))
            for target, part in zip(torch.split(_bytes_of(storage), sizes), parts, strict=True):
                target.copy_(part, non_blocking=True)
        self.moved, self.used = [], 0


def _bytes_of(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


_beds: WeakKeyDictionary[nn.Module | Optimizer, _Bed] = WeakKeyDictionary()


def sleep(
    model: nn.Module | None = None, optimizer: Optimizer | Iterable[Optimizer] | None = None
) -> None:
    """Move shards, gradients, buffers and optimizer state to pinned CPU memory, and free their
    memory on the device.

    Local, in place: parameters, DTensors and state stay the same objects, so optimizers, schedulers
    and hooks stay valid, and :func:`wake` brings the values back. The CPU memory is kept for the
    next time. Until then a forward, a gather, a step, clipping and state dicts raise; torch may end
    the process where other code reads a value. The host waits for the device once, at the end.

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
    moving = []
    for holder, storages in found.items():
        if not storages:
            continue
        bed = _beds.setdefault(holder, _Bed())
        for storage in storages:
            bed.save(storage)
        del bed.blocks[-(-bed.used // BLOCK) :]
        if not bed.hooks:
            _guard(holder, bed)
        moving += storages
    for device in {storage.device for storage in moving}:
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
    for storage in moving:
        storage.resize_(0)


def wake(
    model: nn.Module | None = None, optimizer: Optimizer | Iterable[Optimizer] | None = None
) -> None:
    """Bring back what :func:`sleep` moved; what is awake stays as it is. Local, in place; the host
    does not wait.
    """
    for holder in _holders(model, optimizer):
        bed = _beds.get(holder)
        if bed is None or not bed.moved:
            continue
        bed.restore()
        del asleep[holder]
        for hook in bed.hooks:
            hook.remove()
        woken, bed.hooks, bed.units = bed.units, [], []
        for unit in woken:
            del unit.unshard
            for other, other_bed in _beds.items():  # such as a part
                if unit in other_bed.units:
                    unit.unshard = functools.partial(refuse_asleep, other)
            for module in unit.modules:
                # The next all-gather would wait for this event only, and not for these copies.
                cast(FSDPModule, module).set_post_optim_event(None)  # type: ignore[arg-type]


def _holders(model: nn.Module | None, optimizer: Any) -> list[nn.Module | Optimizer]:
    optimizers = list(optimizer) if isinstance(optimizer, Iterable) else [optimizer]
    return [holder for holder in (model, *optimizers) if holder is not None]


def _resident(holder: nn.Module | Optimizer) -> list[UntypedStorage]:
    """Return the storages that are on the device now, each once, after resharding."""
    if isinstance(holder, nn.Module):
        refuse_meta([*holder.named_parameters(), *holder.named_buffers()])
        watch_gradients(holder)
        for unit in watched_units(_own_parameters(holder)):
            for module in unit.modules:
                cast(FSDPModule, module).reshard()
        params = _own_parameters(holder)
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


def _own_parameters(holder: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that sleep with a module: not those of an average's model."""
    borrowed = getattr(holder, "borrowed", ())
    return [param for param in holder.parameters() if param not in borrowed]


def _guard(holder: nn.Module | Optimizer, bed: _Bed) -> None:
    """Make what reads values raise."""
    refuse = functools.partial(refuse_asleep, holder)
    asleep[holder] = set()
    if isinstance(holder, Optimizer):
        readers: list[Any] = [holder]
        bed.hooks.append(holder.register_step_pre_hook(refuse))
    else:
        readers = list(holder.modules())
        bed.hooks += [each.register_forward_pre_hook(refuse, prepend=True) for each in readers]
        params = _own_parameters(holder)
        asleep[holder].update(map(id, params))
        bed.units = watched_units(params)
        for unit in bed.units:  # for methods that gather, and backward
            unit.unshard = refuse
    for each in readers:
        bed.hooks.append(each.register_state_dict_pre_hook(refuse))
        bed.hooks.append(each.register_load_state_dict_pre_hook(refuse))
