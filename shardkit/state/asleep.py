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

BLOCK = 1 << 25  # bytes: torch rounds each pinned tensor up to a power of two


@dataclass
class _Sleeper:
    """What one model or optimizer has on the CPU, and what guards it, while it is asleep."""

    moved: list[tuple[UntypedStorage, list[Tensor]]] = field(default_factory=list)  # its bytes
    hooks: list[RemovableHandle] = field(default_factory=list)
    units: list[FSDPUnit] = field(default_factory=list)  # whose ``unshard`` raises


_sleepers: WeakKeyDictionary[nn.Module | Optimizer, _Sleeper] = WeakKeyDictionary()


def _blocks_of(storage: UntypedStorage) -> tuple[Tensor, ...]:
    in_bytes = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    return torch.split(in_bytes, BLOCK)


def _copied_to_cpu(storage: UntypedStorage) -> list[Tensor]:
    """Return the bytes of a storage in blocks, which may be on their way."""
    blocks = []
    for block in _blocks_of(storage):
        pin = block.device.type not in ("cpu", "mps")
        copy = torch.empty(block.shape, dtype=torch.uint8, pin_memory=pin)
        blocks.append(copy.copy_(block, non_blocking=True))
    return blocks


def sleep(
    model: nn.Module | None = None, optimizer: Optimizer | Iterable[Optimizer] | None = None
) -> None:
    """Move shards, gradients, buffers and optimizer state to pinned CPU memory, and free their
    memory on the device.

    Local, in place: parameters, DTensors and state stay the same objects, so optimizers, schedulers
    and hooks stay valid, and :func:`wake` brings the values back. Until then a forward, an
    all-gather, a step, clipping and state dicts raise; torch may end the process where other code
    reads a value. The host waits for the device once, at the end.

    What is on the device is what moves: units offloaded to the CPU stay. On a CPU mesh it does the
    same within CPU memory, so that programs can be tested. Gradients that wait for their reduction
    (``accumulate``) stay. Memory that several modules share moves with the first, except frozen
    parameters of an average, which are its model's.

    Args:
        model: sharded or plain, or an average of :func:`sharded_average`; unsharded units are
            resharded. None leaves it: ``sleep(optimizer=optimizer)`` after a step frees the state's
            memory for forward and backward.
        optimizer: one or several, also after ``step_on_local_shards``; None leaves their state.

    Examples:
        >>> sleep(model, optimizer)
        >>> rollouts = engine.generate(prompts)
        >>> wake(model, optimizer)
    """
    storages = {holder: _storages_on_device(holder) for holder in _holders(model, optimizer)}
    moving: list[UntypedStorage] = []
    for holder, own in storages.items():
        if not own:
            continue
        if holder not in _sleepers:
            _sleepers[holder] = _Sleeper()
            _guard(holder, _sleepers[holder])
        for storage in own:
            _sleepers[holder].moved.append((storage, _copied_to_cpu(storage)))
        moving += own
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
        if holder not in _sleepers:
            continue
        sleeper = _sleepers.pop(holder)
        for storage, copies in sleeper.moved:
            storage.resize_(sum(copy.nbytes for copy in copies))
            for block, copy in zip(_blocks_of(storage), copies, strict=True):
                block.copy_(copy, non_blocking=True)
        del asleep[holder]
        for hook in sleeper.hooks:
            hook.remove()
        for unit in sleeper.units:
            del unit.unshard
            for other, still_asleep in _sleepers.items():  # such as a part
                if unit in still_asleep.units:
                    unit.unshard = functools.partial(refuse_asleep, other)
            for module in unit.modules:
                # The next all-gather would wait for this event only, and not for these copies.
                cast(FSDPModule, module).set_post_optim_event(None)  # type: ignore[arg-type]


def _holders(model: nn.Module | None, optimizer: Any) -> list[nn.Module | Optimizer]:
    optimizers = list(optimizer) if isinstance(optimizer, Iterable) else [optimizer]
    return [holder for holder in (model, *optimizers) if holder is not None]


def _storages_on_device(holder: nn.Module | Optimizer) -> list[UntypedStorage]:
    """Return the storages that are on the device now, each once, after resharding."""
    params: list[Tensor] = []
    values: list[Any] = []
    if isinstance(holder, nn.Module):
        refuse_meta([*holder.named_parameters(), *holder.named_buffers()])
        watch_gradients(holder)
        for unit in watched_units(_own_parameters(holder)):
            for module in unit.modules:
                cast(FSDPModule, module).reshard()
        params += _own_parameters(holder)
        values += [*params, *holder.buffers(), *(param.grad for param in params)]
    else:
        for group in holder.param_groups:
            params += group["params"]
        values += tree_leaves(list(holder.state.values()))
    types = set()
    for param in params:
        if isinstance(param, DTensor):
            types.add(param.device_mesh.device_type)
        else:
            types.add(param.device.type)
    device = next(iter(types - {"cpu"}), "cpu")
    storages: dict[UntypedStorage, None] = {}
    for value in values:
        for part in _parts(local_value(value)) if isinstance(value, Tensor) else ():
            storage = part.untyped_storage()
            # On the CPU not those that files, numpy or other processes share.
            is_ours = device != "cpu" or (storage.resizable() and not storage.is_shared())
            if part.device.type == device and storage.nbytes() and is_ours:
                storages[storage] = None
    return list(storages)


def _parts(tensor: Tensor) -> list[Tensor]:
    """Return the plain tensors of which a subclass, such as quantized optimizer state, is made."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return [tensor]
    parts = []
    for name in tensor.__tensor_flatten__()[0]:
        parts += _parts(getattr(tensor, name))
    return parts


def _own_parameters(holder: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that sleep with a module: not those of an average's model."""
    borrowed = getattr(holder, "borrowed", ())
    return [param for param in holder.parameters() if param not in borrowed]


def _guard(holder: nn.Module | Optimizer, sleeper: _Sleeper) -> None:
    """Make what reads values raise."""
    refuse = functools.partial(refuse_asleep, holder)
    asleep[holder] = set()
    readers: list[Any] = [holder]
    if isinstance(holder, Optimizer):
        sleeper.hooks.append(holder.register_step_pre_hook(refuse))
    else:
        readers = list(holder.modules())
        for module in readers:
            sleeper.hooks.append(module.register_forward_pre_hook(refuse, prepend=True))
        params = _own_parameters(holder)
        asleep[holder].update(map(id, params))
        sleeper.units = watched_units(params)
        for unit in sleeper.units:  # for methods that unshard, and backward
            unit.unshard = refuse
    for reader in readers:
        sleeper.hooks.append(reader.register_state_dict_pre_hook(refuse))
        sleeper.hooks.append(reader.register_load_state_dict_pre_hook(refuse))
