"""What the ranks of a team publish of themselves in a store, and what one of them sees of the others."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from shardkit.watching.calls import NOTHING, Record
from shardkit.watching.where import fate, host


class Seen(NamedTuple):
    """What is known of one rank."""

    record: Record  # the last that it published
    age: float = 0.0  # seconds since
    gone: str = ""  # "ended", "is stopped", "has been silent for 12 s", or nothing

    @property
    def has_left(self) -> bool:
        """Whether it left the watch by itself."""
        return bool(self.record["left"])

    @property
    def idle(self) -> float:
        """Seconds since its last call; 0 after it left."""
        return 0.0 if self.has_left else self.record.get("idle", 0.0) + self.age


class Team:
    """The ranks that must make the same calls. Every method asks the store, and raises if that is gone."""

    def __init__(self, ranks: Sequence[int], rank: int, store: Any, period: float) -> None:
        """``store`` is this thread's own; each rank publishes every ``period`` seconds."""
        self.ranks, self.rank = ranks, rank
        self._store = store
        self._silent = 3 * period + 0.5  # threads of a busy rank are late
        self._known = dict.fromkeys(ranks, (NOTHING, time.monotonic()))
        self._own = {"host": host(), "pid": os.getpid()}

    def publish(self, record: Record) -> None:
        """Publish this rank's record."""
        self._store.set(str(self.rank), json.dumps({**record, **self._own, "beat": time.time_ns()}))

    def say(self, word: Mapping[str, Any]) -> None:
        """Publish what all ranks must know."""
        self._store.set("word", json.dumps(word))

    def hear(self) -> Mapping[str, Any]:
        """Return what was said last."""
        return self._read("word") or {"since": None, "report": ""}

    def _read(self, key: str) -> Any:
        return json.loads(self._store.get(key)) if self._store.check([key]) else None

    def look(self, rank: int) -> Seen:
        """Read what a rank has published."""
        record, now = self._read(str(rank)), time.monotonic()
        if record is not None and record["beat"] != self._known[rank][0].get("beat"):
            self._known[rank] = record, now
        return self.known(rank)

    def known(self, rank: int) -> Seen:
        """Return what was read last, without asking the store."""
        record, at = self._known[rank]
        age = time.monotonic() - at
        if record["left"]:
            return Seen(record, age)
        silence = "has not entered the watch" if record is NOTHING else f"has been silent for {age:.0f} s"
        gone = "" if record is NOTHING else fate(record["host"], record["pid"])
        return Seen(record, age, gone or silence * (age >= self._silent))

    def is_first(self) -> bool:
        """Whether all ranks before this one have left or are gone."""
        before = (self.look(rank) for rank in self.ranks[: self.ranks.index(self.rank)])
        return all(seen.has_left or seen.gone for seen in before)
