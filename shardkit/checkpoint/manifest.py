"""The manifest: the last file written into a checkpoint, which lists what makes it whole."""

from __future__ import annotations

import hashlib
import json
import os
import stat
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from shardkit.errors import CheckpointError, listing, message

NAME = "manifest.json"
VERSION = 1
CONFIG = "config.json"  # of the model, for others; whoever edits it damages nothing
FORMATS = ("safetensors", "dcp")
_BLOCK = 1 << 24  # bytes read at a time
_MOST = 1 << 30  # bytes of a manifest; a larger one is not a manifest
_MOST_RANKS = 1 << 24


@dataclass(frozen=True)
class FileEntry:
    """What is known of one file.

    Attributes:
        bytes: its size.
        head: how many bytes at its beginning ``crc32`` is the checksum of; a safetensors file's header, else all.
        crc32: as of :func:`zlib.crc32`.
        sums: for a safetensors file the checksum of each tensor, see ``checksums.py``.
    """

    bytes: int
    head: int
    crc32: int
    sums: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint is.

    Attributes:
        format: ``"safetensors"`` or ``"dcp"``.
        world_size: ranks that saved.
        meshes: shape and axis names of the meshes that the model was on.
        layout: digest of every parameter's name, shape, dtype and placements; equal where nothing about them changed.
        files: by name.
        created: when it was complete, in nanoseconds since 1970.
        torch: the version that saved.
        trainable_only: whether frozen parameters were left out.
    """

    format: str
    world_size: int
    meshes: list[dict[str, Any]]
    layout: str
    files: dict[str, FileEntry]
    created: int = field(default_factory=time.time_ns)
    torch: str = torch.__version__
    trainable_only: bool = False

    def to_bytes(self) -> bytes:
        """JSON, with a digest of the rest as the last entry."""
        files = {name: vars(entry) for name, entry in sorted(self.files.items())}
        body = {"shardkit_checkpoint": VERSION, **vars(self), "files": files}
        return json.dumps(body | {"digest": _digest(body)}, indent=1).encode()


def _digest(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def read_manifest(directory: Path) -> Manifest:
    """The manifest of a checkpoint, after checking that it is as it was written. Local.

    Raises:
        CheckpointError: it is missing, damaged, or of a later version.
    """
    file = directory / NAME
    try:
        if file.stat().st_size > _MOST:
            raise ValueError(f"it is larger than {_MOST:,} bytes")
        body = json.loads(file.read_bytes())
        if body.pop("digest") != _digest(body):
            raise ValueError("its digest is of other contents")
        version = body.pop("shardkit_checkpoint")
        body.setdefault("trainable_only", False)  # not in those of the first saves
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        rule = "A whole checkpoint has the manifest that its save wrote last"
        problem = f"no manifest ({type(error).__name__}: {error})"
        raise CheckpointError(message(str(file), problem, rule, "Use another checkpoint")) from None
    if type(version) is int and version > VERSION:
        rule = f"This shardkit reads up to {VERSION}"
        raise CheckpointError(message(str(file), f"version {version}", rule, "Upgrade shardkit"))
    if problem := next(_problems(version, body), ""):
        raise CheckpointError(message(str(file), problem, "No save writes such a manifest", "Use another checkpoint"))
    files = {name: FileEntry(**entry) for name, entry in body.pop("files").items()}
    return Manifest(files=files, **body)


_TYPES = {"format": str, "world_size": int, "meshes": list, "layout": str, "files": dict, "created": int, "torch": str}
_TYPES["trainable_only"] = bool


def _problems(version: Any, body: dict[str, Any]) -> Iterator[str]:
    """What is not as a save writes it, where someone changed a manifest and its digest."""
    if type(version) is not int or body.keys() != _TYPES.keys():
        yield f"version {version!r} with {listing(body)}"
        return
    yield from (f"{name} is {body[name]!r:.100}" for name, kind in _TYPES.items() if type(body[name]) is not kind)
    if body["format"] not in FORMATS or not 1 <= body["world_size"] <= _MOST_RANKS or body["created"] < 0:
        yield f"format {body['format']!r}, world_size {body['world_size']}, created {body['created']}"
    for name, entry in body["files"].items():
        if name in ("", ".", "..", NAME) or os.path.basename(name) != name or "\0" in name:
            yield f"{name!r} is not the name of a file beside it"
        if not _is_entry(entry):
            yield f"what it says of {name} is not sizes and checksums"


def _is_entry(entry: Any) -> bool:
    limits = {"bytes": 1 << 63, "head": 1 << 63, "crc32": 1 << 32}
    if not isinstance(entry, dict) or entry.keys() != limits.keys() | {"sums"} or not isinstance(entry["sums"], dict):
        return False
    numbers = [(entry[name], limit) for name, limit in limits.items()]
    numbers += [(value, 1 << 64) for value in entry["sums"].values()]
    return all(type(number) is int and 0 <= number < limit for number, limit in numbers)


def written_files(directory: Path) -> set[str]:
    """The names in a checkpoint that its save wrote; none where there is no manifest. Local.

    Raises:
        CheckpointError: the manifest cannot be read, so that nobody knows.
    """
    if not (directory / NAME).is_file():
        return set()
    try:
        return {NAME, *read_manifest(directory).files}
    except CheckpointError as error:
        rule = "Only what shardkit wrote is ever replaced, which the manifest lists"
        problem, fix = f"its manifest cannot be read ({error})", "Delete it, or use another path"
        raise CheckpointError(message("path", problem, rule, fix)) from None


def _size_problems(directory: Path, manifest: Manifest) -> list[str]:
    """Files that are missing or have another size than when they were written; reads no contents."""
    sizes = {name: (_size_of(directory / name), entry.bytes) for name, entry in manifest.files.items()}
    return [
        f"{name} has {'no file' if size is None else f'{size:,} bytes'}, written {written:,}"
        for name, (size, written) in sizes.items()
        if name != CONFIG and size != written
    ]


def _size_of(file: Path) -> int | None:
    """Bytes of a file that really is there; a link might lead anywhere."""
    try:
        found = os.lstat(file)
    except OSError:
        return None
    return found.st_size if stat.S_ISREG(found.st_mode) else None


def check_sizes(directory: Path, manifest: Manifest) -> None:
    """Raise unless every file is there in its size. Local."""
    if problems := _size_problems(directory, manifest):
        rule = "Every file has the size that the manifest states"
        raise CheckpointError(message(str(directory), listing(problems), rule, "Use another checkpoint"))


def created_if_whole(directory: Path) -> int | None:
    """When a checkpoint was complete, if every file has its size; None for any other directory. Local."""
    try:
        manifest = read_manifest(directory)
    except CheckpointError:
        return None
    return None if _size_problems(directory, manifest) else manifest.created


def entry_of(file: Path, head: int | None = None, sums: dict[str, int] | None = None) -> FileEntry:
    """The entry of a file that is written; reads its first ``head`` bytes, by default all. Local."""
    size = file.stat().st_size
    head = size if head is None else head
    return FileEntry(size, head, crc32_of(file, head), sums or {})


def crc32_of(file: Path, head: int) -> int:
    """Checksum of the first ``head`` bytes."""
    value = 0
    with open(file, "rb") as opened:
        while head > 0 and (block := opened.read(min(head, _BLOCK))):
            value, head = zlib.crc32(block, value), head - len(block)
    return value
