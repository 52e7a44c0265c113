"""The calls of one rank in order, what it publishes of them, and where those of several ranks first differ."""

from __future__ import annotations

import time
import zlib
from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple

MOST = 1 << 16  # calls remembered; at least half of them
TAIL = 32  # calls in each record, unless more are asked for
MARKS = 64  # digests in each record
MODULUS = (1 << 61) - 1

Record = Mapping[str, Any]  # what a rank publishes of itself
NOTHING: Record = {"base": 0, "calls": [], "marks": [], "last": "none", "line": "", "left": False, "failed": False}


class Calls:
    """What one rank has called. One thread adds while another reads."""

    def __init__(self) -> None:
        self.moved = time.monotonic()  # when the last call was made
        self._log: tuple[int, list[str]] = (0, [])  # how many were forgotten, and the rest
        self._first, self._rounds, self._digest = "", 0, 0
        self._marks: deque[tuple[int, int, int]] = deque(maxlen=MARKS)

    def add(self, call: str, code: int, of_unit: bool = False) -> None:
        """Remember a call and its :func:`code_of`, in a microsecond.

        Wherever the first call of a unit comes again, once or twice a step, the digest of all calls before is kept.
        """
        forgotten, calls = self._log
        if of_unit:
            self._first = self._first or call
            if call == self._first:
                self._rounds += 1
                self._marks.append((self._rounds, forgotten + len(calls), self._digest))
        self._digest = (self._digest * 1000003 + code) % MODULUS
        calls.append(call)
        self.moved = time.monotonic()
        if len(calls) == MOST:
            self._log = forgotten + MOST // 2, calls[MOST // 2 :]

    def record(self, since: int | None) -> dict[str, Any]:
        """Return the last calls, or all from number ``since`` on, and the digests, JSON-ready."""
        forgotten, calls = self._log
        end = len(calls)
        start = max(0, end - TAIL if since is None else since - forgotten)
        idle, last = time.monotonic() - self.moved, calls[end - 1] if end else "none"
        marks = list(self._marks)
        return {"base": forgotten + start, "calls": calls[start:end], "marks": marks, "last": last, "idle": idle}


def code_of(call: str) -> int:
    """Return a number for a call that is the same in every process."""
    return zlib.crc32(call.encode())


class Difference(NamedTuple):
    """The first call that is not the same on all ranks, by its number from 0; None where it was not made yet."""

    number: int
    calls: Mapping[int, str | None]

    @property
    def is_certain(self) -> bool:
        """Whether ranks made different calls, rather than some of them none yet."""
        return len(set(self.calls.values()) - {None}) > 1


def agreed(records: Mapping[int, Record]) -> tuple[int, bool]:
    """Return up to which call all digests agree, 0 if unknown, and whether a later one differs."""
    marks = [{number: (count, digest) for number, count, digest in each["marks"]} for each in records.values()]
    common = sorted(set.intersection(*map(set, marks)))
    same = [number for number in common if len({each[number] for each in marks}) == 1]
    return (marks[0][same[-1]][0] if same else 0), len(same) < len(common)


def first_difference(records: Mapping[int, Record]) -> Difference | None:
    """Return the first difference among the published calls, if there is one."""
    start = max(each["base"] for each in records.values())
    end = max(each["base"] + len(each["calls"]) for each in records.values())
    made = {rank: dict(enumerate(each["calls"], each["base"])) for rank, each in records.items()}
    for number in range(start, end):
        calls = {rank: each.get(number) for rank, each in made.items()}
        if len(set(calls.values())) > 1:
            return Difference(number, calls)
    return None
