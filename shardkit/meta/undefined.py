"""Which recorded tensors hold memory that nobody wrote: what ordinary construction would leave as garbage."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from shardkit.meta.tape import PART, UPDATE, WHOLE, Op, Tape, View


class Definedness:
    """What is written of each storage, after running over a tape's ops in order.

    A storage is wholly defined, or it has a list of the views that were overwritten since it was made. An op
    that reads undefined memory makes undefined memory. Initialising through an index or a mask
    (``p[mask] = 0``) does not count: which elements it reaches is a matter of values, not of shapes.
    """

    def __init__(self, tapes: Iterable[Tape]) -> None:
        self._written: dict[int, list[View] | None] = {}  # None: all of it
        for tape in tapes:
            for op in tape.ops:
                self._run(op)

    def __call__(self, view: View) -> bool:
        """Whether every element of the view is defined."""
        written = self._written[view.storage]
        if written is None:
            return True
        return bool(written) and _covered(view, written)

    def _run(self, op: Op) -> None:
        clean = not op.undefined and all(map(self, op.reads))
        updates_clean = all(self(view) for view, kind in op.writes if kind == UPDATE)
        for view in op.outs:
            if view is not None:
                self._written[view.storage] = None if clean and updates_clean else []
        for view, kind in op.writes:
            self._write(view, kind, clean)

    def _write(self, view: View, kind: str, clean: bool) -> None:
        written = self._written[view.storage]
        if not clean:
            self._written[view.storage] = []
        elif kind == WHOLE:
            self._written[view.storage] = None
        elif kind == PART and written is not None:
            written.append(view)


def _covered(view: View, written: list[View]) -> bool:
    # Exact, by marking elements: one byte an element, and only for storages that are filled part by part.
    if any(part.dtype.itemsize != view.dtype.itemsize for part in written):
        return False
    size = view.dtype.itemsize
    num_elements = max(v.num_bytes() for v in (view, *written)) // size
    marks = torch.zeros(num_elements, dtype=torch.bool)
    for part in written:
        marks.as_strided(part.size, part.stride, part.offset).fill_(True)
    return bool(marks.as_strided(view.size, view.stride, view.offset).all())
