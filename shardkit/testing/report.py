"""The error that reports how a call failed on each rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

from shardkit.errors import ShardkitError


class Failure(NamedTuple):
    """The failure of one rank that did not return.

    Attributes:
        kind: "died" if its process ended; "raised" if the function raised, could not be called, or returned a value
            that cannot be sent; "stuck" if it did not finish.
        title: to follow "rank 1": "raised KeyError", "was killed by SIGABRT".
        detail: the traceback, or the Python stack and its last output; may be empty.
        skip: the reason, if it asked to skip the test.
    """

    kind: Literal["died", "raised", "stuck"]
    title: str
    detail: str
    skip: str | None = None


class RankFailure(ShardkitError):
    """A call did not return on every rank.

    The message names the ranks that died (with signal or exit code), raised (with traceback) or got stuck (with the
    Python stack); a text that several ranks share is shown once.

    Attributes:
        failures: by rank, without ranks that returned.
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
        """The reason, if every failed rank asked to skip the test, else None."""
        reasons = [failure.skip for failure in self.failures.values()]
        return None if None in reasons else reasons[0]


def _ranks(ranks: list[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
