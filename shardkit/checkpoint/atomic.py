"""A directory that all ranks write together: there when all have succeeded, or not at all."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist

from shardkit.checkpoint import directory
from shardkit.errors import CheckpointError, ShardkitError, message
from shardkit.ranks import Groups, all_gather_bytes, together

T = TypeVar("T")


def shared_token(groups: Groups) -> str:
    """What tells one save of all ranks from all others. Collective."""
    token = directory.new_token()
    return all_gather_bytes(token.encode(), groups[0])[0].decode() if groups else token


def write_whole(
    path: Path, token: str, groups: Groups, write: Callable[[Path], T], finish: Callable[[Path, T], None]
) -> None:
    """Write into a temporary directory beside ``path``, which goes when any rank fails. Collective over ``groups``.

    Args:
        path: of the directory.
        token: of :func:`shared_token`.
        groups: one group, or none for a process alone.
        write: into the temporary directory; collective.
        finish: with what ``write`` returned, put it in its place; the first rank alone, when all have written.

    Raises:
        CheckpointError: on every rank, with the reason of each that failed.
    """
    is_first = not groups or dist.get_rank(groups[0]) == 0
    try:
        _write_and_finish(path, token, groups, write, finish, is_first)
    except BaseException as error:
        if is_first:
            directory.discard(path, token)
        if isinstance(error, Exception) and not isinstance(error, ShardkitError):
            raise CheckpointError(_failure(error)) from error
        raise


def _failure(error: Exception) -> str:
    """Of the disk, where this process is alone; of the connection to a rank that died, or whose group was destroyed."""
    rule = "A checkpoint is complete on all ranks or not there; what was there before is untouched"
    fix = "See why; wait() for a save in the background before destroy_process_group()"
    return message("save_checkpoint", f"{type(error).__name__}: {error}", rule, fix)


def _write_and_finish(
    path: Path,
    token: str,
    groups: Groups,
    write: Callable[[Path], T],
    finish: Callable[[Path, T], None],
    is_first: bool,
) -> None:
    temporary, lock = directory.servant(path, "tmp", token), directory.lock_of(path, token)
    with ExitStack() as held:
        with together(groups, CheckpointError):
            if is_first:
                path.parent.mkdir(parents=True, exist_ok=True)
                directory.clear_stale(path.parent)
                held.enter_context(directory.locked(lock, create=True))
                directory.make_temporary(path, token)
        with together(groups, CheckpointError):
            if not is_first:
                held.enter_context(directory.locked(lock))
        written = write(temporary)
        with together(groups, CheckpointError):
            if is_first:
                finish(temporary, written)
