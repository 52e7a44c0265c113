"""What FSDP1 decided at the first forward, when it is known which wrapper is the root."""

from __future__ import annotations

import os
import sys

import torch.distributed as dist
from torch import nn

from shardkit._fsdp import not_compiled
from shardkit._fsdp.fsdp1 import optimizers_in_backward, set_cast_forward_inputs
from shardkit.errors import message
from shardkit.fsdp1.dropin import tensors
from shardkit.fsdp1.dropin.record import (
    Unavailable,
    in_full_precision,
    inner_of,
    is_wrapper,
    record_of,
    sharded_of,
    without_wrappers,
    wrappers_of,
)

QUIET = "SHARDKIT_FSDP1_QUIET"

_shown = False


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
        _refuse_optimizers_in_backward(wrapper)
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


def _refuse_optimizers_in_backward(root: nn.Module) -> None:
    if any(map(optimizers_in_backward, root.parameters())):
        rule = "FSDP2 does not step such optimizers, so nothing would train"
        fix = "Call shardkit.optimizer_in_backward(model, factory) after wrapping instead"
        raise Unavailable(message("_apply_optimizer_in_backward", "was called on the parameters", rule, fix))


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


def announce(root: nn.Module) -> None:
    """Print to stderr how a model runs, on rank 0, once in a process, unless ``SHARDKIT_FSDP1_QUIET`` is set. Local.

    Args:
        root: a wrapper that has just become a root, with all that is wrapped below it.
    """
    global _shown
    if _shown or os.environ.get(QUIET, "0") not in ("", "0") or (dist.is_initialized() and dist.get_rank() != 0):
        return
    _shown = True
    print("", announcement(root), sep="\n", file=sys.stderr, flush=True)  # a progress bar may have begun a line


def announcement(root: nn.Module) -> str:
    """Return the text: the plan and the notes of each call of the constructor at and below ``root``. Pure."""
    parts = [f"shardkit.fsdp1: FullyShardedDataParallel runs on fully_shard. Shown once; set {QUIET}=1 to silence."]
    named = {id(module): without_wrappers(name) for name, module in root.named_modules()}
    notes: dict[str, None] = {}
    for wrapper in wrappers_of(root):
        record = record_of(wrapper)
        if record.top and record.translation.plan.units:
            name = named[id(wrapper)]
            parts.append((f"{name}: " if name else "") + str(record.translation.plan))
            changed = record.given.changed()
            told = [note for note in record.translation.notes if note.argument.partition(".")[0] in changed]
            notes.update({f"- {note}": None for note in told if note.support not in ("mapped", "implied")})
    if notes:
        parts.append("\n".join(["What differs in FSDP2:", *notes]))
    parts.append(
        "The same without the wrapper: model = shard_like_fsdp1(model, ...) from shardkit.fsdp1, with the same "
        "arguments,\nbefore the optimizer is built. For the rest of the program: python -m shardkit audit FILES"
    )
    return "\n\n".join(parts)
