"""Floating-point operations of a training step, written out.

As in appendix B of PaLM (arXiv 2204.02311). For each token, forward and backward::

    6 N  +  12 L W S        non-causal: every position attends to all S, which is how public figures count
    6 N  +   6 L W S        causal: half of it, which is all that a causal kernel has to do

N: weights that take part in a product of matrices. Those are the linear layers, the head among
them, tied or not. The embedding's lookup multiplies nothing, and norms are not matrix products.
Each weight is 2 operations in forward, and 4 in backward. L: layers. W: heads times the width of
one. S: the sequence's length. Attention is two products of 2 W S in forward and four in backward.
What is recomputed in backward is not counted: MFU, not HFU. ``test_benchmark_train.py`` compares
the non-causal formula with ``torch.utils.flop_counter``, to the last digit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.models import Shape


@dataclass(frozen=True)
class Flops:
    """Operations for one token under the two conventions."""

    full: float
    causal: float


def matmul_weights(shape: Shape) -> int:
    """N of the formula: the weights of all linear layers, the head among them."""
    narrow = shape.width // shape.heads * shape.kv_heads
    attention = 2 * shape.width * shape.width + 2 * shape.width * narrow
    return shape.layers * (attention + 3 * shape.width * shape.mlp) + shape.vocabulary * shape.width


def per_token(shape: Shape, sequence: int) -> Flops:
    """Operations of forward and backward for one token of a sequence of this length."""
    attention = 12 * shape.layers * shape.width * sequence
    products = 6 * matmul_weights(shape)
    return Flops(full=products + attention, causal=products + attention / 2)


def mfu(flops: float, tokens_per_second: float, peak: float | None) -> float | None:
    """Share of a GPU's peak, in operations a second, that a GPU reached; None where the peak is not
    known.
    """
    return None if peak is None else flops * tokens_per_second / peak
