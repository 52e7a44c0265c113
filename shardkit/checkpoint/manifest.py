"""The manifest: the last file written into a checkpoint. It lists all others, with sizes and checksums."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
import time
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from shardkit.checkpoint.format import File
from shardkit.errors import CheckpointError, listing, message

NAME = "manifest.json"
VERSIONS = (1, 2)  # that are read; version 1 had "state" in a file of its own
CONFIG = "config.json"  # the model's, for other programs; users may edit it, so it has no checks
FORMATS = ("safetensors", "dcp")
WAY = "Load an earlier checkpoint: latest_checkpoint() of the directory above returns the newest complete one"
_BLOCK = 1 << 24  # bytes read at a time
_MOST = 1 << 30  # bytes of a manifest; a larger one is not a manifest


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
    meshes: list[dict[str, Any]]  # shape and axis names of the model's meshes
    files: dict[str, FileEntry]
    created: int = field(default_factory=time.time_ns)  # when it was complete, in nanoseconds since 1970
    torch: str = torch.__version__  # the version that saved
    trainable_only: bool = False  # whether frozen parameters were left out
    state: Any = None  # everything that is not a tensor, encoded
    layout: str = ""  # in version 1, a digest

    def to_bytes(self) -> bytes:
        """Return it as JSON; the last entry is a digest of the others."""
        files = {name: vars(entry) for name, entry in sorted(self.files.items())}
        body = {"shardkit_checkpoint": VERSIONS[-1], **vars(self), "files": files}
        return json.dumps(body | {"digest": _digest(body)}, indent=1).encode()


def _digest(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def read_manifest(directory: Path) -> Manifest:
    """Read the manifest of a checkpoint, and check that it is as it was written. Local.

    Raises:
        CheckpointError: it is missing, damaged, or of a later version.
    """
    file = directory / NAME
    try:
        if not file.is_file() or file.stat().st_size > _MOST:  # opening a pipe would wait for its writer
            raise ValueError("there is no such file" if not file.exists() else "it is not such a file")
        body = json.loads(file.read_bytes())
        if body.pop("digest") != _digest(body):
            raise ValueError("its digest does not match its contents")
        if (version := body.pop("shardkit_checkpoint")) not in VERSIONS:
            raise ValueError(f"it has version {version}, and this shardkit reads versions {VERSIONS}: upgrade")
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
    """Return the names of the files that the save of a checkpoint wrote; none without a manifest. Local.

    Raises:
        CheckpointError: the manifest cannot be read, so it is unknown which they are.
    """
    return {NAME, *read_manifest(directory).files} if (directory / NAME).is_file() else set()


def check_sizes(directory: Path, manifest: Manifest) -> None:
    """Raise unless every file is there in its size; reads no contents. Local."""

    def is_whole(name: str, size: int) -> bool:
        with contextlib.suppress(OSError):
            found = os.lstat(directory / name)  # a link might lead anywhere
            return stat.S_ISREG(found.st_mode) and found.st_size == size
        return False

    files = [(name, entry.bytes) for name, entry in manifest.files.items() if name != CONFIG]
    if damaged := [name for name, size in files if not is_whole(name, size)]:
        problem = f"has damaged files: {listing(damaged)}"
        raise CheckpointError(message(str(directory), problem, "They are missing, or of another size", WAY))


def created_if_whole(directory: Path) -> int | None:
    """Return when a checkpoint was complete, if every file has its size; None for any other directory. Local."""
    try:
        manifest = read_manifest(directory)
        check_sizes(directory, manifest)
    except CheckpointError:
        return None
    return manifest.created


def entry_of(file: Path) -> FileEntry:
    """Return the entry of a file, after reading all of it. Local."""
    size = file.stat().st_size
    return FileEntry(size, size, crc32_of(file, size))


def entries_of(files: Iterable[File], sums: Mapping[str, int]) -> dict[str, FileEntry]:
    """Return the entries of safetensors files, given the checksums of their tensors."""
    return {
        file.name: FileEntry(
            file.bytes, len(file.head), zlib.crc32(file.head), {name: sums.get(name, 0) for name in file.tensors}
        )
        for file in files
    }


def crc32_of(file: Path, head: int) -> int:
    """Return the checksum of the first ``head`` bytes."""
    value = 0
    with open(file, "rb") as opened:
        while head > 0 and (block := opened.read(min(head, _BLOCK))):
            value, head = zlib.crc32(block, value), head - len(block)
    return value
