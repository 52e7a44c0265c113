"""The process that measures: ``python -m benchmarks.train.worker``, started by :mod:`run`, one job
a line.

It imports everything and waits, so that the next group's imports happen while the last one is
measured. The GPU is not touched before there is a job.
"""

from __future__ import annotations

import gc
import json
import math
import os
import sys
import time
import uuid
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TextIO

import torch
import torch._dynamo  # or the first forward imports it, a second or two

from benchmarks.models import SHAPES
from benchmarks.train import ceilings, disk, machine, measure, outside, records
from benchmarks.train.case import Case
from benchmarks.train.flops import per_token
from benchmarks.train.group import Group
from benchmarks.train.peaks import peak
from benchmarks.train.world import rank_and_size, world


class Job:
    """One group, as this process measures it.

    Args:
        order: what :mod:`run` sent: the group, of its cases the names of those to measure, the
            suite's name and its device, the folder for records, and a name for the process group
            that no other job has.
        say: sends a message back.
    """

    def __init__(self, order: dict[str, Any], say: Callable[..., None]) -> None:
        self.rank, self.size = rank_and_size()
        self.group = Group.of(order["group"])
        self.cases = [case for case in self.group.cases if case.name in order["cases"]]
        self.folder, self.name, self.say = Path(order["folder"]), order["name"], say
        self.device = device_for(order["device"])
        self.common = {
            "group": self.group.name,
            "suite": order["suite"],
            "run": uuid.uuid4().hex,
            "started": time.time(),
        }

    def run(self) -> None:
        """Measure, and write a record for each case."""
        with ExitStack() as stack:
            if self.group.kind in ("each", "apart", "together"):
                stack.enter_context(world(self.group.fake_ranks, self.device, self.name))
                self.facts = machine.facts(self.device)
                measure.Measurement(self.group, self.cases, self.device, self._at, self._done).run()
            else:
                self.facts = machine.facts(self.device)
                self._other(self.cases[0])

    def _at(self, case: str, doing: str) -> None:
        self.say(case=case, doing=doing)

    def _done(self, seen: measure.Seen) -> None:
        case = seen.case
        record = self._record(case) | {
            name: value for name, value in vars(seen).items() if name != "case"
        }
        if seen.runs and seen.seconds:
            shape = SHAPES[case.model.removeprefix("hf-")]
            flops, most = (
                per_token(shape, case.sequence),
                peak(self.facts["gpu"]) if case.bf16 else None,
            )
            record |= {"flops_per_token": asdict(flops), "peak_flops": most}
            record |= records.speed(case, seen.seconds, flops, most)
        self._write(record)

    def _other(self, case: Case) -> None:
        """A measurement that is not a training step: its values alone."""
        self._at(case.name, "measuring")
        with TemporaryDirectory(prefix="shardkit-bench-", dir=self.folder) as name:
            measures: dict[str, Callable[[], Any]] = {
                "ceilings": lambda: ceilings.measure(self.device),
                "outside": lambda: self._outside(case),
                "disk": lambda: self._disk(case, Path(name)),
            }
            try:
                found = {"values": measures[self.group.kind]()}
            except Exception as error:
                found = {"error": measure.said(error)}
        self._write(self._record(case) | found)

    def _outside(self, case: Case) -> list[tuple[float, float]]:
        with world(case.fake_ranks, self.device, self.name):
            return outside.measure(case, self.device, self.group.rounds)

    def _disk(self, case: Case, folder: Path) -> dict[str, float | None]:
        with world(case.fake_ranks, self.device, self.name):
            speeds = disk.measure(case.model, self.device, folder)
        # JSON has no infinity
        return {name: speed if math.isfinite(speed) else None for name, speed in speeds.items()}

    def _record(self, case: Case) -> records.Record:
        world = records.world_of(case, self.size)
        named = {
            "name": case.name,
            "case": asdict(case),
            "kind": self.group.kind,
            "machine": self.facts,
        }
        settings = {"warm_up": self.group.warm_up, "allocator": self.group.allocator}
        return {
            **named,
            **self.common,
            **settings,
            "world": world,
            "error": None,
            "finished": time.time(),
        }

    def _write(self, record: records.Record) -> None:
        if self.rank == 0:
            records.write(self.folder, record)
        self.say(done=record["name"])


def device_for(kind: str) -> torch.device:
    """The GPU of this rank, or the CPU."""
    if kind == "cpu":
        return torch.device("cpu")
    device = torch.device(kind, int(os.environ.get("LOCAL_RANK", "0")))
    torch.get_device_module(device).set_device(device)
    return device


def serve(orders: TextIO, answers: TextIO) -> None:
    """Run a job for each line, until there are no more."""

    def say(**message: Any) -> None:
        print(json.dumps(message), file=answers, flush=True)

    gc.collect()
    # collecting garbage between rounds need not look at what was imported, a million objects
    gc.freeze()
    say(ready=True)
    for line in orders:
        try:
            Job(json.loads(line), say).run()
        except measure.CaseFailed as failure:
            case, error = failure.args
            say(failed=case, error=error)
            raise SystemExit(1) from failure
        say(finished=True)


def main() -> None:
    """Answers go to what stdout was; stdout itself becomes stderr, since libraries print."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    serve(sys.stdin, answers)


if __name__ == "__main__":
    main()
