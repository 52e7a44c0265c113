"""Write a checkpoint directory under a temporary name, flush it and rename it; find the latest; rotate old ones.

During a save, these may be next to ``runs/step-100``, which is always complete, even if its writers were killed::

    .step-100.tmp-<token>   a checkpoint that is being written
    .step-100.old-<token>   a checkpoint that is being replaced, between two renames
    .step-100.gone-<token>  a checkpoint that is being deleted
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import secrets
import shutil
import stat
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from shardkit.checkpoint.chunks import flush_directory, flush_files
from shardkit.checkpoint.format import File
from shardkit.errors import CheckpointError, ShardkitError, listing, message

NAME = "manifest.json"
VERSION = 2  # version 1 had the state in a file of its own
FORMATS = ("safetensors", "dcp")
WAY = "Load an earlier checkpoint: latest_checkpoint() of the directory above returns the newest complete one"
_BLOCK = 1 << 24  # bytes read at a time
_MOST = 1 << 30  # bytes of a manifest; a larger one is not a manifest
_SIBLING = re.compile(r"^\.(?P<name>.+)\.(?P<kind>tmp|old|gone)-[0-9a-f]{16}$")
_DAY = 24 * 60 * 60  # seconds
_deletions: list[threading.Thread] = []


def draw_token() -> int:
    """Return a random number, by which siblings of saves differ. Local."""
    return secrets.randbits(62)


def sibling_path(path: Path, kind: str, token: int) -> Path:
    """Return the sibling of ``path`` that is written (``"tmp"``), replaced (``"old"``) or deleted (``"gone"``)."""
    return path.with_name(f".{path.name}.{kind}-{token:016x}")


# ---- write: all ranks -------------------------------------------------------------------------------------------


@contextmanager
def temporary_directory(path: Path, token: int, *, is_first: bool) -> Iterator[Path]:
    """Yield a directory beside ``path`` for all ranks to make and to fill; the first deletes it if any fails. Local."""
    temporary = sibling_path(path, "tmp", token)
    try:
        yield temporary
    except BaseException as error:
        if is_first:
            shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(error, Exception) and not isinstance(error, ShardkitError):
            # From the disk, in a process alone; or from a rank that died, or a group that was destroyed.
            rule = "A checkpoint is complete on all ranks or does not appear; any earlier checkpoint is unchanged"
            fix = "See the cause, and wait() for a save in the background before destroy_process_group()"
            problem = f"failed ({type(error).__name__}: {error})"
            raise CheckpointError(message("save_checkpoint", problem, rule, fix)) from error
        raise


def commit(path: Path, token: int, *, replace: bool = False, keep: int | None = None) -> None:
    """Rename the temporary directory, whose files are flushed, to ``path``. Local: the first rank calls it, last.

    With ``replace``, an existing directory is renamed away first, and deleted in a thread afterwards, as are those of
    :func:`rotate`. After a kill between the two renames, :func:`find` finds it, and the next save restores it.
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

    def delete() -> None:
        shutil.rmtree(gone, ignore_errors=True)  # files that are not ours were carried over
        if keep is not None:
            rotate(path, keep)

    if keep is not None or gone.exists():
        thread = threading.Thread(target=delete, name="shardkit-delete")
        thread.start()
        _deletions.append(thread)  # started, since a save in the background may wait for it at once


def finish_deletions() -> None:
    """Wait for what saves of this process still delete; so does the exit of the interpreter. Local."""
    while _deletions:
        _deletions.pop().join()


def carry_over(old: Path, new: Path, ours: Callable[[str], bool]) -> None:
    """Link the files and directories in ``old`` that are not ours into ``new``; raise if it has their names. Local."""
    theirs = {name for name in os.listdir(old) if not ours(name)} if old.is_dir() else set()
    if taken := [name for name in sorted(theirs) if os.path.lexists(new / name)]:
        rule = "This save writes files of the same names, and shardkit replaces only files that it wrote"
        raise CheckpointError(message(str(old), f"has {listing(taken)}", rule, "Move them, or use another path"))

    def skipped(place: str, names: list[str]) -> set[str]:
        return set(names) - theirs if Path(place) == old else set()

    if theirs:
        shutil.copytree(old, new, symlinks=True, ignore=skipped, copy_function=_link, dirs_exist_ok=True)
        for parent, _, _ in os.walk(new):
            flush_directory(Path(parent))


def _link(source: str | Path, target: str | Path) -> None:
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:  # a file system without hard links
        shutil.copy2(source, target, follow_symlinks=False)
        if not os.path.islink(target):
            flush_files([Path(target)])


# ---- find and clear ---------------------------------------------------------------------------------------------


def find(path: Path) -> Path:
    """Return where the checkpoint is, or raise: at ``path``, or where a save that was killed had moved it. Local."""
    if path.exists():
        return path
    for sibling, match in _siblings(path.parent):
        if (match["name"], match["kind"]) == (path.name, "old"):
            return sibling
    fix = "Pass the path of a checkpoint, or latest_checkpoint() of the directory above"
    raise CheckpointError(message("path", f"{path} does not exist", "", fix))


def _siblings(parent: Path) -> list[tuple[Path, re.Match[str]]]:
    """Return the files and directories in ``parent`` that saves make and remove, sorted by name."""
    found = sorted(parent.iterdir()) if parent.is_dir() else []
    return [(each, match) for each in found if (match := _SIBLING.match(each.name))]


def clear_stale(path: Path, token: int) -> None:
    """Delete what killed saves left beside ``path``, and restore what they were replacing. Local, best effort.

    What this save writes has its ``token``; what has another name, and was made within a day, another may be writing.
    """
    for sibling, match in _siblings(path.parent):
        place = path.with_name(match["name"])
        with contextlib.suppress(OSError):
            is_recent = time.time() - os.lstat(sibling).st_ctime < _DAY
            is_in_use = place != path and match["kind"] != "gone" and is_recent
            if is_in_use or sibling.name.endswith(f"-{token:016x}"):
                continue
            if match["kind"] == "old" and not place.exists():
                os.rename(sibling, place)
            elif sibling.is_dir() and not sibling.is_symlink():
                shutil.rmtree(sibling, ignore_errors=True)
            else:
                sibling.unlink()


# ---- rotate -----------------------------------------------------------------------------------------------------


def latest_checkpoint(root: str | os.PathLike[str]) -> Path | None:
    """Return the newest complete checkpoint of shardkit in the directory ``root``, or None. Local, pure.

    The newest is the one that was completed last, whatever its name. A checkpoint is complete if its manifest is
    undamaged and every file has its size; leftovers of killed saves, unfinished saves and other directories are not.

    Examples:
        >>> path = latest_checkpoint("runs")
        >>> start = load_checkpoint(path, model, optimizer)["step"] if path else 0
    """
    return next(reversed(_complete_checkpoints(Path(root))), None)


def _complete_checkpoints(root: Path) -> list[Path]:
    """Return all complete checkpoints in ``root``, oldest first."""
    found = []
    for each in root.iterdir() if root.is_dir() else ():
        with contextlib.suppress(CheckpointError):
            if not each.name.startswith(".") and each.is_dir():
                manifest = read_manifest(each)
                check_sizes(each, manifest)
                found.append((manifest.created, each))
    return [each for _, each in sorted(found)]


def rotate(path: Path, keep: int) -> None:
    """Delete all but the newest ``keep`` complete checkpoints of the family of ``path``. Local.

    A family are siblings whose names differ only in numbers. ``path`` itself is never deleted, nor one with files that
    shardkit did not write. Damaged checkpoints are neither counted nor deleted, and links are only counted.
    """

    def family(name: str) -> str:
        return re.sub(r"\d+", "#", name)

    found = [each for each in _complete_checkpoints(path.parent) if family(each.name) == family(path.name)]
    for each in found[: max(len(found) - keep, 0)]:
        gone = sibling_path(each, "gone", draw_token())
        with contextlib.suppress(OSError, CheckpointError):  # another process may rotate too
            is_ours = not each.is_symlink() and set(os.listdir(each)) <= written_files(each)
            if is_ours and each != path:
                os.rename(each, gone)
        shutil.rmtree(gone, ignore_errors=True)


# ---- the manifest: the last file that is written; it lists all others, with sizes and checksums -------------------


@dataclass(frozen=True)
class FileEntry:
    """The manifest's record of one file."""

    bytes: int
    head: int  # bytes at the start that crc32 covers: the header of a safetensors file, all of any other
    crc32: int
    sums: dict[str, int] = field(default_factory=dict)  # of a safetensors file, the checksum of each tensor


@dataclass(frozen=True)
class Manifest:
    """The record of a checkpoint."""

    format: str  # "safetensors" or "dcp"
    world_size: int  # ranks that saved
    files: dict[str, FileEntry]
    created: int = field(default_factory=time.time_ns)  # when it was complete, in nanoseconds since 1970
    torch: str = torch.__version__  # the version that saved
    trainable_only: bool = False  # whether frozen parameters were left out
    state: Any = None  # everything that is not a tensor, encoded

    def to_bytes(self) -> bytes:
        """Return it as JSON; the last entry is a digest of the others."""
        files = {name: vars(entry) for name, entry in sorted(self.files.items())}
        body = {"shardkit_checkpoint": VERSION, **vars(self), "files": files}
        return json.dumps(body | {"digest": _digest(body)}, indent=1).encode()


def _digest(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def read_manifest(directory: Path) -> Manifest:
    """Read the manifest of a checkpoint, and check that it is as it was written. Local."""
    file = directory / NAME
    try:
        if not file.is_file() or file.stat().st_size > _MOST:  # opening a pipe would wait for its writer
            raise ValueError("there is no such file" if not file.exists() else "it is not such a file")
        body = json.loads(file.read_bytes())
        if body.pop("digest") != _digest(body):
            raise ValueError("its digest does not match its contents")
        if (version := body.pop("shardkit_checkpoint")) not in (1, VERSION):
            raise ValueError(f"it has version {version}, and this shardkit reads up to version {VERSION}")
        for name in ("meshes", "layout") if version == 1 else ():
            del body[name]
        found = Manifest(**body | {"files": {name: FileEntry(**entry) for name, entry in body["files"].items()}})
        if bad := [n for n in found.files if os.path.basename(n) != n or n in ("", ".", "..", NAME) or "\0" in n]:
            raise ValueError(f"{bad[0]!r} is not the name of a file beside it")
        if found.format not in FORMATS or type(found.created) is not int:
            raise ValueError(f"format is {found.format!r} and created {found.created!r}")
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        rule = "A complete checkpoint has the manifest that its save wrote last"
        problem = f"is not a manifest ({type(error).__name__}: {error})"
        raise CheckpointError(message(str(file), problem, rule, WAY)) from None
    return found


def written_files(directory: Path) -> set[str]:
    """Return the names of the files that the save of a checkpoint wrote; none without a manifest. Local."""
    return {NAME, *read_manifest(directory).files} if (directory / NAME).is_file() else set()


def check_sizes(directory: Path, manifest: Manifest) -> None:
    """Raise unless every file is there in its size; reads no contents. Local."""

    def is_whole(name: str, size: int) -> bool:
        with contextlib.suppress(OSError):
            found = os.lstat(directory / name)  # a link might lead anywhere
            return stat.S_ISREG(found.st_mode) and found.st_size == size
        return False

    if damaged := [name for name, entry in manifest.files.items() if not is_whole(name, entry.bytes)]:
        problem = f"has damaged files: {listing(damaged)}"
        raise CheckpointError(message(str(directory), problem, "They are missing, or of another size", WAY))


def entries_of(files: Sequence[File], sums: Mapping[str, int]) -> dict[str, FileEntry]:
    """Return the entries of safetensors files, given the checksums of their tensors."""
    own = {file.name: {name: sums.get(name, 0) for name in file.tensors} for file in files}
    return {f.name: FileEntry(f.bytes, len(f.head), zlib.crc32(f.head), own[f.name]) for f in files}


def crc32_of(file: Path, head: int) -> int:
    """Return the checksum of the first ``head`` bytes."""
    value = 0
    with open(file, "rb") as opened:
        while head > 0 and (block := opened.read(min(head, _BLOCK))):
            value, head = zlib.crc32(block, value), head - len(block)
    return value
