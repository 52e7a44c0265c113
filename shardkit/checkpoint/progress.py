"""A line on rank 0's terminal that says how far a long operation is; nothing where there is no terminal."""

from __future__ import annotations

import sys
import time

import torch.distributed as dist

INTERVAL = 0.2  # seconds between two updates of the line
GIB = 2**30


class Progress:
    """Called with the bytes that are done and their total, shows both on stderr if this is rank 0 at a terminal."""

    def __init__(self, title: str) -> None:
        self._title, self._begun = title, False
        self._shown = self._started = time.monotonic()
        self._visible = sys.stderr.isatty() and (not dist.is_initialized() or dist.get_rank() == 0)

    def __call__(self, done: int, total: int) -> None:
        """Show that this many bytes of the total are done."""
        now = time.monotonic()
        if self._visible and (now - self._shown >= INTERVAL or done >= total):
            self._shown, self._begun = now, True
            rate = done / max(now - self._started, 1e-9) / GIB
            line = f"{self._title}  {done / GIB:.2f}/{total / GIB:.2f} GiB  {rate:.2f} GiB/s"
            print(f"\r{line}", end="", file=sys.stderr, flush=True)

    def close(self) -> None:
        """End the line."""
        if self._begun:
            print(file=sys.stderr, flush=True)
