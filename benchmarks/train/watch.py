"""Bytes of the allocator after each operator of one step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shardkit._torch.dispatch import TorchDispatchMode

MOST_POINTS = 2000


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes ``held()`` after every operator inside of the block, in the order in which the CPU
    issues them.

    That is the order in which memory is taken and given, too. Compiled code is one operator here,
    and torch does not compile inside of such a block, so it is for steps in eager mode.
    """

    def __init__(self, held: Callable[[], int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.held = held
        self.points: list[int] = []
        self.attention: set[str] = set()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run the operator, then look."""
        result = func(*args, **(kwargs or {}))
        self.points.append(self.held())
        if "scaled_dot_product" in func.name():
            self.attention.add(func.name().partition("::")[2].partition(".")[0])
        return result


def thinned(points: Sequence[int], most: int = MOST_POINTS) -> list[int]:
    """At most ``most`` points, each the largest of its stretch: a peak is never lost."""
    stretch = -(-len(points) // most) or 1
    return [max(points[start : start + stretch]) for start in range(0, len(points), stretch)]
