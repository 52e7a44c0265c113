"""The tape: what a construction computes, as a list of aten calls.

A tensor on the tape is a ``View``: which storage, and where in it. That is all that views, in-place
initializers, deep copies and ties need to be exact: two tensors share memory at replay just when
they share it in an ordinary construction.
"""

from __future__ import annotations

import math
import random
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from shardkit._torch import dispatch


@dataclass(frozen=True, slots=True)
class View:
    """A tensor on the tape. Sizes, strides and offset are in elements."""

    storage: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    conj: bool = False
    neg: bool = False

    def of(self, storage: torch.UntypedStorage) -> Tensor:
        """Return the tensor with this view of a real or meta storage."""
        tensor = torch.empty(0, dtype=self.dtype, device=storage.device)
        tensor.set_(storage, self.offset, self.size, self.stride)
        tensor = tensor.conj() if self.conj else tensor
        return dispatch.neg_view(tensor) if self.neg else tensor

    def covers(self, storage: torch.UntypedStorage) -> bool:
        """Return whether the elements are all of a storage."""
        return math.prod(self.size) * self.dtype.itemsize == storage.nbytes()


@dataclass(slots=True)
class Op:
    """One recorded call. Tensors in ``args`` and ``kwargs`` are Views, and storages are numbers."""

    # None: a constant, or undefined memory without ``value``
    func: Callable[..., Any] | None = None
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    # None where an output is in an old storage
    outs: list[View | None] = field(default_factory=list)
    reads: set[int] = field(default_factory=set)  # storages whose content it needs
    # whose content begins here: new, or overwritten whole
    makes: set[int] = field(default_factory=set)
    updates: set[int] = field(default_factory=set)  # that it changes otherwise
    default_dtype: torch.dtype = torch.float32
    on_device: bool = False  # takes a device argument, given at replay
    generator: torch.Generator | None = None  # which it draws from
    # the generator's state before: one that was set, or as op number n left it
    before: Tensor | int | None = None
    value: Tensor | None = None

    def changes(self) -> set[int]:
        return self.makes | self.updates


class Stream:
    """The use of one random number generator by a tape: nothing is drawn, and every reseeding is
    noticed.

    While a tape records, the generator holds a *marker*: a state that says only at which position
    of its stream it is.

        construction           entry     randn()   normal_()   manual_seed(5)   rand()
        position               0         1         2           3                4
        states[position]       a state   op 0      op 7        a state          op 9
        the generator holds    marker 0  marker 1  marker 2    marker 3         marker 4

    Whoever saves and restores states inside the construction (``torch.random.fork_rng``) does so
    with markers, so the next op begins at an earlier position; whoever seeds leaves a state that is
    no marker: a new position. Between recordings the generator keeps the last marker, so that the
    next one goes on from there unless someone seeded or drew.
    """

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator
        self.states: list[Tensor | int] = []
        # Seeds that nobody uses by accident, and the same ones on all ranks.
        self._first_marker = random.Random(generator.initial_seed()).getrandbits(56)

    def position(self) -> int | None:
        """Return the position whose marker the generator holds; None if someone seeded or drew."""
        position = self.generator.initial_seed() - self._first_marker
        if not 0 <= position < len(self.states):
            return None
        marker = torch.Generator(self.generator.device).manual_seed(self._first_marker + position)
        return position if torch.equal(self.generator.get_state(), marker.get_state()) else None

    def enter(self) -> int:
        """Return the position, which is a new one if someone seeded or drew."""
        position = self.position()
        return self._add(self.generator.get_state()) if position is None else position

    def draw(self, number: int) -> Tensor | int:
        """Note that this op draws; return the state before it."""
        before = self.states[self.enter()]
        self._add(number)
        return before

    def leave(self) -> None:
        """Give the generator its true state if that is known without replay."""
        state = self.states[self.enter()]
        if isinstance(state, Tensor):
            self.generator.set_state(state)

    def _add(self, state: Tensor | int) -> int:
        self.states.append(state)
        position = len(self.states) - 1
        self.generator.manual_seed(self._first_marker + position)
        return position


class Tape:
    """All that was recorded, kept alive by the modules that wait for values. There is one at a
    time.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device  # torch's default device during the recording
        self.ops: list[Op] = []
        self.streams: dict[torch.Generator, Stream] = {}
        # strong: a freed one's identity would be reused
        self.storages: list[torch.UntypedStorage] = []
        self.unseen: set[int] = set()  # made where no mode sees it, and not written since
        self._numbers: dict[int, int] = {}

    def add(self, tensor: Tensor) -> View:
        """Add the storage of a meta tensor."""
        self._numbers[id(tensor.untyped_storage())] = len(self.storages)
        self.storages.append(tensor.untyped_storage())
        return view_of(tensor, len(self.storages) - 1)

    def find(self, tensor: Tensor) -> View | None:
        """Return a meta tensor as a View, or None if its storage is not on the tape."""
        number = self._numbers.get(id(tensor.untyped_storage()))
        return None if number is None else view_of(tensor, number)

    def written(self) -> set[int]:
        """Return the storages that hold more than undefined memory."""
        storages: set[int] = set()
        for op in self.ops:
            if op.func is not None or op.value is not None:
                storages |= op.changes()
        return storages


_latest: weakref.ref[Tape] | None = None


def open_tape(device: torch.device | None = None) -> Tape:
    """Return the tape that any model waits for, or a new one."""
    global _latest
    tape = (_latest() if _latest is not None else None) or Tape(device or torch.device("cpu"))
    _latest = weakref.ref(tape)
    return tape


def view_of(tensor: Tensor, number: int) -> View:
    """Return a tensor as a View of the storage with that number."""
    return View(
        number,
        tuple(tensor.size()),
        tensor.stride(),
        int(tensor.storage_offset()),
        tensor.dtype,
        tensor.is_conj(),
        tensor.is_neg(),
    )
