"""Real text that is on every machine: the sources of Python's own standard library."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from torch import Tensor

from shardkit.errors import ShardkitError, message

ENOUGH = 100_000  # bytes


def load_text(folder: Path | None = None) -> Tensor:
    """All modules at the top of the standard library, one after the other, as uint8 of shape (bytes,).

    Args:
        folder: where the ``*.py`` files are; None is where this Python has its standard library.

    Raises:
        ShardkitError: the folder holds less than 100 kB of sources.
    """
    folder = folder or Path(sysconfig.get_path("stdlib"))
    data = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    if len(data) < ENOUGH:
        raise ShardkitError(
            message(
                "text",
                f"{len(data):,} bytes of *.py in {folder}",
                f"The demo trains on at least {ENOUGH:,} bytes of Python's own sources",
                "Use a Python that comes with its standard library as files",
            )
        )
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def micro_batch(text: Tensor, number: int, sequences: int, context: int) -> Tensor:
    """Sequences at random places, int64 of shape (sequences, context + 1); the same for the same ``number``."""
    generator = torch.Generator().manual_seed(number)
    starts = torch.randint(len(text) - context, (sequences, 1), generator=generator)
    return text[starts + torch.arange(context + 1)].long()
