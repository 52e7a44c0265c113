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
from torch.distributed.checkpoint import metadata as torchs
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load

from shardkit.checkpoint.source import Contents, Stored, contents_of, unpack
from shardkit.errors import CheckpointError
from shardkit.shards import covers

DCP_NAME = ".metadata"
# what torch says of a save or load in one process
ALONE = "torch.distributed is (disabled|unavailable)"
_CLASSES = "torch.distributed.checkpoint.metadata"
# What torch 2.0 to 2.15 writes. Paths are of the class of the system that saved.
_ADMITTED = {
    *((_CLASSES, name) for name in (*torchs.__all__, "_MEM_FORMAT_ENCODING")),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("collections", "OrderedDict"),
    *(
        (module, name)
        for module in ("pathlib", "pathlib._local")
        for name in ("PosixPath", "WindowsPath")
    ),
}


class DcpDirectory:
    """A DCP directory as a source."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        found: torchs.Metadata = _Unpickler(io.BytesIO((directory / DCP_NAME).read_bytes())).load()
        for info in found.storage_data.values():
            if Path(info.relative_path).name != str(info.relative_path):
                raise self._damaged(f"{info.relative_path} is not the name of a file")
        leaves: dict[str, Any] = {}
        for key, each in found.state_dict_metadata.items():
            if isinstance(each, torchs.TensorStorageMetadata):
                boxes = {
                    tuple(zip(chunk.offsets, chunk.sizes, strict=True)) for chunk in each.chunks
                }
                if not covers(boxes, each.size):
                    raise self._damaged(f"the chunks of {key} do not fill it")
                leaves[key] = Stored(each.properties.dtype, each.size, key)
            else:
                info = found.storage_data[torchs.MetadataIndex(key)]
                with open(directory / info.relative_path, "rb") as file:
                    file.seek(info.offset)
                    data = file.read(info.length)
                try:
                    leaves[key] = unpack(data)
                # an object of the program that wrote it, perhaps of no use here
                except pickle.UnpicklingError:
                    continue
        self.contents: Contents = contents_of(
            _nested(leaves, found.planner_data or {}), str(directory)
        )

    def _damaged(self, problem: str) -> CheckpointError:
        return CheckpointError(
            f"{self._directory} is damaged: {problem}. Load an earlier checkpoint, or copy it "
            "again."
        )

    def read(self, targets: Iterable[tuple[str, Tensor]]) -> None:
        """Fill each target from the tensor with its key; a DTensor reads only the chunks it has a
        part of. Local.
        """
        reader, planner = (
            FileSystemReader(self._directory),
            DefaultLoadPlanner(flatten_state_dict=False),
        )
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=ALONE)
                load(dict(targets), storage_reader=reader, planner=planner, no_dist=True)
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
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if (module, name) in _ADMITTED or is_dtype:
            return super().find_class(module, name)
        # Python 3.11.0 to 3.11.3 pickle members of enums by it
        if (module, name) == ("builtins", "getattr"):
            return lambda enum, member: enum.__members__[member]
        raise pickle.UnpicklingError(f"{DCP_NAME} has a pickled {module}.{name}")
