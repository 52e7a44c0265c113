"""FSDP1's MixedPrecision and CPUOffload, as FSDP2's policies for each unit."""

from __future__ import annotations

import torch
from torch.distributed.fsdp import CPUOffload, CPUOffloadPolicy, MixedPrecision, MixedPrecisionPolicy, OffloadPolicy

from shardkit.fsdp1.translate.policy import Ignored, Wrapped
from shardkit.planning.tree import ModelTree


def mp_policy(mixed_precision: MixedPrecision | None, *, root: bool) -> MixedPrecisionPolicy:
    """FSDP2's policy for a unit.

    FSDP1 reduces in ``param_dtype`` where ``reduce_dtype`` is None, which FSDP2 does not since torch 2.15. FSDP1 casts
    the inputs of the root only, unless it is told to cast those of every unit; FSDP2 has one flag for each unit.
    """
    if mixed_precision is None or mixed_precision.param_dtype is None:
        return MixedPrecisionPolicy(reduce_dtype=mixed_precision.reduce_dtype if mixed_precision else None)
    return MixedPrecisionPolicy(
        param_dtype=mixed_precision.param_dtype,
        reduce_dtype=mixed_precision.reduce_dtype or mixed_precision.param_dtype,
        cast_forward_inputs=mixed_precision.cast_forward_inputs or (root and mixed_precision.cast_root_forward_inputs),
    )


def full_precision_policy(around: MixedPrecision | None) -> MixedPrecisionPolicy:
    """For BatchNorm: inputs are cast to float32 and outputs back, by hooks in FSDP1 and by the policy in FSDP2."""
    if around is None or around.param_dtype in (None, torch.float32):
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(torch.float32, torch.float32, output_dtype=around.param_dtype)


def offload_policy(cpu_offload: CPUOffload | None, device: torch.device | None) -> OffloadPolicy:
    """FSDP2's policy; memory is pinned for copies to an accelerator only, and raises where there is none."""
    if cpu_offload is None or not cpu_offload.offload_params:
        return OffloadPolicy()
    on_accelerator = torch.accelerator.is_available() and (device is None or device.type != "cpu")
    return CPUOffloadPolicy(pin_memory=on_accelerator)


def buffer_dtypes(
    tree: ModelTree, wrapped: list[Wrapped], mixed_precision: MixedPrecision | None, ignored: Ignored
) -> dict[str, torch.dtype]:
    """What FSDP1 casts each floating-point buffer to at the first forward, by its first FQN.

    A buffer follows the innermost unit around it; those of ignored modules stay as they are.
    """
    own = {each.entry: _buffer_dtype(each, mixed_precision) for each in wrapped}
    around: list[torch.dtype | None] = []
    found: dict[str, torch.dtype] = {}
    seen: set[int] = set()
    for entry, module in enumerate(tree.modules):
        outer = around[tree.parents[entry]] if entry else (mixed_precision.buffer_dtype if mixed_precision else None)
        around.append(own.get(entry, outer))
        dtype = around[entry]
        for name, buffer in module.named_buffers(recurse=False):
            if id(buffer) in seen or module in ignored.modules:
                continue
            seen.add(id(buffer))
            if dtype is not None and buffer.is_floating_point():
                found[f"{tree.fqns[entry]}.{name}".lstrip(".")] = dtype
    return found


def _buffer_dtype(wrapped: Wrapped, mixed_precision: MixedPrecision | None) -> torch.dtype | None:
    own = None if wrapped.full_precision else wrapped.arguments.get("mixed_precision", mixed_precision)
    return own.buffer_dtype if own is not None else None
