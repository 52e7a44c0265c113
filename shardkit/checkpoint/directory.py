"""Write a checkpoint directory under a temporary name, flush it and rename it; find the latest; rotate old ones.

During a save, these may be next to ``runs/step-100``::

    .step-100.tmp-<token>        a checkpoint that is being written
    .step-100.tmp-<token>.lock   locked by the first rank; the system unlocks it when that dies
    .step-100.old-<token>        a checkpoint that is being replaced: between two renames, and until it is deleted
    .step-100.gone-<token>       a checkpoint that is being deleted

So a directory with the checkpoint's name is always complete, even if its writers were killed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

from shardkit.checkpoint import manifest
from shardkit.checkpoint.agreement import on_each, own_rank, ranks_of
from shardkit.checkpoint.transfer import flush_directory, flush_files, opened
from shardkit.errors import CheckpointError, ShardkitError, listing, message
from shardkit.ranks import Groups

_SIBLING = re.compile(r"^\.(?P<name>.+)\.(?P<kind>tmp|old|gone)-(?P<token>[0-9a-f]{16})(?P<lock>\.lock)?$")
_deletions: list[threading.Thread] = []


def new_token() -> str:
    """Return a random token, by which the siblings of one save differ from those of others."""
    return secrets.token_hex(8)


def sibling_path(path: Path, kind: str, token: str) -> Path:
    """Return the sibling of ``path`` that is written (``"tmp"``), replaced (``"old"``) or deleted (``"gone"``)."""
    return path.with_name(f".{path.name}.{kind}-{token}")


def lock_of(path: Path, token: str) -> Path:
    """Return the lock file of a save, which exists before its temporary directory does."""
    return path.with_name(f".{path.name}.tmp-{token}.lock")


# ---- write: all ranks -------------------------------------------------------------------------------------------


class Draft(NamedTuple):
    """A directory that is being written; the first rank passes its token to :func:`commit`."""

    directory: Path
    token: str
    is_first: bool


@contextmanager
def temporary_directory(path: Path, groups: Groups, prepare: Callable[[Path], None] | None = None) -> Iterator[Draft]:
    """Make a directory beside ``path`` for all ranks to fill; delete it if any fails. Collective over ``groups``.

    The first rank calls ``prepare`` with it before the others see it.

    Raises:
        CheckpointError: on every rank, with the reason of each rank that failed.
    """
    token, is_first = new_token(), False

    def make() -> str:
        if is_first:
            path.parent.mkdir(parents=True, exist_ok=True)
            clear_stale(path.parent)
            held.enter_context(locked(lock_of(path, token), create=True))
            sibling_path(path, "tmp", token).mkdir()
            if prepare is not None:
                prepare(sibling_path(path, "tmp", token))
        return token

    try:
        with ExitStack() as held:
            first = ranks_of(groups)[0]
            is_first = own_rank() == first
            token = on_each(make, groups)[first]
            yield Draft(sibling_path(path, "tmp", token), token, is_first)
    except BaseException as error:
        if is_first:
            shutil.rmtree(sibling_path(path, "tmp", token), ignore_errors=True)
            if not sibling_path(path, "tmp", token).exists():
                _unlink(lock_of(path, token))
        if isinstance(error, Exception) and not isinstance(error, ShardkitError):
            # From the disk, in a process alone; or from a rank that died, or a group that was destroyed.
            rule = "A checkpoint is complete on all ranks or does not appear; any earlier checkpoint is unchanged"
            fix = "See the cause, and wait() for a save in the background before destroy_process_group()"
            problem = f"failed ({type(error).__name__}: {error})"
            raise CheckpointError(message("save_checkpoint", problem, rule, fix)) from error
        raise


def commit(path: Path, token: str, *, replace: bool = False, keep: int | None = None) -> None:
    """Rename the temporary directory, whose files are flushed, to ``path``. Local: the first rank calls it, last.

    With ``replace``, an existing directory is renamed away first, and deleted in a thread afterwards, as are the
    checkpoints that :func:`rotate` deletes. After a kill between the two renames, :func:`find` finds it under the other
    name, and the next save restores it.

    Raises:
        OSError: a directory that must not be replaced has appeared meanwhile.
    """
    temporary, old = sibling_path(path, "tmp", token), sibling_path(path, "old", token)
    flush_directory(temporary)
    if replace and path.exists():
        os.rename(path, old)
    try:
        os.rename(temporary, path)
    except OSError:
        if old.exists():
            os.rename(old, path)
        raise
    flush_directory(path.parent)
    gone = sibling_path(path, "gone", token)  # which, unlike the other, nobody restores when it is half deleted
    with contextlib.suppress(OSError):
        os.rename(old, gone)
    _unlink(lock_of(path, token))

    def delete() -> None:
        shutil.rmtree(gone, ignore_errors=True)  # files that are not ours were carried over
        if keep is not None:
            rotate(path, keep)

    if keep is not None or gone.exists():
        _deletions.append(threading.Thread(target=delete, name="shardkit-delete"))
        _deletions[-1].start()


def finish_deletions() -> None:
    """Wait for what saves of this process still delete; so does the exit of the interpreter. Local."""
    while _deletions:
        _deletions.pop().join()


def carry_over(old: Path, new: Path, ours: Callable[[str], bool]) -> None:
    """Link the files and directories in ``old`` that are not ours into ``new``. Local.

    Raises:
        CheckpointError: ``new`` already has one of these names.
    """
    theirs = [each for each in sorted(old.iterdir()) if not ours(each.name)] if old.is_dir() else []
    if taken := [each.name for each in theirs if os.path.lexists(new / each.name)]:
        rule = "This save writes files of the same names, and shardkit replaces only files that it wrote"
        raise CheckpointError(message(str(old), f"has {listing(taken)}", rule, "Move them, or use another path"))
    for each in theirs:
        if each.is_dir() and not each.is_symlink():
            shutil.copytree(each, new / each.name, symlinks=True, copy_function=_link)
            for parent, _, _ in os.walk(new / each.name):
                flush_directory(Path(parent))
        else:
            _link(each, new / each.name)


def _link(source: str | Path, target: str | Path) -> None:
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:  # a file system without hard links
        shutil.copy2(source, target, follow_symlinks=False)
        if not os.path.islink(target):
            flush_files([Path(target)])


def _unlink(file: Path) -> None:
    with contextlib.suppress(OSError):
        file.unlink()


# ---- lock, find and clear ---------------------------------------------------------------------------------------


@contextmanager
def locked(file: Path, *, create: bool = False) -> Iterator[None]:
    """Hold the file's shared lock, where the file system has locks; it also ends with the process. Local."""
    while True:
        with opened(file, os.O_RDWR | os.O_CREAT if create else os.O_RDONLY) as descriptor:
            with contextlib.suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_SH)
            # Else it was deleted after it was opened and before it was locked.
            if not create or (file.exists() and os.path.samestat(os.stat(file), os.fstat(descriptor))):
                yield
                return


@contextmanager
def _if_unused(file: Path) -> Iterator[bool]:
    """Yield whether no process holds the file's lock, and keep others from taking it; False if that is unknown."""
    with ExitStack() as held:
        try:
            descriptor = held.enter_context(opened(file, os.O_RDWR))  # NFS needs write access for exclusive locks
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_unused = True
        except OSError as error:
            is_unused = isinstance(error, FileNotFoundError)
        yield is_unused


def find(path: Path) -> Path:
    """Return where the checkpoint is: at ``path``, or where a save that was killed had moved it. Local, pure.

    Raises:
        CheckpointError: there is none.
    """
    if path.exists():
        return path
    for sibling, match in _siblings(path.parent):
        if (match["name"], match["kind"]) == (path.name, "old"):
            return sibling
    near = sorted(each.name for each in path.parent.iterdir()) if path.parent.is_dir() else []
    rule = f"Beside it are {listing(near, 10)}" if near else f"{path.parent} is empty or does not exist"
    fix = "Pass the path of a checkpoint, or latest_checkpoint()"
    raise CheckpointError(message("path", f"{path} does not exist", rule, fix))


def _siblings(parent: Path) -> list[tuple[Path, re.Match[str]]]:
    """Return the files and directories in ``parent`` that saves make and remove, sorted by name."""
    found = sorted(parent.iterdir()) if parent.is_dir() else []
    return [(each, match) for each in found if (match := _SIBLING.match(each.name))]


def clear_stale(parent: Path) -> None:
    """Delete what killed saves left in ``parent``, and restore what they were replacing. Local, best effort.

    Leaves alone what belongs to a save whose lock a process holds, or whose lock cannot be tested.
    """
    for sibling, match in _siblings(parent):
        place = parent / match["name"]
        lock = lock_of(place, match["token"])
        with _if_unused(lock) as unused, contextlib.suppress(OSError):
            if not unused:
                continue
            if match["kind"] == "old" and not place.exists():
                os.rename(sibling, place)
            elif sibling == lock or sibling.is_symlink():
                sibling.unlink()
            else:
                shutil.rmtree(sibling, ignore_errors=True)


# ---- rotate -----------------------------------------------------------------------------------------------------


def latest_checkpoint(root: str | os.PathLike[str]) -> Path | None:
    """Return the newest complete checkpoint of shardkit in the directory ``root``, or None. Local, pure.

    The newest is the one that was completed last, whatever its name. A checkpoint is complete if its manifest is
    undamaged and every file has its size; leftovers of killed saves, unfinished saves and other directories are not.

    Example:
        >>> path = latest_checkpoint("runs")
        >>> start = load_checkpoint(path, model, optimizer)["step"] if path else 0
    """
    return next(reversed(_complete_checkpoints(Path(root))), None)


def _complete_checkpoints(root: Path) -> list[Path]:
    """Return all complete checkpoints in ``root``, oldest first."""
    candidates = [each for each in root.iterdir() if not each.name.startswith(".")] if root.is_dir() else []
    created = [(manifest.created_if_whole(each), each) for each in candidates if each.is_dir()]
    return [each for _, each in sorted((at, each) for at, each in created if at is not None)]


def rotate(path: Path, keep: int) -> None:
    """Delete all but the newest ``keep`` complete checkpoints of the family of ``path``. Local.

    A family are siblings whose names differ only in numbers, so ``best`` survives the rotation of ``step-100``.
    ``path`` itself is never deleted, nor a checkpoint that is being loaded, since loading holds its lock, nor one with
    files that shardkit did not write. Damaged checkpoints are neither counted nor deleted, and links are only counted.
    """

    def family(name: str) -> str:
        return re.sub(r"\d+", "#", name)

    found = [each for each in _complete_checkpoints(path.parent) if family(each.name) == family(path.name)]
    for each in found[: max(len(found) - keep, 0)]:
        gone = sibling_path(each, "gone", new_token())
        # Another process may rotate too.
        with _if_unused(each / manifest.NAME) as unused, contextlib.suppress(OSError, CheckpointError):
            is_ours = not each.is_symlink() and set(os.listdir(each)) <= manifest.written_files(each)
            if unused and is_ours and each != path:
                os.rename(each, gone)
        shutil.rmtree(gone, ignore_errors=True)
