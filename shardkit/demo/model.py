"""A small byte-level transformer in plain torch: nothing in it knows of sharding."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BYTES = 256


class ByteTransformer(nn.Module):
    """Predicts the next byte of a text.

    Args:
        dim: width of the residual stream, in elements; a multiple of ``2 * num_heads``.
        num_layers: blocks.
        num_heads: attention heads.
        context: the longest sequence, in bytes.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, dim: int = 128, num_layers: int = 4, num_heads: int = 4, context: int = 128) -> None:
        super().__init__()
        self.embedding = nn.Embedding(BYTES, dim)
        self.layers = nn.ModuleList(Block(dim, num_heads) for _ in range(num_layers))
        self.norm = nn.RMSNorm(dim)
        self.head = nn.Linear(dim, BYTES, bias=False)
        angles = _rotary_angles(context, dim // num_heads)
        # Not persistent, so in no checkpoint: materialize() has to compute them, and does.
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """From bytes, int64 of shape (batch, sequence), the logits of each next byte, (batch, sequence, 256)."""
        length = tokens.shape[1]
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, self.cos[:length], self.sin[:length])
        logits: Tensor = self.head(self.norm(x))
        return logits


class Block(nn.Module):
    """Attention, then an MLP, each on normalized input and added to the residual stream."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(dim)
        self.attention = Attention(dim, num_heads)
        self.mlp_norm = nn.RMSNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """(batch, sequence, dim) in and out; ``cos`` and ``sin`` are (sequence, dim / num_heads / 2)."""
        x = x + self.attention(self.attention_norm(x), cos, sin)
        out: Tensor = x + self.mlp(self.mlp_norm(x))
        return out


class Attention(nn.Module):
    """Causal self-attention with rotary positions."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """(batch, sequence, dim) in and out."""
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(_rotate(q, cos, sin), _rotate(k, cos, sin), v, is_causal=True)
        out: Tensor = self.out(y.transpose(1, 2).flatten(2))
        return out


def _rotary_angles(context: int, head_dim: int) -> Tensor:
    """(context, head_dim / 2), in radians: position times one frequency for each pair of elements."""
    frequencies = 10_000.0 ** (-torch.arange(0, head_dim, 2) / head_dim)
    return torch.outer(torch.arange(context), frequencies)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Each pair of elements of ``x``, (batch, heads, sequence, head_dim), turned by its position's angle."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)
