"""Measure a group's training steps, in this process and its world."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.train import meter
from benchmarks.train.agreement import compare
from benchmarks.train.case import Case, Training
from benchmarks.train.group import Group
from benchmarks.train.sides import SIDES
from benchmarks.train.watch import Watch, thinned

Say = Callable[[str, str], None]


class CaseFailed(Exception):
    """A case that ends this process, since other ranks wait for this one: its name, and what
    happened.
    """


@dataclass
class Seen:
    """What was seen of one case so far.

    Attributes:
        case: the row.
        seconds: of each timed step, a list for each round.
        losses: of the warm-up steps after the first build, before anything was timed.
        first_step: seconds of the very first step, which compiles and makes state.
        allocated, reserved: most bytes in a round of steps with nothing else in this process; None
            on a CPU.
        stayed: bytes that were still allocated after the case was freed.
        agreement: with the first case of a comparison; see :func:`agreement.compare`.
        timeline: bytes after each operator of a step, thinned.
        attention: operators of attention that the step ran, as it was watched.
        error: why the case could not be measured, or None.
        unavailable: why the case cannot run here, or None.
    """

    case: Case
    seconds: list[list[float]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    first_step: float | None = None
    allocated: int | None = None
    reserved: int | None = None
    stayed: int | None = None
    agreement: dict[str, Any] | None = None
    timeline: list[int] | None = None
    attention: list[str] = field(default_factory=list)
    error: str | None = None
    unavailable: str | None = None

    @property
    def runs(self) -> bool:
        """Whether there is still something to measure."""
        return self.error is None and self.unavailable is None


class Measurement:
    """Measures the cases of a group. Collective: all ranks do the same.

    Args:
        group: which, its world being entered already.
        cases: those of its cases that are to be measured.
        device: of this rank.
        say: is told the case and what is being done with it, for progress and for blame.
        done: gets a case as soon as nothing more will be measured of it.
    """

    def __init__(
        self,
        group: Group,
        cases: Iterable[Case],
        device: torch.device,
        say: Say,
        done: Callable[[Seen], None],
    ) -> None:
        self.group, self.device, self.say, self.done = group, device, say, done
        self.rank = dist.get_rank() if dist.is_initialized() and not group.fake_ranks else 0
        self.alone = group.fake_ranks > 0 or not dist.is_initialized() or dist.get_world_size() == 1
        self.all = [Seen(case, unavailable=SIDES[case.side].unavailable(case)) for case in cases]

    def run(self) -> None:
        """All of it."""
        {"each": self._each, "apart": self._apart, "together": self._together}[self.group.kind]()

    def _each(self) -> None:
        for seen in self.all:
            self._visit(seen, partial(self._each_round, seen))
            self._finish(seen)

    def _each_round(self, seen: Seen, training: Training) -> None:
        self._first(seen, training, counts=True)
        for number in range(1, self.group.rounds):
            self._time(seen, training, number)

    def _apart(self, first: int = 0) -> None:
        for number in range(first, self.group.rounds):
            for seen in self._in_turn(number):
                self._visit(seen, partial(self._one_round, seen, number))
        for seen in self.all:
            self._finish(seen)

    def _one_round(self, seen: Seen, number: int, training: Training) -> None:
        if number == 0:
            self._first(seen, training, counts=True)
        else:
            self._warm_up(seen, training)
            self._time(seen, training, number)

    def _together(self) -> None:
        for seen in self.all:
            self._visit(seen, partial(self._first, seen, counts=False))
        if not self._rounds_together():  # then there is room for one at a time
            self._apart()
            return
        for seen in self.all:
            self._finish(seen)

    def _rounds_together(self) -> bool:
        try:
            trainings = {}
            for seen in filter(lambda seen: seen.runs, self.all):
                self.say(seen.case.name, "building all")
                trainings[seen.case] = SIDES[seen.case.side].build(seen.case, self.device)
                self._warm_up(seen, trainings[seen.case])
            for number in range(self.group.rounds):
                for seen in self._in_turn(number):
                    # the last side's data leaves the caches
                    self._steps(seen, trainings[seen.case], number, 1)
                    self._time(seen, trainings[seen.case], number)
        except torch.OutOfMemoryError as error:
            if not self.alone:
                raise
            traceback.clear_frames(error.__traceback__)
            trainings.clear()
        fitted = bool(trainings) or not any(seen.runs for seen in self.all)
        trainings.clear()
        meter.free(self.device)
        for seen in self.all if not fitted else ():
            seen.seconds.clear()
        return fitted

    def _in_turn(self, number: int) -> list[Seen]:
        at = number % len(self.all)
        return [seen for seen in self.all[at:] + self.all[:at] if seen.runs]

    def _visit(self, seen: Seen, act: Callable[[Training], None]) -> None:
        """Build, act and free. What goes wrong is the case's error, unless other ranks wait for
        this one.
        """
        if not seen.runs:
            return
        self.say(seen.case.name, "building")
        try:
            act(SIDES[seen.case.side].build(seen.case, self.device))
        except Exception as error:
            seen.error = said(error)
            traceback.clear_frames(error.__traceback__)  # whose variables hold the model
        if seen.error is not None and not self.alone:
            raise CaseFailed(seen.case.name, seen.error)
        seen.stayed = meter.free(self.device)

    def _first(self, seen: Seen, training: Training, *, counts: bool) -> None:
        """Warm up, compare losses, then run a round for its peak and, if it ``counts``, its
        seconds.
        """
        seen.losses = self._warm_up(seen, training)
        pivot = self.all[0]
        if self.group.compares and seen is not pivot and pivot.losses:
            seen.agreement = compare(seen.case, self._common(seen), pivot.case, pivot.losses)

        def note(allocated: int | None, reserved: int | None) -> None:
            seen.allocated, seen.reserved = self._most(allocated), self._most(reserved)

        with meter.peak(self.device, note):
            self._time(seen, training, 0) if counts else self._steps(seen, training, 0, 2)
        if (
            seen.case.name in self.group.watch
            and seen.allocated is not None
            and not seen.case.compile
        ):
            self._watch(seen, training)

    def _common(self, seen: Seen) -> list[float]:
        """The losses that others must have too: a bare model's ranks train apart, and agree before
        the first update.
        """
        return seen.losses if self.alone or seen.case.side != "bare" else seen.losses[:1]

    def _warm_up(self, seen: Seen, training: Training) -> list[float]:
        self.say(seen.case.name, "compiling, warming up" if seen.case.compile else "warming up")
        ids = meter.batches(seen.case, self.device, self.rank, 0, self.group.warm_up)
        start = time.perf_counter()
        losses = [training.step(ids[0]).item()]
        seen.first_step = seen.first_step or time.perf_counter() - start
        losses += [training.step(each).item() for each in ids[1:]]
        _check_finite(losses)
        return losses

    def _time(self, seen: Seen, training: Training, number: int) -> None:
        self.say(seen.case.name, f"round {number + 1} of {self.group.rounds}")
        seen.seconds.append(self._slowest(self._steps(seen, training, number, self.group.steps)))

    def _steps(self, seen: Seen, training: Training, number: int, count: int) -> list[float]:
        first = self.group.warm_up + number * self.group.steps
        ids = meter.batches(seen.case, self.device, self.rank, first, count)
        if not self.alone:
            dist.barrier()
        seconds, losses = meter.timed(training, ids, self.device)
        _check_finite(losses.tolist())
        return seconds

    def _watch(self, seen: Seen, training: Training) -> None:
        ids = meter.batches(seen.case, self.device, self.rank, 0, 1)
        with Watch(lambda: meter.held(self.device) or 0) as watch:
            training.step(ids[0])
        seen.timeline, seen.attention = thinned(watch.points), sorted(watch.attention)

    def _slowest(self, values: list[float]) -> list[float]:
        if self.alone:
            return values
        most = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        return most.tolist()

    def _most(self, value: int | None) -> int | None:
        return value if value is None or self.alone else int(self._slowest([float(value)])[0])

    def _finish(self, seen: Seen) -> None:
        self.done(seen)


def _check_finite(losses: list[float]) -> None:
    bad = [number for number, loss in enumerate(losses) if not -1e9 < loss < 1e9]
    if bad:
        raise ArithmeticError(f"the loss of step {bad[0]} is {losses[bad[0]]}")


def said(error: BaseException) -> str:
    """An error in a line or two: its kind, what it says, and where."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename.rpartition('/')[2]}:{frames[-1].lineno})" if frames else ""
    kind = "out of memory" if isinstance(error, torch.OutOfMemoryError) else type(error).__name__
    return f"{kind}: {str(error).strip()[:600]}{where}"
