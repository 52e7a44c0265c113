"""The calls of one rank in order, where those of several ranks first differ, and the report of
it.
"""

from __future__ import annotations

import functools
import linecache
import sysconfig
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NamedTuple, TypeAlias

import torch

from shardkit.errors import message

Call: TypeAlias = Any  # (what is called, the line of the user's code); a list once it was JSON
Record: TypeAlias = Mapping[str, Any]  # what a rank publishes of itself
NOTHING: Record = {"first": 1, "calls": [], "texts": [], "line": "", "left": False}


def tail(count: int, calls: Sequence[Call]) -> dict[str, Any]:
    """Return the part of a record for the last of ``count`` calls; most are those of the step
    before again.
    """
    index = {call: number for number, call in enumerate(dict.fromkeys(calls))}
    return {
        "first": count - len(calls) + 1,
        "texts": list(index),
        "calls": [index[call] for call in calls],
    }


def calls_of(record: Record) -> dict[int, Call]:
    """Return the published calls by their numbers, from 1."""
    return {
        record["first"] + place: record["texts"][index]
        for place, index in enumerate(record["calls"])
    }


_PATHS = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
_LIBRARIES = (
    "<",
    *(str(path) for path in (*_PATHS, Path(torch.__file__).parent, Path(__file__).parents[1])),
)


@functools.cache
def _is_users(file: str) -> bool:
    return not file.startswith(_LIBRARIES)


def line_of(where: FrameType | TracebackType | None) -> str:
    """Return the innermost line of a thread or an error that is the user's, not of an installed
    package. Local.

    As ``model.py:8: x = layer(x), from train.py:20``, with at most two callers; empty if there is
    none.
    """
    lines: list[tuple[str, int]] = []
    while where is not None:
        frame, number = (
            (where.tb_frame, where.tb_lineno) if isinstance(where, TracebackType) else (where, 0)
        )
        if _is_users(frame.f_code.co_filename):
            lines.append((frame.f_code.co_filename, number or frame.f_lineno))
        where = where.tb_next if isinstance(where, TracebackType) else where.f_back
        if number == 0 and len(lines) == 3:
            break
    return _text(tuple(lines[:-4:-1] if number else lines)) if lines else ""


@functools.lru_cache(4096)
def _text(lines: tuple[tuple[str, int], ...]) -> str:
    places = [f"{Path(file).name}:{number}" for file, number in lines]
    code = linecache.getline(*lines[0]).strip()
    return ", from ".join([": ".join(filter(None, [places[0], code])), *places[1:]])


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
    made = {rank: calls_of(record) for rank, record in records.items()}
    start, end = 1, 0
    for calls in made.values():
        start = max(start, min(calls, default=1))
        end = max(end, max(calls, default=0))
    for number in range(start, end + 1):
        here = {rank: calls.get(number) for rank, calls in made.items()}
        if len({call and call[0] for call in here.values()}) > 1:
            return Difference(number, here)
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
    """Return the report: a sentence in the form of errors, and a line for each group of all ranks.
    Pure.
    """
    calls = difference.calls if difference else {}
    idle = max(each.idle for each in seen.values())
    problems = [
        f"{named(ranks)} {gone}"
        for gone, ranks in _grouped(seen, lambda rank: seen[rank].gone)
        if gone
    ]
    if difference is not None and difference.is_certain:
        made = _grouped(calls, lambda rank: (calls[rank] or [""])[0])
        each = ", ".join(f"{call} on {named(ranks)}" for call, ranks in made if call)
        problems.append(f"ranks differ in call {difference.number}: {each}")
    elif difference is not None and not problems:
        late = [rank for rank, call in calls.items() if call is None]
        problems.append(f"{named(late)} did not make call {difference.number} within {idle:.0f} s")
    elif not problems:
        problems.append(
            f"no rank has made a call for {idle:.0f} s; until then all made the same calls"
        )
    rule = "Every rank must make the same calls in the same order, with the same arguments"
    fix = "Compare the code lines of the ranks below; docs/troubleshooting.md lists usual causes"
    rows = _grouped(
        seen, lambda rank: _row(seen[rank], calls.get(rank), difference.number if difference else 0)
    )
    return "\n".join(
        [
            message("watch:", "; ".join(problems), rule, fix),
            *(f"- {named(r)}: {row}" for row, r in rows),
        ]
    )


def _row(seen: Seen, call: Call | None, number: int) -> str:
    """Return the call that differs and its line, or the last call; then where the rank is, if
    elsewhere.
    """
    last, made = max(calls_of(seen.record).items(), default=(0, ("none", "")))
    parts = [*call] if call else [f"last {'known ' * bool(seen.gone)}call: {made[0]}"]
    parts += [f"now at {made[0]}"] if call and last != number else []
    return "; ".join(
        dict.fromkeys(
            filter(None, [seen.gone, *parts, seen.record.get("error"), seen.record["line"]])
        )
    )


def _grouped(ranks: Iterable[int], key: Callable[[int], str]) -> list[tuple[str, list[int]]]:
    groups: dict[str, list[int]] = {}
    for rank in ranks:
        groups.setdefault(key(rank), []).append(rank)
    return list(groups.items())


def named(ranks: list[int]) -> str:
    """Return ``rank 3`` or ``ranks 0-2, 5``."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    texts = [f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs]
    return f"{'ranks' if len(ranks) > 1 else 'rank'} {', '.join(texts)}"
