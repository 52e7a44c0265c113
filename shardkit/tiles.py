"""Compute a function of tokens in tiles, so that what it computes in between is alive for one tile
at a time.

Each tile is checkpointed: backward computes it again. All tiles are in one call of a module, so
FSDP2 gathers it once.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardkit.errors import ShardkitError, message

_MIXES = re.compile("Attention|Attn|Mixer|Conv[123]d|BatchNorm|Mamba|SSM|Recurrent|LSTM|GRU|RNN")


def tiled(module: nn.Module, fqn: str, tiles: int) -> Callable[..., Tensor]:
    """Return the forward of a module that works on each token alone, computed in at most ``tiles``
    tiles of tokens.

    The first tensor that it gets has the shape (..., tokens, features), and is cut along its
    tokens; so are other tensors with the same leading dims, such as a residual or a weight for each
    token. All else is given whole to each tile. A single token, or none, is not cut. Random numbers
    are drawn for each tile, and the same again in backward.

    A module that mixes tokens would be silently wrong. One that holds a module of a kind that does,
    such as attention or a convolution, by the name of its class, is refused.
    """
    mixing = [
        type(each).__name__ for each in module.modules() if _MIXES.search(type(each).__name__)
    ]
    fix = "Leave the module out of tiles="
    if mixing:
        rule = (
            "A module with tiles= must compute each token alone, since each call gets one tile "
            "of tokens"
        )
        raise ShardkitError(message(fqn, f"holds a {mixing[0]}, which combines tokens", rule, fix))
    forward: Callable[..., Tensor] = module.forward

    @functools.wraps(forward)
    def in_tiles(*args: Any, **kwargs: Any) -> Tensor:
        first = next((each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)), None)
        if first is None or first.ndim < 2:
            given = (
                "no tensor" if first is None else f"a tensor of shape {tuple(first.shape)} first"
            )
            rule = (
                "A module with tiles= is called with a tensor of shape (..., tokens, features) "
                "first"
            )
            raise ShardkitError(message(fqn, f"was called with {given}", rule, fix))
        lead, dim = first.shape[:-1], first.ndim - 2
        if lead[dim] < 2:
            return forward(*args, **kwargs)

        def part(each: Any, tile: int) -> Any:
            is_cut = isinstance(each, Tensor) and each.shape[: dim + 1] == lead
            return each.chunk(tiles, dim)[tile] if is_cut else each

        def of_contiguous(
            *args: Any, **kwargs: Any
        ) -> Tensor:  # in the checkpoint, which keeps no copies
            return forward(
                *map(_contiguous, args),
                **{name: _contiguous(each) for name, each in kwargs.items()},
            )

        outputs = []
        for tile in range(len(first.chunk(tiles, dim))):
            parts = [part(each, tile) for each in args]
            named = {name: part(each, tile) for name, each in kwargs.items()}
            outputs.append(checkpoint(of_contiguous, *parts, use_reentrant=False, **named))
        return torch.cat(outputs, -2)

    return in_tiles


def _contiguous(each: Any) -> Any:
    return each.contiguous() if isinstance(each, Tensor) else each
