"""Directories of torch.distributed.checkpoint (DCP), written by shardkit, by FSDP1's SHARDED_STATE_DICT, or by hand.

Read with DCP's own reader and planner, each rank on its own: unlike ``dcp.load`` that needs no collectives, and reads
only what is asked for.
"""

from __future__ import annotations

import io
import json
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_saver import save

from shardkit import _torch
from shardkit.checkpoint.dcp_metadata import NAME, read_metadata
from shardkit.checkpoint.manifest import FileEntry, entry_of
from shardkit.checkpoint.source import Contents, Stored, contents_of, local_bytes
from shardkit.checkpoint.transfer import Meter, Progress
from shardkit.errors import CheckpointError, message
from shardkit.ranks import Groups, all_gather_bytes, together
from shardkit.shards import local_value


class DcpDirectory:
    """A DCP directory.

    Args:
        directory: which has a ``.metadata``.
        listed: the names of the files that may be read; None: all in the directory.
        allow_pickle: unpickle what is not plain data, which can run code.
    """

    def __init__(self, directory: Path, listed: Collection[str] | None = None, *, allow_pickle: bool = False) -> None:
        self._reader, self._allow_pickle = FileSystemReader(directory), allow_pickle
        self._metadata = read_metadata(directory, listed, allow_pickle)
        self._objects = [key for key, entry in self._entries() if not isinstance(entry, TensorStorageMetadata)]
        self.contents: Contents = contents_of(self._tree(), str(directory))

    def _entries(self) -> list[tuple[str, Any]]:
        return list(self._metadata.state_dict_metadata.items())

    def _tree(self) -> dict[Any, Any]:
        """The nested dicts that were saved: tensors as :class:`Stored`, everything else read."""
        values = self._plain()
        tree: dict[Any, Any] = {}
        paths = self._metadata.planner_data or {}
        for key, entry in self._entries():
            path = paths.get(key, (key,)) if isinstance(paths, Mapping) else (key,)
            at = tree
            for step in path[:-1]:
                at = at.setdefault(step, {})
            is_tensor = isinstance(entry, TensorStorageMetadata)
            at[path[-1]] = Stored(entry.properties.dtype, entry.size, key) if is_tensor else values[key]
        return tree

    def _plain(self) -> dict[str, Any]:
        planner = _PlainPlanner(self._allow_pickle)
        self._read({key: io.BytesIO() for key in self._objects}, planner)
        return planner.values

    def _read(self, targets: dict[str, Any], planner: DefaultLoadPlanner) -> None:
        if not targets:
            return
        planner.set_up_planner(targets, self._metadata, is_coordinator=True)
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)
        plan = self._reader.prepare_local_plan(planner.create_local_plan())
        self._reader.read_data(plan, planner).wait()

    def read(self, targets: Iterable[tuple[str, Tensor]], progress: Progress | None = None) -> None:
        """Fill each target from the tensor of its key; a DTensor reads the chunks that it has a part of. Local."""
        wanted = list(targets)
        meter = Meter(progress, sum(map(local_bytes, (tensor for _, tensor in wanted))))
        for batch in _batches(wanted):
            self._read(dict(batch), _TensorPlanner(flatten_state_dict=False))
            meter.add(sum(map(local_bytes, (tensor for _, tensor in batch))))


def _batches(targets: list[tuple[str, Tensor]]) -> Iterator[list[tuple[str, Tensor]]]:
    """Some at a time, for the progress line."""
    for start in range(0, len(targets), 64):
        yield targets[start : start + 64]


class _PlainPlanner(DefaultLoadPlanner):
    """Unpickles tensors and plain data only, unless asked; torch's own planner unpickles anything."""

    values: dict[str, Any]

    def __init__(self, allow_pickle: bool) -> None:
        super().__init__(flatten_state_dict=False)
        self.values, self._allow_pickle = {}, allow_pickle

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Called by the reader for each object."""
        fqn = read_item.dest_index.fqn
        try:
            self.values[fqn] = torch.load(value, weights_only=not self._allow_pickle)
        except Exception as error:  # whatever is in there: it is of use to the program that wrote it only
            self.values[fqn] = Unreadable(fqn, str(error).strip().splitlines()[0])


class _TensorPlanner(DefaultLoadPlanner):
    """Fills tensors by what is of their kind; a quantised piece would be copied into plain memory without a word."""

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """Called by the reader for where a piece goes, of which it asks for ``detach``, ``size`` and ``copy_``."""
        target = super().resolve_tensor(read_item)
        return target if _torch.is_wrapper(target) else _PlainTarget(target, read_item)  # type: ignore[return-value]


class _PlainTarget:
    def __init__(self, target: Tensor, item: ReadItem) -> None:
        self._target, self._item = target, item

    def detach(self) -> _PlainTarget:
        return self

    def size(self) -> torch.Size:
        return self._target.size()

    def copy_(self, piece: Tensor) -> None:
        piece = local_value(piece)
        if _torch.is_wrapper(piece):
            problem = f"stored as {type(piece).__name__}, where it goes is plain"
            rule = "Quantised tensors are loaded as what they were"
            fix = "Load it with torch's dcp.load into an optimizer that has stepped, and save that with save_checkpoint"
            raise CheckpointError(message(self._item.dest_index.fqn, problem, rule, fix))
        self._target.detach().copy_(piece)


class Unreadable:
    """An object that a checkpoint holds pickled, and that is not plain data."""

    def __init__(self, key: str, reason: str) -> None:
        self.key, self.reason = key, reason

    def __repr__(self) -> str:
        return f"<{self.key}: {self.reason}>"


def write(directory: Path, tree: dict[str, Any], groups: Groups) -> dict[str, FileEntry]:
    """Save nested dicts with ``dcp.save`` and return the entries of all its files. Collective over ``groups``.

    What it writes, ``dcp.load`` of the same nested dicts reads. torch sends plans between ranks as pickles, for which
    it needs numpy.
    """
    # Across ranks, dcp.save gathers what each rank met and raises on all of them; alone it warns of being alone.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        save(
            tree,
            storage_writer=FileSystemWriter(directory),
            process_group=groups[0] if groups else None,
            no_dist=not groups,
        )
    rank = dist.get_rank(groups[0]) if groups else 0
    with together(groups, CheckpointError):
        if rank == 0:
            read_metadata(directory, None, allow_pickle=False)  # which checks that the pieces fill every tensor
        own = sorted(directory.glob(f"__{rank}_*")) + ([directory / NAME] if rank == 0 else [])
        found = {file.name: entry_of(file) for file in own}
    data = json.dumps({name: [entry.bytes, entry.head, entry.crc32] for name, entry in found.items()}).encode()
    for each in all_gather_bytes(data, groups[0]) if groups else []:
        found |= {name: FileEntry(*numbers) for name, numbers in json.loads(each).items()}
    return found
