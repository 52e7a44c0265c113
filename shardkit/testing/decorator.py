"""@distributed: an ordinary test function whose body runs on every rank."""

from __future__ import annotations

import functools
import unittest
from collections.abc import Callable
from typing import Any, ParamSpec

import torch

from shardkit.testing.pool import RankPool
from shardkit.testing.report import RankFailure
from shardkit.testing.target import register

P = ParamSpec("P")

_session_pools: dict[tuple[int, str], RankPool] = {}


def distributed(
    *, world_size: int = 4, backend: str | None = None, timeout: float = 60
) -> Callable[[Callable[P, object]], Callable[P, None]]:
    """Run a test's body on every rank of a pool that the whole session shares.

    The test passes when the body returns on every rank. Its arguments (from ``parametrize``, from fixtures, from
    hypothesis) are made once, in pytest's process, and sent pickled to all ranks, so all of them see the same. A
    body that calls ``pytest.skip`` on every rank skips the test. The session's pools, one for each world size and
    backend, are started by the first test that needs them.

    Args:
        world_size: number of ranks.
        backend: ``"gloo"``, ``"nccl"``, or None for NCCL where there are ``world_size`` GPUs and gloo elsewhere.
            ``"nccl"`` skips the test where there are fewer.
        timeout: seconds that the body may take, imports not counted.

    Raises:
        ShardkitError: when decorating, if the function is inside another one, where no other process finds it.
        RankFailure: when called, if a rank raised, died or did not finish in time.

    Example:
        @distributed(world_size=4)
        def test_ranks_know_each_other():
            assert torch.distributed.get_world_size() == 4
    """

    def decorate(body: Callable[P, object]) -> Callable[P, None]:
        given = getattr(body, "hypothesis", None)
        if given is not None:  # @given below us: take its place around the body, so that one process draws
            given.inner_test = decorate(given.inner_test)
            return body  # type: ignore[return-value]
        register(body)

        @functools.wraps(body)
        def test(*args: P.args, **kwargs: P.kwargs) -> None:
            _run(_session_pool(world_size, backend), timeout, body, args, kwargs)

        return test

    return decorate


def _run(
    pool: RankPool, timeout: float, body: Callable[..., object], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    __tracebackhide__ = True  # pytest shows the ranks' tracebacks, in the message, and not how they came here
    skip = None
    try:
        pool.run_within(timeout, body, args, kwargs)
    except RankFailure as failure:
        if failure.skip is None:
            raise
        skip = failure.skip
    if skip is not None:
        raise unittest.SkipTest(skip)  # outside of the handler: the skip is no consequence of a failure


def _session_pool(world_size: int, backend: str | None) -> RankPool:
    gpus = torch.cuda.device_count()
    if backend is None:
        backend = "nccl" if gpus >= world_size else "gloo"
    if backend == "nccl" and gpus < world_size:
        raise unittest.SkipTest(f"NCCL with {world_size} ranks needs {world_size} GPUs, and there are {gpus}")
    key = world_size, backend
    if key not in _session_pools:
        _session_pools[key] = RankPool(world_size, backend=backend)
    return _session_pools[key]
