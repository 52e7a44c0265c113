"""``watch``: each rank notes its calls, and a thread compares them with the other ranks' through
the store.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import sys
import threading
import time
import zlib
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from shardkit._fsdp import fsdp_units
from shardkit._fsdp.collectives import observe_collectives
from shardkit._torch import named_sharded_parameters
from shardkit._torch.dispatch import store_of_its_own
from shardkit.errors import ShardkitError
from shardkit.ranks import check_module, listeners
from shardkit.watching.calls import (
    NOTHING,
    Call,
    Record,
    Seen,
    compose,
    first_difference,
    line_of,
    tail,
)

logger = logging.getLogger("shardkit")

TAIL = 1024  # calls that a rank publishes, the last ones
_STORE = "the store of the process group"
_running: list[Watcher] = []
# How many watches this process has entered, by their ranks: the number is part of the store's key,
# so that the watches of the ranks find each other.
_entered = Counter[int]()


@contextmanager
def watch(*models: nn.Module, after: float = 30.0, end: bool = False) -> Iterator[None]:
    """Report which rank is in another call, and its line of code, when ranks disagree or one of
    them is lost.

    Each rank notes the units that it all-gathers and reduces, and shardkit's own collective calls
    with their arguments. A thread publishes them in the store of the process group. One rank
    compares them and logs one error with the first call in which ranks differ, the line of the
    user's code that made it on each rank, and the ranks that are silent: as soon as calls differ,
    also if nothing hangs, and at most ``after`` + 2 seconds after a rank made its last call. Other
    collectives (``dist.barrier()``, tensor parallelism) show as the line at which a rank is.

    Local: entering and leaving wait for no rank. A call costs microseconds; on CPUs, where gloo
    aborts a rank that gets a message of another size, it asks the store first (0.1 ms), and waits
    for the report if ranks differ. All ranks of the models' meshes must enter.
    ``SHARDKIT_WATCH=30``, or ``=30,end``, watches every model that ``shard_model`` or
    ``apply_plan`` shards, to the end of the program.

    Args:
        models: sharded. Every rank must run the same units in the same order: give pipeline stages,
            or models that only some ranks have, watches of their own.
        after: seconds without a call after which ranks are reported. A longer pause, as to
            evaluate, is reported too.
        end: end the program on every rank with that error: it is raised by the next call, or, where
            a rank waits in a collective, printed, and the process ends with exit code 1, without
            cleaning up.

    Raises:
        ShardkitError: ``after`` is not positive; a model is not a module; and the report, with
            ``end`` or in place of an error of gloo or NCCL.
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
        raise ShardkitError(
            "SHARDKIT_WATCH must be a number of seconds, optionally followed by ,end, got "
            f"{setting!r}. Set SHARDKIT_WATCH=30."
        )
    watching = _start([model], float(seconds), bool(end))
    if watching is not None:
        atexit.register(lambda: watching.leave(getattr(sys, "last_value", None)))


def _start(models: Sequence[nn.Module], after: float, end: bool) -> Watcher | None:
    """Start to watch; None in a world of one rank or of the fake backend. Local."""
    for model in models:
        check_module(model)
    if not after > 0:
        raise ShardkitError(f"after must be a positive number, got {after!r}. Pass after=30.")
    if not dist.is_initialized() or dist.get_backend() == "fake":
        return None
    meshes = set()
    for model in models:
        for _, param in named_sharded_parameters(model):
            if isinstance(param, DTensor):
                meshes.add(param.device_mesh)
    ranks: set[int] = set()
    for mesh in meshes:
        ranks.update(mesh.mesh.flatten().tolist())
    on_cpu = any(mesh.device_type == "cpu" for mesh in meshes)
    return Watcher(models, sorted(ranks), after, end, asks=on_cpu) if len(ranks) > 1 else None


def _is_of_communication(error: BaseException | None) -> bool:
    if isinstance(error, dist.DistError):
        return True
    names = ("gloo", "NCCL", "ProcessGroup")
    return isinstance(error, RuntimeError) and any(name in str(error) for name in names)


class Watcher:
    """One watch on this rank: notes its calls, and runs the thread that compares them."""

    def __init__(
        self, models: Sequence[nn.Module], ranks: list[int], after: float, end: bool, asks: bool
    ) -> None:
        self.ranks = ranks  # all that are watched
        self.report = ""  # what was reported last
        self.count = 0  # calls so far
        self._rank = dist.get_rank()
        self._after = after
        self._ends = end
        self._asks = asks  # whether each call is compared before it is made
        # The first rank reads all records in each period.
        self._period = min(max(1.0, len(ranks) / 256), after / 5)
        team = zlib.crc32(repr(ranks).encode())
        _entered[team] += 1
        self._store = store_of_its_own(f"shardkit_watch_{team}_{_entered[team]}")
        self._user_thread = threading.get_ident()
        self._lock = threading.Lock()  # of the count, the calls, and the time of the last one
        self._calls = deque[Call](maxlen=TAIL)
        now = self._last_call = time.monotonic()
        self._state: dict[str, Any] = {}  # "line", "error", "failed": what is known of the end
        # What is known of each rank, and since when.
        self._known: dict[int, tuple[Record, float]] = dict.fromkeys(ranks, (NOTHING, now))
        self._polls = 0  # since there is something new to report
        self._reported = ""  # the state of the ranks at the last report
        self._left = threading.Event()  # this rank has left the watch
        self._gone = threading.Event()  # the thread has ended
        self._settled = threading.Event()  # the report is final
        self._undo = []
        for number, model in enumerate(models):
            names = {module: name or "(root)" for name, module in model.named_modules()}
            prefix = f"model {number}: " if number else ""
            for unit in fsdp_units(model):
                name = prefix + ", ".join(names[module] for module in unit.modules)
                self._undo.append(observe_collectives(unit, partial(self._note_unit, name)))
        listeners.append(self._note_own)
        _running.append(self)
        threading.Thread(target=self._run, name="shardkit.watch", daemon=True).start()

    # --- In the thread that trains: notes ---

    def _note_unit(self, name: str, operation: str) -> None:
        self._note(f"{operation} of {name}")

    def _note_own(self, call: str) -> None:
        # A call concerns the watch of the fewest ranks: all of them make it, and others may not.
        if len(self.ranks) == min(len(watcher.ranks) for watcher in _running):
            self._note(call)

    def _note(self, call: str) -> None:
        self._add(call, self._line())
        if self._asks and not self._settled.is_set():
            with suppress(RuntimeError, OSError):  # the process that holds the store has ended
                self._ask(call)
        if self.report and self._ends:
            raise ShardkitError(self.report)

    def _add(self, call: str, line: str) -> None:
        with self._lock:
            self.count += 1
            self._last_call = time.monotonic()
            self._calls.append((call, line))

    def _ask(self, call: str) -> None:
        """Wait for the report if a rank made another call of this number."""
        if self._rank == self.ranks[0] and self.count > TAIL:
            self._store.delete_key(f"call {self.count - TAIL}")
        if self._store.compare_set(f"call {self.count}", "", call).decode() != call:
            self._settled.wait(self._after + 5 * self._period + 2.0)

    def _line(self) -> str:
        return line_of(sys._current_frames().get(self._user_thread))

    def leave(self, error: BaseException | None) -> None:
        """Note the end. Waits until it is published; and for the report, for seconds, if
        communication failed.
        """
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
        elif error is None:
            self._add("the end of the watch", "")
        elif not self.report:
            name = type(error).__name__
            self._state["error"] = f"{name}: {error}"[:200]
            self._add(f"raised {name}", "")
        self._left.set()
        self._gone.wait(2.0)

    # --- In the thread of the watch: comparing ---

    def _run(self) -> None:
        left = False
        while not left and not (self._state.get("failed") and self._settled.is_set()):
            # A rank whose process group is destroyed communicates no more: the others must know.
            left = self._left.wait(self._period) or not dist.is_initialized()
            # A host that is lost closes no connection, so its store would be waited for.
            no_answer = [f"watch: {_STORE} does not answer"]
            stuck = threading.Timer(max(self._after, 5.0), self._exit, no_answer)
            stuck.daemon = True
            stuck.start()
            patience = 2 * self._period + 1.0
            try:
                self._poll(left)
            except (RuntimeError, OSError):
                if not self._ends:
                    logger.warning(f"watch: ended, since the process that holds {_STORE} has")
                    break
                self.report = self.report or f"watch: the process that holds {_STORE} has ended"
                patience = self._after
            finally:
                stuck.cancel()
            # The next call raises the report; a rank that waits in a collective makes none.
            if self.report and not left and self._ends and not self._left.wait(patience):
                self._exit(self.report)
        self._gone.set()

    def _exit(self, text: str) -> None:
        if self._ends:
            print(text, file=sys.stderr, flush=True)
            os._exit(1)

    def _poll(self, left: bool = False) -> None:
        """Publish this rank's record and hear a report; the first rank that has neither left nor
        gone compares all.
        """
        with self._lock:
            record = tail(self.count, list(self._calls))
            idle = time.monotonic() - self._last_call
        record |= {"idle": idle, "beat": time.time_ns(), "left": left, "line": self._line()}
        record |= self._state
        self._write(f"{self._rank} calls", record)
        first = self._rank
        for rank in self.ranks[: self.ranks.index(self._rank)]:
            other = self.peek(rank)
            if not other.record["left"] and not other.gone:
                first = rank
                break
        # So that the first rank need not read the calls of all in each period, each rank compares
        # its own with the first one's.
        calls_of_first = self._read(f"{first} calls") or NOTHING
        difference = first_difference({first: calls_of_first, self._rank: record})
        short: dict[str, Any] = {}
        for key in ("idle", "beat", "left", "failed"):
            if key in record:
                short[key] = record[key]
        short["differs"] = difference is not None and difference.is_certain
        self._write(str(self._rank), short)
        report = self._read("report")
        if report and report["report"] != self.report:
            self._hear(**report)
        if not self._settled.is_set() and first == self._rank:
            self._look({rank: self.peek(rank) for rank in self.ranks})

    def _write(self, key: str, value: Any) -> None:
        self._store.set(key, json.dumps(value))

    def _read(self, key: str) -> Any:
        return json.loads(self._store.get(key)) if self._store.check([key]) else None

    def peek(self, rank: int) -> Seen:
        """Read what a rank has published."""
        record, now = self._read(str(rank)), time.monotonic()
        if record is not None and record["beat"] != self._known[rank][0].get("beat"):
            self._known[rank] = record, now
        record, since = self._known[rank]
        age = now - since
        gone = ""
        # The thread of a busy rank is late.
        if age >= 3 * self._period + 0.5 and not record["left"]:
            gone = "never entered the watch" if record is NOTHING else f"silent for {age:.0f} s"
        return Seen(record, age, gone)

    def _look(self, seen: Mapping[int, Seen]) -> None:
        """Compare the calls of all ranks if one is lost, waits for long, or made other calls than
        this one.
        """
        suspicious = max(other.idle for other in seen.values()) >= self._after
        for other in seen.values():
            if other.gone or other.record.get("failed") or other.record.get("differs"):
                suspicious = True
        if suspicious:
            full = {}
            for rank, other in seen.items():
                record = self._read(f"{rank} calls") or NOTHING
                full[rank] = other._replace(record=record)
            self._compare(full)
            return
        self._polls = 0
        # All go on: what was reported must not be taken for the cause of a later error.
        if self.report:
            self._tell("", "", settled=False)

    def _compare(self, seen: Mapping[int, Seen]) -> None:
        """Report if calls differ and all ranks made them, a rank is lost, or none is made for long.

        The first two are final; ranks that were late may go on, or turn out to be lost.
        """
        records = {rank: other.record for rank, other in seen.items()}
        difference = first_difference(records)
        if difference is None or not difference.is_certain:
            # What a lost rank called last is not known.
            alive = {rank: record for rank, record in records.items() if not seen[rank].gone}
            difference = first_difference(alive or records)
        settled = False
        if difference is not None and difference.is_certain:
            settled = all(call or seen[rank].gone for rank, call in difference.calls.items())
        is_gone = any(other.gone for other in seen.values())
        lost = is_gone and any(record.get("failed") for record in records.values())
        stalled = max(other.idle for other in seen.values()) >= self._after
        state = ""
        if settled or lost or stalled:
            counts = [record["first"] + len(record["calls"]) for record in records.values()]
            state = repr((settled, lost, stalled and counts))
        self._polls = self._polls + 1 if state and state != self._reported else 0
        if settled or self._polls > 3:  # else records may not yet say what each rank did
            report = compose(seen, difference)
            logger.error(report)
            self._tell(report, state, settled or lost)

    def _tell(self, report: str, state: str, settled: bool) -> None:
        self._write("report", {"report": report, "state": state, "settled": settled})
        self._hear(report, state, settled)

    def _hear(self, report: str, state: str, settled: bool) -> None:
        self.report, self._reported = report, state
        if settled:
            self._settled.set()
