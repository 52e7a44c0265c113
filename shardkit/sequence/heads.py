"""The exchange between sequence parts and heads: all tokens of some heads, where a rank had some
tokens of all heads.

Ulysses (arXiv 2309.14509): everything but attention works on each token alone, and attention on
each head alone.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from shardkit.errors import PlanError


class _Exchange(torch.autograd.Function):
    """Split a tensor along one dim over the group, and concatenate what arrives along another; one
    all-to-all.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, split: int, concat: int) -> Tensor:
        ctx.arguments = (group, concat, split)
        parts = torch.stack(x.chunk(group.size(), split))
        arrived = torch.empty_like(parts)
        dist.all_to_all_single(arrived, parts, group=group)
        return arrived.movedim(0, concat).flatten(concat, concat + 1).contiguous()  # models view it

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return exchange(grad, *ctx.arguments), None, None, None


def exchange(x: Tensor, group: dist.ProcessGroup, split: int, concat: int) -> Tensor:
    """Return ``x`` with ``split``'s size divided by the ranks of ``group``, and ``concat``'s
    multiplied. Collective.
    """
    out: Tensor = _Exchange.apply(x, group, split, concat)  # type: ignore[no-untyped-call]
    return out


class Heads(NamedTuple):
    """How attention heads are dealt to ranks."""

    queries: int  # query heads of one rank
    keys: int  # key and value heads of one rank
    copies: int  # of each key and value head before the exchange, where they are fewer than ranks


def deal(queries: int, keys: int, ranks: int) -> Heads:
    """Deal ``queries`` query heads and ``keys`` key and value heads to ``ranks``."""
    if queries % ranks or queries % keys:
        fix = "Repeat the key heads yourself"
        if queries % ranks:
            fix = f"Use a number of ranks that divides {queries}"
        raise PlanError(
            f"attention has {queries} query heads and {keys} key and value heads, on {ranks} "
            "ranks. Each rank computes the same number of query heads, and each key head serves "
            f"the same number of them. {fix}."
        )
    copies = ranks // math.gcd(keys, ranks)
    if (queries // keys) % copies:  # the heads of a rank belong to unequal parts of groups
        copies = queries // keys
    return Heads(queries // ranks, keys * copies // ranks, copies)


def to_heads(
    query: Tensor, key: Tensor, value: Tensor, group: dist.ProcessGroup, heads: int, sequence: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Exchange this rank's tokens of all heads for all tokens of its heads. Collective: three
    all-to-alls.
    """
    copies = deal(query.shape[heads], key.shape[heads], group.size()).copies
    if copies > 1:
        key = key.repeat_interleave(copies, heads)
        value = value.repeat_interleave(copies, heads)
    return (
        exchange(query, group, heads, sequence),
        exchange(key, group, heads, sequence),
        exchange(value, group, heads, sequence),
    )


def ulysses(
    attend: Callable[..., Tensor], group: dist.ProcessGroup, *, heads: int = 1, sequence: int = 2
) -> Callable[..., Tensor]:
    """Return ``attend`` for sequences of which each rank of ``group`` holds a part.

    The result takes ``query, key, value`` of this rank's tokens and returns the output of the same
    tokens. ``attend`` itself gets all tokens of this rank's share of the heads, and any further
    arguments as they are, so a mask is of the whole sequence. Four all-to-alls forward and four
    backward, each **collective** over the group.

    Everything else in the model must work on each token alone, and get the positions of this rank's
    tokens.

    Args:
        attend: ``attend(query, key, value, ...)``, such as ``F.scaled_dot_product_attention``,
            which returns a tensor with the dims of the query. With fewer key heads than query heads
            it must support that (for torch's, ``enable_gqa=True``).
        group: ranks with consecutive parts of the sequence, in order, each of the same length.
        heads, sequence: the dims of heads and tokens; (2, 1) for flash attention's own layout.

    Raises:
        PlanError: when called, if the ranks do not divide the query heads.

    Examples:
        >>> attend = ulysses(F.scaled_dot_product_attention, mesh["sp"].get_group())
        >>> out = attend(query, key, value, is_causal=True)
    """

    @functools.wraps(attend)
    def on_parts(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        out = attend(*to_heads(query, key, value, group, heads, sequence), *args, **kwargs)
        return exchange(out, group, split=sequence, concat=heads)

    return on_parts
