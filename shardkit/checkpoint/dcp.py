"""Directories of torch.distributed.checkpoint (DCP), written by shardkit, by FSDP1's SHARDED_STATE_DICT, or directly.

Each rank reads on its own: unlike ``dcp.load`` this needs no collectives, and reads only what is asked for. DCP's
``.metadata`` is a pickle, but reading it runs no code: the names of the few data classes that torch writes stand for
empty shells, which are filled with the attributes in the pickle, and no other name is admitted. Everything in it is
checked before it is used.
"""

from __future__ import annotations

import io
import json
import math
import os
import pickle
import warnings
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import metadata as torchs
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from shardkit.checkpoint.chunks import covers
from shardkit.checkpoint.manifest import FileEntry, entry_of
from shardkit.checkpoint.read import fill, within
from shardkit.checkpoint.source import Contents, Stored, contents_of
from shardkit.checkpoint.transfer import Progress, opened, read_all
from shardkit.errors import CheckpointError, message
from shardkit.ranks import Groups, all_gather_bytes, together
from shardkit.shards import Box

NAME = ".metadata"
_CLASSES = "torch.distributed.checkpoint.metadata"
_DEEPEST = 64  # dims, as torch has them
_PACKED = 16  # bytes of a tensor per byte of a file, at most: float64 in four bits, of quantized tensors
# What torch 2.0 to 2.15 writes. Paths are of the class of the system that saved.
_ADMITTED = {
    *((_CLASSES, name) for name in torchs.__all__),
    (_CLASSES, "_MEM_FORMAT_ENCODING"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
    *((module, name) for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "WindowsPath")),
}


class DcpDirectory:
    """A DCP directory.

    Args:
        directory: has a ``.metadata``.
        listed: the names of the files that may be read; None: all in the directory.
        allow_pickle: unpickle other objects than plain data, which can run code.

    Raises:
        CheckpointError: it has contents that torch does not write, or that do not fit its files.
    """

    def __init__(self, directory: Path, listed: Collection[str] | None = None, *, allow_pickle: bool = False) -> None:
        self._directory = directory
        found = read_metadata(directory, listed, allow_pickle)
        self._places = found.places
        tree: dict[Any, Any] = {}
        for key, path in found.paths.items():
            at = tree
            for step in path[:-1]:
                at = at.setdefault(step, {})
            at[path[-1]] = found.tensors[key] if key in found.tensors else self._plain(key, allow_pickle)
        self.contents: Contents = contents_of(tree, str(directory))

    def _plain(self, key: str, allow_pickle: bool) -> Any:
        try:
            return self._load(self._places[key][0][1], weights_only=not allow_pickle)
        except Exception as error:  # any object of the program that wrote it, and perhaps of no use here
            return Unreadable(key, str(error).strip().splitlines()[0])

    def _load(self, place: Place, weights_only: bool = True) -> Any:
        with opened(self._directory / place.file, os.O_RDONLY) as descriptor:
            stream: Any = _Slice(descriptor, place.offset, place.length)
            if place.transforms:  # such as compression
                transforms = FileSystemReader(self._directory).transforms
                stream = transforms.transform_load_stream(cast(Any, None), place.transforms, stream)
                stream = io.BytesIO(stream.read(-1))
            return torch.load(stream, map_location="cpu", weights_only=weights_only)

    def read(self, targets: Iterable[tuple[str, Tensor]], progress: Progress | None = None) -> None:
        """Fill each target from the tensor with its key; a DTensor loads only the chunks it has a part of. Local."""
        fill(targets, lambda key: [(box, partial(self._load, place)) for box, place in self._places[key]], progress)


class _Slice(io.RawIOBase):
    """A range of bytes of an open file, as a file for torch.load."""

    def __init__(self, descriptor: int, start: int, length: int) -> None:
        self._descriptor, self._start, self._length, self._at = descriptor, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (0, self._at, self._length)[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        data = memoryview(buffer)[: max(self._length - self._at, 0)]
        read_all(self._descriptor, data, self._start + self._at)
        self._at += len(data)
        return len(data)


class Unreadable:
    """A pickled object in a checkpoint that is not plain data."""

    def __init__(self, key: str, reason: str) -> None:
        self.key, self.reason = key, reason

    def __repr__(self) -> str:
        return f"<{self.key}: {self.reason}>"


def write(directory: Path, tree: dict[str, Any], groups: Groups) -> dict[str, FileEntry]:
    """Save nested dicts with ``dcp.save``, and return the entries of its files. Collective over ``groups``.

    ``dcp.load`` of the same nested dicts reads them. torch needs numpy to send plans between ranks as pickles.
    """
    # Across ranks, dcp.save gathers errors and raises on all ranks; in one process it warns that it is alone.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        group = groups[0] if groups else None
        save(tree, storage_writer=FileSystemWriter(directory), process_group=group, no_dist=not groups)
    rank = dist.get_rank(groups[0]) if groups else 0
    with together(groups, CheckpointError):
        if rank == 0:
            read_metadata(directory, None, allow_pickle=False)  # checks that the pieces fill every tensor
        own = sorted(directory.glob(f"__{rank}_*")) + ([directory / NAME] if rank == 0 else [])
        found = {file.name: entry_of(file) for file in own}
    data = json.dumps({name: [entry.bytes, entry.head, entry.crc32] for name, entry in found.items()}).encode()
    for each in all_gather_bytes(data, groups[0]) if groups else []:
        found |= {name: FileEntry(*numbers) for name, numbers in json.loads(each).items()}
    return found


# ---- its metadata -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """A range of bytes in a file."""

    file: str
    offset: int
    length: int
    transforms: Sequence[str]


@dataclass(frozen=True)
class Metadata:
    """The contents of a DCP directory, by key."""

    tensors: dict[str, Stored]
    places: dict[str, list[tuple[Box, Place]]]  # the chunks of tensors; any other value is one chunk
    paths: dict[str, tuple[str | int, ...]]  # in the nested dicts that were saved


def read_metadata(directory: Path, listed: Collection[str] | None, allow_pickle: bool) -> Metadata:
    """Read ``.metadata``; arguments and errors are those of :class:`DcpDirectory`. Local."""
    try:
        if listed is not None and NAME not in listed:
            raise ValueError("the manifest does not list it")
        data = within(directory, NAME).read_bytes()
        return _checked(pickle.loads(data) if allow_pickle else _Shells(io.BytesIO(data)).load(), directory, listed)
    except _NotAdmittedError as error:
        fix = "If you trust the author, pass allow_pickle=True, which runs any code that is in it"
        rule = "Only the data classes that torch itself writes are read without running code"
        raise CheckpointError(message(str(directory), f"{NAME} holds a pickled {error}", rule, fix)) from None
    except CheckpointError:
        raise
    except Exception as error:  # unpickling can raise anything
        rule = "A DCP directory has the metadata that dcp.save writes last"
        problem = f"{NAME} cannot be read ({type(error).__name__}: {error})"
        raise CheckpointError(message(str(directory), problem, rule, "Use another checkpoint")) from None


class _NotAdmittedError(Exception):
    pass


class Shell:
    """The attributes of a pickled object, without its class."""

    def __new__(cls, *args: Any) -> Shell:
        return super().__new__(cls)

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, tuple):  # of slots; or of TensorProperties, which starts with the dtype
            state = state[1] if len(state) == 2 else {"dtype": state[0]}
        self.__dict__.update(state)


class _Shells(pickle.Unpickler):
    """Loads objects as shells, with new classes each time, since a pickle may set attributes of classes."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self._shells: dict[tuple[str, str], type] = {}

    def find_class(self, module: str, name: str) -> Any:
        """Return the class that a name in the pickle stands for."""
        if module == "torch" and (name == "Size" or isinstance(getattr(torch, name, None), torch.dtype)):
            return getattr(torch, name)  # immutable
        if (module, name) not in _ADMITTED:
            raise _NotAdmittedError(f"{module}.{name}")
        base = dict if name == "OrderedDict" else Shell
        return self._shells.setdefault((module, name), type(name, (base,), {}))


def _checked(found: Any, directory: Path, listed: Collection[str] | None) -> Metadata:
    """Check all metadata, of torch's own classes or shells of them."""
    places = dict(_places(found.storage_data, directory, listed))
    left = len(places)  # each chunk is stored; one list of chunks that many tensors share would take forever
    result = Metadata({}, {}, {})
    paths = getattr(found, "planner_data", None) or {}
    for key, value in found.state_dict_metadata.items():
        _check(isinstance(key, str), f"{key!r} is not a name")
        path = paths.get(key, (key,))
        _check(type(path) is tuple and 0 < len(path) <= len(key) + 1, f"{key} is at {type(path).__name__} of the dict")
        _check(all(type(step) in (str, int) for step in path), f"{key} has a path of other than names and numbers")
        result.paths[key] = path
        if not hasattr(value, "chunks"):
            _check((key, None) in places, f"{key} is not stored")
            result.places[key] = [((), places[key, None])]
            continue
        left -= len(value.chunks)
        _check(left >= 0, "it has more chunks than are stored")
        result.tensors[key], result.places[key] = _tensor(key, value, places)
    dicts = {path[:end] for path in result.paths.values() for end in range(1, len(path))}
    _check(dicts.isdisjoint(result.paths.values()), "one path is of a dict and of a value")
    return result


def _places(
    found: Any, directory: Path, listed: Collection[str] | None
) -> Iterator[tuple[tuple[str, torch.Size | None], Place]]:
    """Yield where each chunk is stored, by name and offsets."""
    sizes: dict[str, int] = {}
    for index, info in found.items():
        name, at = info.relative_path, (info.offset, info.length)
        if name not in sizes:
            _check(listed is None or name in listed, f"the manifest does not list {name!r}")
            sizes[name] = os.stat(within(directory, name)).st_size
        _check(_are_sizes(at) and sum(at) <= sizes[name], f"{index.fqn} is at {at} of {name}")
        start, transforms = getattr(index, "offset", None), getattr(info, "transform_descriptors", None) or ()
        _check(all(isinstance(each, str) for each in transforms), "transforms must be names")
        yield (index.fqn, None if start is None else _size(start)), Place(name, *at, tuple(transforms))


def _tensor(
    key: str, found: Any, places: dict[tuple[str, torch.Size | None], Place]
) -> tuple[Stored, list[tuple[Box, Place]]]:
    shape, dtype = _size(found.size), found.properties.dtype
    _check(isinstance(dtype, torch.dtype), f"{key} has no dtype")
    pieces: dict[Box, Place] = {}
    for start, size in ((_size(each.offsets), _size(each.sizes)) for each in found.chunks):
        _check((key, start) in places, f"{key} at {tuple(start)} is not stored")
        place = places[key, start]
        fits = place.transforms or math.prod(size) * dtype.itemsize <= _PACKED * place.length
        _check(len(start) == len(size) == len(shape) and fits, f"{key} at {tuple(start)} does not fit its file")
        pieces[tuple(zip(start, size, strict=True))] = place
    _check(covers(pieces, shape), f"the chunks of {key} do not fill it, each element once")
    return Stored(dtype, shape, key), list(pieces.items())


def _size(found: Any) -> torch.Size:
    _check(isinstance(found, torch.Size) and len(found) <= _DEEPEST and _are_sizes(found), "sizes must be integers")
    return found  # type: ignore[no-any-return]


def _are_sizes(values: Collection[Any]) -> bool:
    return all(type(value) is int and 0 <= value < 1 << 63 for value in values)


def _check(condition: object, problem: str) -> None:
    if not condition:
        raise ValueError(problem)
