"""The manifest: the last file written into a checkpoint. It lists all others, with sizes and checksums."""

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
CONFIG = "config.json"  # the model's, for other programs; users may edit it, so it has no checks
FORMATS = ("safetensors", "dcp")
_BLOCK = 1 << 24  # bytes read at a time
_MOST = 1 << 30  # bytes of a manifest; a larger one is not a manifest
_MOST_RANKS = 1 << 24


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
    layout: str  # digest of every parameter's name, shape, dtype and placements
    files: dict[str, FileEntry]
    created: int = field(default_factory=time.time_ns)  # when it was complete, in nanoseconds since 1970
    torch: str = torch.__version__  # the version that saved
    trainable_only: bool = False  # whether frozen parameters were left out

    def to_bytes(self) -> bytes:
        """Return it as JSON; the last entry is a digest of the others."""
        files = {name: vars(entry) for name, entry in sorted(self.files.items())}
        body = {"shardkit_checkpoint": VERSION, **vars(self), "files": files}
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
        if file.stat().st_size > _MOST:
            raise ValueError(f"it is larger than {_MOST:,} bytes")
        body = json.loads(file.read_bytes())
        if body.pop("digest") != _digest(body):
            raise ValueError("its digest does not match its contents")
        version = body.pop("shardkit_checkpoint")
        body.setdefault("trainable_only", False)  # the first saves did not write it
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        rule = "A complete checkpoint has the manifest that its save wrote last"
        problem = f"no manifest ({type(error).__name__}: {error})"
        raise CheckpointError(message(str(file), problem, rule, "Use another checkpoint")) from None
    if type(version) is int and version > VERSION:
        rule = f"This version of shardkit reads manifests up to version {VERSION}"
        raise CheckpointError(message(str(file), f"it has version {version}", rule, "Upgrade shardkit"))
    if problem := next(_problems(version, body), ""):
        rule = "save_checkpoint does not write such a manifest: the file was changed"
        raise CheckpointError(message(str(file), problem, rule, "Use another checkpoint"))
    files = {name: FileEntry(**entry) for name, entry in body.pop("files").items()}
    return Manifest(files=files, **body)


_TYPES = {"format": str, "world_size": int, "meshes": list, "layout": str, "files": dict, "created": int, "torch": str}
_TYPES["trainable_only"] = bool
_LIMITS = {"bytes": 1 << 63, "head": 1 << 63, "crc32": 1 << 32}


def _problems(version: Any, body: dict[str, Any]) -> Iterator[str]:
    """Yield what a save does not write, for a manifest that was changed together with its digest."""
    if type(version) is not int or body.keys() != _TYPES.keys():
        yield f"it has version {version!r} and the entries {listing(body)}"
        return
    yield from (f"{name} is {body[name]!r:.100}" for name, kind in _TYPES.items() if type(body[name]) is not kind)
    if body["format"] not in FORMATS or not 1 <= body["world_size"] <= _MOST_RANKS or body["created"] < 0:
        yield f"format is {body['format']!r}, world_size {body['world_size']} and created {body['created']}"
    for name, entry in body["files"].items():
        if name in ("", ".", "..", NAME) or os.path.basename(name) != name or "\0" in name:
            yield f"{name!r} is not the name of a file beside it"
        sums = entry.get("sums") if isinstance(entry, dict) and entry.keys() == {*_LIMITS, "sums"} else None
        numbers = [(entry[key], limit) for key, limit in _LIMITS.items()] if isinstance(sums, dict) else [(-1, 0)]
        numbers += [(value, 1 << 64) for value in sums.values()] if isinstance(sums, dict) else []
        if not all(type(number) is int and 0 <= number < limit for number, limit in numbers):
            yield f"the entry of {name} is not sizes and checksums"


def written_files(directory: Path) -> set[str]:
    """Return the names of the files that the save of a checkpoint wrote; none without a manifest. Local.

    Raises:
        CheckpointError: the manifest cannot be read, so it is unknown which they are.
    """
    if not (directory / NAME).is_file():
        return set()
    try:
        return {NAME, *read_manifest(directory).files}
    except CheckpointError as error:
        rule = "shardkit replaces only files that it wrote, and the manifest lists them"
        problem, fix = f"its manifest cannot be read ({error})", "Delete it, or use another path"
        raise CheckpointError(message("path", problem, rule, fix)) from None


def check_sizes(directory: Path, manifest: Manifest) -> None:
    """Raise unless every file is there in its size; reads no contents. Local."""
    problems = []
    for name, entry in manifest.files.items():
        try:
            found = os.lstat(directory / name)  # a link might lead anywhere
            size = found.st_size if stat.S_ISREG(found.st_mode) else None
        except OSError:
            size = None
        if name != CONFIG and size != entry.bytes:
            problems.append(f"{name} has {'no file' if size is None else f'{size:,} bytes'}, written {entry.bytes:,}")
    if problems:
        rule = "Every file has the size that the manifest states"
        raise CheckpointError(message(str(directory), listing(problems), rule, "Use another checkpoint"))


def created_if_whole(directory: Path) -> int | None:
    """Return when a checkpoint was complete, if every file has its size; None for any other directory. Local."""
    try:
        manifest = read_manifest(directory)
        check_sizes(directory, manifest)
    except CheckpointError:
        return None
    return manifest.created


def entry_of(file: Path, sums: dict[str, int] | None = None) -> FileEntry:
    """Return the entry of a file, after reading all of it. Local."""
    size = file.stat().st_size
    return FileEntry(size, size, crc32_of(file, size), sums or {})


def crc32_of(file: Path, head: int) -> int:
    """Return the checksum of the first ``head`` bytes."""
    value = 0
    with open(file, "rb") as opened:
        while head > 0 and (block := opened.read(min(head, _BLOCK))):
            value, head = zlib.crc32(block, value), head - len(block)
    return value
