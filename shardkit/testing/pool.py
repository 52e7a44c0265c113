"""Run functions and tests on ranks that stay between calls: RankPool and @distributed."""

from __future__ import annotations

import atexit
import contextlib
import functools
import multiprocessing
import multiprocessing.util  # its exit hook waits for children; it must be registered before ours
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
import unittest
from collections.abc import Callable, Mapping
from multiprocessing.connection import wait
from pathlib import Path
from types import FunctionType
from typing import Any, ParamSpec, TypeVar

import torch

from shardkit._torch.dispatch import RANK_IMPORTS
from shardkit.errors import ShardkitError
from shardkit.testing import worker
from shardkit.testing.worker import (
    STACK_SIGNAL,
    STARTED,
    Call,
    Failure,
    Returned,
    Seat,
    attribute,
    bodies,
    key_of,
)

P = ParamSpec("P")
T = TypeVar("T")

# A fork server has no threads, so its forks are safe where the parent's would not be, and it
# imports torch once: 4 ranks are ready 0.1 s after it is (1.7 s), against 4.5 s to spawn 4, on 2
# cores. macOS's libraries do not survive a fork.
START_METHOD = "forkserver" if sys.platform == "linux" else "spawn"
START_LIMIT = 120.0  # seconds to start, and to import what a call needs, which a slow disk delays
# Seconds for the other ranks to report after one has failed, and for a stuck one to write its
# stack.
GRACE = 1.0
STACK_PAUSE = 0.05  # seconds without growth after which a stack file is complete
# Preloading them saves each rank 1 to 3 s.
_OFTEN = {"numpy", "pytest", "hypothesis", "transformers"}
LAST_LINES = 10  # of the output of a rank that died, in its report
# Subgroups (a 2-D mesh makes three for each rank) live until the rank ends, because torch caches
# meshes that refer to them. Each costs threads and file descriptors, so ranks that hold many are
# replaced, which takes 0.1 s.
MOST_GROUPS = 64


class RankFailure(ShardkitError):
    """A call did not return on every rank.

    The message names the ranks that died (with signal or exit code), raised (with traceback) or got
    stuck (with the Python stack); a text that several ranks share is shown once.

    Attributes:
        failures: by rank, without ranks that returned.
    """

    def __init__(self, name: str, world_size: int, failures: Mapping[int, Failure]) -> None:
        self.failures = dict(failures)
        ranks_of: dict[Failure, list[str]] = {}
        for rank, failure in failures.items():
            ranks_of.setdefault(failure, []).append(str(rank))
        titles, details = [], []
        # Likely causes first, which is the order of the alphabet: died, raised, stuck.
        for failure in sorted(ranks_of, key=lambda failure: failure.kind):
            ranks = ranks_of[failure]
            title = f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(ranks)} {failure.title}"
            titles.append(title)
            if failure.detail:
                details.append(f"--- {title} ---\n{failure.detail.strip()}")
        summary = f"{name}: {'; '.join(titles)} (of {world_size} ranks)."
        super().__init__("\n\n".join([summary, *details]))

    @property
    def skip(self) -> str | None:
        """The reason, if every failed rank asked to skip the test, else None."""
        reasons = [failure.skip for failure in self.failures.values()]
        return None if None in reasons else reasons[0]


class RankPool:
    """``world_size`` processes in one process group, started at the first call and reused.

    The ranks find each other through a file, so no port is used. Each runs one thread, with the
    parent's import path, working directory and environment, with RANK, LOCAL_RANK, WORLD_SIZE and
    LOCAL_WORLD_SIZE, and with all seeds 0 at the start of every call. Their output is printed here
    after the call, each line after ``[rank N]``. After a failure the next call starts new
    processes. They end with ``close`` or with this process, even if it is killed.

    Args:
        world_size: number of ranks, all on this machine.
        backend: ``"gloo"``, or ``"nccl"`` with one GPU for each rank.
        timeout: seconds that one call may take, without imports.

    Examples:
        >>> with RankPool(4) as pool:
        ...     assert pool.run(torch.distributed.get_rank) == [0, 1, 2, 3]
    """

    def __init__(self, world_size: int, *, backend: str = "gloo", timeout: float = 60) -> None:
        self.world_size = world_size
        self.backend = backend
        self.timeout = timeout
        self._directory = ""
        self._ranks: list[_Rank] = []

    def run(self, function: Callable[..., T], /, *args: Any, **kwargs: Any) -> list[T]:
        """Call ``function(*args, **kwargs)`` on every rank and return the results in the order of
        ranks.

        Args:
            function: a function at the top level of an importable module or script.
            args: picklable, the same on every rank; ``torch.distributed.get_rank()`` tells ranks
                apart.
            kwargs: likewise.

        Raises:
            RankFailure: a rank raised, died or did not finish in time.
            ShardkitError: other processes cannot find the function.
        """
        __tracebackhide__ = True  # for pytest: the caller's line and the message are enough
        call = _call(function, args, kwargs)
        keep = False
        try:
            self._start()
            # Through a file, because a pipe would block on a large request to a stuck rank.
            request = Path(self._directory, "request")
            request.write_bytes(pickle.dumps(call))
            for rank in self._ranks:
                with contextlib.suppress(BrokenPipeError):  # receive() will report that it died
                    rank.connection.send(str(request))
            outcomes = _outcomes(self._ranks, self.timeout)
            for rank in self._ranks:
                for line in rank.new_lines(printed=True):
                    print(f"[rank {rank.seat.rank}] {line}")
            failures, returned = {}, []
            for number, outcome in enumerate(outcomes):
                if isinstance(outcome, Failure):
                    failures[number] = outcome
                else:
                    returned.append(outcome)
            if failures:
                raise RankFailure(call.name, self.world_size, failures)
            values = [pickle.loads(outcome.value) for outcome in returned]
            keep = all(0 < outcome.groups <= MOST_GROUPS for outcome in returned)
            return values
        finally:
            if not keep:
                self.close()

    def close(self) -> None:
        """End the processes; the next call starts new ones."""
        for rank in self._ranks:
            rank.process.kill()
        # Emptied one by one, since a second call may follow one that Ctrl-C interrupted.
        while self._ranks:
            rank = self._ranks[-1]
            rank.process.join()
            rank.connection.close()
            self._ranks.pop().process.close()
        shutil.rmtree(self._directory, ignore_errors=True)
        _open_pools.discard(self)

    def __enter__(self) -> RankPool:
        """The pool itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self.close()

    def _start(self) -> None:
        if self._ranks and all(rank.process.is_alive() for rank in self._ranks):
            return
        self.close()  # a library's thread may have ended one between calls
        self._directory = tempfile.mkdtemp(prefix="shardkit-ranks-")
        _open_pools.add(self)
        for rank in range(self.world_size):
            self._ranks.append(_Rank(Seat(rank, self.world_size, self.backend, self._directory)))


_open_pools: set[RankPool] = set()
_owner = os.getpid()


@atexit.register
def _close_all() -> None:
    if os.getpid() == _owner:  # not in a fork of the process that owns them
        for pool in list(_open_pools):
            pool.close()


class _Rank:
    """One process, as the parent knows it. It joins the group on its own."""

    def __init__(self, seat: Seat) -> None:
        self.seat = seat
        self._printed = 0  # bytes of its output
        seat.output.touch()
        seat.stack.touch()
        # CUDA does not survive a fork, and an import may have initialized it.
        method = "spawn" if seat.backend == "nccl" else START_METHOD
        context: Any = multiprocessing.get_context(method)
        if method == "forkserver":  # has an effect only before the server starts
            loaded = [n for n in sys.modules if n in _OFTEN or n.startswith("transformers.")]
            context.set_forkserver_preload([*RANK_IMPORTS, worker.__name__, *loaded])
        self.connection, theirs = context.Pipe()
        self.process = context.Process(
            target=worker.serve, args=(seat, theirs), name=f"shardkit-rank-{seat.rank}"
        )
        self.process.start()
        theirs.close()  # so that its death closes the pipe

    def receive(self) -> Returned | Failure | str:
        """Return its message, or that it died. Called when either is known."""
        try:
            if self.connection.poll():
                return pickle.loads(self.connection.recv_bytes())  # type: ignore[no-any-return]
        except (EOFError, OSError):
            self.process.join(GRACE)
        code = self.process.exitcode  # None if unknown; below 0, the negated signal number
        title = f"exited with code {code}"
        if code is not None and code < 0:
            title = f"was killed by {signal.Signals(-code).name}"
        detail = "\n".join([worker.call_stack(self.seat), *self.new_lines()[-LAST_LINES:]])
        return Failure("died", title, detail)

    def stack(self) -> str:
        """Return its present Python stack, most recent call last; empty if it writes none."""
        with contextlib.suppress(ProcessLookupError):  # it may die meanwhile
            os.kill(self.process.pid, STACK_SIGNAL)
        deadline = time.monotonic() + GRACE
        size, before = 0, -1
        while time.monotonic() < deadline and not size == before > 0:  # until it stops growing
            wait([self.process.sentinel], STACK_PAUSE)
            size, before = self.seat.stack.stat().st_size, size
        return worker.call_stack(self.seat)

    def new_lines(self, *, printed: bool = False) -> list[str]:
        """Return its output since what was printed."""
        new = self.seat.output.read_bytes()[self._printed :]
        if printed:
            self._printed += len(new)
        return new.decode(errors="replace").splitlines()


def _outcomes(ranks: list[_Rank], timeout: float) -> list[Returned | Failure]:
    """Wait for one outcome of every rank, within three limits: to import what the call needs, to
    run it, and after the first failure.
    """
    outcomes: dict[_Rank, Returned | Failure] = {}
    loading = set(ranks)
    has_failed = False
    late = f"did not start and import within {START_LIMIT:g} s"
    deadline = time.monotonic() + START_LIMIT
    while len(outcomes) < len(ranks):
        waiting = [rank for rank in ranks if rank not in outcomes]
        rank_of: dict[Any, _Rank] = {}
        for rank in waiting:
            rank_of[rank.connection] = rank_of[rank.process.sentinel] = rank
        ready = wait(list(rank_of), max(0.0, deadline - time.monotonic()))
        if not ready:
            for rank in waiting:
                outcomes[rank] = Failure("stuck", late, rank.stack())
            break
        for rank in dict.fromkeys(rank_of[handle] for handle in ready):
            news = rank.receive()
            loading.discard(rank)
            if not isinstance(news, str):
                outcomes[rank] = news
            if has_failed:
                continue
            if isinstance(news, Failure):
                has_failed = True
                late = f"did not finish within {GRACE:g} s of the first failure"
                deadline = time.monotonic() + GRACE
            elif news == STARTED and not loading:
                late = f"did not finish within {timeout:g} s"
                deadline = time.monotonic() + timeout
    return [outcomes[rank] for rank in ranks]


def _call(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    """Return the call as other processes can make it."""
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    name = getattr(function, "__qualname__", "")
    if module is None:
        raise _not_found(function)
    is_body = bodies.get(key_of(module.__name__, name)) is function
    if not is_body and attribute(module, name) is not function:
        raise _not_found(function)
    return Call(
        module.__name__,
        getattr(module, "__file__", None),
        name,
        "@pytest_ar" in vars(module),  # pytest's name for its helper
        pickle.dumps((args, kwargs)),
        sys.path,
        os.getcwd(),
        dict(os.environ),
    )


def _not_found(function: object) -> ShardkitError:
    name = getattr(function, "__qualname__", repr(function))
    return ShardkitError(
        f"{name} cannot be found by other processes. Ranks import its module and look it up by "
        "name, so it must be at the module's top level. Move it there and pass what it closes over "
        "as arguments."
    )


def distributed(
    *, world_size: int = 4, backend: str | None = None, timeout: float = 60
) -> Callable[[Callable[P, object]], Callable[P, None]]:
    """Run a test's body on every rank of a pool that the whole session shares.

    The test passes if the body returns on every rank. Its arguments (from ``parametrize``,
    fixtures, hypothesis) are made once, in pytest's process, and sent pickled to all ranks. A body
    that calls ``pytest.skip`` on every rank skips the test. There is one pool for each world size
    and backend, started by the first test that needs it.

    Args:
        world_size: number of ranks.
        backend: as for :class:`RankPool`, or None for NCCL where there are ``world_size`` GPUs and
            gloo elsewhere. ``"nccl"`` skips the test where there are fewer.
        timeout: seconds that the body may take, without imports.

    Raises:
        ShardkitError: when decorating, if the function is inside another one, where other processes
            cannot find it.
        RankFailure: when called, if a rank raised, died or did not finish in time.

    Examples:
        >>> @distributed(world_size=4)
        ... def test_ranks_know_each_other():
        ...     assert torch.distributed.get_world_size() == 4
    """

    def decorate(body: Callable[P, object]) -> Callable[P, None]:
        given = getattr(body, "hypothesis", None)
        if given is not None:
            # @given is below: wrap its body instead, so that only this process draws examples.
            given.inner_test = decorate(given.inner_test)
            return body  # type: ignore[return-value]
        if not isinstance(body, FunctionType) or "<" in body.__qualname__:
            raise _not_found(body)
        bodies[key_of(body.__module__, body.__qualname__)] = body

        @functools.wraps(body)
        def test(*args: P.args, **kwargs: P.kwargs) -> None:
            pool = _session_pool(world_size, backend)
            pool.timeout = timeout
            try:
                pool.run(body, *args, **kwargs)
            except RankFailure as failure:
                if failure.skip is None:
                    raise
                raise unittest.SkipTest(failure.skip) from None

        return test

    return decorate


@functools.cache
def _session_pool(world_size: int, backend: str | None) -> RankPool:
    gpus = torch.cuda.device_count()
    if backend is None:
        backend = "nccl" if gpus >= world_size else "gloo"
    if backend == "nccl" and gpus < world_size:
        raise unittest.SkipTest(
            f"NCCL with {world_size} ranks needs {world_size} GPUs, and there are {gpus}"
        )
    return RankPool(world_size, backend=backend)
