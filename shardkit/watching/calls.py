"""The calls of one rank in order, where those of several ranks first differ, and the report of it."""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from shardkit.errors import message

TAIL = 1024  # calls in each record, the last ones

Record = Mapping[str, Any]  # what a rank publishes of itself
NOTHING: Record = {"base": 0, "calls": [], "last": "none", "line": "", "left": False, "failed": False}


class Calls:
    """What one rank has called. One thread adds while another reads."""

    def __init__(self) -> None:
        self.moved = time.monotonic()  # when the last call was made
        self.count, self._tail, self._lock = 0, deque[str](maxlen=TAIL), threading.Lock()

    def add(self, call: str) -> None:
        """Remember a call, in a microsecond."""
        with self._lock:
            self._tail.append(call)
            self.count, self.moved = self.count + 1, time.monotonic()

    def record(self) -> dict[str, Any]:
        """Return the last calls, JSON-ready."""
        with self._lock:
            calls, base = list(self._tail), self.count - len(self._tail)
        last, idle = calls[-1] if calls else "none", time.monotonic() - self.moved
        return {"base": base, "calls": calls, "last": last, "idle": idle}


class Difference(NamedTuple):
    """The first call that is not the same on all ranks, by its number from 0; None where it was not made yet."""

    number: int
    calls: Mapping[int, str | None]

    @property
    def is_certain(self) -> bool:
        """Whether ranks made different calls, rather than some of them none yet."""
        return len(set(self.calls.values()) - {None}) > 1


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


class Seen(NamedTuple):
    """What one rank knows of another."""

    record: Record  # the last that it published
    age: float = 0.0  # seconds since
    gone: str = ""  # "silent for 12 s", or nothing

    @property
    def idle(self) -> float:
        """Seconds since its last call; 0 after it left."""
        return 0.0 if self.record["left"] else self.record.get("idle", 0.0) + self.age


def compose(seen: Mapping[int, Seen], difference: Difference | None) -> str:
    """Return the report: a sentence in the form of errors, and a line for each group of all ranks. Pure."""
    idle = max(each.idle for each in seen.values())
    problems = [f"{named(ranks)} {gone}" for gone, ranks in _grouped(seen, lambda rank: seen[rank].gone) if gone]
    if difference is not None and difference.is_certain:
        made = _grouped(difference.calls, lambda rank: difference.calls[rank] or "")
        each = ", ".join(f"{call} on {named(ranks)}" for call, ranks in made if call)
        problems.append(f"ranks differ in call {difference.number + 1}: {each}")
    elif difference is not None and not problems:
        late = [rank for rank, call in difference.calls.items() if call is None]
        problems.append(f"{named(late)} did not make call {difference.number + 1} within {idle:.0f} s")
    elif not problems:
        problems.append(f"no rank has made a call for {idle:.0f} s; until then all made the same calls")
    rule = "Every rank must make the same calls in the same order, with the same arguments"
    fix = "Compare the code lines of the ranks below; docs/when-ranks-disagree.md lists usual causes"
    rows = _grouped(seen, lambda rank: _row(seen[rank], difference.calls.get(rank) if difference else None))
    return "\n".join([message("watch:", "; ".join(problems), rule, fix), *(f"- {named(r)}: {row}" for row, r in rows)])


def _row(seen: Seen, call: str | None) -> str:
    last = seen.record["last"]
    parts = [seen.gone, call or f"last {'known ' * bool(seen.gone)}call: {last}"]
    parts += [f"now at {last}"] if call and last != call else []
    return "; ".join(filter(None, [*parts, seen.record.get("error"), seen.record["line"]]))


def _grouped(ranks: Iterable[int], key: Callable[[int], str]) -> list[tuple[str, list[int]]]:
    groups: dict[str, list[int]] = {}
    for rank in ranks:
        groups.setdefault(key(rank), []).append(rank)
    return list(groups.items())


def named(ranks: list[int]) -> str:
    """Return ``rank 3`` or ``ranks 0-2, 5``."""
    runs = [[rank for _, rank in run] for _, run in itertools.groupby(enumerate(ranks), lambda each: each[1] - each[0])]
    text = ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)
    return f"rank{'s' * (len(ranks) > 1)} {text}"
