"""The calls of one rank in order, where those of several ranks first differ, and the report of
it.
"""

from __future__ import annotations

import functools
import linecache
import sysconfig
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NamedTuple, TypeAlias

import torch

Call: TypeAlias = Any  # (what is called, the line of the user's code); a list once it was JSON
Record: TypeAlias = Mapping[str, Any]  # what a rank publishes of itself
NOTHING: Record = {"first": 1, "calls": [], "texts": [], "line": "", "left": False}


def tail(count: int, calls: Sequence[Call]) -> dict[str, Any]:
    """Return the part of a record for the last of ``count`` calls; most are those of the step
    before again.
    """
    texts = dict.fromkeys(calls)
    index = {call: number for number, call in enumerate(texts)}
    return {
        "first": count - len(calls) + 1,
        "texts": list(texts),
        "calls": [index[call] for call in calls],
    }


def calls_of(record: Record) -> dict[int, Call]:
    """Return the published calls by their numbers, from 1."""
    numbered = enumerate(record["calls"], record["first"])
    return {number: record["texts"][index] for number, index in numbered}


_PATHS = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
_LIBRARIES = ("<", *_PATHS, str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))


@functools.cache
def _is_users(file: str) -> bool:
    return not file.startswith(_LIBRARIES)


def line_of(where: FrameType | TracebackType | None) -> str:
    """Return the innermost line of a thread or an error that is the user's, not of an installed
    package. Local.

    As ``model.py:8: x = layer(x), from train.py:20``, with at most two callers; empty if there is
    none.
    """
    lines: list[tuple[str, int]] = []  # innermost first
    if isinstance(where, TracebackType):
        for frame, number in traceback.walk_tb(where):
            if _is_users(frame.f_code.co_filename):
                lines.insert(0, (frame.f_code.co_filename, number))
    else:
        while where is not None and len(lines) < 3:
            if _is_users(where.f_code.co_filename):
                lines.append((where.f_code.co_filename, where.f_lineno))
            where = where.f_back
    return _text(tuple(lines[:3])) if lines else ""


@functools.lru_cache(4096)
def _text(lines: tuple[tuple[str, int], ...]) -> str:
    places = [f"{Path(file).name}:{number}" for file, number in lines]
    code = linecache.getline(*lines[0]).strip()
    if code:
        places[0] += f": {code}"
    return ", from ".join(places)


class Difference(NamedTuple):
    """The first call that is not the same on all ranks, by its number from 1; None where it was not
    made yet.
    """

    number: int
    calls: Mapping[int, Call | None]

    @property
    def is_certain(self) -> bool:
        """Whether ranks made different calls, rather than some of them none yet."""
        return len({call[0] for call in self.calls.values() if call}) > 1


def first_difference(records: Mapping[int, Record]) -> Difference | None:
    """Return the first difference among the published calls, if there is one."""
    start, end = 1, 0
    published = {}
    for rank, record in records.items():
        published[rank] = calls_of(record)
        start = max(start, min(published[rank], default=1))
        end = max(end, max(published[rank], default=0))
    for number in range(start, end + 1):
        calls = {rank: numbered.get(number) for rank, numbered in published.items()}
        if len({call and call[0] for call in calls.values()}) > 1:
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
    """Return the report: a sentence in the form of errors, and a line for each group of ranks.
    Pure.
    """
    idle = max(other.idle for other in seen.values())
    problems = []
    for gone, ranks in _groups({rank: other.gone for rank, other in seen.items()}):
        if gone:
            problems.append(f"{named(ranks)} {gone}")
    if difference is not None and difference.is_certain:
        texts = {rank: call[0] if call else "" for rank, call in difference.calls.items()}
        calls = [f"{text} on {named(ranks)}" for text, ranks in _groups(texts) if text]
        problems.append(f"ranks differ in call {difference.number}: {', '.join(calls)}")
    elif difference is not None and not problems:
        late = [rank for rank, call in difference.calls.items() if call is None]
        problems.append(f"{named(late)} did not make call {difference.number} within {idle:.0f} s")
    elif not problems:
        problems.append(
            f"no rank has made a call for {idle:.0f} s; until then all made the same calls"
        )
    lines = [
        f"watch: {'; '.join(problems)}. Every rank must make the same calls in the same order, "
        "with the same arguments. Compare the code lines of the ranks below; "
        "docs/troubleshooting.md lists usual causes."
    ]
    rows = {rank: _row(other, rank, difference) for rank, other in seen.items()}
    lines += [f"- {named(ranks)}: {row}" for row, ranks in _groups(rows)]
    return "\n".join(lines)


def _row(seen: Seen, rank: int, difference: Difference | None) -> str:
    """Return the call that differs and its line, or the last call; then where the rank is, if
    elsewhere.
    """
    number, last = max(calls_of(seen.record).items(), default=(0, ("none", "")))
    call = difference.calls.get(rank) if difference else None
    parts: list[str | None] = [seen.gone]
    if difference is not None and call is not None:
        parts += call
        if number != difference.number:
            parts.append(f"now at {last[0]}")
    else:
        parts.append(f"last {'known ' if seen.gone else ''}call: {last[0]}")
    parts += [seen.record.get("error"), seen.record["line"]]
    return "; ".join(dict.fromkeys(filter(None, parts)))


def _groups(texts: Mapping[int, str]) -> list[tuple[str, list[int]]]:
    """Return the ranks that have the same text, in the order of the first of them."""
    groups: dict[str, list[int]] = {}
    for rank, text in texts.items():
        groups.setdefault(text, []).append(rank)
    return list(groups.items())


def named(ranks: list[int]) -> str:
    """Return ``rank 3`` or ``ranks 0-2, 5``."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    texts = [f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs]
    return f"{'ranks' if len(ranks) > 1 else 'rank'} {', '.join(texts)}"
