"""The directory of a checkpoint: written under a hidden name, renamed when complete, found, and
rotated.

During a save, these may be beside ``runs/step-100``, which is always complete, even if writers were
killed::

    .step-100.tmp   a checkpoint that is being written or deleted
    .step-100.old   a checkpoint that is being replaced, between two renames

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
from pathlib import Path
from typing import Any

import torch

from shardkit.checkpoint.byte_ranges import flush_directory, write_bytes
from shardkit.errors import CheckpointError, listing

MANIFEST = "manifest.json"
VERSION = 3


def draft_of(path: Path) -> Path:
    """Return the hidden directory in which a checkpoint is written, or deleted."""
    return path.with_name(f".{path.name}.tmp")


def _replaced(path: Path) -> Path:
    return path.with_name(f".{path.name}.old")


def find(path: Path) -> Path:
    """Return where a checkpoint is: at ``path``, or where a save that was killed between two
    renames left it.
    """
    if path.exists():
        return path
    if _replaced(path).exists():
        return _replaced(path)
    raise CheckpointError(
        f"{path} does not exist. Pass the path of a checkpoint, or latest_checkpoint() of the "
        "directory above."
    )


# ---- write: the first rank -----------------------------------------------------------------------


def prepare(path: Path, overwrite: bool) -> None:
    """Raise unless a checkpoint may be written to ``path``; clear what a killed save left beside
    it.
    """
    if not path.exists() and _replaced(path).exists():
        os.rename(_replaced(path), path)
    shutil.rmtree(draft_of(path), ignore_errors=True)
    shutil.rmtree(_replaced(path), ignore_errors=True)
    if not path.exists() or (path.is_dir() and not any(path.iterdir())):
        return
    if not (path / MANIFEST).is_file():
        raise CheckpointError(
            f"{path} is not a checkpoint. Only a checkpoint of shardkit is ever replaced. Use "
            "another path."
        )
    if not overwrite:
        raise CheckpointError(f"{path} exists. Use another path, or pass overwrite=True.")
    if foreign := _foreign_files(path):
        raise CheckpointError(
            f"{path} has files that shardkit did not write: {listing(foreign)}. Replacing it would "
            "delete them. Move them, or use another path."
        )


def _foreign_files(path: Path) -> list[str]:
    return sorted(set(os.listdir(path)) - {MANIFEST, *read_manifest(path)["files"]})


def commit(path: Path, files: Mapping[str, tuple[int, int]], world_size: int) -> None:
    """Write the manifest, and rename the draft, whose other files are flushed, to ``path``.

    ``files`` are sizes and checksums by name. A checkpoint at ``path`` is replaced.
    """
    draft, old = draft_of(path), _replaced(path)
    manifest = {
        "shardkit_checkpoint": VERSION,
        "created": time.time_ns(),
        "world_size": world_size,
        "torch": torch.__version__,
        "files": files,
    }
    write_bytes(draft / MANIFEST, json.dumps(manifest, indent=1).encode())
    flush_directory(draft)
    if (path / MANIFEST).is_file():
        os.rename(path, old)
    try:
        os.rename(draft, path)
    except OSError:
        if old.exists():
            os.rename(old, path)
        raise
    flush_directory(path.parent)


def clean_up(path: Path, keep: int | None) -> None:
    """After a commit, delete what it replaced, and with ``keep`` all but the newest checkpoints of
    its family.

    A family are siblings whose names differ only in numbers. ``path`` itself is never deleted, nor
    a checkpoint with files that shardkit did not write. Links are only counted.
    """
    shutil.rmtree(_replaced(path), ignore_errors=True)
    if keep is None:
        return
    family = re.sub(r"\d+", "#", path.name)
    for leftover in path.parent.glob(".*.tmp"):  # of saves that were killed
        if re.sub(r"\d+", "#", leftover.name) == f".{family}.tmp":
            shutil.rmtree(leftover, ignore_errors=True)
    checkpoints = []
    for each in complete_checkpoints(path.parent):
        if re.sub(r"\d+", "#", each.name) == family:
            checkpoints.append(each)
    for each in checkpoints[:-keep]:
        if each != path and not each.is_symlink() and not _foreign_files(each):
            os.rename(each, draft_of(each))
            shutil.rmtree(draft_of(each), ignore_errors=True)


# ---- read ----------------------------------------------------------------------------------------


def read_manifest(directory: Path) -> dict[str, Any]:
    """Return the manifest of a checkpoint; raise if it, or the size of a file, is not as it was
    written. Local.
    """
    try:
        if not (directory / MANIFEST).is_file():  # opening a pipe would wait for its writer
            raise ValueError(f"there is no file {MANIFEST}")
        manifest: dict[str, Any] = json.loads((directory / MANIFEST).read_bytes())
        version = manifest["shardkit_checkpoint"]
        if version != VERSION:
            raise CheckpointError(
                f"{directory} has version {version}, and this shardkit reads version {VERSION}. "
                "Its weights load from the file model.safetensors in it, by strict=False if the "
                "model has extra state."
            )
        int(manifest["created"])
        for name, (size, _) in manifest["files"].items():
            found = os.lstat(directory / name)
            if Path(name).name != name or not stat.S_ISREG(found.st_mode) or found.st_size != size:
                raise ValueError(f"{name} is not a file of {size:,} bytes")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{directory} is not a complete checkpoint ({type(error).__name__}: {error}). Load an "
            "earlier one: latest_checkpoint() of the directory above returns the newest complete "
            "one."
        ) from error
    return manifest


def latest_checkpoint(root: str | os.PathLike[str]) -> Path | None:
    """Return the newest complete checkpoint of shardkit in the directory ``root``, or None. Local,
    pure.

    The newest is the one that was completed last, whatever its name. A checkpoint is complete if
    its manifest is undamaged and every file has its size; leftovers of killed saves, unfinished
    saves and other directories are not.

    Examples:
        >>> path = latest_checkpoint("runs")
        >>> start = load_checkpoint(path, model, optimizer)["step"] if path else 0
    """
    found = complete_checkpoints(Path(root))
    return found[-1] if found else None


def complete_checkpoints(root: Path) -> list[Path]:
    """Return all complete checkpoints in ``root``, oldest first."""
    found = []
    for each in root.iterdir() if root.is_dir() else ():
        if not each.name.startswith(".") and (each / MANIFEST).is_file():
            try:
                found.append((read_manifest(each)["created"], each))
            except CheckpointError:
                continue
    return [path for _, path in sorted(found)]
