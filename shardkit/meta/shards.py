"""Cut this rank's part out of each full tensor, and install it in the tensor objects of the model."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from shardkit._fsdp.params import post_accumulate_hooks, set_post_accumulate_hooks
from shardkit._torch import local_tensor
from shardkit._torch.states import offloaded_parameters, reread_sharded_parameters
from shardkit.meta.tape import View
from shardkit.references import Setter
from shardkit.shards import as_sharded, device_of, local_part, wrapped_as


@dataclass(eq=False)
class Target:
    """One meta tensor of the model, under all its names."""

    tensor: Tensor
    fqns: list[str] = field(default_factory=list)
    slots: list[tuple[nn.Module, str]] = field(default_factory=list)  # as parameter or buffer
    places: list[Setter] = field(default_factory=list)  # elsewhere: each puts another tensor there
    view: View | None = None  # on the tape
    value: Tensor | None = None


def target_device(model: nn.Module) -> Callable[[Tensor], torch.device]:
    """Return a function that says where each tensor of the model belongs: on its mesh, or on the CPU if offloaded.

    Plain tensors belong on the device of the first mesh.
    """
    sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
    offloaded = {id(param) for module in sharded for param in offloaded_parameters(module)}
    meshes = [param.device_mesh for param in model.parameters() if isinstance(param, DTensor)]
    plain = device_of(meshes[0]) if meshes else torch.device("cpu")

    def device(tensor: Tensor) -> torch.device:
        if not isinstance(tensor, DTensor):
            return plain
        return torch.device("cpu") if id(tensor) in offloaded else device_of(tensor.device_mesh)

    return device


class Cutter:
    """Keeps this rank's part of a full value, on the device where it belongs."""

    def __init__(self, model: nn.Module) -> None:
        self._device = target_device(model)
        self._storages: dict[int, torch.UntypedStorage] = {}  # of plain tensors, so that aliases stay aliases

    def cut(self, target: Target, full: Tensor, alone: bool) -> None:
        """Set ``target.value`` from the full value; if ``alone``, its memory may be kept."""
        tensor, device = target.tensor, self._device(target.tensor)
        if isinstance(tensor, DTensor):
            part = local_part(full, tensor).resolve_conj().resolve_neg()  # a collective sends the memory as it is
            alone &= part.is_contiguous() and part.nbytes == part.untyped_storage().nbytes()
            local = part.to(device, tensor.dtype, copy=not alone, memory_format=torch.contiguous_format)
            target.value = as_sharded(wrapped_as(local, local_tensor(tensor)), tensor)
        elif full.dtype != tensor.dtype:
            target.value = full.to(device, tensor.dtype, copy=True)
        else:
            assert target.view is not None
            if target.view.storage not in self._storages:
                storage = full.untyped_storage()
                there = torch.empty(
                    0 if storage.device == device else storage.nbytes(), dtype=torch.uint8, device=device
                )
                moved = there.untyped_storage().copy_(storage, non_blocking=False) if there.numel() else storage
                self._storages[target.view.storage] = moved
            target.value = target.view.of(self._storages[target.view.storage])


def install(model: nn.Module, targets: Iterable[Target]) -> None:
    """Give each tensor object its value. The objects stay, so optimizers, ties and attributes keep working."""
    for target in targets:
        tensor, value = target.tensor, target.value
        assert value is not None
        if isinstance(tensor, nn.Parameter):
            value = nn.Parameter(value, requires_grad=tensor.requires_grad)
        value.__dict__.update(tensor.__dict__)
        target.value, hooks = None, post_accumulate_hooks(tensor)
        try:
            torch.utils.swap_tensors(tensor, value)  # type: ignore[no-untyped-call]
        except RuntimeError:  # a weak reference to it, or a view of it, holds on to its present content
            if isinstance(tensor, DTensor):
                raise
            for module, name in target.slots:
                places: dict[str, Any] = module._parameters if name in module._parameters else module._buffers
                places[name] = value
            for put in target.places:
                put(value)
        if hooks:
            set_post_accumulate_hooks(tensor, hooks)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            reread_sharded_parameters(module)
