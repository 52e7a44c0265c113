"""Llamas in plain torch, in the shapes that people train: nothing to install, and quick to build on meta."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Shape:
    """What a Llama is made of: its width, that of its MLP, and counts."""

    width: int
    mlp: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    tied: bool = False


# From the config.json of meta-llama/Llama-3.2-1B and of Meta-Llama-3-8B and -70B.
SHAPES = {
    "1B": Shape(2048, 8192, 16, 32, 8, 128_256, tied=True),
    "8B": Shape(4096, 14_336, 32, 32, 8, 128_256),
    "70B": Shape(8192, 28_672, 80, 64, 8, 128_256),
    "tiny": Shape(64, 160, 4, 4, 2, 1000),
}


def rotate(x: Tensor) -> Tensor:
    """Rotary position embedding of heads: ``(batch, heads, positions, width)``."""
    half = x.shape[-1] // 2
    frequencies = 500_000.0 ** -(torch.arange(half, device=x.device) / half)
    angles = torch.arange(x.shape[-2], device=x.device)[:, None] * frequencies
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    low, high = x[..., :half], x[..., half:]
    return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)


class Attention(nn.Module):
    """Causal, with grouped keys and values."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head = shape.width // shape.heads
        self.q = nn.Linear(shape.width, shape.width, bias=False)
        self.k = nn.Linear(shape.width, shape.kv_heads * self.head, bias=False)
        self.v = nn.Linear(shape.width, shape.kv_heads * self.head, bias=False)
        self.out = nn.Linear(shape.width, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """``(batch, positions, width)`` in and out."""
        q, k, v = (linear(x).unflatten(-1, (-1, self.head)).transpose(1, 2) for linear in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True, enable_gqa=True)
        return self.out(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Mlp(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.width, shape.mlp, bias=False)
        self.up = nn.Linear(shape.width, shape.mlp, bias=False)
        self.down = nn.Linear(shape.mlp, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """``(batch, positions, width)`` in and out."""
        return self.down(F.silu(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]


class Block(nn.Module):
    """Attention and MLP, each behind its norm."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.RMSNorm(shape.width), nn.RMSNorm(shape.width)
        self.attention, self.mlp = Attention(shape), Mlp(shape)

    def forward(self, x: Tensor) -> Tensor:
        """``(batch, positions, width)`` in and out."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))  # type: ignore[no-any-return]


class Llama(nn.Module):
    """From token ids, ``(batch, positions)``, to the loss of the next ones."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed = nn.Embedding(shape.vocabulary, shape.width)
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        if shape.tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        """The loss in float32."""
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x)).float()
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def llama(name: str) -> Llama:
    """A Llama of a named shape, on the meta device."""
    with torch.device("meta"):
        return Llama(SHAPES[name])


def tokens(batch: int, positions: int) -> Tensor:
    """Token ids without values."""
    return torch.empty(batch, positions, dtype=torch.long, device="meta")
