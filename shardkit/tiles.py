"""Compute a function of tokens in tiles, so that what it computes in between is alive for one tile at a time.

Each tile is checkpointed: backward computes it again. All tiles are parts of one call of a module, so FSDP2 gathers and
reduces nothing more often.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from shardkit.errors import ShardkitError, message


class Tokens:
    """The arguments of a forward that gets a tensor of shape (..., tokens, features) first.

    Attributes:
        first: that tensor.
        dim: the dim of its tokens; that of all tensors which have the same tokens, with or without features.
    """

    def __init__(self, fqn: str, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        self._args, self._kwargs = args, kwargs
        first = next((each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)), None)
        if first is None or first.ndim < 2:
            given = "no tensor" if first is None else f"a tensor of shape {tuple(first.shape)} first"
            rule = "A module with tiles= is called with a tensor of shape (..., tokens, features) first"
            raise ShardkitError(message(fqn, f"called with {given}", rule, "Leave the module out of the rule"))
        self.first, self.dim = first, first.ndim - 2

    def __len__(self) -> int:
        return self.first.shape[self.dim]

    def calls(self, cut: Callable[[Tensor], Sequence[Tensor]]) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        """Return the arguments of each part: of the tensors with tokens those that ``cut`` returns, others whole."""
        number = len(cut(self.first))
        values = (*self._args, *self._kwargs.values())
        columns = [cut(each) if self._has_tokens(each) else [each] * number for each in values]
        here = len(self._args)
        return [(row[:here], dict(zip(self._kwargs, row[here:], strict=True))) for row in zip(*columns, strict=True)]

    def _has_tokens(self, each: Any) -> bool:
        lead = self.dim + 1
        return isinstance(each, Tensor) and each.shape[:lead] == self.first.shape[:lead] and each.ndim <= lead + 1


def in_tiles(forward: Callable[..., Tensor], tiles: int, fqn: str = "forward") -> Callable[..., Tensor]:
    """Return ``forward``, which works on each token alone, computed in at most ``tiles`` tiles of tokens.

    A single token, or none, is not cut. Random numbers are drawn for each tile, and the same again in backward.
    """

    @functools.wraps(forward)
    def tiled(*args: Any, **kwargs: Any) -> Tensor:
        tokens = Tokens(fqn, args, kwargs)
        if len(tokens) < 2:
            return forward(*args, **kwargs)
        calls = tokens.calls(lambda each: each.chunk(tiles, tokens.dim))
        return torch.cat([checkpoint(_of_contiguous, forward, *call, use_reentrant=False) for call in calls], -2)

    return tiled


def _of_contiguous(forward: Callable[..., Tensor], args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
    """Call ``forward`` with tensors that it may view in another shape, as it may those that are not cut."""
    given = [each.contiguous() if isinstance(each, Tensor) else each for each in (*args, *kwargs.values())]
    return forward(*given[: len(args)], **dict(zip(kwargs, given[len(args) :], strict=True)))
