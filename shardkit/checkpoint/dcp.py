"""Directories of torch.distributed.checkpoint (DCP), by shardkit, by FSDP1's SHARDED_STATE_DICT, or by programs.

torch's own reader and writer do the work. Only ``.metadata`` is unpickled with a list of the names that torch writes
there, and other values with ``weights_only``, since a pickle can run code.
"""

from __future__ import annotations

import io
import json
import pickle
import warnings
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import metadata as torchs
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from shardkit.checkpoint.chunks import covers
from shardkit.checkpoint.manifest import FileEntry, entry_of
from shardkit.checkpoint.read import within
from shardkit.checkpoint.source import Contents, Stored, contents_of
from shardkit.checkpoint.transfer import Meter, Progress
from shardkit.errors import CheckpointError, listing, message
from shardkit.ranks import Groups, all_gather_bytes, together
from shardkit.shards import local_value

NAME = ".metadata"
_ALONE = "torch.distributed is (disabled|unavailable)"  # what torch says of a save or load in one process
_CLASSES = "torch.distributed.checkpoint.metadata"
# What torch 2.0 to 2.15 writes. Paths are of the class of the system that saved.
_ADMITTED = {
    *((_CLASSES, name) for name in (*torchs.__all__, "_MEM_FORMAT_ENCODING")),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("collections", "OrderedDict"),
    *((module, name) for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "WindowsPath")),
}


class DcpDirectory:
    """A DCP directory as a source.

    Args:
        directory: has a ``.metadata``.
        listed: the names of the files that may be read; None: all.
        allow_pickle: unpickle other objects than plain data, which can run code.

    Raises:
        CheckpointError: its metadata cannot be read, or names other files.
    """

    def __init__(self, directory: Path, listed: Collection[str] | None = None, *, allow_pickle: bool = False) -> None:
        self._directory, self._allow_pickle = directory, allow_pickle
        self._metadata = found = self._checked_metadata(listed)
        specs = found.state_dict_metadata.items()
        plain: dict[str, Any] = {key: None for key, each in specs if isinstance(each, torchs.BytesStorageMetadata)}
        self._load(plain)
        tensors = ((key, each) for key, each in specs if isinstance(each, torchs.TensorStorageMetadata))
        leaves = plain | {key: Stored(each.properties.dtype, each.size, key) for key, each in tensors}
        try:
            tree = _nested(leaves, getattr(found, "planner_data", None) or {})
            self.contents: Contents = contents_of(tree, str(directory))
        except (TypeError, ValueError, AttributeError, RecursionError) as error:  # somebody else's metadata
            raise self._damaged(f"the names of its values do not nest ({error})") from error

    def _checked_metadata(self, listed: Collection[str] | None) -> torchs.Metadata:
        where = str(self._directory)
        try:
            if listed is not None and NAME not in listed:
                raise ValueError("the manifest does not list it")
            data = io.BytesIO((self._directory / NAME).read_bytes())
            found: torchs.Metadata = (pickle.Unpickler if self._allow_pickle else _Unpickler)(data).load()
            names = {within(self._directory, info.relative_path).name for info in found.storage_data.values()}
            uncovered = [key for key, each in found.state_dict_metadata.items() if not _is_covered(each)]
        except _NotAdmittedError as error:
            rule = "Only the data classes that torch itself writes are read without running code"
            fix = "If you trust the author, pass allow_pickle=True, which runs any code that is in it"
            raise CheckpointError(message(where, f"has a {NAME} with a pickled {error}", rule, fix)) from None
        except CheckpointError:
            raise
        except Exception as error:  # unpickling can raise anything
            problem = f"has a {NAME} that cannot be read ({type(error).__name__}: {error})"
            fix = "Load an earlier checkpoint, or copy this one again"
            raise CheckpointError(message(where, problem, "dcp.save writes it last", fix)) from error
        if listed is not None and (unlisted := sorted(names.difference(listed))):
            raise self._damaged(f"the manifest does not list {listing(unlisted)}")
        if uncovered:
            raise self._damaged(f"the chunks of {listing(uncovered)} do not fill it")
        return found

    def _load(self, tensors: dict[str, Any]) -> None:
        reader = _Reader(self._directory, self._metadata)
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=_ALONE)
                load(tensors, storage_reader=reader, planner=_Planner(self._allow_pickle), no_dist=True)
        except (
            Exception,
            CheckpointException,
        ) as error:  # the latter is none of the former
            raise self._damaged(str(error).strip().splitlines()[-1]) from error

    def _damaged(self, problem: str) -> CheckpointError:
        where, fix = str(self._directory), "Load an earlier checkpoint, or copy this one again"
        return CheckpointError(message(where, f"is damaged: {problem}", "", fix))

    def read(self, targets: Iterable[tuple[str, Tensor]], progress: Progress | None = None) -> None:
        """Fill each target from the tensor with its key; a DTensor reads only the chunks it has a part of. Local."""
        wanted = list(targets)
        meter = Meter(progress, sum(local_value(target).nbytes for _, target in wanted))
        while wanted:
            batch: dict[str, Any] = {}
            rest = []
            for key, target in wanted:
                if batch.setdefault(key, target) is not target:  # several tensors of one key
                    rest.append((key, target))
            self._load(dict(batch))
            meter.add(sum(local_value(target).nbytes for target in batch.values()))
            wanted = rest


def _nested(leaves: dict[str, Any], paths: dict[str, tuple[str | int, ...]]) -> dict[Any, Any]:
    tree: dict[Any, Any] = {}
    for key, value in leaves.items():
        *around, last = paths.get(key, (key,))
        at = tree
        for step in around:
            at = at.setdefault(step, {})
        at[last] = value
    return tree


def _is_covered(stored: Any) -> bool:
    if not isinstance(stored, torchs.TensorStorageMetadata):
        return True
    return covers({tuple(zip(each.offsets, each.sizes, strict=True)) for each in stored.chunks}, stored.size)


class _NotAdmittedError(Exception):
    pass


class _Unpickler(pickle.Unpickler):
    """Loads DCP's metadata, and no other objects."""

    def find_class(self, module: str, name: str) -> Any:
        """Return the class of a name in the pickle, if torch writes it there."""
        if (module, name) in _ADMITTED or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        raise _NotAdmittedError(f"{module}.{name}")


class _Reader(FileSystemReader):
    def __init__(self, directory: Path, metadata: torchs.Metadata) -> None:
        super().__init__(directory)
        self._found = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> torchs.Metadata:
        """Return what was read before; torch's unpickles anything (torch 2.13 to 2.15)."""
        self._found.storage_meta = torchs.StorageMeta(load_id=self.load_id)
        return self._found


class _Planner(DefaultLoadPlanner):
    def __init__(self, allow_pickle: bool) -> None:
        super().__init__(flatten_state_dict=False)
        self._allow_pickle = allow_pickle

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Do as torch's, which unpickles anything (torch 2.13 to 2.15)."""
        key = read_item.dest_index.fqn
        try:
            self.original_state_dict[key] = torch.load(value, weights_only=not self._allow_pickle)
        except Exception as error:  # any object of the program that wrote it, and perhaps of no use here
            self.original_state_dict[key] = Unreadable(key, str(error).strip().partition("\n")[0])


class Unreadable:
    """A pickled object in a checkpoint that is not plain data."""

    def __init__(self, key: str, reason: str) -> None:
        self.key, self.reason = key, reason

    def __repr__(self) -> str:
        return f"<{self.key}: {self.reason}>"


def write(directory: Path, tree: dict[str, Any], groups: Groups) -> dict[str, FileEntry]:
    """Save nested dicts with ``dcp.save``, and return the entries of its files. Collective over ``groups``.

    ``dcp.load`` of the same nested dicts reads them. torch needs numpy to send plans between ranks as pickles. Across
    ranks it gathers errors and raises on all ranks.
    """
    group = groups[0] if groups else None
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=_ALONE)
        try:
            save(tree, storage_writer=FileSystemWriter(directory), process_group=group, no_dist=not groups)
        except CheckpointException as error:  # which is no Exception; on all ranks
            reasons = [f"rank {rank}: {type(each[0]).__name__}: {each[0]}" for rank, each in error.failures.items()]
            rule, fix = "Nothing was saved; any earlier checkpoint is unchanged", "See the cause"
            raise CheckpointError(message("save_checkpoint", f"failed ({listing(reasons)})", rule, fix)) from error
    rank = dist.get_rank(group) if groups else 0
    with together(groups, CheckpointError):
        own = sorted(directory.glob(f"__{rank}_*")) + ([directory / NAME] if rank == 0 else [])
        found = {file.name: entry_of(file) for file in own}
    data = json.dumps({name: [entry.bytes, entry.head, entry.crc32] for name, entry in found.items()}).encode()
    for each in all_gather_bytes(data, group) if groups else []:
        found |= {name: FileEntry(*numbers) for name, numbers in json.loads(each).items()}
    return found
