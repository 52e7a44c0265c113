"""What the demo shows: rank 0 speaks, in a line that moves where there is a terminal."""

from __future__ import annotations

import sys

import torch.distributed as dist
from torch import Tensor

LINES = 5  # of progress, where there is no terminal


def say(text: str) -> None:
    """Print on rank 0."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(text, flush=True)


class Progress:
    """One line that counts steps; off a terminal a few plain lines."""

    def __init__(self, title: str, steps: int) -> None:
        self._title, self._steps = title, steps
        self._terminal = sys.stdout.isatty()

    def show(self, step: int, loss: Tensor) -> None:
        """Step ``step``, from 0, is done. Rank 0 reads the loss, which waits for the device; the others do not."""
        last = step + 1 == self._steps
        due = last or step == 0 or self._terminal or (step + 1) % max(1, self._steps // (LINES - 1)) == 0
        if not due or (dist.is_initialized() and dist.get_rank() != 0):
            return
        start, end = ("\r", "\n" if last else "") if self._terminal else ("", "\n")
        line = f"{self._title:8} step {step + 1:>{len(str(self._steps))}}/{self._steps}  loss {loss.item():.4f}"
        print(f"{start}{line}", end=end, flush=True)
