"""Run functions and tests on ranks that stay between calls: RankPool and @distributed."""

from __future__ import annotations

import functools
import os
import pickle
import sys
import threading
import unittest
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

import torch

from shardkit.errors import ShardkitError, message
from shardkit.testing.ranks import Ranks
from shardkit.testing.report import RankFailure
from shardkit.testing.target import Target, register
from shardkit.testing.worker import Call, Returned, seats

P = ParamSpec("P")
T = TypeVar("T")

# Subgroups (a 2-D mesh makes three for each rank) live until the rank ends, because torch caches meshes that refer to
# them. Each costs threads and file descriptors, so ranks that hold many are replaced, which takes 0.1 s.
MOST_GROUPS = 64


class RankPool:
    """``world_size`` processes in one process group, started at the first call and reused.

    The ranks find each other through a file, so no port is used. Each runs one thread, with the parent's import path,
    working directory and environment, with RANK, LOCAL_RANK, WORLD_SIZE and LOCAL_WORLD_SIZE, and with all seeds 0 at
    the start of every call. Their output is printed here after the call, each line after ``[rank N]``. After a failure
    the next call starts new processes. They end with ``close`` or with this process, even if it is killed.

    Args:
        world_size: number of ranks, all on this machine.
        backend: ``"gloo"``, or ``"nccl"`` with one GPU for each rank.
        timeout: seconds that one call may take, without imports.

    Raises:
        ShardkitError: this process is a rank of another pool.

    Example:
        with RankPool(4) as pool:
            assert pool.run(torch.distributed.get_rank) == [0, 1, 2, 3]
    """

    def __init__(self, world_size: int, *, backend: str = "gloo", timeout: float = 60) -> None:
        if seats:
            problem = f"this process is rank {seats[0].rank} of a pool of {seats[0].world_size}"
            rule = "A rank cannot start a pool of its own"
            raise ShardkitError(message("RankPool", problem, rule, "Make the pool in the test, not in its body"))
        if world_size < 1 or timeout <= 0:
            problem = f"world_size is {world_size} and timeout is {timeout} s"
            fix = "Pass a world_size of at least 1 and a timeout above 0"
            raise ShardkitError(message("RankPool", problem, "Both must be positive", fix))
        self.world_size = world_size
        self.backend = backend
        self.timeout = timeout
        self._ranks: Ranks | None = None
        self._lock = threading.Lock()

    def run(self, function: Callable[..., T], /, *args: Any, **kwargs: Any) -> list[T]:
        """Call ``function(*args, **kwargs)`` on every rank and return the results in the order of ranks.

        Args:
            function: a function at the top level of an importable module or script.
            args: picklable, the same on every rank; ``torch.distributed.get_rank()`` tells ranks apart.
            kwargs: likewise.

        Raises:
            RankFailure: a rank raised, died or did not finish in time.
            ShardkitError: other processes cannot find the function, or an argument cannot be pickled.
        """
        __tracebackhide__ = True
        return self.run_within(self.timeout, function, args, kwargs)

    def run_within(
        self, timeout: float, function: Callable[..., T], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[T]:
        """``run`` with a time limit of its own, in seconds."""
        __tracebackhide__ = True  # for pytest: the caller's line and the message are enough
        target = Target.of(function)
        try:
            arguments = pickle.dumps((args, kwargs))
        except Exception as error:  # pickle raises whatever the value's class raises
            rule = "Arguments are pickled on their way to the ranks"
            fix = "Pass plain data or plain tensors and build the rest in the function"
            raise ShardkitError(message(target.name, f"an argument cannot be pickled ({error})", rule, fix)) from None
        call = Call(target, arguments, sys.path, os.getcwd(), dict(os.environ))
        with self._ready_ranks() as ranks:
            outcomes = ranks.exchange(call, timeout)
            returned = [outcome for outcome in outcomes if isinstance(outcome, Returned)]
            if len(returned) < self.world_size:
                failures = {rank: end for rank, end in enumerate(outcomes) if not isinstance(end, Returned)}
                raise RankFailure(call.target.name, self.world_size, failures)
            values = [pickle.loads(each.value) for each in returned]
            if all(0 < each.groups <= MOST_GROUPS for each in returned):
                self._ranks = ranks
            return values

    def close(self) -> None:
        """End the processes; the next call starts new ones."""
        ranks, self._ranks = self._ranks, None
        if ranks is not None:
            ranks.kill()

    def __enter__(self) -> RankPool:
        """The pool itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self.close()

    @contextmanager
    def _ready_ranks(self) -> Iterator[Ranks]:
        """Yield ranks for one call, which are killed afterwards unless the body put them back."""
        if not self._lock.acquire(blocking=False):
            rule = "A pool runs one call at a time"
            fix = "Wait for it, or make another pool"
            raise ShardkitError(message("RankPool.run", "another thread is running a call", rule, fix))
        try:
            if self._ranks is not None and not self._ranks.alive():
                self.close()
            ranks, self._ranks = self._ranks or Ranks(self.world_size, self.backend), None
            try:
                yield ranks
            finally:
                if self._ranks is None:
                    ranks.kill()
        finally:
            self._lock.release()


_session_pools: dict[tuple[int, str], RankPool] = {}


def distributed(
    *, world_size: int = 4, backend: str | None = None, timeout: float = 60
) -> Callable[[Callable[P, object]], Callable[P, None]]:
    """Run a test's body on every rank of a pool that the whole session shares.

    The test passes if the body returns on every rank. Its arguments (from ``parametrize``, fixtures, hypothesis) are
    made once, in pytest's process, and sent pickled to all ranks. A body that calls ``pytest.skip`` on every rank skips
    the test. There is one pool for each world size and backend, started by the first test that needs it.

    Args:
        world_size: number of ranks.
        backend: as for :class:`RankPool`, or None for NCCL where there are ``world_size`` GPUs and gloo elsewhere.
            ``"nccl"`` skips the test where there are fewer.
        timeout: seconds that the body may take, without imports.

    Raises:
        ShardkitError: when decorating, if the function is inside another one, where other processes cannot find it.
        RankFailure: when called, if a rank raised, died or did not finish in time.

    Example:
        @distributed(world_size=4)
        def test_ranks_know_each_other():
            assert torch.distributed.get_world_size() == 4
    """

    def decorate(body: Callable[P, object]) -> Callable[P, None]:
        given = getattr(body, "hypothesis", None)
        if given is not None:  # @given is below: wrap its body instead, so that only this process draws examples
            given.inner_test = decorate(given.inner_test)
            return body  # type: ignore[return-value]
        register(body)

        @functools.wraps(body)
        def test(*args: P.args, **kwargs: P.kwargs) -> None:
            skip = None
            try:
                _session_pool(world_size, backend).run_within(timeout, body, args, kwargs)
            except RankFailure as failure:
                skip = failure.skip
                if skip is None:
                    raise
            if skip is not None:
                raise unittest.SkipTest(skip)  # outside of the handler, so that the skip has no context

        return test

    return decorate


def _session_pool(world_size: int, backend: str | None) -> RankPool:
    gpus = torch.cuda.device_count()
    if backend is None:
        backend = "nccl" if gpus >= world_size else "gloo"
    if backend == "nccl" and gpus < world_size:
        raise unittest.SkipTest(f"NCCL with {world_size} ranks needs {world_size} GPUs, and there are {gpus}")
    if (world_size, backend) not in _session_pools:
        _session_pools[world_size, backend] = RankPool(world_size, backend=backend)
    return _session_pools[world_size, backend]
