"""A small byte-level transformer in plain torch, without any sharding, and the text it learns."""

from __future__ import annotations

import functools
import sysconfig
from pathlib import Path

import torch
from torch import Tensor, nn

from shardkit.errors import ShardkitError, message

BYTES = 256
LEAST_TEXT = 100_000  # bytes


class ByteTransformer(nn.Module):
    """Predicts the next byte of a text: torch's pre-norm blocks over embedded bytes and sinusoidal positions."""

    positions: Tensor

    def __init__(self, dim: int = 128, num_layers: int = 4, num_heads: int = 4, context: int = 128) -> None:
        super().__init__()
        self.embedding = nn.Embedding(BYTES, dim)
        options = {"dropout": 0.0, "activation": "gelu", "batch_first": True, "norm_first": True}
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(dim, num_heads, 4 * dim, **options)  # type: ignore[arg-type]
            for _ in range(num_layers)
        )
        self.norm = nn.RMSNorm(dim)
        self.head = nn.Linear(dim, BYTES, bias=False)
        angles = torch.outer(torch.arange(context), 10_000.0 ** (-torch.arange(0, dim, 2) / dim))
        # Not persistent, so not in any checkpoint: materialize() has to compute it, and does.
        self.register_buffer("positions", torch.cat((angles.sin(), angles.cos()), dim=-1), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of each next byte, (batch, sequence, 256), for int64 bytes of (batch, sequence)."""
        length = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=tokens.device)
        x = self.embedding(tokens) + self.positions[:length]
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        logits: Tensor = self.head(self.norm(x))
        return logits


@functools.cache
def load_text(folder: Path | None = None) -> Tensor:
    """Return the ``*.py`` files of a folder, None: the standard library's, concatenated, as uint8 of shape (bytes,)."""
    folder = folder or Path(sysconfig.get_path("stdlib"))
    data = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    if len(data) < LEAST_TEXT:
        problem = f"needs at least {LEAST_TEXT:,} bytes of Python's own sources, and {folder} has {len(data):,}"
        raise ShardkitError(message("demo", problem, "", "Use a Python that has its standard library as files"))
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def micro_batch(text: Tensor, number: int, sequences: int, context: int) -> Tensor:
    """Return sequences at random places, int64 of (sequences, context + 1); the same for the same ``number``."""
    starts = torch.randint(len(text) - context, (sequences, 1), generator=torch.Generator().manual_seed(number))
    return text[starts + torch.arange(context + 1)].long()
