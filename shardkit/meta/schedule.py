"""Schedule: what has to run for the values that are wanted, what waits for what, and how long memory lives."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shardkit.meta.tape import UPDATE, WHOLE, Op, View


@dataclass(frozen=True)
class Final:
    """A tensor that is wanted at the end: ``take`` gets its value once, as soon as that is final.

    ``take(value, alone)`` may keep the value's memory when it is ``alone``, as nothing else will look at it, and
    says whether it did.
    """

    view: View
    take: Callable[[Tensor, bool], bool]


@dataclass(slots=True)
class Buffer:
    """One life of a storage: from the op that makes or wholly overwrites it to the next that does."""

    changes: list[int] = field(default_factory=list)
    reads: list[int] = field(default_factory=list)
    uses: int = 0  # needed ops that have not run, and finals that were not taken
    real: torch.UntypedStorage | None = None


class Schedule:
    """Which ops are needed, what each waits for, and after which random op each final value is there."""

    def __init__(self, ops: list[Op], finals: list[Final]) -> None:
        self.ops = ops
        self.buffers: list[dict[int, Buffer]] = []  # of each op: storage -> the life of it that the op touches
        self.waits: list[list[int]] = []
        current: dict[int, Buffer] = {}
        for index, op in enumerate(ops):
            self.buffers.append(self._touch(index, op, current))
            self.waits.append(self._data_waits(index, op))
        self.final_buffers = [current[final.view.storage] for final in finals]
        self.needed = self._find_needed()
        self._add_order_waits()
        self._count_uses()
        ready = self._ready()
        self.finals_after: dict[int, list[tuple[Final, Buffer]]] = defaultdict(list)
        for final, buffer in zip(finals, self.final_buffers, strict=True):
            self.finals_after[ready[buffer.changes[-1]]].append((final, buffer))

    def _touch(self, index: int, op: Op, current: dict[int, Buffer]) -> dict[int, Buffer]:
        touched = {view.storage: current[view.storage] for view in op.reads}
        for view in op.reads:
            touched[view.storage].reads.append(index)
        for view, kind in op.writes:
            if kind == WHOLE:
                current[view.storage] = Buffer()
            touched[view.storage] = current[view.storage]
            if touched[view.storage].changes[-1:] != [index]:
                touched[view.storage].changes.append(index)
        for out in op.outs:
            if out is not None:
                touched[out.storage] = current[out.storage] = Buffer(changes=[index])
        return touched

    def _data_waits(self, index: int, op: Op) -> list[int]:
        """The ops that made what this one reads or changes: the last change, which waits for those before it."""
        before = []
        for buffer in self.buffers[index].values():
            changes = buffer.changes[:-1] if buffer.changes[-1] == index else buffer.changes
            before += changes[-1:]
        return before

    def _find_needed(self) -> list[bool]:
        needed = [False] * len(self.ops)
        todo = [buffer.changes[-1] for buffer in self.final_buffers]
        for index, op in enumerate(self.ops):
            # What decides how many numbers a random op draws must be right: all that it reads.
            todo += [] if not op.random else [index] if _reads_values(op) else []
        while todo:
            index = todo.pop()
            if not needed[index]:
                needed[index] = True
                todo += self.waits[index]
        return needed

    def _add_order_waits(self) -> None:
        """A change in place waits for the needed reads of what was there before."""
        for buffer in {id(b): b for touched in self.buffers for b in touched.values()}.values():
            reads = [index for index in buffer.reads if self.needed[index]]
            for change in buffer.changes:
                if self.needed[change]:
                    self.waits[change] += [read for read in reads if read < change]

    def _count_uses(self) -> None:
        for index, touched in enumerate(self.buffers):
            if self.needed[index]:
                for buffer in {id(b): b for b in touched.values()}.values():
                    buffer.uses += 1
        for buffer in self.final_buffers:
            buffer.uses += 1

    def _ready(self) -> list[int]:
        """For each op the last random op that it depends on, itself included; -1 for none."""
        ready: list[int] = []
        for index, op in enumerate(self.ops):
            after = max((ready[i] for i in self.waits[index]), default=-1)
            ready.append(index if op.random else after)
        return ready


def _reads_values(op: Op) -> bool:
    return bool(op.reads) or any(kind == UPDATE for _, kind in op.writes)
