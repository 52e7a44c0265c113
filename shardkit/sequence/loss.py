"""The loss over a large vocabulary, without ever holding the logits of all tokens."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardkit.errors import ShardkitError


def tiled_loss(
    head: nn.Module,
    hidden: Tensor,
    labels: Tensor,
    *,
    tiles: int,
    loss: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> Tensor:
    """Return the loss of ``head(hidden)``, a sum over tokens, in tiles: the logits of one are alive
    at a time.

    Backward computes each tile's logits again. ``head`` is called once, and all tiles are inside of
    this call, so that FSDP2 unshards and reduces it once, also as a part of the unit ``[norm,
    head]`` or with a tied weight. Call it where the model would call ``head``: in its forward, or
    in a method of ``forward_methods``. Local.

    Args:
        head: maps (tokens, features) to logits, each token alone.
        hidden: (..., features), such as the last hidden states.
        labels: (...), of the same tokens: a causal model's are shifted first.
        tiles: the most tiles; fewer tokens make fewer.
        loss: maps the logits and labels of any tokens to their sum, for one that caps the logits
            first, or weighs tokens: labels may have further dims. None is the cross entropy of the
            tokens that are not labeled -100, in float32 at least.

    Returns:
        The sum, for :func:`shardkit.scale_loss`.

    Raises:
        ShardkitError: ``labels`` are not of the same tokens.
    """
    dims = hidden.ndim - 1
    if dims < 1 or labels.shape[:dims] != hidden.shape[:-1]:
        raise ShardkitError(
            f"labels have shape {tuple(labels.shape)}, and hidden has {tuple(hidden.shape)}. Each "
            "token needs a label. Shift labels, then cut both alike."
        )
    forward = head.forward
    own = vars(head).get("forward")
    totals: list[Tensor] = []

    def tile(hidden: Tensor, labels: Tensor) -> Tensor:
        return (loss or _cross_entropy)(forward(hidden), labels)

    # Labels are not an argument: FSDP2 would cast those that are weights to bf16.
    def in_tiles(hidden: Tensor) -> Tensor:
        hidden_tiles = hidden.flatten(0, -2).chunk(tiles)
        label_tiles = labels.flatten(0, dims - 1).chunk(tiles)
        sums = []
        for part in zip(hidden_tiles, label_tiles, strict=True):
            sums.append(checkpoint(tile, *part, use_reentrant=False))
        totals.append(torch.stack(sums).sum())
        return totals[0]

    head.forward = in_tiles
    try:
        total: Tensor = head(hidden)
        # The sum before FSDP2 casts it to the unit's output_dtype.
        return total if total.dtype == totals[0].dtype else totals[0]
    finally:
        if own is None:
            del head.forward
        else:
            head.forward = own


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")
