"""The directory of a checkpoint: written under a hidden name, renamed when complete, found, and
rotated.

During a save, these may be beside ``runs/step-100``, which is always complete, even if writers were
killed::

    .step-100.tmp   a checkpoint that is being written or deleted
    .step-100.old   a complete checkpoint that is being replaced, between two renames

The manifest is the last file of a checkpoint that is written. It lists all others, with sizes and
checksums.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from shardkit.checkpoint.byte_ranges import flush_directory, flush_file
from shardkit.errors import CheckpointError, listing

MANIFEST = "manifest.json"
VERSION = 3


def draft_of(path: Path) -> Path:
    """Return the hidden directory in which a checkpoint is written, or deleted."""
    return path.with_name(f".{path.name}.tmp")


def replaced_of(path: Path) -> Path:
    """Return the hidden directory to which a complete checkpoint is moved while another takes its
    place.
    """
    return path.with_name(f".{path.name}.old")


def is_vacant(path: Path) -> bool:
    """Whether nothing is at ``path``, or an empty directory, which a rename replaces."""
    return not path.exists() or (path.is_dir() and not any(path.iterdir()))


def find(path: Path) -> Path:
    """Return where a checkpoint is: at ``path``, or where a save that was killed between two
    renames left it.
    """
    if is_vacant(path) and replaced_of(path).exists():
        return replaced_of(path)
    if path.exists():
        return path
    raise CheckpointError(
        f"{path} does not exist. Pass the path of a checkpoint, or latest_checkpoint() of the "
        "directory above."
    )


# ---- write: the first rank -----------------------------------------------------------------------


def prepare(path: Path, overwrite: bool) -> None:
    """Raise unless a checkpoint may be written to ``path``; clear what killed saves left beside it:
    the disk may be full of it.
    """
    put_back(path)
    if not is_vacant(path):
        if not (path / MANIFEST).is_file():
            raise CheckpointError(
                f"{path} is not a checkpoint. Only a checkpoint of shardkit is ever replaced. Use "
                "another path."
            )
        if not overwrite:
            raise CheckpointError(f"{path} exists. Use another path, or pass overwrite=True.")
        foreign = _foreign_files(path)
        if foreign:
            raise CheckpointError(
                f"{path} has files that shardkit did not write: {listing(foreign)}. Replacing it "
                "would delete them. Move them, or use another path."
            )
    clear(path)


def put_back(path: Path) -> None:
    """Undo the first rename of :func:`rename_draft`, after a kill before the second."""
    if is_vacant(path) and replaced_of(path).exists():
        os.rename(replaced_of(path), path)


def clear(path: Path) -> None:
    """Delete the draft beside ``path``, and what was replaced by what is there now."""
    shutil.rmtree(draft_of(path), ignore_errors=True)
    if replaced_of(path).is_symlink():  # to a checkpoint, which a draft must not write into
        replaced_of(path).unlink()
    elif replaced_of(path).exists() and not is_vacant(path):
        # Renamed first: of a kill while it is deleted a draft is left, never half a checkpoint.
        with suppress(OSError):  # the draft could not be deleted: the next save tries again
            os.rename(replaced_of(path), draft_of(path))
        shutil.rmtree(draft_of(path), ignore_errors=True)


def _family(name: str) -> str:
    return re.sub(r"\d+", "#", name)


def _foreign_files(path: Path) -> list[str]:
    files = read_manifest(path, check_files=False)["files"]
    return sorted(set(os.listdir(path)) - {MANIFEST, *files})


def commit(path: Path, files: Mapping[str, tuple[int, int]], world_size: int) -> None:
    """Write the manifest, and rename the draft, whose other files are flushed, to ``path``.

    ``files`` are sizes and checksums by name. A checkpoint at ``path`` is replaced.
    """
    draft = draft_of(path)
    manifest = {
        "shardkit_checkpoint": VERSION,
        "created": time.time_ns(),
        "world_size": world_size,
        "torch": torch.__version__,
        "files": files,
    }
    (draft / MANIFEST).write_text(json.dumps(manifest, indent=1))
    flush_file(draft / MANIFEST)
    flush_directory(draft)
    rename_draft(path, replace=(path / MANIFEST).is_file())


def rename_draft(path: Path, *, replace: bool) -> None:
    """Rename the draft to ``path``; with ``replace`` what is there is renamed before.

    After a kill between the two renames, :func:`find` and :func:`put_back` know where it is.
    """
    if replace:
        os.rename(path, replaced_of(path))
    try:
        os.rename(draft_of(path), path)
    except OSError:
        put_back(path)
        raise
    flush_directory(path.parent)


def rotate(path: Path, keep: int) -> None:
    """Delete all but the newest ``keep`` checkpoints of the family of ``path``.

    A family are siblings whose names differ only in numbers. ``path`` itself is never deleted, nor
    a checkpoint with files that shardkit did not write. Links are only counted.
    """
    family = []
    for checkpoint in complete_checkpoints(path.parent):
        if _family(checkpoint.name) == _family(path.name):
            family.append(checkpoint)
    for old in family[:-keep]:
        with suppress(OSError, CheckpointError):  # another process may rotate too
            place = find(old)
            if old != path and not place.is_symlink() and not _foreign_files(place):
                os.rename(place, draft_of(old))
                shutil.rmtree(draft_of(old), ignore_errors=True)


# ---- read ----------------------------------------------------------------------------------------


def read_manifest(directory: Path, check_files: bool = True) -> dict[str, Any]:
    """Return the manifest of a checkpoint; raise if it, or the size of a file, is not as it was
    written. Local.

    The files of another version are not looked at.
    """
    try:
        if not (directory / MANIFEST).is_file():  # opening a pipe would wait for its writer
            raise ValueError(f"there is no file {MANIFEST}")
        manifest: dict[str, Any] = json.loads((directory / MANIFEST).read_bytes())
        int(manifest["created"])
        check_files = check_files and manifest["shardkit_checkpoint"] == VERSION
        for name, (size, _) in manifest["files"].items() if check_files else ():
            info = os.lstat(directory / name)
            if Path(name).name != name or not stat.S_ISREG(info.st_mode) or info.st_size != size:
                raise ValueError(f"{name} is not a file of {size:,} bytes")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{directory} is not a complete checkpoint ({type(error).__name__}: {error}). Load an "
            "earlier one: latest_checkpoint() of the directory above returns the newest complete "
            "one. To save under this name, delete it."
        ) from error
    return manifest


def latest_checkpoint(root: str | os.PathLike[str]) -> Path | None:
    """Return the newest complete checkpoint of shardkit in the directory ``root``, or None. Local,
    pure.

    The newest is the one that was completed last, whatever its name. A checkpoint is complete if
    its manifest is undamaged and every file has its size; leftovers of killed saves, unfinished
    saves and other directories are not. One that a killed save was replacing is returned by its
    own name, under which :func:`load_checkpoint` finds it. Checkpoints in a format that this
    version does not read count: their load raises, and says how to get the weights.

    Examples:
        >>> path = latest_checkpoint("runs")
        >>> start = load_checkpoint(path, model, optimizer)["step"] if path else 0
    """
    checkpoints = complete_checkpoints(Path(root))
    return checkpoints[-1] if checkpoints else None


def complete_checkpoints(root: Path) -> list[Path]:
    """Return all complete checkpoints in ``root``, oldest first."""
    names = set()
    if root.is_dir():
        for path in root.iterdir():
            names.add(re.sub(r"^\.(.+)\.old$", r"\1", path.name))
    checkpoints = []
    for name in names:
        if not name.startswith("."):
            with suppress(CheckpointError, OSError):  # such as lost+found, which cannot be read
                manifest = read_manifest(find(root / name))
                checkpoints.append((manifest["created"], root / name))
    return [path for _, path in sorted(checkpoints)]
