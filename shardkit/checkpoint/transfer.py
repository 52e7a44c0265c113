"""Counts of bytes for a Progress."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from shardkit.checkpoint.chunks import flush_directory as flush_directory
from shardkit.checkpoint.chunks import flush_files as flush_files

Progress: TypeAlias = Callable[[int, int], None]


class Meter:
    """Counts bytes for a Progress."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self._progress, self._total, self._done = progress, total, 0

    def add(self, count: int) -> None:
        """Count more bytes as done."""
        self._done += count
        if self._progress is not None:
            self._progress(self._done, self._total)
