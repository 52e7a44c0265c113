"""What became of a call on each rank, and how a failure is told."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass

from shardkit.errors import ShardkitError


@dataclass(frozen=True)
class Raised:
    """The function raised, or could not be called, or its return value could not be sent.

    Attributes:
        kind: the exception's class name.
        detail: the traceback, from the function on.
        skip: the reason, if it asked for the test to be skipped.
    """

    kind: str
    detail: str
    skip: str | None

    @property
    def title(self) -> str:
        """What happened, after "rank 1"."""
        return f"raised {self.kind}"


@dataclass(frozen=True)
class Died:
    """The rank's process ended in the middle of the call.

    Attributes:
        exit_code: negative is the number of the signal that killed it; None is not known.
        detail: the Python stack, if it crashed, and the last it printed.
    """

    exit_code: int | None
    detail: str

    @property
    def title(self) -> str:
        """What happened, after "rank 1"."""
        if self.exit_code is not None and self.exit_code < 0:
            return f"was killed by {signal.Signals(-self.exit_code).name}"
        return f"exited with code {self.exit_code}"


@dataclass(frozen=True)
class Stuck:
    """The rank had neither returned nor raised when the call was given up.

    Attributes:
        reason: ``"did not finish within 60 s"``, say.
        detail: its Python stack then, most recent call last; empty if it gave none.
    """

    reason: str
    detail: str

    @property
    def title(self) -> str:
        """What happened, after "rank 1"."""
        return self.reason


Failure = Raised | Died | Stuck


class RankFailure(ShardkitError):
    """A call did not return on every rank.

    The message names the ranks that died (with signal or exit code), raised (with their tracebacks) or got stuck
    (with the place); the same text on several ranks is shown once.

    Attributes:
        failures: what happened, by rank; ranks that returned are not in it.
    """

    def __init__(self, name: str, world_size: int, failures: Mapping[int, Failure]) -> None:
        self.failures = dict(failures)
        super().__init__(_explain(name, world_size, _alike(failures)))

    @property
    def skip(self) -> str | None:
        """The reason, when every failure is the wish to skip the test, else None."""
        reasons = [failure.skip if isinstance(failure, Raised) else None for failure in self.failures.values()]
        return None if None in reasons else reasons[0]


def _alike(failures: Mapping[int, Failure]) -> dict[Failure, list[int]]:
    """The ranks of each different failure, likely causes first: a dead rank makes others raise or wait."""
    alike: dict[Failure, list[int]] = {}
    order = (Died, Raised, Stuck)
    for rank in sorted(failures, key=lambda rank: (order.index(type(failures[rank])), rank)):
        alike.setdefault(failures[rank], []).append(rank)
    return alike


def _explain(name: str, world_size: int, alike: Mapping[Failure, list[int]]) -> str:
    titles = "; ".join(f"{_ranks(ranks)} {failure.title}" for failure, ranks in alike.items())
    sections = [
        f"--- {_ranks(ranks)} {failure.title} ---\n{failure.detail.strip()}"
        for failure, ranks in alike.items()
        if failure.detail
    ]
    return "\n\n".join([f"{name}: {titles} (of {world_size} ranks).", *sections])


def _ranks(ranks: list[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
