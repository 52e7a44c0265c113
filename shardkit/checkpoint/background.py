"""Saves in the background: a copy of the state in CPU memory, a thread that writes it, and a
handle.
"""

from __future__ import annotations

import atexit
import logging
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardkit.ranks import Groups

logger = logging.getLogger("shardkit")


class SaveHandle:
    """A save that may still be running.

    A process has at most one: the next save or load waits for it, and so does the exit of the
    interpreter. Call :meth:`wait` before ``destroy_process_group()``.
    """

    def __init__(self, future: Future[None] | None = None) -> None:
        self._future = future  # None when its error has been raised

    def done(self) -> bool:
        """Whether the checkpoint is complete, or the save has failed. Local."""
        return self._future is None or self._future.done()

    def wait(self, timeout: float | None = None) -> None:
        """Return when the checkpoint is complete, on all ranks. Local.

        Args:
            timeout: seconds; None waits as long as it takes.

        Raises:
            CheckpointError: the save failed on some rank; raised once, here or at the next save. An
                earlier checkpoint is unchanged.
            concurrent.futures.TimeoutError: the save is not done in time, and continues.
        """
        if error := self.error(timeout):
            self._future = None
            raise error

    def error(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the save, and return its error, unless that has been raised. Local."""
        return self._future.exception(timeout) if self._future is not None else None


_pending = SaveHandle()


def pending() -> SaveHandle:
    """Return the handle of the last save, or of none. Local."""
    return _pending


def start_in_background(write: Callable[[], None]) -> SaveHandle:
    """Run ``write`` in a thread, for which the exit of the interpreter waits."""
    global _pending
    executor = ThreadPoolExecutor(1, thread_name_prefix="shardkit-save")
    _pending = SaveHandle(executor.submit(write))
    executor.shutdown(wait=False)
    return _pending


@atexit.register
def _report_unseen() -> None:
    """Log the error of a save that nobody waited for."""
    if error := _pending.error():
        logger.error("save_checkpoint: the last checkpoint was not saved: %s", error)


# Collectives of two threads on one group would be matched with each other.
_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = (
    weakref.WeakKeyDictionary()
)


def background_groups(groups: Groups) -> Groups:
    """Return a gloo group of the same ranks for background saves. Collective the first time.

    torch names the group of some ranks by the number of groups that each has: these must be equal.
    """
    if not groups:
        return []
    base = groups[0] or dist.group.WORLD
    assert base is not None, "ranks that save together are in a group"
    if base not in _groups:
        is_world = base is dist.group.WORLD
        ranks = None if is_world else dist.get_process_group_ranks(base)
        _groups[base] = dist.new_group(
            ranks, backend="gloo", use_local_synchronization=not is_world
        )
    return [_groups[base]]


# The memory of each model's last background save, in order. The next one overwrites it: to find new
# pages takes a CPU longer than to fill them.
_kept: weakref.WeakKeyDictionary[nn.Module, list[Tensor]] = weakref.WeakKeyDictionary()


@torch.no_grad()
def copied_to_host(tensors: Iterable[Tensor], model: nn.Module) -> list[Tensor]:
    """Return copies of plain tensors in CPU memory. Local; no save of the model may be running."""
    kept = iter(_kept.pop(model, []))
    copies, devices = [], set()
    for tensor in tensors:
        memory = next(kept, None)
        if memory is None or (memory.shape, memory.dtype) != (tensor.shape, tensor.dtype):
            pin = tensor.device.type not in ("cpu", "mps")
            memory = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pin)
        copies.append(memory.copy_(tensor, non_blocking=True))
        devices.add(tensor.device)
    for device in devices:
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
    _kept[model] = copies
    return copies
