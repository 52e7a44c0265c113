"""``watch``: each rank notes its calls, and a thread compares them with the other ranks' through the store."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial

import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from shardkit._fsdp import events, fsdp_units
from shardkit._torch import named_sharded_parameters
from shardkit._torch.worlds import store_of_its_own
from shardkit.errors import ShardkitError, message
from shardkit.ranks import check_module, listeners
from shardkit.watching.calls import NOTHING, Calls, Record, agreed, code_of, first_difference
from shardkit.watching.report import compose
from shardkit.watching.team import Seen, Team
from shardkit.watching.where import line_of_error, line_of_thread

logger = logging.getLogger("shardkit")

_entered = Counter[int]()  # watches of this process so far, by team: by these numbers ranks find each other's
_running: list[_Watch] = []


@contextmanager
def watch(*models: nn.Module, after: float = 30.0, end: bool = False) -> Iterator[None]:
    """Report which rank is in another call, and its line of code, when ranks disagree or one of them is lost.

    Each rank notes the units that it gathers and reduces, and shardkit's own collective calls with their arguments. A
    thread publishes them in the store of the process group. The first living rank compares them and logs one error
    with the first call in which ranks differ, the ranks that ended, stopped or are silent, and the line of the user's
    code at which each rank is: as soon as calls differ, also if nothing hangs, and at most ``after`` + 2 seconds after
    a rank made its last call. Other collectives (``dist.barrier()``, tensor parallelism) show as that line only.

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
        rule = "It must be a number of seconds, optionally followed by ,end"
        raise ShardkitError(message("SHARDKIT_WATCH", f"is {setting!r}", rule, "Set SHARDKIT_WATCH=30"))
    watching = _start([model], float(seconds), bool(end))
    if watching is not None:
        atexit.register(lambda: watching.leave(getattr(sys, "last_value", None)))


def _start(models: Sequence[nn.Module], after: float, end: bool) -> _Watch | None:
    """Start to watch; None in a world of one rank or of the fake backend. Local."""
    for model in models:
        check_module(model)
    if not after > 0:
        raise ShardkitError(message("after", f"is {after!r}", "It must be a positive number", "Pass after=30"))
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


class _Watch:
    def __init__(self, models: Sequence[nn.Module], ranks: list[int], after: float, end: bool) -> None:
        self.report = ""
        self._after, self._ends = after, end
        self._period = min(max(1.0, len(ranks) / 256), after / 5)  # in each the first rank reads all records
        team = code_of(repr(ranks))
        _entered[team] += 1
        store = store_of_its_own(f"shardkit_watch_{team}_{_entered[team]}")
        self.team = Team(ranks, dist.get_rank(), store, self._period)
        self._calls, self._names = Calls(), set[str]()
        self._state = {"left": False, "failed": False, "error": "", "line": ""}
        self._user_thread = threading.get_ident()
        self._word: Mapping[str, object] = {"since": None, "report": ""}
        self._incomplete_since, self._is_settled = 0.0, False  # settled: the rest follows from what was reported
        self._reported: object = None
        self._exit_at = float("inf")
        self._answered, self._poller, self._store_is_gone = time.monotonic(), threading.Thread(), False
        self._wake, self._gone = threading.Event(), threading.Event()
        self._undo = [undo for number, model in enumerate(models) for undo in self._observe(model, number)]
        listeners.append(self._note_own)
        _running.append(self)
        threading.Thread(target=self._run, name="shardkit.watch", daemon=True).start()

    # --- In the thread that trains: notes ---

    def _observe(self, model: nn.Module, number: int) -> Iterator[Callable[[], None]]:
        names = {module: name or "(root)" for name, module in model.named_modules()}
        for unit in fsdp_units(model):
            name = (f"model {number}: " if number else "") + ", ".join(names[module] for module in unit.modules)
            yield events.observe_collectives(unit, partial(self._note_unit, name))

    def _note_own(self, call: str) -> None:
        # All ranks of a smaller team make a call that concerns a larger one, but not the other way around.
        if len(self.team.ranks) == min(len(each.team.ranks) for each in _running):
            self._note(call)
            self._publish_new(call.partition("(")[0])

    def _publish_new(self, name: str) -> None:
        """Publish a kind of call at once where it is new: gloo may end a rank that makes it alone."""
        if name not in self._names and not self._store_is_gone:
            self._names.add(name)
            with suppress(RuntimeError, OSError):
                self.team.publish(self._record())

    def _note_unit(self, name: str, operation: str) -> None:
        self._note(f"{operation} of {name}", of_unit=True)

    def _note(self, call: str, of_unit: bool = False) -> None:
        if self.report and self._ends:
            raise ShardkitError(self.report)
        self._calls.add(call, code_of(call), of_unit)

    def leave(self, error: BaseException | None) -> None:
        """Note the end. Waits until it is published; and for the report, for seconds, if communication failed."""
        if self not in _running:
            return
        _running.remove(self)
        listeners.remove(self._note_own)
        for undo in self._undo:
            undo()
        if error is not None:
            self._state["line"] = line_of_error(error.__traceback__)
        if _is_of_communication(error):
            self._state["failed"] = True  # as other ranks: one of them has more to say
            self._gone.wait(5 * self._period + 2.0)
        elif error is None or not self.report:
            call = "the end of the watch" if error is None else f"raised {type(error).__name__}"
            self._state["error"] = "" if error is None else f"{type(error).__name__}: {error}"[:200]
            self._calls.add(call, code_of(call))
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
            self._poll_within(self._after)
            if left or (self._state["failed"] and self.report):
                self._gone.set()
            elif not self.report and self._is_alone():
                self._tell_alone()
            if time.monotonic() > self._exit_at and not self._gone.is_set():
                print(self.report, file=sys.stderr, flush=True)
                os._exit(1)

    def _poll_within(self, seconds: float) -> None:
        """Poll in a thread of its own: a store whose process is stopped never answers."""
        if not self._poller.is_alive() and not self._store_is_gone:
            self._poller = threading.Thread(target=self._poll, name="shardkit.watch.store", daemon=True)
            self._poller.start()
        self._poller.join(seconds)

    def _poll(self) -> None:
        try:
            self.team.publish(self._record())
            self._word = self.team.hear()
            if self._word["report"] and self._word["report"] != self.report:
                self._hear(str(self._word["report"]))
            if not self._is_settled and self.team.is_first():
                self._compare({rank: self.team.look(rank) for rank in self.team.ranks})
        except (RuntimeError, OSError):  # the process with the store ended; torch logs each further attempt
            self._store_is_gone = True
            return
        self._answered = time.monotonic()

    def _record(self) -> Record:
        line = self._state["line"] or line_of_thread(self._user_thread)
        return {**self._calls.record(self._word["since"]), **self._state, "line": line}  # type: ignore[arg-type]

    def _compare(self, seen: Mapping[int, Seen]) -> None:
        records = {rank: each.record for rank, each in seen.items()}
        same, differ = agreed(records)
        difference = first_difference(records)
        some_are_late = any(
            call is None and not seen[r].gone for r, call in (difference.calls if difference else {}).items()
        )
        if difference is None or not difference.is_certain:  # what a lost rank called last is not known
            difference = first_difference({r: each for r, each in records.items() if not seen[r].gone} or records)
        certain = differ or (difference is not None and difference.is_certain)
        lost = any(s.gone == "ended" or (s.gone and any(r["failed"] for r in records.values())) for s in seen.values())
        stalled = max(each.idle for each in seen.values()) >= self._after
        state = certain, lost, stalled and [each["base"] + len(each["calls"]) for each in records.values()]
        if not (certain or lost or stalled) or state == self._reported:
            return
        if self._is_complete(same, seen, (certain or lost) and some_are_late):
            self._reported, self._incomplete_since, self._is_settled = state, 0.0, certain
            self._tell(compose(seen, difference))

    def _is_complete(self, same: int, seen: Mapping[int, Seen], some_are_late: bool) -> bool:
        """Whether the records reach from the first difference to what each rank did there; else wait, for seconds."""
        reach = all(each.record["base"] <= same or each.gone for each in seen.values())
        if reach and not some_are_late:
            return True
        if not reach and self._word["since"] != same:
            self._word = {**self._word, "since": same}
            self.team.say(self._word)
        self._incomplete_since = self._incomplete_since or time.monotonic()
        return time.monotonic() > self._incomplete_since + 3 * self._period

    def _is_alone(self) -> bool:
        """Whether the store is gone, and this rank has waited, or has failed too."""
        waited = time.monotonic() - max(self._answered, self._calls.moved) > self._after
        return waited or (self._store_is_gone and bool(self._state["failed"]))

    def _tell_alone(self) -> None:
        """Report what this rank knows, without the store."""
        known = {rank: self.team.known(rank) for rank in self.team.ranks}
        known[self.team.rank] = Seen(self._record())
        silence = f"the store has not answered for {time.monotonic() - self._answered:.0f} s"
        report = compose({rank: each for rank, each in known.items() if each.record is not NOTHING}, None, silence)
        logger.error(report)
        self._hear(report)

    def _tell(self, report: str) -> None:
        logger.error(report)
        self._word = {"since": None, "report": report}
        self._hear(report)
        self.team.say(self._word)

    def _hear(self, report: str) -> None:
        self.report = report
        if self._ends:
            self._exit_at = time.monotonic() + 2 * self._period + 1.0
