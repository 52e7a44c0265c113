"""The directory of a checkpoint: written beside its place, flushed, renamed into it last; found, and rotated.

Beside ``runs/step-100`` stand, only while they are needed::

    .step-100.tmp-<token>        what is being written
    .step-100.tmp-<token>.lock   locked by every rank that writes; the system unlocks it when they die
    .step-100.old-<token>        what is being replaced, from one rename to the next
    .step-100.gone-<token>       what is being deleted

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
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from shardkit.checkpoint import manifest
from shardkit.errors import CheckpointError, ShardkitError, listing, message
from shardkit.ranks import Groups, all_gather_bytes, together

_SIBLING = re.compile(r"^\.(?P<name>.+)\.(?P<kind>tmp|old|gone)-(?P<token>[0-9a-f]{16})(?P<lock>\.lock)?$")


def new_token() -> str:
    """What tells this save's temporary directory from all others."""
    return secrets.token_hex(8)


def sibling_path(path: Path, kind: str, token: str) -> Path:
    """The sibling of ``path`` that is written (``"tmp"``), replaced (``"old"``) or deleted (``"gone"``)."""
    return path.with_name(f".{path.name}.{kind}-{token}")


def lock_of(path: Path, token: str) -> Path:
    """The file that the writers of a checkpoint lock, from before its temporary directory is there."""
    return path.with_name(f".{path.name}.tmp-{token}.lock")


# ---- written by all ranks ---------------------------------------------------------------------------------------


class Draft(NamedTuple):
    """A directory that is being written, for the first rank to :func:`commit` with its token."""

    directory: Path
    token: str
    is_first: bool


@contextmanager
def temporary_directory(path: Path, groups: Groups) -> Iterator[Draft]:
    """Make a directory beside ``path`` for all ranks to fill, which goes if any fails. Collective over ``groups``.

    Raises:
        CheckpointError: on every rank, with the reason of each that failed.
    """
    is_first, token = False, new_token()
    try:
        is_first = not groups or dist.get_rank(groups[0]) == 0
        token = all_gather_bytes(token.encode(), groups[0])[0].decode() if groups else token
        temporary, lock = sibling_path(path, "tmp", token), lock_of(path, token)
        with ExitStack() as held:
            with together(groups, CheckpointError):
                if is_first:
                    path.parent.mkdir(parents=True, exist_ok=True)
                    clear_stale(path.parent)
                    held.enter_context(locked(lock, create=True))
                    temporary.mkdir()
            with together(groups, CheckpointError):
                if not is_first:
                    held.enter_context(locked(lock))
            yield Draft(temporary, token, is_first)
    except BaseException as error:
        if is_first:
            _discard(path, token)
        if isinstance(error, Exception) and not isinstance(error, ShardkitError):
            # Of the disk, for a process alone; of the connection to a rank that died, or whose group was destroyed.
            rule = "A checkpoint is complete on all ranks or not there; what was there before is untouched"
            fix = "See why; wait() for a save in the background before destroy_process_group()"
            raise CheckpointError(message("save_checkpoint", f"{type(error).__name__}: {error}", rule, fix)) from error
        raise


def commit(path: Path, token: str, *, replace: bool = False) -> None:
    """Put the temporary directory, whose files are flushed, in its place. Local: the first rank does it, last.

    With ``replace``, what is there already is renamed away first and deleted after. Killed between the two renames,
    :func:`find` finds it under the other name, and the next save puts it back.

    Raises:
        OSError: something came to be there that is not to be replaced.
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
    shutil.rmtree(old, ignore_errors=True)  # what is not ours was carried over
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


def _discard(path: Path, token: str) -> None:
    """Delete the temporary directory of a save that failed, as far as that goes."""
    temporary = sibling_path(path, "tmp", token)
    shutil.rmtree(temporary, ignore_errors=True)
    if not temporary.exists():
        _unlink(lock_of(path, token))


def _unlink(file: Path) -> None:
    with contextlib.suppress(OSError):
        file.unlink()


# ---- locks ------------------------------------------------------------------------------------------------------


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
def _if_unused(file: Path) -> Iterator[bool]:
    """Whether no process holds the file's lock, and nobody gets it meanwhile. False where one cannot know."""
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


# ---- found, and cleared -----------------------------------------------------------------------------------------


def find(path: Path) -> Path:
    """Where the checkpoint of this name is: there, or where a save that was killed had moved it. Local, pure.

    Raises:
        CheckpointError: there is none.
    """
    if path.exists():
        return path
    for sibling, match in _siblings(path.parent):
        if (match["name"], match["kind"]) == (path.name, "old"):
            return sibling
    near = sorted(each.name for each in path.parent.iterdir()) if path.parent.is_dir() else []
    problem = f"there is nothing at {path}"
    rule = f"Beside it are {', '.join(near[:10])}" if near else f"{path.parent} is empty or does not exist"
    raise CheckpointError(message("path", problem, rule, "Pass what save_checkpoint was given, or latest_checkpoint()"))


def _siblings(parent: Path) -> list[tuple[Path, re.Match[str]]]:
    """What saves make in ``parent`` and remove again, in the order of names."""
    found = sorted(parent.iterdir()) if parent.is_dir() else []
    return [(each, match) for each in found if (match := _SIBLING.match(each.name))]


def clear_stale(parent: Path) -> None:
    """Delete what killed saves left in ``parent``, and put back what they were replacing. Local, best effort.

    Nothing is touched while a process holds the lock of its save, nor where that cannot be known.
    """
    for sibling, match in _siblings(parent):
        place = parent / match["name"]
        lock = lock_of(place, match["token"])
        with _if_unused(lock) as unused, contextlib.suppress(OSError, CheckpointError):
            if not unused:
                continue
            if match["kind"] == "old" and not place.exists():
                os.rename(sibling, place)
            elif sibling == lock or (match["kind"] == "gone" and sibling.is_symlink()):
                sibling.unlink()
            elif match["kind"] == "gone":
                _delete_written(sibling, place)
            else:
                shutil.rmtree(sibling, ignore_errors=True)


# ---- rotated ----------------------------------------------------------------------------------------------------


def latest_checkpoint(root: str | os.PathLike[str]) -> Path | None:
    """The newest whole checkpoint of shardkit among the directories in ``root``; None if there is none. Local, pure.

    Newest by when it was complete, whatever its name. Whole means that its manifest is undamaged and every file has its
    size: what a killed save left, what is being written, and what others put there is passed over.

    Example:
        >>> path = latest_checkpoint("runs")
        >>> start = load_checkpoint(path, model, optimizer)["step"] if path else 0
    """
    found = _whole_checkpoints(Path(root))
    return found[-1] if found else None


def _whole_checkpoints(root: Path) -> list[Path]:
    """All whole checkpoints in ``root``, oldest first."""
    if not root.is_dir():
        return []
    candidates = [each for each in root.iterdir() if each.is_dir() and not each.name.startswith(".")]
    created = [(at, each) for each in candidates if (at := manifest.created_if_whole(each)) is not None]
    return [each for _, each in sorted(created)]


def check_keep(keep: int | None) -> None:
    """Raise unless ``keep`` is None or a positive number."""
    if keep is not None and (type(keep) is not int or keep < 1):
        rule = "It is how many checkpoints stay, this one among them, so 1 or more, or None for all"
        raise CheckpointError(message("keep", f"is {keep!r}", rule, "Use such as 3"))


def rotate(path: Path, keep: int) -> list[Path]:
    """Delete all but the newest ``keep`` whole checkpoints that are named like ``path``, and return them. Local.

    Named alike are siblings whose names differ in their numbers only, so that ``best`` survives the rotation of
    ``step-100``. ``path`` itself, which is complete, is never deleted, nor one that is being loaded: loading holds its
    lock. Damaged ones are neither counted nor deleted, and links are only counted. Of a checkpoint go the files that
    its save wrote: with others in it, the directory stays, with these.
    """
    family = [each for each in _whole_checkpoints(path.parent) if _family(each.name) == _family(path.name)]
    surplus = [each for each in family[: len(family) - keep] if each != path]
    return [each for each in surplus if _delete(each)]


def _family(name: str) -> str:
    return re.sub(r"\d+", "#", name)


def _delete(path: Path) -> bool:
    """Delete a checkpoint unless somebody holds its lock: at once under its own name, then file by file."""
    if path.is_symlink():  # what it leads to is not ours
        return False
    with _if_unused(path / manifest.NAME) as unused:
        if not unused:
            return False
        gone = sibling_path(path, "gone", new_token())
        try:
            os.rename(path, gone)
        except OSError:  # somebody else rotates too, or it is not ours to delete: the save itself has succeeded
            return False
    with contextlib.suppress(OSError, CheckpointError):
        _delete_written(gone, path)
    return True


def _delete_written(gone: Path, place: Path) -> None:
    """Delete what the manifest in ``gone`` lists, itself last; what then is left, others put there, and goes back.

    Where something of ours cannot be deleted, it stays as it is, with its manifest, for :func:`clear_stale`.
    """
    ours = manifest.written_files(gone)
    for names in (ours - {manifest.NAME}, ours & {manifest.NAME}):
        for name in names:
            _unlink(gone / name)
        if any(os.path.lexists(gone / name) for name in names):
            return
    try:
        gone.rmdir()
    except OSError:
        if not place.exists():
            os.rename(gone, place)


# ---- flushed ----------------------------------------------------------------------------------------------------


def write_file(path: Path, data: bytes) -> None:
    """Write a small file and flush it. Local."""
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def flush_file(path: Path) -> None:
    """Have the system write what it holds of the file, also from other processes of this machine. Local."""
    with open(path, "rb+") as file:
        os.fsync(file.fileno())


def flush_directory(path: Path) -> None:
    """Have the system write the names in the directory. Local; some network file systems refuse, and need none."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with contextlib.suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
