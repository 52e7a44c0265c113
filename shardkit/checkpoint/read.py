"""Read safetensors files into shards: each rank reads the byte ranges that it needs, straight into its memory.

Anyone may have written the files, so everything in them is checked before it is used.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from shardkit._torch import is_wrapper
from shardkit.checkpoint.chunks import Part, common, inside, opened, part_of, raw, read_all, runs_of, staged
from shardkit.checkpoint.format import (
    INDEX,
    LENGTH,
    MAX_HEADER,
    SUFFIX,
    Entry,
    header_length,
    parse_header,
    parse_json,
)
from shardkit.errors import CheckpointError, listing, message
from shardkit.shards import Box, local_value

Chunk: TypeAlias = "tuple[Box, Callable[[], Tensor]]"  # its box in its tensor, and a function that loads it


@dataclass(frozen=True)
class Located:
    """A tensor, and the file that holds it."""

    file: Path
    entry: Entry


def read_parts(jobs: Iterable[tuple[Located, Part]]) -> None:
    """Fill parts of tensors from files, converted to their dtype. Local.

    Each rank reads the bytes of its shards straight into them; shards on another device, of another dtype or not
    contiguous go through a buffer of 16 MiB. Raises OSError where the system refuses, or a file is shorter than it was.
    """
    by_file: dict[Path, list[tuple[Entry, Part]]] = {}
    for located, part in sorted(jobs, key=lambda job: job[0].entry.start):
        by_file.setdefault(located.file, []).append((located.entry, part))
    for file, job in sorted(by_file.items()):
        with opened(file, os.O_RDONLY) as descriptor:
            for entry, part in job:
                for view, values, box in staged(part, entry.dtype):
                    data = raw(values)
                    for low, high, start in runs_of(box, entry.shape).bytes(entry.dtype.itemsize):
                        read_all(descriptor, data[low:high], entry.start + start)
                    if values is not view:
                        view.copy_(values)


@torch.no_grad()
def fill(targets: Iterable[tuple[str, Tensor]], chunks: Callable[[str], Iterable[Chunk]]) -> None:
    """Copy into each target, given with its key, its part of the chunks of that key. Local; one chunk at a time.

    Quantized chunks, such as torchao's optimizer state in DCP files, are copied as their values.
    """
    for key, into, box in [(key, *part_of(target)) for key, target in targets]:
        for at, load in chunks(key):
            if (shared := common(box, at)) is not None:
                loaded = local_value(load())
                values = loaded.dequantize() if is_wrapper(loaded) else loaded
                inside(into, box, shared).copy_(inside(values, at, shared))


# ---- files ------------------------------------------------------------------------------------------------------


def locate(path: str | os.PathLike[str]) -> dict[str, Located]:
    """Return every tensor at a path, by name. Local; reads headers and indexes only.

    Args:
        path: a safetensors file; an index (``*.index.json``) with its files beside it; or a directory, in which
            ``model.safetensors`` is taken, else ``model.safetensors.index.json``, else its only index, else its only
            safetensors file. A snapshot in the hub's cache, with its links to blobs, is such a directory.

    Raises:
        CheckpointError: there is no such file, it breaks a rule of its format, or it leads out of its directory.
    """
    start = Path(path)
    try:
        file = within(start, _choice(start)) if start.is_dir() else start
        if file.suffix == ".json":
            return _by_index(file)
        return {name: Located(file, entry) for name, entry in _read_header(file).items()}
    except (OSError, RuntimeError, ValueError) as error:  # no permission, links in a circle, a NUL in a name
        rule = "shardkit reads a safetensors file, a *.safetensors.index.json, or a directory that has either"
        fix = "Check the path, or fetch the files again"
        raise CheckpointError(message(str(start), f"cannot be read: {error}", rule, fix)) from None


def _choice(directory: Path) -> str:
    names = sorted(each.name for each in directory.iterdir())
    for choice in ("model" + SUFFIX, "model" + INDEX):
        if choice in names:
            return choice
    indexes = [name for name in names if name.endswith(INDEX)]
    found = indexes or [name for name in names if name.endswith(SUFFIX)]
    if len(found) != 1:
        raise ValueError(f"it has {listing(found or names) or 'no files'}, and not one index, or one file without one")
    return found[0]


def _by_index(index: Path) -> dict[str, Located]:
    table = parse_json(_read(index, 0, min(_size(index), MAX_HEADER)))
    places: Any = table.get("weight_map") if isinstance(table, dict) else None
    if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
        raise ValueError("it has no weight_map from tensors to files")
    files = {name: within(index.parent, name) for name in dict.fromkeys(places.values())}
    headers = {name: _read_header(file) for name, file in files.items()}
    if lost := [f"{key} ({name})" for key, name in places.items() if key not in headers[name]]:
        raise ValueError(f"it lists tensors that the files do not have: {listing(lost)}")
    return {key: Located(files[name], headers[name][key]) for key, name in places.items()}


def within(directory: Path, name: str) -> Path:
    """Return the path of a file that is really in the directory, or in the blobs of the hub's cache it belongs to.

    Raises:
        ValueError: it is elsewhere.
    """
    root, file = directory.resolve(), (directory / name).resolve()
    blobs = root.parent.parent / "blobs" if root.parent.name == "snapshots" else root
    if os.path.basename(name) != name or not (file.is_relative_to(root) or file.is_relative_to(blobs)):
        raise ValueError(f"{name!r} leads out of the directory, to {file}")
    return directory / name


def _read_header(file: Path) -> dict[str, Entry]:
    size = _size(file)
    try:
        length = header_length(_read(file, 0, min(LENGTH, size)), size)
        return parse_header(_read(file, LENGTH, length), size)
    except ValueError as error:
        raise ValueError(f"{file.name} is not a safetensors file: {error}") from None


def _size(file: Path) -> int:
    if file.exists() and not file.is_file():  # opening a pipe would wait for its writer
        raise ValueError(f"{file.name} is not a regular file")
    return file.stat().st_size


def _read(file: Path, start: int, count: int) -> bytes:
    data = bytearray(count)
    with opened(file, os.O_RDONLY) as descriptor:
        read_all(descriptor, memoryview(data), start)
    return bytes(data)
