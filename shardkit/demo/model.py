"""A small byte-level transformer in plain torch, which knows nothing of sharding, and the text it learns."""

from __future__ import annotations

import functools
import sysconfig
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardkit.errors import ShardkitError, message

BYTES = 256
LEAST_TEXT = 100_000  # bytes


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
        frequencies = 10_000.0 ** (-torch.arange(0, dim // num_heads, 2) / (dim // num_heads))
        angles = torch.outer(torch.arange(context), frequencies)
        # Not persistent, so in no checkpoint: materialize() has to compute them, and does.
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """From bytes, int64 of shape (batch, sequence), the logits of each next byte, (batch, sequence, 256)."""
        x, length = self.embedding(tokens), tokens.shape[1]
        for layer in self.layers:
            x = layer(x, self.cos[:length], self.sin[:length])
        logits: Tensor = self.head(self.norm(x))
        return logits


class Block(nn.Module):
    """Causal self-attention with rotary positions, then an MLP, each on normalized input, added to its input."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.attention_norm, self.mlp_norm = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """(batch, sequence, dim) in and out; ``cos`` and ``sin`` are (sequence, dim / num_heads / 2)."""
        qkv = self.qkv(self.attention_norm(x))
        q, k, v = qkv.unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(_rotate(q, cos, sin), _rotate(k, cos, sin), v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        out: Tensor = x + self.mlp(self.mlp_norm(x))
        return out


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)


@functools.cache
def load_text(folder: Path | None = None) -> Tensor:
    """All modules at the top of the standard library, one after the other, as uint8 of shape (bytes,).

    Args:
        folder: where the ``*.py`` files are; None is where this Python has its standard library.

    Raises:
        ShardkitError: the folder holds less than 100 kB of sources.
    """
    folder = folder or Path(sysconfig.get_path("stdlib"))
    data = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    if len(data) < LEAST_TEXT:
        rule = f"The demo trains on at least {LEAST_TEXT:,} bytes of Python's own sources"
        fix = "Use a Python that comes with its standard library as files"
        raise ShardkitError(message("text", f"{len(data):,} bytes of *.py in {folder}", rule, fix))
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def micro_batch(text: Tensor, number: int, sequences: int, context: int) -> Tensor:
    """Sequences at random places, int64 of shape (sequences, context + 1); the same for the same ``number``."""
    starts = torch.randint(len(text) - context, (sequences, 1), generator=torch.Generator().manual_seed(number))
    return text[starts + torch.arange(context + 1)].long()
