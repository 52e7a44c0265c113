"""``watch``: each rank notes its calls, and a thread compares them with the other ranks' through the store."""

from __future__ import annotations

import atexit
import json
import linecache
import logging
import os
import sys
import sysconfig
import threading
import time
import traceback
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from shardkit._fsdp import fsdp_units
from shardkit._fsdp.observe import observe_collectives
from shardkit._torch import named_sharded_parameters
from shardkit._torch.worlds import store_of_its_own
from shardkit.errors import ShardkitError, message
from shardkit.ranks import check_module, listeners
from shardkit.watching.calls import NOTHING, Calls, Difference, Record, Seen, compose, first_difference

logger = logging.getLogger("shardkit")

_PATHS = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
_LIBRARIES = ("<", *(str(path) for path in (*_PATHS, Path(torch.__file__).parent, Path(__file__).parents[1])))
_entered = Counter[int]()  # watches of this process so far, by team: by these numbers ranks find each other's
_running: list[_Watch] = []


@contextmanager
def watch(*models: nn.Module, after: float = 30.0, end: bool = False) -> Iterator[None]:
    """Report which rank is in another call, and its line of code, when ranks disagree or one of them is lost.

    Each rank notes the units that it gathers and reduces, and shardkit's own collective calls with their arguments. A
    thread publishes them in the store of the process group. The first living rank compares them and logs one error
    with the first call in which ranks differ, the ranks that are silent, and the line of the user's code at which each
    rank is: as soon as calls differ, also if nothing hangs, and at most ``after`` + 2 seconds after a rank made its
    last call. Other collectives (``dist.barrier()``, tensor parallelism) show as that line only.

    Local: entering and leaving wait for no rank, and a call costs microseconds. All ranks of the models' meshes must
    enter. ``SHARDKIT_WATCH=30`` watches every model that ``shard_model`` or ``apply_plan`` shards, to the end of the
    program; ``SHARDKIT_WATCH=30,end`` is ``end=True``. With one rank it does nothing.

    Args:
        models: sharded. Every rank must run the same units in the same order: give pipeline stages, or models that only
            some ranks have, watches of their own.
        after: seconds without a call after which ranks are reported. A longer pause, as to evaluate, is reported too.
        end: end the program on every rank with that error: it is raised by the next call, or, where a rank waits in a
            collective, printed, and the process ends with exit code 1, without cleaning up.

    Raises:
        ShardkitError: ``after`` is not positive; a model is not a module; and the report, with ``end`` or in place of
            an error of gloo or NCCL.

    Example:
        >>> with watch(model, after=30):
        ...     train(model)
    """
    watching = _start(models, after, end)
    try:
        yield
    except BaseException as error:
        if watching is not None:
            watching.leave(error)
            if watching.report and (end or _is_of_communication(error)):
                raise ShardkitError(watching.report) from error
        raise
    if watching is not None:
        watching.leave(None)


def watch_script(model: nn.Module, setting: str) -> None:
    """Watch a model to the end of the program, as the value of ``SHARDKIT_WATCH`` says. Local."""
    seconds, _, end = setting.partition(",")
    if not seconds.replace(".", "", 1).isdigit() or end not in ("", "end"):
        problem = f"must be a number of seconds, optionally followed by ,end, got {setting!r}"
        raise ShardkitError(message("SHARDKIT_WATCH", problem, "", "Set SHARDKIT_WATCH=30"))
    watching = _start([model], float(seconds), bool(end))
    if watching is not None:
        atexit.register(lambda: watching.leave(getattr(sys, "last_value", None)))


def _start(models: Sequence[nn.Module], after: float, end: bool) -> _Watch | None:
    """Start to watch; None in a world of one rank or of the fake backend. Local."""
    for model in models:
        check_module(model)
    if not after > 0:
        raise ShardkitError(message("after", f"must be a positive number, got {after!r}", "", "Pass after=30"))
    if not dist.is_initialized() or dist.get_backend() == "fake":
        return None
    params = [param for model in models for _, param in named_sharded_parameters(model)]
    meshes = dict.fromkeys(param.device_mesh for param in params if isinstance(param, DTensor))
    ranks = sorted({rank for mesh in meshes for rank in mesh.mesh.flatten().tolist()})
    return _Watch(models, ranks, after, end) if len(ranks) > 1 else None


def _is_of_communication(error: BaseException | None) -> bool:
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(name in str(error) for name in ("gloo", "NCCL", "ProcessGroup"))
    )


def line_of(where: FrameType | TracebackType | None) -> str:
    """Return the innermost line of a thread or an error that is the user's, not of an installed package. Local.

    As ``model.py:8: x = layer(x), from train.py:20``, with at most two callers; empty if there is none.
    """
    of_error = isinstance(where, TracebackType)
    walk: Any = traceback.walk_tb if of_error else traceback.walk_stack
    found = [(frame.f_code.co_filename, number) for frame, number in walk(where)] if where is not None else []
    lines = [line for line in found if not line[0].startswith(_LIBRARIES)]
    lines = lines[:-4:-1] if of_error else lines[:3]  # the innermost first
    places = [f"{Path(file).name}:{number}" for file, number in lines]
    code = [linecache.getline(*line).strip() for line in lines[:1]]
    return ", from ".join([": ".join([*places[:1], *filter(None, code)]), *places[1:]])


class RankStore:
    """What the ranks that must make the same calls publish. Every method asks the store, and raises if that is gone."""

    def __init__(self, ranks: Sequence[int], rank: int, store: Any, period: float) -> None:
        """``store`` is this thread's own; each rank publishes every ``period`` seconds."""
        self.ranks, self.rank = ranks, rank
        self._store = store
        self._silent = 3 * period + 0.5  # threads of a busy rank are late
        self._known: dict[int, tuple[Record, float]] = dict.fromkeys(ranks, (NOTHING, time.monotonic()))

    def publish(self, record: Record) -> None:
        """Publish this rank's record."""
        self._store.set(str(self.rank), json.dumps({**record, "beat": time.time_ns()}))

    def broadcast(self, report: str) -> None:
        """Publish a report to all ranks."""
        self._store.set("report", json.dumps(report))

    def report(self) -> str:
        """Return what was broadcast last."""
        return self._read("report") or ""

    def _read(self, key: str) -> Any:
        return json.loads(self._store.get(key)) if self._store.check([key]) else None

    def peek(self, rank: int) -> Seen:
        """Read what a rank has published."""
        record, now = self._read(str(rank)), time.monotonic()
        if record is not None and record["beat"] != self._known[rank][0].get("beat"):
            self._known[rank] = record, now
        record, at = self._known[rank]
        is_silent = now - at >= self._silent and not record["left"]
        silence = "never entered the watch" if record is NOTHING else f"silent for {now - at:.0f} s"
        return Seen(record, now - at, silence if is_silent else "")

    def is_first(self) -> bool:
        """Whether all ranks before this one have left or are gone."""
        before = (self.peek(rank) for rank in self.ranks[: self.ranks.index(self.rank)])
        return all(seen.record["left"] or seen.gone for seen in before)


class _Watch:
    def __init__(self, models: Sequence[nn.Module], ranks: list[int], after: float, end: bool) -> None:
        self.report = ""
        self._after, self._ends = after, end
        self._period = min(max(1.0, len(ranks) / 256), after / 5)  # in each the first rank reads all records
        team = zlib.crc32(repr(ranks).encode())
        _entered[team] += 1
        store = store_of_its_own(f"shardkit_watch_{team}_{_entered[team]}")
        self.team = RankStore(ranks, dist.get_rank(), store, self._period)
        self._calls, self._user_thread = Calls(), threading.get_ident()
        self._state = {"left": False, "failed": False, "error": "", "line": ""}
        self._polls, self._is_settled = 0, False  # since there is something to report; the rest follows from a report
        self._reported: object = None
        self._found: Difference | None = None
        self._exit_at = float("inf")
        self._wake, self._gone = threading.Event(), threading.Event()
        self._undo = []
        for number, model in enumerate(models):
            names = {module: name or "(root)" for name, module in model.named_modules()}
            for unit in fsdp_units(model):
                name = (f"model {number}: " if number else "") + ", ".join(names[module] for module in unit.modules)
                self._undo.append(observe_collectives(unit, partial(self._note_unit, name)))
        listeners.append(self._note_own)
        _running.append(self)
        threading.Thread(target=self._run, name="shardkit.watch", daemon=True).start()

    # --- In the thread that trains: notes ---

    def _note_unit(self, name: str, operation: str) -> None:
        if self.report and self._ends:
            raise ShardkitError(self.report)
        self._calls.add(f"{operation} of {name}")

    def _note_own(self, call: str) -> None:
        # All ranks of a smaller team make a call that concerns a larger one, but not the other way around.
        if len(self.team.ranks) == min(len(each.team.ranks) for each in _running):
            if self.report and self._ends:
                raise ShardkitError(self.report)
            self._calls.add(call)
            with suppress(RuntimeError, OSError):  # at once: gloo may end a rank that makes it alone
                self.team.publish(self._record())

    def leave(self, error: BaseException | None) -> None:
        """Note the end. Waits until it is published; and for the report, for seconds, if communication failed."""
        if self not in _running:
            return
        _running.remove(self)
        listeners.remove(self._note_own)
        for undo in self._undo:
            undo()
        if error is not None:
            self._state["line"] = line_of(error.__traceback__)
        if _is_of_communication(error):
            self._state["failed"] = True  # as other ranks: one of them has more to say
            self._gone.wait(5 * self._period + 2.0)
        elif error is None or not self.report:
            self._state["error"] = "" if error is None else f"{type(error).__name__}: {error}"[:200]
            self._calls.add("the end of the watch" if error is None else f"raised {type(error).__name__}")
        self._state["left"] = True
        self._wake.set()
        self._gone.wait(2.0)

    # --- In the thread of the watch: comparing ---

    def _run(self) -> None:
        while not self._gone.is_set():
            self._wake.wait(self._period)
            if not dist.is_initialized():  # this rank communicates no more; the others must not miss it
                self._state["left"] = True
            left = self._state["left"]
            # A host that is lost closes no connection, and the store of its process would be waited for.
            stuck = threading.Timer(max(self._after, 5.0), self._end_without_store)
            stuck.daemon = True
            stuck.start()
            try:
                self._poll()
            except (RuntimeError, OSError):
                if not self._ends:
                    logger.warning("watch: ended, since the process that holds the store of the process group has")
                    self._gone.set()
                elif not self.report:  # a report that was heard ends this rank already
                    self.report = "watch: the process that holds the store of the process group has ended"
                    self._exit_at = time.monotonic() + self._after
            finally:
                stuck.cancel()
            if left or (self._state["failed"] and self.report):
                self._gone.set()
            if time.monotonic() > self._exit_at and not self._gone.is_set():
                print(self.report, file=sys.stderr, flush=True)
                os._exit(1)

    def _end_without_store(self) -> None:
        if self._ends:
            print("watch: the store of the process group does not answer", file=sys.stderr, flush=True)
            os._exit(1)

    def _poll(self) -> None:
        self.team.publish(self._record())
        if (report := self.team.report()) and report != self.report:
            self._hear(report)
        if not self._is_settled and self.team.is_first():
            self._compare({rank: self.team.peek(rank) for rank in self.team.ranks})

    def _record(self) -> Record:
        line = self._state["line"] or line_of(sys._current_frames().get(self._user_thread))
        return {**self._calls.record(), **self._state, "line": line}

    def _compare(self, seen: Mapping[int, Seen]) -> None:
        """Report if calls differ, a rank is lost or no call is made, once the records say what each rank did then."""
        records = {rank: each.record for rank, each in seen.items()}
        difference = first_difference(records)
        if difference is None or not difference.is_certain:  # what a lost rank called last is not known
            difference = first_difference({r: each for r, each in records.items() if not seen[r].gone} or records)
        if self._found is None and difference is not None and difference.is_certain:
            self._found = difference  # ranks that do not wait for each other soon leave it behind
        difference, certain = self._found or difference, self._found is not None
        lost = any(each.gone for each in seen.values()) and any(each["failed"] for each in records.values())
        stalled = max(each.idle for each in seen.values()) >= self._after
        state = certain, lost, stalled and [each["base"] + len(each["calls"]) for each in records.values()]
        self._polls = self._polls + 1 if any(state) and state != self._reported else 0
        if self._polls > 3:
            self._reported, self._is_settled = state, certain
            report = compose(seen, difference)
            logger.error(report)
            self._hear(report)
            self.team.broadcast(report)

    def _hear(self, report: str) -> None:
        self.report = report
        if self._ends:
            self._exit_at = time.monotonic() + 2 * self._period + 1.0
