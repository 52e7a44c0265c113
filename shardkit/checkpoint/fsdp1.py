"""Files of ``torch.save``: what FSDP1's FULL_STATE_DICT and plain programs leave."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardkit.checkpoint.pieces import part_of
from shardkit.checkpoint.source import Contents, Stored, contents_of, local_bytes
from shardkit.checkpoint.transfer import Meter, Progress
from shardkit.errors import CheckpointError, message
from shardkit.shards import local_part

SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".tar")


class TorchFile:
    """A file of ``torch.save``, mapped into memory: what is not asked for is not read."""

    def __init__(self, file: Path, *, allow_pickle: bool = False) -> None:
        self.contents: Contents
        self._tensors: dict[str, Tensor] = {}
        tree = _loaded(file, allow_pickle)
        if not isinstance(tree, Mapping):
            rule = "A checkpoint is a dict of tensors, or of such dicts"
            fix = "Save model.state_dict() rather than the model"
            raise CheckpointError(message(str(file), f"it holds a {type(tree).__name__}", rule, fix))
        self.contents = contents_of(self._stored(tree, ()), str(file))

    def _stored(self, value: Any, path: tuple[str, ...]) -> Any:
        """The same tree with a :class:`Stored` in the place of each tensor."""
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


def _loaded(file: Path, allow_pickle: bool) -> Any:
    try:
        return torch.load(file, map_location="cpu", weights_only=not allow_pickle, mmap=_is_zip(file))
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, AttributeError, KeyError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        rule = "Loaded are files of torch.save with tensors and plain data, since pickles can run code"
        fix = "Save state dicts, with SHARDED ones as a DCP directory; or pass allow_pickle=True if you trust it"
        raise CheckpointError(message(str(file), f"torch.load says: {reason}", rule, fix)) from error


def _is_zip(file: Path) -> bool:
    """Whether ``torch.save`` wrote it in its present form (since torch 1.6), the only one that can be mapped."""
    with open(file, "rb") as opened:
        return opened.read(4) == b"PK\x03\x04"
