"""Run a suite, a process for each group, and keep the tables up to date."""

from __future__ import annotations

import itertools
import os
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks.train import records, report
from benchmarks.train.child import Child
from benchmarks.train.group import Group, Suite
from benchmarks.train.ranks import ranks

PATIENCE = 0.2  # seconds between two looks at a child
SLACK = 180.0  # seconds that a group may take beyond twice its estimate, which is one of an H200
OLD = 10.0  # seconds after which plots are drawn again, which takes a second or two of another core
SHORT = 30.0  # the same where time is limited


class Runner:
    """Runs what is not measured yet. Collective under torchrun.

    Args:
        suite: as written, for one rank.
        folder: gets a JSON for each case, logs, and the tables.
        minutes: after which no group starts and what still runs is ended; None sets no limit.
        retry: measure again what failed or was not available.
    """

    def __init__(
        self, suite: Suite, folder: Path, *, minutes: float | None = None, retry: bool = False
    ) -> None:
        self.ranks = ranks()
        self.suite, self.folder = suite.for_ranks(self.ranks.size), folder
        self.started = self.drawn = time.monotonic()
        self.deadline = self.started + 60 * minutes if minutes else None
        self.skipped: list[str] = []
        self.child: Child | None = None
        self.spare: Child | None = None
        self.line = Line(self.ranks.rank == 0)
        if self.ranks.rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
            for record in records.read(folder).values() if retry else ():
                if not records.measured(record):
                    records.path_of(folder, record["name"]).unlink()

    def run(self) -> None:
        """All groups. The tables are there at the end, however it ends."""
        try:
            for number, group in enumerate(self.suite.groups):
                self._group(number, group)
        finally:
            for child in (self.child, self.spare):
                if child is not None:
                    child.end()
            self.line.end()
            self._report(plots=True)

    def _group(self, number: int, group: Group) -> None:
        for attempt in itertools.count():
            key = f"{number}.{attempt}"
            names = self.ranks.decide(key, lambda: self._to_measure(group))
            if not names:
                return
            outcome = self.ranks.ended(key, self._attempt(number, group, names, key))
            self._report(plots=True)
            if outcome is None or outcome.get("cut"):
                return
            self._blame(group, names, outcome)

    def _to_measure(self, group: Group) -> list[str]:
        """Return the names of the remaining cases; empty if too little time is left."""
        names = pending(group, records.read(self.folder))
        if (
            names
            and self.deadline is not None
            and time.monotonic() + estimated(group, names) > self.deadline
        ):
            self.skipped.append(group.name)
            return []
        return names

    def _attempt(
        self, number: int, group: Group, names: list[str], key: str
    ) -> dict[str, Any] | None:
        """Measure them. None if all went well, or ``{"case": ..., "error": ...}``, or
        ``{"cut": True}``.
        """
        child = self._child_for(group)
        suite = {
            "suite": self.suite.name,
            "device": self.suite.device,
            "folder": str(self.folder.resolve()),
        }
        child.send({**suite, "group": asdict(group), "cases": names, "name": f"group/{key}"})
        self._prepare_next(number)
        limit = time.monotonic() + 2 * estimated(group, names) + (SHORT if self.deadline else SLACK)
        end = min(limit, self.deadline) if self.deadline else limit
        outcome = self._wait(
            child, f"[{number + 1}/{len(self.suite.groups)}] {group.name}", key, end
        )
        if outcome == {"late": True}:
            cut = end < limit
            outcome = (
                {"cut": True}
                if cut
                else {"case": None, "error": "it took longer than twice the estimate"}
            )
        if outcome is not None or self.suite.fresh:
            child.end()
            self.child = None
        return outcome

    def _wait(self, child: Child, title: str, key: str, end: float) -> dict[str, Any] | None:
        at = None
        while True:
            answer = child.answer(PATIENCE) or {}
            if "doing" in answer:
                at = answer["case"]
                self.line.show(
                    f"{title}: {at}, {answer['doing']}  {time.monotonic() - self.started:.0f} s"
                )
            elif "done" in answer:
                at = None
                self._report(plots=False)
            elif "failed" in answer:
                return {"case": answer["failed"], "error": answer["error"]}
            elif answer.get("finished"):
                return None
            elif child.died:
                return {"case": at, "error": child.last_words()}
            elif self.ranks.any_ended_badly(key):
                return {"case": None, "error": "another rank's process ended"}
            if time.monotonic() > end:
                return {"late": True}

    def _blame(self, group: Group, names: list[str], outcome: dict[str, Any]) -> None:
        """A record for the case that ended the process, or for all that have none, so that they are
        not tried again.
        """
        if self.ranks.rank != 0:
            return
        blamed = (
            {outcome["case"]}
            if outcome["case"] in names
            else set(pending(group, records.read(self.folder)))
        )
        for case in group.cases:
            if case.name in blamed:
                record = records.failed(
                    case, group.name, outcome["error"], now=time.time(), size=self.ranks.size
                )
                records.write(self.folder, {**record, "suite": self.suite.name})

    def _child_for(self, group: Group) -> Child:
        spare, self.spare = self.spare, None
        if self.child is None and spare is not None and spare.allocator == group.allocator:
            self.child = spare
        elif spare is not None:
            spare.end()
        if self.child is not None and self.child.allocator != group.allocator:
            self.child.end()
            self.child = None
        self.child = self.child or self._start(group)
        return self.child

    def _prepare_next(self, number: int) -> None:
        """Start the next group's process, whose imports take seconds and no GPU."""
        later = self.suite.groups[number + 1 :]
        if self.suite.fresh and later:
            self.spare = self._start(later[0])

    def _start(self, group: Group) -> Child:
        return Child(
            self.folder / "logs" / f"{group.name}.rank{self.ranks.rank}.{os.getpid()}.txt",
            group.allocator,
        )

    def _report(self, *, plots: bool) -> None:
        """Write the tables, and the plots where asked or where they are old."""
        plots = plots or time.monotonic() - self.drawn > OLD
        self.drawn = time.monotonic() if plots else self.drawn
        if self.ranks.rank == 0:
            report.write(self.folder, self.suite, skipped=self.skipped, plots=plots)


def pending(group: Group, known: dict[str, records.Record]) -> list[str]:
    """Names of the cases without a record; of a comparison all that did not fail, as soon as one
    has no record.
    """
    missing = [case.name for case in group.cases if case.name not in known]
    if not group.compares or not missing:
        return missing
    return [
        case.name
        for case in group.cases
        if case.name not in known or records.measured(known[case.name])
    ]


def estimated(group: Group, names: list[str]) -> float:
    """Seconds that these cases of a group will need, on an H200."""
    from benchmarks.train.estimate import seconds

    return seconds(replace(group, cases=tuple(case for case in group.cases if case.name in names)))


class Line:
    """What is being done, in one line of rank 0's terminal; nothing where there is none."""

    def __init__(self, first: bool) -> None:
        self._visible, self._long = first and sys.stderr.isatty(), 0

    def show(self, text: str) -> None:
        """Replace the line."""
        if self._visible:
            print(f"\r{text:{self._long}}", end="", file=sys.stderr, flush=True)
            self._long = len(text)

    def end(self) -> None:
        """Leave the line."""
        if self._long:
            print(file=sys.stderr, flush=True)
            self._long = 0
