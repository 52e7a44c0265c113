"""Directories of torch.distributed.checkpoint (DCP), by shardkit, by FSDP1's SHARDED_STATE_DICT, or by programs.

torch's own reader and writer do the work. Only ``.metadata`` is first unpickled with a list of the names that torch
writes there, and values that are not tensors with ``weights_only``, since a pickle can run code.
"""

from __future__ import annotations

import io
import pickle
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import metadata as torchs
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from shardkit.checkpoint.asynchronous import on_each
from shardkit.checkpoint.chunks import covers
from shardkit.checkpoint.directory import FileEntry, entry_of
from shardkit.checkpoint.format import within
from shardkit.checkpoint.source import Contents, Stored, contents_of
from shardkit.errors import CheckpointError, listing, message
from shardkit.ranks import Groups

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
    """A DCP directory as a source."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        data = io.BytesIO((directory / NAME).read_bytes())
        found: torchs.Metadata = _Unpickler(data).load()
        leaves: dict[str, Any] = {}
        for key, each in found.state_dict_metadata.items():
            if isinstance(each, torchs.TensorStorageMetadata):
                if not covers({tuple(zip(at.offsets, at.sizes, strict=True)) for at in each.chunks}, each.size):
                    raise self._damaged(f"the chunks of {key} do not fill it")
                leaves[key] = Stored(each.properties.dtype, each.size, key)
            else:
                leaves |= self._plain(key, found.storage_data[torchs.MetadataIndex(key)])
        for info in found.storage_data.values():
            within(directory, info.relative_path)
        self.contents: Contents = contents_of(_nested(leaves, found.planner_data or {}), str(directory))

    def _plain(self, key: str, info: Any) -> dict[str, Any]:
        """Read a value that is not a tensor; nothing if it is an object that is not plain data."""
        with open(within(self._directory, info.relative_path), "rb") as file:
            file.seek(info.offset)
            data = io.BytesIO(file.read(info.length))
        try:
            return {key: torch.load(data, weights_only=True)}
        except pickle.UnpicklingError:  # of the program that wrote it, and perhaps of no use here
            return {}

    def _damaged(self, problem: str) -> CheckpointError:
        where, fix = str(self._directory), "Load an earlier checkpoint, or copy this one again"
        return CheckpointError(message(where, f"is damaged: {problem}", "", fix))

    def read(self, targets: Iterable[tuple[str, Tensor]]) -> None:
        """Fill each target from the tensor with its key; a DTensor reads only the chunks it has a part of. Local."""
        wanted = list(targets)
        while wanted:
            batch: dict[str, Any] = dict(wanted)
            wanted = [(key, target) for key, target in wanted if batch[key] is not target]  # several of one key
            reader, planner = FileSystemReader(self._directory), DefaultLoadPlanner(flatten_state_dict=False)
            try:
                with warnings.catch_warnings():
                    warnings.filterwarnings("ignore", message=_ALONE)
                    load(batch, storage_reader=reader, planner=planner, no_dist=True)
            except (Exception, CheckpointException) as error:  # the latter is none of the former
                raise self._damaged(str(error).strip().splitlines()[-1]) from error


def _nested(leaves: dict[str, Any], paths: dict[str, tuple[str | int, ...]]) -> dict[Any, Any]:
    tree: dict[Any, Any] = {}
    for key, value in leaves.items():
        *around, last = paths.get(key, (key,))
        at = tree
        for step in around:
            at = at.setdefault(step, {})
        at[last] = value
    return tree


class _Unpickler(pickle.Unpickler):
    """Loads DCP's metadata, and no other objects."""

    def find_class(self, module: str, name: str) -> Any:
        """Return the class of a name in the pickle, if torch writes it there."""
        if (module, name) in _ADMITTED or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{NAME} has a pickled {module}.{name}")


def write(directory: Path, tree: dict[str, Any], groups: Groups) -> dict[str, FileEntry]:
    """Save nested dicts with ``dcp.save``, and return the entries of its files. Collective over ``groups``."""
    group = groups[0] if groups else None
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=_ALONE)
        try:
            save(tree, storage_writer=FileSystemWriter(directory), process_group=group, no_dist=not groups)
        except CheckpointException as error:  # which is no Exception; on all ranks
            reasons = [f"rank {rank}: {type(each[0]).__name__}: {each[0]}" for rank, each in error.failures.items()]
            rule = "Nothing was saved; any earlier checkpoint is unchanged"
            raise CheckpointError(message("save_checkpoint", f"failed ({listing(reasons)})", rule, "")) from error
    rank = dist.get_rank(group) if groups else 0

    def own() -> dict[str, Any]:
        files = sorted(directory.glob(f"__{rank}_*")) + ([directory / NAME] if rank == 0 else [])
        return {file.name: vars(entry_of(file)) for file in files}

    return {n: FileEntry(**entry) for found in on_each(own, groups).values() for n, entry in found.items()}
