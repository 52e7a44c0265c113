"""What the starting processes of several ranks tell each other, so that all measure the same and
end together.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any


class Alone:
    """One process. The other kind is :class:`Launched`."""

    rank, size = 0, 1

    def decide(self, key: str, make: Callable[[], Any]) -> Any:
        """What rank 0 makes."""
        return make()

    def ended(self, key: str, outcome: Any) -> Any:
        """What went wrong, of the rank that names a case if one does; None if every rank ended
        well. Waits for all.
        """
        return outcome

    def any_ended_badly(self, key: str) -> bool:
        """Whether another rank has said so already."""
        return False


class Launched(Alone):
    """A rank of several, with the store that torchrun serves."""

    def __init__(self) -> None:
        from benchmarks.train.world import rank_and_size, store

        self.rank, self.size = rank_and_size()
        self._store = store("parents")
        self._store.set_timeout(timedelta(hours=2))

    def decide(self, key: str, make: Callable[[], Any]) -> Any:
        """What rank 0 makes, on every rank. Collective."""
        if self.rank == 0:
            self._store.set(f"decided/{key}", json.dumps(make()))
        return json.loads(self._store.get(f"decided/{key}"))

    def ended(self, key: str, outcome: Any) -> Any:
        """As above. Collective."""
        if outcome is not None:
            self._store.set(f"bad/{key}", "")
        self._store.set(f"ended/{key}/{self.rank}", json.dumps(outcome))
        outcomes = [json.loads(self._store.get(f"ended/{key}/{rank}")) for rank in range(self.size)]
        bad = [each for each in outcomes if each is not None]
        return min(bad, key=lambda each: not each.get("case"), default=None)

    def any_ended_badly(self, key: str) -> bool:
        """Local."""
        return bool(self._store.check([f"bad/{key}"]))


def ranks() -> Alone:
    """Of this process: torchrun's, or one alone."""
    return Launched() if int(os.environ.get("WORLD_SIZE", "1")) > 1 else Alone()
