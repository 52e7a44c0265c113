"""How a call failed on each rank, and the error that reports it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

from shardkit.errors import ShardkitError


class Failure(NamedTuple):
    """What happened on a rank that did not return.

    Attributes:
        kind: its process ended; the function raised, could not be called, or its value not sent; or it did neither.
        title: what happened, after "rank 1": "raised KeyError", "was killed by SIGABRT".
        detail: the traceback; or the Python stack and the last that it printed; empty where there is none.
        skip: the reason, if it asked for the test to be skipped.
    """

    kind: Literal["died", "raised", "stuck"]
    title: str
    detail: str
    skip: str | None = None


class RankFailure(ShardkitError):
    """A call did not return on every rank.

    The message names the ranks that died (with signal or exit code), raised (with their tracebacks) or got stuck
    (with the place); the same text on several ranks is shown once.

    Attributes:
        failures: what happened, by rank; ranks that returned are not in it.
    """

    def __init__(self, name: str, world_size: int, failures: Mapping[int, Failure]) -> None:
        self.failures = dict(failures)
        ranks_of: dict[Failure, list[int]] = {}
        for _, rank in sorted((failure.kind, rank) for rank, failure in failures.items()):
            ranks_of.setdefault(failures[rank], []).append(rank)  # likely causes first: died, raised, stuck
        titles = {failure: f"{_ranks(ranks)} {failure.title}" for failure, ranks in ranks_of.items()}
        sections = [f"--- {title} ---\n{each.detail.strip()}" for each, title in titles.items() if each.detail]
        super().__init__("\n\n".join([f"{name}: {'; '.join(titles.values())} (of {world_size} ranks).", *sections]))

    @property
    def skip(self) -> str | None:
        """The reason, when every failure is the wish to skip the test, else None."""
        reasons = [failure.skip for failure in self.failures.values()]
        return None if None in reasons else reasons[0]


def _ranks(ranks: list[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
