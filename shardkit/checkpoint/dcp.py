"""A directory of torch.distributed.checkpoint (DCP) as a source. torch's own reader does the work.

A pickle can run code, so ``.metadata`` is first unpickled with a list of the names that torch
writes there, and values that are not tensors with ``weights_only``.
"""

from __future__ import annotations

import io
import pickle
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load

from shardkit.checkpoint.source import Stored, contents_of, unpack
from shardkit.errors import CheckpointError

DCP_NAME = ".metadata"
# what torch says of a save or load in one process
ALONE = "torch.distributed is (disabled|unavailable)"
# What torch 2.0 to 2.15 writes.
_ADMITTED = {
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("collections", "OrderedDict"),
}
for _name in (*dcp_metadata.__all__, "_MEM_FORMAT_ENCODING"):
    _ADMITTED.add(("torch.distributed.checkpoint.metadata", _name))
for _module in ("pathlib", "pathlib._local"):
    _ADMITTED.add((_module, "PosixPath"))


class DcpDirectory:
    """A DCP directory as a source."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        data = io.BytesIO((directory / DCP_NAME).read_bytes())
        metadata: dcp_metadata.Metadata = _Unpickler(data).load()
        for info in (metadata.storage_data or {}).values():
            if ".." in Path(info.relative_path).parts or Path(info.relative_path).is_absolute():
                raise ValueError(f"{info.relative_path!r} leads out of the directory")
        paths = metadata.planner_data or {}
        tree: dict[Any, Any] = {}
        for key, saved in metadata.state_dict_metadata.items():
            if isinstance(saved, dcp_metadata.TensorStorageMetadata):
                value = Stored(saved.properties.dtype, saved.size, key)
            else:
                info = metadata.storage_data[dcp_metadata.MetadataIndex(key)]
                with open(directory / info.relative_path, "rb") as file:
                    file.seek(info.offset)
                    packed = file.read(info.length)
                try:
                    value = unpack(packed)
                except pickle.UnpicklingError:  # an object of the program that wrote it
                    continue
            *outer, last = paths.get(key, (key,))
            inner = tree
            for step in outer:
                inner = inner.setdefault(step, {})
            inner[last] = value
        self.contents = contents_of(tree)

    def read(self, targets: Iterable[tuple[str, Tensor]]) -> None:
        """Fill each target from the tensor with its key; a DTensor reads only the chunks it has a
        part of. Local.
        """
        reader = FileSystemReader(self._directory)
        planner = DefaultLoadPlanner(flatten_state_dict=False)
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=ALONE)
                load(dict(targets), storage_reader=reader, planner=planner, no_dist=True)
        except (Exception, CheckpointException) as error:  # the latter is none of the former
            problem = str(error).strip().splitlines()[-1]
            raise CheckpointError(
                f"{self._directory} is damaged: {problem}. Load an earlier checkpoint, or copy it "
                "again."
            ) from error


class _Unpickler(pickle.Unpickler):
    """Loads DCP's metadata, and no other objects."""

    def find_class(self, module: str, name: str) -> Any:
        """Return the class of a name in the pickle, if torch writes it there."""
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if (module, name) in _ADMITTED or is_dtype:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{DCP_NAME} has a pickled {module}.{name}")
