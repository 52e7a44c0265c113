"""Start a set of rank processes, exchange calls with them, and end them; the parent's side."""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import multiprocessing.util  # its exit hook waits for children; registered first, it runs after ours
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import cache
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from pathlib import Path

from shardkit._torch import RANK_IMPORTS
from shardkit.testing import worker
from shardkit.testing.report import Failure
from shardkit.testing.worker import STACK_SIGNAL, STARTED, Call, Returned, Seat, exit_with_parent, serve

# A fork server has no threads, so its forks are safe where the parent's would not be, and it imports torch once:
# 4 ranks are ready 0.1 s after it is (1.7 s), against 4.5 s to spawn 4, on 2 cores.
START_METHOD = "forkserver" if sys.platform == "linux" else "spawn"  # macOS's libraries do not survive a fork
# A process has one fork server: one that the program has started already works too, more slowly.
TEST_IMPORTS = ("numpy", "pytest", "hypothesis")  # preloaded too, if this process has imported them
LAZY_IMPORTS = ("transformers",)  # likewise, with all submodules: saves 1 to 3 s for each rank
START_LIMIT = 120.0  # seconds to start, and to import what a call needs, which a slow disk delays
GRACE = 1.0  # seconds for the other ranks to report after one has failed
STACK_LIMIT = 1.0  # seconds to wait for the stack of a stuck rank
LAST_LINES = 10  # of the output of a rank that died, in its report
STACK_PAUSE = 0.05  # seconds without growth after which a stack file is complete

Outcome = Returned | Failure


@dataclass
class Rank:
    """One process, as the parent knows it."""

    seat: Seat
    process: BaseProcess
    connection: Connection
    printed: int = 0  # bytes of its output that the parent has printed

    @classmethod
    def start(cls, seat: Seat) -> Rank:
        """Start the process, which joins the group on its own."""
        # CUDA does not survive a fork either, and an import may have initialized it.
        context = _context("spawn" if seat.backend == "nccl" else START_METHOD)
        ours, theirs = context.Pipe()
        process = context.Process(target=serve, args=(seat, theirs), name=f"shardkit-rank-{seat.rank}")
        process.start()
        theirs.close()  # so that its death closes the pipe
        return cls(seat, process, ours)

    def receive(self) -> Outcome | str:
        """Return its message, or that it died. Called when either is known."""
        try:
            if self.connection.poll():
                return pickle.loads(self.connection.recv_bytes())  # type: ignore[no-any-return]
        except (EOFError, OSError):
            self.process.join(GRACE)
        last = self._new_output().decode(errors="replace").splitlines()[-LAST_LINES:]
        code = self.process.exitcode  # None if unknown; below 0, the negated signal number
        how = f"exited with code {code}" if code is None or code >= 0 else f"was killed by {signal.Signals(-code).name}"
        return Failure("died", how, "\n".join([_call_stack(self.seat.stack.read_text()), *last]))

    def stack(self) -> str:
        """Return its present Python stack, most recent call last; empty if it writes none."""
        assert self.process.pid is not None
        with contextlib.suppress(ProcessLookupError):  # it may die meanwhile
            os.kill(self.process.pid, STACK_SIGNAL)
        deadline, size = time.monotonic() + STACK_LIMIT, 0
        while time.monotonic() < deadline:
            wait([self.process.sentinel], STACK_PAUSE)
            size, before = self.seat.stack.stat().st_size, size
            if size == before > 0:
                break
        return _call_stack(self.seat.stack.read_text())

    def print_output(self) -> None:
        """Print its output since the last time, each line after its rank."""
        new = self._new_output()
        self.printed += len(new)
        for line in new.decode(errors="replace").splitlines():
            print(f"[rank {self.seat.rank}] {line}")

    def _new_output(self) -> bytes:
        with self.seat.output.open("rb") as output:
            output.seek(self.printed)
            return output.read()


class Ranks:
    """Processes in one process group. After a failure they can only be killed."""

    def __init__(self, world_size: int, backend: str) -> None:
        self.directory = tempfile.mkdtemp(prefix="shardkit-ranks-")
        self.ranks: list[Rank] = []
        _running.add(self)
        try:
            for rank in range(world_size):
                seat = Seat(rank, world_size, backend, self.directory)
                seat.output.touch()
                seat.stack.touch()
                self.ranks.append(Rank.start(seat))
        except BaseException:
            self.kill()
            raise

    def alive(self) -> bool:
        """Return whether every process still runs; a library's thread may end one between calls."""
        return all(rank.process.is_alive() for rank in self.ranks)

    def exchange(self, call: Call, timeout: float) -> list[Outcome]:
        """Run one call on every rank, print the ranks' output, and return the outcomes by rank."""
        # A file, because a pipe would block on a large request to a stuck rank.
        request = Path(self.directory, "request")
        request.write_bytes(pickle.dumps(call))
        for rank in self.ranks:
            with contextlib.suppress(BrokenPipeError):  # receive() will report that it died
                rank.connection.send(str(request))
        outcomes = _collect(self.ranks, timeout)
        for rank in self.ranks:
            rank.print_output()
        return outcomes

    def kill(self) -> None:
        """Kill the processes and remove their files."""
        for rank in self.ranks:
            rank.process.kill()
        while self.ranks:  # emptied one by one: a second kill may follow one that Ctrl-C interrupted
            rank = self.ranks[-1]
            rank.process.join()
            rank.connection.close()
            self.ranks.pop().process.close()
        shutil.rmtree(self.directory, ignore_errors=True)
        _running.discard(self)


_running: set[Ranks] = set()
_owner = os.getpid()


@atexit.register
def _kill_all() -> None:
    if os.getpid() == _owner:  # not in a fork of the process that owns them
        for ranks in list(_running):
            ranks.kill()


def _collect(ranks: list[Rank], timeout: float) -> list[Outcome]:
    """Wait for one outcome of every rank, within the time limits."""
    outcomes: dict[int, Outcome] = {}
    loading = {rank.seat.rank for rank in ranks}
    late, deadline = f"did not start and import within {START_LIMIT:g} s", time.monotonic() + START_LIMIT
    failed = False
    while len(outcomes) < len(ranks):
        waiting = [rank for rank in ranks if rank.seat.rank not in outcomes]
        handles = [handle for rank in waiting for handle in (rank.connection, rank.process.sentinel)]
        ready = wait(handles, max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for rank in [each for each in waiting if each.connection in ready or each.process.sentinel in ready]:
            news = rank.receive()
            loading.discard(rank.seat.rank)
            if not isinstance(news, str):
                outcomes[rank.seat.rank] = news
            if failed:
                continue
            if isinstance(news, Failure):
                failed = True
                late, deadline = f"did not finish within {GRACE:g} s of the first failure", time.monotonic() + GRACE
            elif news == STARTED and not loading:
                late, deadline = f"did not finish within {timeout:g} s", time.monotonic() + timeout
    for rank in ranks:
        if rank.seat.rank not in outcomes:
            outcomes[rank.seat.rank] = Failure("stuck", late, rank.stack())
    return [outcomes[rank] for rank in range(len(ranks))]


def _call_stack(dump: str) -> str:
    """Return the call's frames in faulthandler's dump of all threads, most recent last, without the worker's."""
    for thread in dump.split("\n\n"):
        frames = [line for line in thread.splitlines() if line.startswith("  File")]
        ours = [number for number, frame in enumerate(frames) if worker.__file__ in frame]
        if ours and f"in {exit_with_parent.__name__}" not in thread:
            return "\n".join(["Stack (most recent call last):", *reversed(frames[: ours[0]])])
    return dump


@cache
def _context(method: str) -> SpawnContext | ForkServerContext:
    if method == "spawn":
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*RANK_IMPORTS, worker.__name__, *imports_of_tests()])
    return context


def imports_of_tests() -> list[str]:
    """Return the modules of this process that its ranks are likely to need."""
    return [name for name in sys.modules if name in TEST_IMPORTS or name.partition(".")[0] in LAZY_IMPORTS]
