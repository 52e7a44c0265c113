"""The parent's side of one set of rank processes: start them, exchange one call, end them."""

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
# 4 ranks are ready 0.1 s after it is (1.7 s), against 4.5 s for each spawn of 4, on 2 cores.
START_METHOD = "forkserver" if sys.platform == "linux" else "spawn"  # macOS's libraries do not survive a fork
# A process has one fork server: one that the program has started already serves as well, only slower.
TEST_IMPORTS = ("numpy", "pytest", "hypothesis")  # imported there too, where this process has them
LAZY_IMPORTS = ("transformers",)  # with all of their modules that this process has: 1 to 3 s for each rank otherwise
START_LIMIT = 120.0  # seconds to start, and to import what a call needs: a slow disk is not the test's fault
GRACE = 1.0  # seconds that the other ranks have to report too, once one has failed
STACK_LIMIT = 1.0  # seconds to wait for the stack of a rank that is stuck
LAST_LINES = 10  # of the output of a rank that died, for its report
STACK_PAUSE = 0.05  # a stack file that has not grown for so long is complete

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
        """Start the process; it joins the group on its own."""
        # CUDA does not survive a fork either, and an import may have asked it for its devices.
        context = _context("spawn" if seat.backend == "nccl" else START_METHOD)
        ours, theirs = context.Pipe()
        process = context.Process(target=serve, args=(seat, theirs), name=f"shardkit-rank-{seat.rank}")
        process.start()
        theirs.close()  # so that its death closes the pipe
        return cls(seat, process, ours)

    def receive(self) -> Outcome | str:
        """What it has to say, or that it is dead. Called when either is known."""
        try:
            if self.connection.poll():
                return pickle.loads(self.connection.recv_bytes())  # type: ignore[no-any-return]
        except (EOFError, OSError):
            self.process.join(GRACE)
        last = self._new_output().decode(errors="replace").splitlines()[-LAST_LINES:]
        code = self.process.exitcode  # None if it is not known; below 0 the signal's number
        how = f"exited with code {code}" if code is None or code >= 0 else f"was killed by {signal.Signals(-code).name}"
        return Failure("died", how, "\n".join([_call_stack(self.seat.stack.read_text()), *last]))

    def stack(self) -> str:
        """Its Python stack now, most recent call last; empty when it gives none."""
        assert self.process.pid is not None
        with contextlib.suppress(ProcessLookupError):  # it may die as we look
            os.kill(self.process.pid, STACK_SIGNAL)
        deadline, size = time.monotonic() + STACK_LIMIT, 0
        while time.monotonic() < deadline:
            wait([self.process.sentinel], STACK_PAUSE)
            size, before = self.seat.stack.stat().st_size, size
            if size == before > 0:
                break
        return _call_stack(self.seat.stack.read_text())

    def print_output(self) -> None:
        """Print what it has printed since the last time, each line after its rank."""
        new = self._new_output()
        self.printed += len(new)
        for line in new.decode(errors="replace").splitlines():
            print(f"[rank {self.seat.rank}] {line}")

    def _new_output(self) -> bytes:
        with self.seat.output.open("rb") as output:
            output.seek(self.printed)
            return output.read()


class Ranks:
    """Processes in one process group. After a failure the only use of them is ``kill``."""

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
        """Whether every process still runs; a library's thread may have ended one between calls."""
        return all(rank.process.is_alive() for rank in self.ranks)

    def exchange(self, call: Call, timeout: float) -> list[Outcome]:
        """Run one call on every rank; what became of it, by rank. Prints the ranks' output."""
        # A file, for a pipe would block on a large request to a rank that is stuck.
        request = Path(self.directory, "request")
        request.write_bytes(pickle.dumps(call))
        for rank in self.ranks:
            with contextlib.suppress(BrokenPipeError):  # receive will find that it is dead
                rank.connection.send(str(request))
        outcomes = _collect(self.ranks, timeout)
        for rank in self.ranks:
            rank.print_output()
        return outcomes

    def kill(self) -> None:
        """End the processes, however stuck they are, and remove their files."""
        for rank in self.ranks:
            rank.process.kill()
        while self.ranks:  # emptied, for a second kill may follow one that Ctrl-C interrupted
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
    if os.getpid() == _owner:  # not in a fork of the process that they belong to
        for ranks in list(_running):
            ranks.kill()


def _collect(ranks: list[Rank], timeout: float) -> list[Outcome]:
    """Wait for one outcome of every rank, but not longer than allowed."""
    outcomes: dict[int, Outcome] = {}
    loading = {rank.seat.rank for rank in ranks}
    late, deadline = f"did not start and import within {START_LIMIT:g} s", time.monotonic() + START_LIMIT
    failed = False
    while len(outcomes) < len(ranks):
        speaking = _speaking([rank for rank in ranks if rank.seat.rank not in outcomes], deadline)
        if not speaking:
            break
        for rank in speaking:
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


def _speaking(ranks: list[Rank], deadline: float) -> list[Rank]:
    """The ranks that have sent something or died, as soon as there are any; none when the time is up."""
    handles = [handle for rank in ranks for handle in (rank.connection, rank.process.sentinel)]
    ready = wait(handles, max(0.0, deadline - time.monotonic()))
    return [rank for rank in ranks if rank.connection in ready or rank.process.sentinel in ready]


def _call_stack(dump: str) -> str:
    """The call's frames in faulthandler's dump of all threads, most recent last, without those of ours."""
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
    context.set_forkserver_preload([*RANK_IMPORTS, worker.__name__, *_imports_of_tests()])
    return context


def _imports_of_tests() -> list[str]:
    return [name for name in sys.modules if name in TEST_IMPORTS or name.partition(".")[0] in LAZY_IMPORTS]
