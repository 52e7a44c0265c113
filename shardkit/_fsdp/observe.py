"""The collectives of an FSDP unit, noted right before each.

Private names of torch 2.13 to 2.15, like the rest of ``_fsdp``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

from shardkit._fsdp import FSDPUnit


def observe_collectives(unit: FSDPUnit, note: Callable[[str], None]) -> Callable[[], None]:
    """Call ``note`` right before each all-gather, reduce-scatter or all-reduce of a unit; return what ends it. Local.

    An all-reduce that follows a reduce-scatter is not noted. The objects that run collectives, torch's or those of
    ``set_custom_all_gather``, become copies of a derived class, which passes torch's isinstance checks. On a shard axis
    of one rank FSDP2 all-reduces without them, and only allocates the input and the output (torch 2.11 to 2.15).
    """
    own: Any = unit
    before = own._all_gather_comm, own._reduce_scatter_comm
    group = getattr(own.mesh_info, "shard_process_group", None)
    alone = group is None or group.size() == 1
    own._all_gather_comm = _noting(before[0], partial(note, "all-gather"))
    own._reduce_scatter_comm = _noting(before[1], partial(note, "all-reduce" if alone else "reduce-scatter"), alone)

    def end() -> None:
        own._all_gather_comm, own._reduce_scatter_comm = before

    return end


def _noting(comm: Any, note: Callable[[], None], when_it_allocates: bool = False) -> Any:
    allocations = 0

    class Noting(type(comm)):  # type: ignore[misc]
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            note()
            return super().__call__(*args, **kwargs)

        def allocate(self, *args: Any, **kwargs: Any) -> Any:
            nonlocal allocations
            allocations += 1
            if when_it_allocates and allocations % 2:  # the input, not the output
                note()
            return super().allocate(*args, **kwargs)

    noting = copy.copy(comm)
    noting.__class__ = Noting
    return noting
