"""Compute a function of tokens in tiles, so that what it computes in between is alive for one tile at a time.

Each tile is checkpointed: backward computes it again. All tiles are in one call of a module, so FSDP2 gathers it once.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardkit._fsdp import not_compiled
from shardkit._torch import FakeTensor
from shardkit.errors import ShardkitError, message

_DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
_FIX = "Leave the module out of tiles="


class Tokens:
    """The arguments of a forward that gets a tensor of shape (..., tokens, features) first.

    Attributes:
        first: that tensor.
        dim: the dim of its tokens; that of all tensors which have the same tokens, with or without features.
        tensors: the names of the arguments that are tensors.
    """

    def __init__(
        self, fqn: str, names: Sequence[str], args: Sequence[Any], kwargs: dict[str, Any], decided: dict[str, bool]
    ) -> None:
        """``names`` are the parameters of the forward; ``decided`` keeps which of them are cut, for later calls."""
        self._args, self._kwargs, self._decided = args, kwargs, decided
        self._names = [*names[: len(args)], *map(str, range(len(names), len(args))), *kwargs]
        values = (*args, *kwargs.values())
        self.tensors = frozenset(n for n, each in zip(self._names, values, strict=True) if isinstance(each, Tensor))
        first = next((each for each in values if isinstance(each, Tensor)), None)
        if first is None or first.ndim < 2:
            given = "no tensor" if first is None else f"a tensor of shape {tuple(first.shape)} first"
            rule = "A module with tiles= is called with a tensor of shape (..., tokens, features) first"
            raise ShardkitError(message(fqn, f"was called with {given}", rule, _FIX))
        self.first, self.dim = first, first.ndim - 2

    def __len__(self) -> int:
        return self.first.shape[self.dim]

    def calls(self, cut: Callable[[Tensor], Sequence[Tensor]]) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        """Return the arguments of each part: of the tensors with tokens those that ``cut`` returns, others whole."""
        number = len(cut(self.first))
        values = (*self._args, *self._kwargs.values())
        pairs = zip(self._names, values, strict=True)
        columns = [cut(each) if self._has_tokens(name, each) else [each] * number for name, each in pairs]
        here = len(self._args)
        return [(row[:here], dict(zip(self._kwargs, row[here:], strict=True))) for row in zip(*columns, strict=True)]

    def _has_tokens(self, name: str, each: Any) -> bool:
        if not isinstance(each, Tensor):
            return False
        lead = self.dim + 1
        found = each.shape[:lead] == self.first.shape[:lead] and each.ndim <= lead + 1
        return self._decided.setdefault(name, found) and found


def tiled(module: nn.Module, fqn: str, tiles: int) -> Callable[..., Tensor]:
    """Return the forward of a module that works on each token alone, computed in at most ``tiles`` tiles of tokens.

    A single token, or none, is not cut. Random numbers are drawn for each tile, and the same again in backward. Which
    arguments are cut is decided at the first call that has them, by their shape.

    The first call with more tokens than tiles, in each mode of training and with each set of tensors, computes half of
    the first tile alone too, and raises if that differs: a module that mixes tokens, as attention does, would be
    silently wrong. Fewer tokens are not cut before that.
    """
    forward: Callable[..., Tensor] = module.forward
    checked, decided = set[tuple[bool, frozenset[str]]](), dict[str, bool]()
    names = [*inspect.signature(forward).parameters]

    @functools.wraps(forward)
    def in_tiles(*args: Any, **kwargs: Any) -> Tensor:
        tokens = Tokens(fqn, names, args, kwargs, decided)
        call = (module.training, tokens.tensors)
        if len(tokens) < 2 or (call not in checked and len(tokens) <= tiles):
            return forward(*args, **kwargs)
        if call not in checked and _check(module, forward, tokens, fqn, tiles):
            checked.add(call)
        calls = tokens.calls(lambda each: each.chunk(tiles, tokens.dim))
        return torch.cat([checkpoint(_of_contiguous, forward, *call, use_reentrant=False) for call in calls], -2)

    return in_tiles


def _of_contiguous(forward: Callable[..., Tensor], args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
    """Call ``forward`` with tensors that it may view in another shape, as it may those that are not cut."""
    given = [each.contiguous() if isinstance(each, Tensor) else each for each in (*args, *kwargs.values())]
    return forward(*given[: len(args)], **dict(zip(kwargs, given[len(args) :], strict=True)))


@not_compiled
@torch.no_grad()
def _check(module: nn.Module, forward: Callable[..., Any], tokens: Tokens, fqn: str, tiles: int) -> bool:
    """Return whether half of a tile is computed alike alone; False if its values cannot tell. Raise if it is not."""
    half = -(-len(tokens) // tiles) // 2
    if isinstance(tokens.first, FakeTensor) or tokens.first.is_meta or not tokens.first.numel():
        return False
    dropouts = [each for each in module.modules() if isinstance(each, _DROPOUT) and each.training]
    for each in dropouts:  # they work on each token alone, and nothing could be compared with random numbers
        each.training = False
    try:
        (tile,) = tokens.calls(lambda each: [each.narrow(tokens.dim, 0, 2 * half)])
        (part,) = tokens.calls(lambda each: [each.narrow(tokens.dim, half, half)])
        whole, alone = (_of_contiguous(forward, *call) for call in (tile, part))
    finally:
        for each in dropouts:
            each.training = True
    rows = (*tokens.first.shape[: tokens.dim], 2 * half)
    rule = "A module with tiles= must compute each token alone, since each call gets one tile of tokens"
    if not isinstance(whole, Tensor) or whole.shape[:-1] != rows:
        returned = tuple(whole.shape) if isinstance(whole, Tensor) else type(whole).__name__
        raise ShardkitError(message(fqn, f"returns {returned} for {rows} tokens", rule, _FIX))
    largest = float(whole.abs().max())
    difference = float((whole.narrow(tokens.dim, half, half) - alone).abs().max())
    dtypes = [whole.dtype, *(param.dtype for param in module.parameters() if param.is_floating_point())]
    if torch.is_autocast_enabled(whole.device.type):
        dtypes.append(torch.get_autocast_dtype(whole.device.type))
    eps = max(torch.finfo(dtype).eps for dtype in dtypes if dtype.itemsize > 1)  # kernels differ with the shape
    if difference > eps**0.5 * largest:
        problem = f"computes a token differently, by {difference / largest:.1e}, when other tokens are left out"
        raise ShardkitError(message(fqn, problem, rule, _FIX))
    return 0 < largest < float("inf")
