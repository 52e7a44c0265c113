"""DCP's ``.metadata``, which is a pickle: read without running anything, and checked before anything follows it.

torch writes a handful of data classes into it. Here their names stand for empty shells that are filled with what the
pickle says; nothing of torch or Python is called, and no other name is admitted. Torch's own classes are then made from
what was checked. So a file that anyone may have written does no more than a JSON file would.
"""

from __future__ import annotations

import io
import math
import os
import pickle
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import FileSystemReader

from shardkit.checkpoint.locate import within
from shardkit.checkpoint.owners import fingerprint
from shardkit.checkpoint.pieces import whole
from shardkit.errors import CheckpointError, message
from shardkit.shards import Box

NAME = ".metadata"
_CLASSES = "torch.distributed.checkpoint.metadata"
_FILES = "torch.distributed.checkpoint.filesystem"
_DEEPEST = 64  # dims, as torch has them
_PACKED = 16  # bytes that one in a file may stand for: float64 in four bits, as quantised tensors are stored
# What torch 2.0 to 2.15 writes. A path is in there as the class of the system that saved.
_ADMITTED = {
    *((_CLASSES, name) for name in dcp.__all__),
    (_CLASSES, "_MEM_FORMAT_ENCODING"),
    (_FILES, "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
    *((module, name) for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "WindowsPath")),
}

Chunk: TypeAlias = "tuple[tuple[int, ...], tuple[int, ...]]"  # offsets and sizes


def read_metadata(directory: Path, listed: Collection[str] | None, allow_pickle: bool) -> dcp.Metadata:
    """What a DCP directory says that it holds. Local.

    Args:
        directory: which has a ``.metadata``.
        listed: names of the files that may be read; None: all in the directory.
        allow_pickle: unpickle whatever is in there, which runs code if its author wants.

    Raises:
        CheckpointError: it holds what torch does not write, or does not fit its files.
    """
    try:
        if listed is not None and NAME not in listed:
            raise ValueError("the manifest does not list it")
        path = within(directory, NAME)
        if allow_pickle:
            return FileSystemReader(directory).read_metadata()
        return _checked(_Shells(io.BytesIO(path.read_bytes())).load(), directory, listed)
    except _NotAdmittedError as error:
        fix = "If you trust who wrote it pass allow_pickle=True, which runs any code that is in it"
        rule = "Only the data classes that torch itself writes are read without running code"
        raise CheckpointError(message(str(directory), f"{NAME} holds a pickled {error}", rule, fix)) from None
    except CheckpointError:
        raise
    except Exception as error:  # unpickling raises whatever it likes
        rule = "A DCP directory has the metadata that dcp.save writes last"
        problem = f"{NAME} cannot be read ({type(error).__name__}: {error})"
        raise CheckpointError(message(str(directory), problem, rule, "Use another checkpoint")) from None


# ---- a pickle that runs nothing -------------------------------------------------------------------------------


class _NotAdmittedError(Exception):
    pass


class _Shell:
    """What a pickle says of one object: the arguments that it was to be made with, and its state."""

    def __new__(cls, *args: Any) -> _Shell:
        shell = super().__new__(cls)
        shell.__dict__["args"] = args
        return shell

    def __setstate__(self, state: Any) -> None:
        self.__dict__["state"] = state


class _Shells(pickle.Unpickler):
    """Makes a shell for each object. Classes are new ones each time, since a pickle may set their attributes."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self._shells: dict[tuple[str, str], type] = {}

    def find_class(self, module: str, name: str) -> Any:
        """Called for each name in the pickle."""
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if (module, name) not in _ADMITTED:
            raise _NotAdmittedError(f"{module}.{name}")
        base = dict if name == "OrderedDict" else _Shell
        return self._shells.setdefault((module, name), type(name, (base,), {}))


# ---- what it says, checked ------------------------------------------------------------------------------------


def _checked(found: Any, directory: Path, listed: Collection[str] | None) -> dcp.Metadata:
    """Torch's own metadata of the shells that were read."""
    fields = _fields(found, "Metadata")
    storage = dict(_storage(fields["storage_data"], directory, listed))
    left = len(storage)  # each chunk is stored somewhere; a list that is shared by many tensors would be no end of work
    entries: dict[str, Any] = {}
    for key, value in _dict(fields["state_dict_metadata"]).items():
        _check(isinstance(key, str), f"{key!r} is not a name")
        if _is(value, "BytesStorageMetadata"):
            _check((key, None) in storage, f"{key} is stored nowhere")
            entries[key] = dcp.BytesStorageMetadata()
            continue
        own = _fields(value, "TensorStorageMetadata")
        left -= len(own["chunks"])
        _check(left >= 0, "it has more chunks than are stored")
        entries[key] = _tensor(key, own, storage)
    paths = _dict(fields.get("planner_data") or {})
    planner = {key: _path(key, path) for key, path in paths.items() if key in entries}
    return dcp.Metadata(entries, planner, {dcp.MetadataIndex(*key): info for key, info in storage.items()})


@dataclass(frozen=True)
class Place:
    """Where a piece lies, with the names that torch's reader asks for, those of its own ``_StorageInfo``."""

    relative_path: str
    offset: int
    length: int
    transform_descriptors: Sequence[str] | None


def _storage(found: Any, directory: Path, listed: Collection[str] | None) -> Iterator[tuple[tuple[str, Any], Place]]:
    """Where each piece lies, by name and offsets."""
    sizes: dict[str, int] = {}
    for index, value in _dict(found).items():
        key, info = _fields(index, "MetadataIndex"), _fields(value, "_StorageInfo")
        name, offset, length = info["relative_path"], info["offset"], info["length"]
        if name not in sizes:
            _check(listed is None or name in listed, f"the manifest does not list {name!r}")
            sizes[name] = os.stat(within(directory, name)).st_size
        at = (offset, length)
        _check(_are_sizes(at) and offset + length <= sizes[name], f"{key['fqn']} lies at {at} of {name}")
        start = key.get("offset")
        transforms = info.get("transform_descriptors")
        _check(transforms is None or all(isinstance(each, str) for each in transforms), "transforms have names")
        place = Place(name, offset, length, transforms)
        yield (key["fqn"], None if start is None else torch.Size(_size(start))), place


def _tensor(key: str, fields: dict[str, Any], storage: dict[tuple[str, Any], Place]) -> dcp.TensorStorageMetadata:
    shape = torch.Size(_size(fields["size"]))
    properties = fields["properties"].__dict__.get("state")
    dtype = properties["dtype"] if isinstance(properties, dict) else properties[0]
    _check(isinstance(dtype, torch.dtype), f"{key} has no dtype")
    chunks = [_fields(each, "ChunkStorageMetadata") for each in fields["chunks"]]
    pieces = dict.fromkeys((torch.Size(_size(each["offsets"])), torch.Size(_size(each["sizes"]))) for each in chunks)
    for start, size in pieces:
        _check((key, start) in storage, f"{key} at {tuple(start)} is stored nowhere")
        info = storage[key, start]
        fits = info.transform_descriptors or math.prod(size) * dtype.itemsize <= _PACKED * info.length
        _check(len(start) == len(size) == len(shape) and fits, f"{key} at {tuple(start)} does not fit its file")
    boxes: list[Box] = [tuple(zip(*piece, strict=True)) for piece in pieces]
    complete = fingerprint(boxes, shape) == fingerprint([whole(shape)], shape)
    _check(complete, f"the chunks of {key} do not fill it, each element once")
    return dcp.TensorStorageMetadata(
        dcp.TensorProperties(dtype), shape, [dcp.ChunkStorageMetadata(*piece) for piece in pieces]
    )


def _path(key: str, path: Any) -> tuple[str | int, ...]:
    _check(type(path) is tuple and 0 < len(path) <= len(key) + 1, f"{key} is at {type(path).__name__} of the dict")
    _check(all(type(step) in (str, int) for step in path), f"{key} has a path of other than names and numbers")
    return path  # type: ignore[no-any-return]


def _size(found: Any) -> tuple[int, ...]:
    """A ``torch.Size``."""
    sizes = found.args[0] if _is(found, "Size") and found.args else ()
    _check(type(sizes) in (tuple, list) and len(sizes) <= _DEEPEST and _are_sizes(sizes), "sizes are whole numbers")
    return tuple(sizes)


def _are_sizes(values: Collection[Any]) -> bool:
    return all(type(value) is int and 0 <= value < 1 << 63 for value in values)


def _fields(found: Any, name: str) -> dict[str, Any]:
    _check(_is(found, name), f"a {type(found).__name__} where a {name} should be")
    return _dict(found.__dict__.get("state"))


def _is(found: Any, name: str) -> bool:
    return isinstance(found, _Shell) and type(found).__name__ == name


def _dict(found: Any) -> dict[Any, Any]:
    _check(isinstance(found, dict), f"a {type(found).__name__} where a dict should be")
    return found  # type: ignore[no-any-return]


def _check(condition: object, problem: str) -> None:
    if not condition:
        raise ValueError(problem)
