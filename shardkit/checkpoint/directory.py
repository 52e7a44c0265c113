"""The directory of a checkpoint: written beside its place, flushed, and renamed into it last.

Beside ``runs/step-100`` stand, only while they are needed::

    .step-100.tmp-<token>        what is being written
    .step-100.tmp-<token>.lock   locked by every rank that writes; the system unlocks it when they die
    .step-100.old-<token>        what is being replaced, from one rename to the next

So a directory under its own name is whole, whenever its writers were killed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from shardkit.errors import CheckpointError, listing, message

_SERVANT = re.compile(r"^\.(?P<name>.+)\.(?P<kind>tmp|old|gone)-(?P<token>[0-9a-f]{16})(?P<lock>\.lock)?$")


def new_token() -> str:
    """What tells this save's temporary directory from all others."""
    return secrets.token_hex(8)


def servant(path: Path, kind: str, token: str) -> Path:
    """The sibling of ``path`` that is written (``"tmp"``), replaced (``"old"``) or deleted (``"gone"``)."""
    return path.with_name(f".{path.name}.{kind}-{token}")


def make_temporary(path: Path, token: str) -> None:
    """Make the directory and its parents; the caller holds its lock. Local: the first rank does it."""
    servant(path, "tmp", token).mkdir()


def lock_of(path: Path, token: str) -> Path:
    """The file that the writers of a checkpoint lock, from before its temporary directory is there."""
    return path.with_name(f".{path.name}.tmp-{token}.lock")


@contextmanager
def locked(file: Path, *, create: bool = False) -> Iterator[None]:
    """Hold the file's shared lock, where the file system has locks; it ends with the process too. Local."""
    descriptor = _locked_descriptor(file, os.O_RDWR | os.O_CREAT if create else os.O_RDONLY)
    try:
        yield
    finally:
        os.close(descriptor)


def _locked_descriptor(file: Path, flags: int) -> int:
    while True:
        descriptor = os.open(file, flags, 0o666)
        try:
            with contextlib.suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_SH)
            if os.path.samestat(os.stat(file), os.fstat(descriptor)):
                return descriptor
        except OSError as error:
            if not (isinstance(error, FileNotFoundError) and flags & os.O_CREAT):
                os.close(descriptor)
                raise
        os.close(descriptor)  # somebody deleted what we opened, just before we locked it


@contextmanager
def if_unused(file: Path) -> Iterator[bool]:
    """Whether no process holds the file's lock, and nobody gets it meanwhile. False where one cannot know. Local."""
    try:
        descriptor = os.open(file, os.O_RDWR)  # NFS locks exclusively only what is open for writing
    except FileNotFoundError:
        yield True
        return
    except OSError:
        yield False
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        yield False
    else:
        yield True
    finally:
        os.close(descriptor)


def commit(path: Path, token: str, *, replace: bool = False) -> None:
    """Put the temporary directory, whose files are flushed, in its place. Local: the first rank does it, last.

    With ``replace``, what is there already is renamed away first and deleted after. Killed between the two renames,
    :func:`find` finds it under the other name, and the next save puts it back.

    Raises:
        OSError: something came to be there that is not to be replaced.
    """
    temporary, old = servant(path, "tmp", token), servant(path, "old", token)
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
    shutil.rmtree(old, ignore_errors=True)
    _unlink(lock_of(path, token))


def carry_over(old: Path, new: Path, ours: Callable[[str], bool]) -> None:
    """Link into ``new`` what is in ``old`` under names that are not ours, directories too. Local.

    Raises:
        CheckpointError: such a name is in ``new`` already.
    """
    theirs = [each for each in sorted(old.iterdir()) if not ours(each.name)] if old.is_dir() else []
    if taken := [each.name for each in theirs if os.path.lexists(new / each.name)]:
        rule = "What shardkit did not write is never replaced, and this save writes files of the same names"
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
            flush_file(Path(target))


def discard(path: Path, token: str) -> None:
    """Delete the temporary directory of a save that failed, as far as that goes. Local."""
    temporary = servant(path, "tmp", token)
    shutil.rmtree(temporary, ignore_errors=True)
    if not temporary.exists():
        _unlink(lock_of(path, token))


def _unlink(file: Path) -> None:
    with contextlib.suppress(OSError):
        file.unlink()


def find(path: Path) -> Path:
    """Where the checkpoint of this name is: there, or where a save that was killed had moved it. Local, pure.

    Raises:
        CheckpointError: there is none.
    """
    if path.exists():
        return path
    for sibling in servants(path.parent):
        if (match := _SERVANT.match(sibling.name)) and (match["name"], match["kind"]) == (path.name, "old"):
            return sibling
    near = sorted(each.name for each in path.parent.iterdir()) if path.parent.is_dir() else []
    problem = f"there is nothing at {path}"
    rule = f"Beside it are {', '.join(near[:10])}" if near else f"{path.parent} is empty or does not exist"
    raise CheckpointError(message("path", problem, rule, "Pass what save_checkpoint was given, or latest_checkpoint()"))


def servants(parent: Path) -> list[Path]:
    """What saves make in ``parent`` and remove again, in the order of names. Local."""
    return sorted(each for each in parent.iterdir() if _SERVANT.match(each.name)) if parent.is_dir() else []


def clear_stale(parent: Path) -> None:
    """Delete what killed saves left in ``parent``, and put back what they were replacing. Local, best effort.

    Nothing is touched while a process holds the lock of its save, nor where that cannot be known.
    """
    for sibling in servants(parent):
        match = _SERVANT.match(sibling.name)
        assert match is not None
        place, lock = parent / match["name"], lock_of(parent / match["name"], match["token"])
        with if_unused(lock) as unused, contextlib.suppress(OSError):
            if not unused:
                continue
            if match["kind"] == "old" and not place.exists():
                os.rename(sibling, place)
            elif sibling == lock:
                lock.unlink()
            else:
                shutil.rmtree(sibling, ignore_errors=True)


def remove(path: Path) -> None:
    """Delete a directory and all in it, as far as that goes. Local."""
    shutil.rmtree(path, ignore_errors=True)


def write_file(path: Path, data: bytes) -> None:
    """Write a small file and flush it. Local."""
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def flush_file(path: Path) -> None:
    """Have the system write what it holds of the file, also from other processes of this machine. Local."""
    descriptor = os.open(path, os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def flush_directory(path: Path) -> None:
    """Have the system write the names in the directory. Local; some network file systems refuse, and need none."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with contextlib.suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
