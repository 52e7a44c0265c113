"""Files of ``torch.save``: what FSDP1's FULL_STATE_DICT and plain programs leave."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardkit.checkpoint.pieces import part_of
from shardkit.checkpoint.source import Contents, Stored, contents_of, local_bytes
from shardkit.checkpoint.transfer import Meter, Progress
from shardkit.errors import CheckpointError, message
from shardkit.shards import Box, local_part

SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".tar")


class TorchFile:
    """A file of ``torch.save``, mapped into memory: what is not asked for is not read."""

    def __init__(self, file: Path, *, allow_pickle: bool = False) -> None:
        self.contents: Contents
        self._tensors: dict[str, Tensor] = {}
        tree = loaded(file, allow_pickle)
        if not isinstance(tree, Mapping):
            rule = "A checkpoint is a dict of tensors, or of such dicts"
            fix = "Save model.state_dict() rather than the model"
            raise CheckpointError(message(str(file), f"it holds a {type(tree).__name__}", rule, fix))
        self.contents = contents_of(self._stored(tree, ()), str(file))

    def _stored(self, value: Any, path: tuple[str, ...]) -> Any:
        """The same tree with a :class:`Stored` in the place of each tensor."""
        if isinstance(value, (DTensor, ShardedPieces)):
            rule = "A file for each rank is read with those of all others"
            fix = "Pass the directory that has them, with rank_<number> at the end of their names"
            raise CheckpointError(message(".".join(path), "it is the shard of one rank", rule, fix))
        if isinstance(value, Tensor):
            key = ".".join(path)
            self._tensors[key] = value
            return Stored(value.dtype, value.shape, key)
        if isinstance(value, Mapping):
            return {key: self._stored(each, (*path, str(key))) for key, each in value.items()}
        return value

    @torch.no_grad()
    def read(self, targets: Iterable[tuple[str, Tensor]], progress: Progress | None = None) -> None:
        """Copy into each target the part that it has of the tensor of its key. Local."""
        wanted = list(targets)
        meter = Meter(progress, sum(local_bytes(target) for _, target in wanted))
        for key, target in wanted:
            part = local_part(self._tensors[key], target) if isinstance(target, DTensor) else self._tensors[key]
            part_of(target)[0].copy_(part)
            meter.add(part.nbytes)


def loaded(file: Path, allow_pickle: bool) -> Any:
    """What is in a file of ``torch.save``, mapped; FSDP1's ShardedTensors as :class:`ShardedPieces`. Local.

    Raises:
        CheckpointError: it is not such a file, or holds other than tensors and plain data.
    """
    try:
        try:
            with torch.serialization.safe_globals(_SHELLS), _quiet_meshes():
                return torch.load(file, map_location="cpu", weights_only=True, mmap=_is_zip(file))
        except pickle.UnpicklingError:
            if not allow_pickle:
                raise
            return torch.load(file, map_location="cpu", weights_only=False, mmap=_is_zip(file))
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, AttributeError, KeyError, TypeError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        rule = "Loaded are files of torch.save with tensors and plain data, since pickles can run code"
        fix = "Save state dicts, with SHARDED ones as a DCP directory; or pass allow_pickle=True if you trust it"
        raise CheckpointError(message(str(file), f"torch.load says: {reason}", rule, fix)) from error


class ShardedPieces(Tensor):
    """A ShardedTensor of FSDP1, as its file has it. torch's own class wants the process group that wrote it.

    Attributes:
        size_of_whole: of the full tensor.
        pieces: what the rank has of it, each with where it lies.
    """

    size_of_whole: torch.Size
    pieces: list[tuple[Tensor, Box]]

    def __setstate__(self, state: Any) -> None:
        shards, metadata, *_ = state
        self.size_of_whole = torch.Size(metadata.fields["size"])
        places = [(shard.fields["tensor"], shard.fields["metadata"].fields) for shard in shards]
        self.pieces = [(t, tuple(zip(at["shard_offsets"], at["shard_sizes"], strict=True))) for t, at in places]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Called for whatever is computed with it: there are pieces, and no values."""
        if func is torch.ops.aten.detach.default:  # by torch.load
            return args[0]
        raise NotImplementedError(func)


class _Shell:
    """What a file says of an object that is not made again."""

    def __new__(cls, *args: Any) -> _Shell:
        return super().__new__(cls)

    def __setstate__(self, state: Any) -> None:
        found = state[1] if isinstance(state, tuple) and len(state) == 2 else state  # of slots
        self.fields: dict[str, Any] = found if isinstance(found, dict) else {}


def _attribute(owner: Any, name: str) -> type[_Shell]:
    """In the place of ``getattr``, by which a nested class is pickled."""
    return _Shell


_SHARD = "torch.distributed._shard"
_SHELLS: list[Any] = [
    (ShardedPieces, f"{_SHARD}.sharded_tensor.api.ShardedTensor"),
    (_attribute, "builtins.getattr"),
    (_attribute, "__builtin__.getattr"),
    *(
        (_Shell, name)
        for name in (
            f"{_SHARD}.sharded_tensor.shard.Shard",
            f"{_SHARD}.metadata.ShardMetadata",
            f"{_SHARD}.sharding_spec.chunk_sharding_spec.ChunkShardingSpec",
            f"{_SHARD}.sharding_spec.api.EnumerableShardingSpec",
            f"{_SHARD}.sharded_tensor.metadata.MEM_FORMAT_ENCODING",
            f"{_SHARD}.sharded_tensor.metadata.ShardedTensorMetadata",
            f"{_SHARD}.sharded_tensor.metadata.TensorProperties",
            "torch.distributed.remote_device._remote_device",
        )
    ),
]


def _is_zip(file: Path) -> bool:
    """Whether ``torch.save`` wrote it in its present form (since torch 1.6), the only one that can be mapped."""
    with open(file, "rb") as opened:
        return opened.read(4) == b"PK\x03\x04"


@contextmanager
def _quiet_meshes() -> Iterator[None]:
    """Silence what a DeviceMesh logs when it is unpickled where its process groups are not there (torch 2.13)."""
    logger = logging.getLogger("torch.distributed.device_mesh")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before
