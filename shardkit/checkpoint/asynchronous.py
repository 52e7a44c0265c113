"""The ranks of a save or a load; and saves in the background: a copy of the state, a thread, and a handle."""

from __future__ import annotations

import atexit
import logging
import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardkit._torch import with_local
from shardkit.checkpoint.chunks import MASK
from shardkit.errors import CheckpointError, message
from shardkit.ranks import Groups, collective_device, raise_together
from shardkit.shards import local_value

logger = logging.getLogger("shardkit")

# ---- ranks ------------------------------------------------------------------------------------------------------


def world(group: dist.ProcessGroup | None = None) -> Groups:
    """Return the group that was passed, which must contain this rank, or the default group; none for one rank."""
    if not dist.is_initialized():
        return []
    if group is not None and dist.get_rank(group) < 0:
        problem = f"does not have rank {dist.get_rank()}, which makes the call"
        raise CheckpointError(message("group", problem, "", "Pass each rank a group that it is in"))
    return [group] if dist.get_world_size(group) > 1 else []


def own_rank() -> int:
    """Return this process's global rank."""
    return dist.get_rank() if dist.is_initialized() else 0


def ranks_of(groups: Groups) -> list[int]:
    """Return the global ranks of the one group, ascending, or this rank alone. Local."""
    return sorted(dist.get_process_group_ranks(groups[0])) if groups else [own_rank()]


def sums_on_each(body: Callable[[], Sequence[int]], count: int, groups: Groups) -> list[int]:
    """Run a local body, and return sums over ranks of its ``count`` numbers, mod 2**64, or raise on all. Collective.

    One all-reduce, so that what a rank receives does not grow with the number of ranks.
    """
    if not groups:
        return list(body())
    own, problem = [0] * count, None
    try:
        own = list(body())
    except Exception as error:  # whatever it is, the other ranks must not wait for this one
        problem = error
    signed = [each - (each >> 63 << 64) for each in (*own, int(problem is not None))]
    for group in groups:
        total = torch.tensor(signed, device=collective_device(group))
        dist.all_reduce(total, group=group)
        signed = total.tolist()
    if signed.pop():
        raise_together(problem, groups, CheckpointError)
    return [each & MASK for each in signed]


# ---- in the background ------------------------------------------------------------------------------------------


class SaveHandle:
    """A save that may still be running.

    A process has at most one: the next save or load waits for it, and so does the exit of the interpreter. Call
    :meth:`wait` before ``destroy_process_group()``.
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
            CheckpointError: the save failed on some rank; raised once, here or at the next save. An earlier
                checkpoint is unchanged.
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


def start_pending(write: Callable[[], None]) -> SaveHandle:
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


# Of background saves: collectives of two threads on one group would be matched with each other.
_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = weakref.WeakKeyDictionary()


def background_groups(groups: Groups) -> Groups:
    """Return a gloo group of the same ranks for background saves; none for one rank. Collective the first time.

    torch names the group of some ranks by the number of groups that each has: these must be equal.
    """
    if not groups:
        return []
    base = groups[0] or dist.group.WORLD
    assert base is not None, "ranks that save together are in a group"
    if base not in _groups:
        ranks = None if base is dist.group.WORLD else dist.get_process_group_ranks(base)
        _groups[base] = dist.new_group(ranks, backend="gloo", use_local_synchronization=ranks is not None)
    return [_groups[base]]


# The memory of each model's last background save, by shape, dtype and device of the tensors. The next overwrites it:
# to find new pages takes a CPU longer than to fill them.
_Kept: TypeAlias = dict[tuple[torch.Size, torch.dtype, torch.device], list[Tensor]]
_kept: weakref.WeakKeyDictionary[nn.Module, _Kept] = weakref.WeakKeyDictionary()


@torch.no_grad()
def host_copies(tensors: Iterable[Tensor], model: nn.Module) -> dict[int, Tensor]:
    """Copy into CPU memory, each once, by the tensors' ids. Local; no save of the model may be running."""
    spare, used = _kept.pop(model, {}), _Kept()
    made: dict[int, Tensor] = {}
    for tensor in tensors:
        if id(tensor) in made:
            continue
        part = local_value(tensor)
        kind = (part.shape, part.dtype, part.device)
        if not (found := spare.get(kind)):
            found = [torch.empty(part.shape, dtype=part.dtype, pin_memory=part.device.type not in ("cpu", "mps"))]
        buffer = found.pop().copy_(part, non_blocking=True)
        used.setdefault(kind, []).append(buffer)
        made[id(tensor)] = with_local(tensor, buffer) if isinstance(tensor, DTensor) else buffer
    if any(device.type != "cpu" for _, _, device in used):
        torch.accelerator.synchronize()
    _kept[model] = used
    return made
