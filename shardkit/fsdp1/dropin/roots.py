"""What FSDP1 decided at the first forward, when it is known which wrapper is the root."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from shardkit._fsdp import not_compiled, own_parameters
from shardkit._fsdp.fsdp1 import set_cast_forward_inputs
from shardkit.fsdp1.dropin import optimizers, tensors
from shardkit.fsdp1.dropin.announce import announce
from shardkit.fsdp1.dropin.record import in_full_precision, inner_of, is_wrapper, record_of, sharded_of, wrappers_of


@not_compiled
def begin(wrapper: nn.Module) -> bool:
    """Make ``wrapper`` the root of all below it, unless that was decided before; return whether it is one. Local.

    As in FSDP1 the root stays gathered after forward and has its own setting for casting inputs, and buffers take
    their ``buffer_dtype`` now.
    """
    record = record_of(wrapper)
    if record.root is None:
        for each in wrappers_of(wrapper):
            record_of(each).root = each is wrapper
            _set_up_unit(each)
        _cast_behind(wrapper)
        _cast_buffers(wrapper)
        optimizers.step_in_backward(wrapper)
        announce(wrapper)
    return record.root is True


@not_compiled
def begin_forward(wrapper: nn.Module) -> None:
    """Make ``wrapper`` the root if it is the first; refuse parameters in another dtype than their own. Local."""
    if begin(wrapper):
        tensors.check_own_dtype(wrapper)


def _set_up_unit(wrapper: nn.Module) -> None:
    record, sharded = record_of(wrapper), sharded_of(wrapper)
    if sharded is None or in_full_precision(wrapper):
        return
    sharded.set_reshard_after_forward(record.reshards, recurse=False)
    set_cast_forward_inputs(sharded, record.casts_inputs)
    precision = record.mixed_precision
    if precision.keep_low_precision_grads and precision.param_dtype is not None:
        for param in own_parameters(sharded):  # type: ignore[arg-type]
            param.grad_dtype = None  # any
            hook = partial(_cast_gradient, precision.param_dtype)
            param.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]


def _cast_gradient(dtype: torch.dtype, param: torch.Tensor) -> None:
    if param.grad is not None:
        param.grad = param.grad.to(dtype)


def _cast_behind(root: nn.Module) -> None:
    """Let the unit of a module that was wrapped twice cast the inputs of the outer wrapper, which has no unit."""
    inner = inner_of(root)
    while is_wrapper(inner) and (sharded := sharded_of(inner)) is None:
        inner = inner_of(inner)
    if is_wrapper(inner) and sharded is not None and record_of(root).casts_inputs:
        set_cast_forward_inputs(sharded, True)


def _cast_buffers(root: nn.Module) -> None:
    """Cast the buffers below ``root``, each by the innermost wrapper around it; those of ignored modules stay."""
    seen: set[int] = set()
    for wrapper in reversed(wrappers_of(root)):  # inner ones first
        record = record_of(wrapper)
        dtype = None if in_full_precision(wrapper) else record.mixed_precision.buffer_dtype
        ignored = record.ignored_in(inner_of(wrapper))
        for module in wrapper.modules():
            for name, buffer in module._buffers.items():
                if buffer is None or id(buffer) in seen or module in ignored:
                    continue
                seen.add(id(buffer))
                if dtype is not None and buffer.is_floating_point():
                    record.buffer_dtypes.setdefault((module, name), buffer.dtype)
                    buffer.data = buffer.to(dtype)
