"""From a path to the tensors behind it: a safetensors file, an index of many, or a directory that has either.

What is read here was written by anyone, so nothing in it is believed before it is checked. Local; a few kilobytes.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardkit.checkpoint.format import LENGTH, MAX_HEADER, Entry, Header, header_length, parse_header, strict_json
from shardkit.checkpoint.layout import INDEX, SUFFIX
from shardkit.checkpoint.transfer import opened, raw_bytes
from shardkit.errors import CheckpointError, listing, message

_RULE = "shardkit reads a safetensors file, a *.safetensors.index.json, or a directory that has either"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


@dataclass(frozen=True)
class Located:
    """A tensor, and the file that has it."""

    file: Path
    entry: Entry


def locate(path: str | os.PathLike[str]) -> dict[str, Located]:
    """Every tensor behind a path, by name. Local; reads headers and indexes only.

    Args:
        path: a safetensors file; an index (``*.index.json``), whose files lie beside it; or a directory, of which
            ``model.safetensors``, else ``model.safetensors.index.json``, else its only index, else its only
            safetensors file is taken. A snapshot in the hub's cache, with its links to blobs, is such a directory.

    Raises:
        CheckpointError: there is no such thing, or it breaks a rule of its format, or leads out of its directory.
    """
    try:
        return _located(Path(path))
    except (OSError, RuntimeError, ValueError) as error:  # what may not be listed, links in a circle, a NUL in a name
        raise _refused(Path(path), f"it cannot be read ({error})") from None


def _located(start: Path) -> dict[str, Located]:
    file = within(start, _choice(start)) if start.is_dir() else start
    if file.suffix == ".json":
        return _by_index(file)
    return {name: Located(file, entry) for name, entry in read_header(file).tensors.items()}


def _choice(directory: Path) -> str:
    names = sorted(each.name for each in directory.iterdir())
    indexes = [name for name in names if name.endswith(INDEX)]
    plain = [name for name in names if name.endswith(SUFFIX)]
    for choice in (["model" + SUFFIX], ["model" + INDEX]):
        if choice[0] in names:
            return choice[0]
    found = indexes or plain
    if len(found) == 1:
        return found[0]
    if found:
        raise CheckpointError(message(str(directory), f"it has {listing(found)}", "One must be meant", "Pass its path"))
    pickles = [name for name in names if name.endswith(_PICKLES)]
    problem = f"it has pickles, {listing(pickles)}, and no safetensors" if pickles else "it has no safetensors"
    raise CheckpointError(message(str(directory), problem, _RULE, "Convert it, or pass another path"))


def _by_index(index: Path) -> dict[str, Located]:
    places = _weight_map(index)
    files = {name: within(index.parent, name) for name in dict.fromkeys(places.values())}
    if absent := [name for name, file in files.items() if not file.exists()]:
        raise CheckpointError(
            message(str(index), f"it names {listing(absent)}", "Its files lie beside it", "Fetch what is missing")
        )
    headers = {name: read_header(file) for name, file in files.items()}
    if lost := [f"{key} ({name})" for key, name in places.items() if key not in headers[name].tensors]:
        problem, rule = f"it names {listing(lost)}, not there", "Each tensor is in the file that the index says"
        raise CheckpointError(message(str(index), problem, rule, "Fetch index and files anew"))
    return {key: Located(files[name], headers[name].tensors[key]) for key, name in places.items()}


def _weight_map(index: Path) -> dict[str, str]:
    text = _read(index, 0, _checked_size(index, MAX_HEADER))
    try:
        table = strict_json(text)
    except (ValueError, RecursionError) as error:
        raise _refused(index, f"it is no JSON ({error})") from None
    found: Any = table.get("weight_map") if isinstance(table, dict) else None
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found.values()):
        raise _refused(index, "it has no weight_map from tensors to files")
    return found


def within(directory: Path, name: str) -> Path:
    """A file of a directory, which must really be there, or in the blobs of the hub's cache that it belongs to."""
    if name in ("", ".", "..") or os.path.basename(name) != name or "\0" in name:
        raise _refused(directory, f"{name!r} is not the name of a file in it")
    root, file = directory.resolve(), (directory / name).resolve()
    blobs = root.parent.parent / "blobs" if root.parent.name == "snapshots" else root
    if not file.is_relative_to(root) and not file.is_relative_to(blobs):
        raise CheckpointError(
            message(
                str(directory / name),
                f"it is a link to {file}",
                "What a directory or an index names lies in the directory, or in the blobs of the hub's cache",
                "Copy it there, or pass the path of the one file",
            )
        )
    return directory / name


# ---- one file -------------------------------------------------------------------------------------------------


def read_header(file: Path) -> Header:
    """The header of a safetensors file, checked. Local.

    Raises:
        CheckpointError: there is no such file, or it breaks a rule of the format.
    """
    size = _checked_size(file, None)
    try:
        length = header_length(_read(file, 0, min(LENGTH, size)), size)
        return parse_header(_read(file, LENGTH, length), size)
    except ValueError as error:
        raise _refused(file, str(error)) from None


def _checked_size(file: Path, most: int | None) -> int:
    try:
        found = os.stat(file)
    except OSError as error:
        raise _refused(file, error.strerror or str(error)) from None
    if not stat.S_ISREG(found.st_mode):
        raise _refused(file, "it is no regular file")
    if most is not None and found.st_size > most:
        raise _refused(file, f"it has {found.st_size:,} bytes, and an index at most {most:,}")
    return found.st_size


def _read(file: Path, start: int, count: int) -> bytes:
    try:
        with opened(file, os.O_RDONLY) as descriptor:
            return raw_bytes(descriptor, start, count)
    except OSError as error:
        raise _refused(file, error.strerror or str(error)) from None


def _refused(file: Path, problem: str) -> CheckpointError:
    return CheckpointError(message(str(file), problem, _RULE, "Check the path, or fetch the file anew"))
