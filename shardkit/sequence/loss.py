"""The loss over a large vocabulary, without ever holding the logits of all tokens."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardkit.errors import ShardkitError, message


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
    this call, so that FSDP2 gathers and reduces it once, also as a part of the unit ``[norm,
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
        problem = f"have shape {tuple(labels.shape)}, and hidden has {tuple(hidden.shape)}"
        raise ShardkitError(
            message(
                "labels", problem, "Each token needs a label", "Shift labels, then cut both alike"
            )
        )
    forward, own, made = head.forward, vars(head).get("forward"), list[Tensor]()

    def tile(hidden: Tensor, labels: Tensor) -> Tensor:
        return (loss or _cross_entropy)(forward(hidden), labels)

    def in_tiles(
        hidden: Tensor,
    ) -> Tensor:  # labels are not an argument, since FSDP2 would cast weights to bf16
        parts = zip(
            hidden.flatten(0, -2).chunk(tiles),
            labels.flatten(0, dims - 1).chunk(tiles),
            strict=True,
        )
        made.append(
            torch.stack([checkpoint(tile, *part, use_reentrant=False) for part in parts]).sum()
        )
        return made[0]

    head.forward = in_tiles
    try:
        total: Tensor = head(hidden)
        # FSDP2 cast it to the unit's output_dtype
        return total if total.dtype == made[0].dtype else made[0]
    finally:
        if own is None:
            del head.forward
        else:
            head.forward = own


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")
