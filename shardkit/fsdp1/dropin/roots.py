"""What FSDP1 decided at the first forward, when it is known which wrapper is the root."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, ShardingStrategy

from shardkit._fsdp import initialize, not_compiled, own_parameters
from shardkit._fsdp.fsdp1 import accumulating_in_param_dtype, set_cast_forward_inputs
from shardkit.fsdp1.dropin import optimizers
from shardkit.fsdp1.dropin.announce import announce
from shardkit.fsdp1.dropin.methods import not_gathered
from shardkit.fsdp1.dropin.record import in_full_precision, inner_of, record_of, sharded_of, wrappers_of
from shardkit.sharded.entry import attend
from shardkit.sharded.outside import refuse_calls_outside


@not_compiled
def begin(wrapper: nn.Module) -> bool:
    """Makes ``wrapper`` the root of all below it, unless that was decided before; returns whether it is one. Local.

    As in FSDP1 the root is not resharded after forward and casts its inputs, which the others do not; and buffers
    take their ``buffer_dtype`` now.
    """
    record = record_of(wrapper)
    if record.root is None:
        for each in wrappers_of(wrapper):
            record_of(each).root = each is wrapper
            _settle(each)
        _cast_buffers(wrapper)
        optimizers.step_in_backward(wrapper)
        announce(wrapper)
    return record.root is True


def attend_to(module: nn.Module, strategy: ShardingStrategy) -> None:
    """The core's ``attend``: a child, ``module.forward`` or inference_mode first, double backward. Local, in place.

    Under NO_SHARD every rank has whole parameters (``tensors``), so that any module may be called.
    """
    if isinstance(module, FSDPModule):
        attend(module)
        if strategy is not ShardingStrategy.NO_SHARD:
            refuse_calls_outside(module, not_gathered)


@contextmanager
def accumulating(root: nn.Module) -> Iterator[None]:
    """In this context gradients that are not reduced add up in ``param_dtype``, as FSDP1's did. Local."""
    sharded = sharded_of(root)
    if sharded is not None:
        initialize(sharded)
    with accumulating_in_param_dtype(root):
        yield


@not_compiled
def reshard(wrapper: nn.Module) -> None:
    """Frees what a forward left gathered for a backward that will not come. Local.

    Else ``parameters()`` of a module around the wrapper would show full tensors, and an optimizer made from them
    would train them for nothing.
    """
    for module in wrapper.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _settle(wrapper: nn.Module) -> None:
    """Tell the wrapper's unit whether it is the root's."""
    record, sharded = record_of(wrapper), sharded_of(wrapper)
    if sharded is None or in_full_precision(wrapper):
        return
    sharded.set_reshard_after_forward(record.reshards, recurse=False)
    set_cast_forward_inputs(sharded, record.casts_inputs)
    precision = record.mixed_precision
    if precision.keep_low_precision_grads and precision.param_dtype is not None:
        for param in own_parameters(sharded):  # type: ignore[arg-type]
            param.grad_dtype = None  # any
            lower = partial(_lower, precision.param_dtype)
            param.register_post_accumulate_grad_hook(lower)  # type: ignore[no-untyped-call]


def _lower(dtype: torch.dtype, param: torch.Tensor) -> None:
    if param.grad is not None:
        param.grad = param.grad.to(dtype)


def _cast_buffers(root: nn.Module) -> None:
    for wrapper, module, name in buffers_by_wrapper(root):
        record, buffer = record_of(wrapper), module._buffers[name]
        dtype = None if in_full_precision(wrapper) else record.mixed_precision.buffer_dtype
        if dtype is not None and buffer is not None and buffer.is_floating_point():
            record.buffer_dtypes.setdefault((module, name), buffer.dtype)
            buffer.data = buffer.to(dtype)


def buffers_by_wrapper(root: nn.Module) -> Iterator[tuple[nn.Module, nn.Module, str]]:
    """The innermost wrapper around each buffer, the buffer's module and name; none of ignored modules. Local, pure."""
    seen: set[int] = set()
    for wrapper in reversed(list(wrappers_of(root))):  # inner ones first
        ignored = record_of(wrapper).ignored_in(inner_of(wrapper))
        for module in wrapper.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and id(buffer) not in seen and module not in ignored:
                    seen.add(id(buffer))
                    yield wrapper, module, name
