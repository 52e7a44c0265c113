"""What the drop-in prints once: the plan that a program runs by, and how FSDP2 differs."""

from __future__ import annotations

import os
import sys

import torch.distributed as dist
from torch import nn

from shardkit.fsdp1.dropin.record import record_of, without_wrappers, wrappers_of

QUIET = "SHARDKIT_FSDP1_QUIET"

_shown = False


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
