"""stop_requested: end a training loop on SIGTERM, after the same step on every rank."""

from __future__ import annotations

import os
import signal
from types import FrameType

import torch.distributed as dist

from shardkit.ranks import max_over_ranks, note, one_group

_received = 0  # the last signal of this process


def stop_requested(group: dist.ProcessGroup | None = None) -> bool:
    """Return whether any rank has received SIGTERM. **Collective**: one all-reduce of 8 bytes.

    The first call replaces the process's handler of SIGTERM: from then on the signal no longer ends
    the process. All ranks get the same answer, which stays True once it is. Call it once a step;
    with NCCL alone it waits for the GPU, as ``loss.item()`` does.

    Args:
        group: whose ranks call it; the default process group without one.

    Raises:
        ValueError: by Python, outside of the main thread, where handlers cannot be set.

    Examples:
        >>> while step < steps and not stop_requested():
        ...     step += 1
    """
    if signal.getsignal(signal.SIGTERM) is not _receive:
        signal.signal(signal.SIGTERM, _receive)
    note("stop_requested")
    return max_over_ranks([_received], one_group(group)[0]) != [0]


def _receive(number: int, frame: FrameType | None) -> None:
    global _received
    _received = number


def _end_as_usual() -> None:
    """Let SIGTERM end a fork of this process, as ``multiprocessing`` ends its workers."""
    if signal.getsignal(signal.SIGTERM) is _receive:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


os.register_at_fork(after_in_child=_end_as_usual)
