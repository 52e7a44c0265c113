"""A model as it was before sharding, for when sharding fails in the middle."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from shardkit._fsdp.params import forget
from shardkit._torch import has_own_dispatch
from shardkit.apply.carry import Carried
from shardkit.reach import Snapshot


class Undo:
    """What sharding may change of a model, as it is now: the modules' classes, attributes and hooks, the parameters.

    Held are the model's own tensors, so nothing is copied. Those on an accelerator are let go of as they are sharded,
    for their memory is wanted; with any of these gone, the model cannot be restored.

    Args:
        model: before sharding.
        device: the device type that sharding moves tensors to.
        carried: what knows where else parameters are held.
    """

    def __init__(self, model: nn.Module, device: str, carried: Carried) -> None:
        self.is_whole = True
        self._modules = list(model.modules())
        self._snapshot = Snapshot(model)
        self._params = {id(param): _Before(param, device) for param in model.parameters()}
        self._buffers = [_Before(buffer, device) for buffer in model.buffers()]
        self._slots = [
            (module._parameters, name, id(param))
            for module in self._modules
            for name, param in module._parameters.items()
        ]
        self._places = {key: belongings.places for key, belongings in carried.of.items()}

    def settle(self, params: Iterable[nn.Parameter]) -> None:
        """These were sharded: free what memory they took on the accelerator. Local."""
        for param in params:
            before = self._params.get(id(param))
            if before is not None and before.is_kept:
                before.restore_data()
            elif self._params.pop(id(param), None) is not None:
                self.is_whole = False

    def restore(self) -> None:
        """Make the model what it was. Local; in place."""
        for key, param in self._params.items():
            for put in self._places.get(key, ()):
                put(param.tensor)
        for before in (*self._params.values(), *self._buffers):
            before.restore()
        self._snapshot.restore()
        for module in self._modules:
            forget(module)
        for registry, name, key in self._slots:
            if key in self._params:
                registry[name] = self._params[key].tensor


class _Before:
    """A parameter or buffer: its attributes, and its data where sharding would move or rearrange it."""

    def __init__(self, tensor: Any, device: str) -> None:
        self.tensor = tensor
        moves = tensor.device.type not in (device, "meta")
        self.is_kept = tensor.device.type in ("cpu", "meta") and not (moves and has_own_dispatch(type(tensor)))
        self._attributes = dict(vars(tensor))
        self._data = tensor.data if moves or not tensor.is_contiguous() else None

    def restore_data(self) -> None:
        if self._data is not None:
            self.tensor.data = self._data

    def restore(self) -> None:
        self.restore_data()
        vars(self.tensor).clear()
        vars(self.tensor).update(self._attributes)
