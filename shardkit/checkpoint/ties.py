"""Names that are one tensor in the model and several in a file: what the file has under them must be the same."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardkit._torch import with_local
from shardkit.checkpoint.match import Match
from shardkit.errors import CheckpointError, message
from shardkit.shards import local_value

logger = logging.getLogger("shardkit")

Read = Callable[[Iterable[tuple[str, Tensor]]], None]  # fills each tensor from the file's tensor of that name


def check_ties(matched: Match, tensors: Mapping[str, Tensor], read: Read, where: str, strict: bool) -> None:
    """Compare this rank's part of what a file has twice of one tensor; changes nothing. Local.

    Raises:
        CheckpointError: with ``strict``, naming all whose values differ; else they are logged as a warning.
    """
    differ = [
        f"{other} differs from {first}"
        for first, other, source in matched.also
        if not _equal(tensors[first], matched.sources[first], source, read)
    ]
    if not differ:
        return
    rule = "They are one tensor in the model, which can have one value"
    fix = "Untie them (config.tie_word_embeddings=False), leave one out with key_map=, "
    fix += "or pass strict=False to take the first"
    text = message(where, "; ".join(differ), rule, fix)
    if strict:
        raise CheckpointError(text)
    logger.warning(text)


def _equal(like: Tensor, one: str, other: str, read: Read) -> bool:
    values = [_room(like), _room(like)]
    read(zip((one, other), values, strict=True))
    flat = [local_value(value).flatten() for value in values]
    return torch.equal(*flat) or torch.equal(*(each.view(torch.uint8) for each in flat))  # NaN equals itself


def _room(like: Tensor) -> Tensor:
    local = torch.empty(local_value(like).shape, dtype=like.dtype)
    return with_local(like, local) if isinstance(like, DTensor) else local
