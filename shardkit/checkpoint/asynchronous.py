"""Saving while training goes on: a copy of the state, a thread that writes it, and a handle to wait for."""

from __future__ import annotations

import atexit
import contextlib
import logging
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardkit._torch import process_groups, with_local
from shardkit.errors import CheckpointError, listing, message
from shardkit.ranks import Groups, all_gather_bytes

logger = logging.getLogger("shardkit")


class SaveHandle:
    """A save that may still be going on.

    There is at most one in a process: the next save, or a load, waits for it. The interpreter's exit waits for it too.
    Wait for it before ``destroy_process_group()``.
    """

    def __init__(self) -> None:
        self._future: Future[None] | None = None  # until its error was raised

    def start(self, write: Callable[[], None]) -> SaveHandle:
        """Run ``write`` in a thread. The interpreter's exit waits for it: the last checkpoint must not be lost."""
        executor = ThreadPoolExecutor(1, thread_name_prefix="shardkit-save")
        self._future = executor.submit(write)
        executor.shutdown(wait=False)
        return self

    def done(self) -> bool:
        """Whether the checkpoint is complete, or the save has failed. Local."""
        return self._future is None or self._future.done()

    def wait(self, timeout: float | None = None) -> None:
        """Return when the checkpoint is complete, on all ranks. Local.

        Args:
            timeout: seconds; None waits as long as it takes.

        Raises:
            CheckpointError: the save failed, on any rank; raised once, here or at the next save. What was there
                before is untouched.
            TimeoutError: it is not done in time, and goes on.
        """
        self.finish(timeout)

    def finish(self, timeout: float | None = None, *, keep_group: bool = False) -> None:
        """As :meth:`wait`; may leave the group of the background to the next save."""
        if self._future is None:
            return
        if wait([self._future], timeout).not_done:
            raise TimeoutError(message("save_checkpoint", f"not done after {timeout} s", "It goes on", "Wait again"))
        if not keep_group and _pending in (self, None):
            release_groups()
        future, self._future = self._future, None
        future.result()

    def report_unseen(self) -> None:
        """Log the error that nobody was told."""
        error = None if self._future is None else self._future.exception()
        if error is not None:
            logger.error("save_checkpoint: the last checkpoint was not saved: %s", error)


_pending: SaveHandle | None = None


def finish_pending(*, keep_group: bool = False) -> None:
    """Wait for the save that is going on, if any, and raise if it failed. Local.

    Args:
        keep_group: leave the group that it used to the next save in the background.
    """
    global _pending
    pending, _pending = _pending, None
    if pending is not None:
        pending.finish(keep_group=keep_group)


def start_pending(write: Callable[[], None]) -> SaveHandle:
    """Start a save that the next one will wait for."""
    global _pending
    _pending = SaveHandle().start(write)
    return _pending


@atexit.register
def _report_unseen() -> None:
    if _pending is not None:
        _pending.report_unseen()


# Where the ranks of a background save meet. Collectives of two threads on one group would be matched with each other.
_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = weakref.WeakKeyDictionary()


def background_groups(groups: Groups) -> Groups:
    """A gloo group of the same ranks for background saves; none for a rank alone. Collective the first time.

    Raises:
        CheckpointError: on every rank; torch could not name the group alike on all of them.
    """
    if not groups:
        return []
    base = groups[0] or dist.group.WORLD
    assert base is not None, "ranks that save together are in a group"
    if base not in _groups:
        _groups[base] = _new_group(base)
    return [_groups[base]]


def _new_group(base: dist.ProcessGroup) -> dist.ProcessGroup:
    if base is dist.group.WORLD:
        return dist.new_group(backend="gloo")  # type: ignore[no-any-return]
    counts = [int(each) for each in all_gather_bytes(str(len(process_groups.pg_names)).encode(), base)]
    if len(set(counts)) > 1:
        problem = f"its ranks are in {listing(map(str, counts))} process groups"
        rule = "async_=True makes a group of these ranks alone, which torch names by how many there are"
        raise CheckpointError(message("group", problem, rule, "Pass async_=False, or make as many groups on each rank"))
    ranks = dist.get_process_group_ranks(base)
    return dist.new_group(ranks, backend="gloo", use_local_synchronization=True)  # type: ignore[no-any-return]


def release_groups() -> None:
    """Destroy the groups of background saves, none of which is going on, with their threads and descriptors. Local."""
    for base in list(_groups):
        group = _groups.pop(base)
        with contextlib.suppress(ValueError, AssertionError):  # destroyed before, with the world
            dist.destroy_process_group(group)


class Staging:
    """CPU memory for a copy of a state, pinned where that comes from an accelerator, and used again by later saves."""

    def __init__(self) -> None:
        self._copies: dict[str, Tensor] = {}

    @torch.no_grad()
    def copy(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors with this rank's part copied; waits for the device. Local.

        The result is valid until the next call.
        """
        first = {id(tensors[name]): name for name in reversed(list(tensors))}
        made = {key: self._copy(name, tensors[name]) for key, name in first.items()}
        copies = {name: made[id(tensor)] for name, tensor in tensors.items()}  # tied ones stay one object
        if any(tensor.device.type != "cpu" for tensor in tensors.values()):
            torch.accelerator.synchronize()
        for name in self._copies.keys() - set(first.values()):
            del self._copies[name]
        return copies

    def _copy(self, name: str, tensor: Tensor) -> Tensor:
        part = tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()
        buffer = self._copies.get(name)
        if buffer is None or (buffer.shape, buffer.dtype) != (part.shape, part.dtype):
            pin = part.device.type not in ("cpu", "mps")
            self._copies[name] = buffer = torch.empty(part.shape, dtype=part.dtype, pin_memory=pin)
        buffer.copy_(part, non_blocking=True)
        return with_local(tensor, buffer) if isinstance(tensor, DTensor) else buffer


_stagings: weakref.WeakKeyDictionary[nn.Module, Staging] = weakref.WeakKeyDictionary()


def staging_of(model: nn.Module) -> Staging:
    """The staging memory of a model, which lives as long as the model does."""
    return _stagings.setdefault(model, Staging())
