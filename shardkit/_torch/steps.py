"""Private names of torch for gradients and optimizers: one kernel for many tensors, and what a step
reads.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardkit._torch import local_tensor, require_names, torch_version

# grads: one kernel for many tensors, as in torch.nn.utils.clip_grad_norm_; no public names (torch
# 2.13 to 2.15).
foreach_norm = torch._foreach_norm
foreach_mul_ = torch._foreach_mul_


def by_device_and_dtype(tensors: Iterable[Tensor | None]) -> list[list[Tensor]]:
    """Return the local tensors in groups that one such kernel accepts."""
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
    for tensor in tensors:
        if tensor is not None:
            local = local_tensor(tensor) if isinstance(tensor, DTensor) else tensor
            groups[local.device, local.dtype].append(local)
    return list(groups.values())


def local_tensors(
    tensors: list[Any], params: list[Any], otherwise: Callable[[DTensor, Any], Tensor]
) -> list[Any]:
    """Return the local tensor of each DTensor placed like its parameter, and other tensors
    unchanged. Local.

    ``otherwise`` is called with a DTensor of other placements and its parameter, and returns its
    local tensor.
    """
    local = []
    for tensor, param in zip(tensors, params, strict=True):
        if not isinstance(tensor, DTensor):
            local.append(tensor)
        elif isinstance(param, DTensor) and tensor._spec.placements == param._spec.placements:
            local.append(tensor._local_tensor)
        else:
            local.append(otherwise(tensor, param))
    return local


def redistributed(grad: DTensor, param: Any) -> Tensor:
    """Place a gradient like its parameter, such as a Partial one of
    tensor parallelism. Collective.
    """
    return grad.redistribute(placements=param.placements).to_local()


# optim: torch's optimizers collect the tensors of a step in this method: it appends each
# parameter's to a list of parameters, one of gradients, and one for each kind of state that the
# update needs (torch 2.13 to 2.15).
COLLECT = "_init_group"


def count_for_schedulers(step: Any) -> None:
    """Keep LR schedulers from replacing a step function (torch 2.13 to 2.15), which then calls
    :func:`note_step`.
    """
    step._wrapped_by_lr_sched = True


def counts_for_schedulers(step: Any) -> bool:
    """Return whether ``optimizer.step`` is an LR scheduler's wrapper, or marked as one."""
    return hasattr(step, "_wrapped_by_lr_sched")


def note_step(optimizer: Any) -> None:
    """Tell an LR scheduler that the optimizer stepped; otherwise it warns of a wrong order."""
    optimizer._opt_called = True


# optim: with this attribute GradScaler leaves infs to the step; otherwise it asserts that there
# were gradients.
SCALES_ITSELF = "_step_supports_amp_scaling"


def steps_in_backward(parameters: Iterable[Tensor]) -> bool:
    """Return whether ``optimizer_in_backward`` steps any of the parameters: its hook has an
    attribute for this.
    """
    for param in parameters:
        for hook in (param._post_accumulate_grad_hooks or {}).values():
            if getattr(hook, "steps_in_backward", False):
                return True
    return False


def wait_for_offload(param: DTensor) -> None:
    """Wait in a gradient's hook until an offloaded one is there. Local; before torch 2.13 it may be
    on its way.
    """
    device = param.device_mesh.device_type
    if torch_version() < (2, 13) and local_tensor(param).is_cpu and device != "cpu":
        torch.get_device_module(device).current_stream().synchronize()


# grads: ``DTensor.device_mesh`` without the property, in a third of the time.
mesh_of: Callable[[DTensor], DeviceMesh] = operator.attrgetter("_spec.mesh")

# grads: the kernel of torch.amp.GradScaler, for plain tensors of one device and dtype.
amp_unscale_ = torch._amp_foreach_non_finite_check_and_unscale_


class UnscalingGradScaler(torch.amp.GradScaler):
    """``torch.amp.GradScaler`` whose subclasses have a method ``unscale_grads``.

    ``unscale_`` and ``step`` call ``_unscale_grads_`` (torch 2.11 to 2.15); torch has no public way
    to replace it.
    """

    # multiplies all gradients by the second argument; returns 1.0 if any rank has a non-finite one,
    # else 0.0
    unscale_grads: Any

    def __init_subclass__(cls) -> None:
        require_names(torch.amp.GradScaler, "GradScaler", ["_unscale_grads_"])

    def _unscale_grads_(
        self, optimizer: Any, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool = True
    ) -> dict[torch.device, Tensor]:
        return {found_inf.device: self.unscale_grads(optimizer, inv_scale, found_inf, allow_fp16)}
