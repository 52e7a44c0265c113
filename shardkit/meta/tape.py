"""The tape: what ordinary construction computes, as plain records of aten calls.

A tensor on the tape is a ``View``: which storage, and where in it. That is all that views, in-place initializers,
deep copies and ties need to be exact, because two tensors share memory here just when they share it in an
ordinary construction.
"""

from __future__ import annotations

import ctypes
import hashlib
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardkit._torch import dispatch

# How an op writes to a view. "update" keeps or reads what was there (mul_, index_put_); "part" overwrites the
# view without reading it; "whole" does so and the view is all of its storage, so the old content is dead.
UPDATE, PART, WHOLE = "update", "part", "whole"


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

    def num_bytes(self) -> int:
        """Bytes that a storage needs so that this view fits."""
        if 0 in self.size:
            return 0
        last = self.offset + sum((n - 1) * s for n, s in zip(self.size, self.stride, strict=True))
        return (last + 1) * self.dtype.itemsize

    def written(self, num_bytes: int, *, overwrites: bool) -> tuple[View, str]:
        """Return this view of a storage of ``num_bytes``, and how an op writes to it."""
        return self, UPDATE if not overwrites else WHOLE if self.covers(num_bytes) else PART

    def covers(self, num_bytes: int) -> bool:
        """Return whether every byte of a storage of ``num_bytes`` is in this view, each once."""
        expected = 1
        for stride, size in sorted((s, n) for n, s in zip(self.size, self.stride, strict=True) if n != 1):
            if stride != expected:
                return False
            expected *= size
        return self.offset == 0 and expected * self.dtype.itemsize == num_bytes


@dataclass(slots=True)
class Op:
    """One recorded call. Tensors in ``args`` and ``kwargs`` are Views; ``outs`` are the new storages it made."""

    func: Callable[..., Any] | None  # None: a constant, ``value``, or undefined memory when that is None too
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    outs: tuple[View | None, ...] = ()  # None where an output is one of the inputs, or a view of one
    reads: tuple[View, ...] = ()
    writes: tuple[tuple[View, str], ...] = ()
    default_dtype: torch.dtype = torch.float32
    undefined: bool = False  # makes memory that nobody has written: empty, empty_like, ...
    on_device: bool = False  # takes a device argument, given at replay
    stream: Stream | None = None  # which it draws from
    at: int = 0  # the position of the stream before it
    value: Tensor | None = None

    def uses_values(self) -> bool:
        """Return whether it reads any memory."""
        return bool(self.reads or any(kind == UPDATE for _, kind in self.writes))

    def overwritten(self) -> list[int]:
        """Return the storages that it overwrites as a whole."""
        return [view.storage for view, kind in self.writes if kind == WHOLE]

    def made(self) -> list[int]:
        """Return the storages whose content begins here: new ones, and those that are overwritten as a whole."""
        return [view.storage for view in self.outs if view is not None] + self.overwritten()

    def changed(self) -> list[int]:
        """Return the storages that it makes or writes to."""
        return self.made() + [view.storage for view, kind in self.writes if kind != WHOLE]


@dataclass
class Recording:
    """What one ``init_on_meta``, or one call of initializers, added to the tape."""

    start: int  # its first op
    device: torch.device  # torch's default device during the recording
    entry: int  # the position of torch's default generator when it began
    ends: dict[Stream, int] = field(default_factory=dict)  # where it left the generators


class Tape:
    """All that was recorded, kept alive by the modules that were built. There is one at a time.

    A recording goes on where the last one ended, as long as any model of that waits for its values.
    """

    def __init__(self) -> None:
        self.ops: list[Op] = []
        self.recordings: list[Recording] = []  # that are complete
        self.streams: dict[int, Stream] = {}  # by id of the generator
        self.storages: list[torch.UntypedStorage] = []  # strong: a freed one's identity would be reused
        self._ids: dict[int, int] = {}

    def add(self, storage: torch.UntypedStorage) -> int:
        """Add a storage, and return its number."""
        self._ids[id(storage)] = len(self.storages)
        self.storages.append(storage)
        return len(self.storages) - 1

    def find(self, tensor: Tensor) -> View | None:
        """Return a meta tensor as a View, or None if its storage is not on the tape."""
        number = self._ids.get(id(tensor.untyped_storage()))
        return None if number is None else view_of(tensor, number)


_latest: weakref.ref[Tape] | None = None


def open_tape() -> Tape:
    """Return the tape that any model waits for, or a new one."""
    global _latest
    tape = (_latest() if _latest is not None else None) or Tape()
    _latest = weakref.ref(tape)
    return tape


def view_of(tensor: Tensor, number: int) -> View:
    """Return a tensor as a View of the storage with that number."""
    size, stride, offset = tuple(tensor.size()), tensor.stride(), int(tensor.storage_offset())
    return View(number, size, stride, offset, tensor.dtype, tensor.is_conj(), tensor.is_neg())


def map_leaves(fn: Callable[[Any], Any], tree: Any) -> Any:
    """Apply ``fn`` to every leaf of nested lists, tuples and dicts: the only containers in aten calls."""
    if isinstance(tree, (list, tuple)):
        return type(tree)(map_leaves(fn, item) for item in tree)
    if isinstance(tree, dict):
        return {key: map_leaves(fn, item) for key, item in tree.items()}
    return fn(tree)


def leaves(tree: Any) -> Iterator[Any]:
    """Yield the leaves of nested lists, tuples and dicts, in order."""
    if isinstance(tree, (list, tuple, dict)):
        for item in tree.values() if isinstance(tree, dict) else tree:
            yield from leaves(item)
    else:
        yield tree


def tensors_of(tree: Any) -> list[Tensor]:
    """Return the tensors among the leaves."""
    return [leaf for leaf in leaves(tree) if isinstance(leaf, Tensor)]


class Definedness:
    """Which elements of each storage are written after running ops in order.

    An op that reads undefined memory makes undefined memory. Initializing through an index or a mask (``p[mask] = 0``)
    does not count: which elements it reaches is a matter of values, not of shapes.
    """

    def __init__(self, ops: Iterable[Op]) -> None:
        self._written: dict[int, list[View] | None] = {}  # the views overwritten since it was made; None: all of it
        for op in ops:
            self._run(op)

    def __call__(self, view: View) -> bool:
        """Return whether every element of the view is defined."""
        written = self._written[view.storage]
        if written is None or 0 in view.size:
            return True
        # Exact, by marking elements: one byte an element, and only for storages that are filled part by part.
        size = view.dtype.itemsize
        if not written or any(part.dtype.itemsize != size for part in written):
            return False
        marks = torch.zeros(max(each.num_bytes() for each in (view, *written)) // size, dtype=torch.bool)
        for part in written:
            marks.as_strided(part.size, part.stride, part.offset).fill_(True)
        return bool(marks.as_strided(view.size, view.stride, view.offset).all())

    def _run(self, op: Op) -> None:
        clean = not op.undefined and all(map(self, op.reads))
        updates_clean = all(self(view) for view, kind in op.writes if kind == UPDATE)
        for view in op.outs:
            if view is not None:
                self._written[view.storage] = None if clean and updates_clean else []
        for view, kind in op.writes:
            written = self._written[view.storage]
            if not clean or kind == WHOLE:
                self._written[view.storage] = None if clean else []
            elif kind == PART and written is not None:
                written.append(view)


class State(NamedTuple):
    """A true state of a generator."""

    value: Tensor
    on_device: Tensor | None = None  # of the accelerator's default generator at that time, if it had one

    def restore(self, generator: torch.Generator) -> None:
        """Give it to a generator; one of another device gets the seed that the state was made with."""
        if generator.device.type != "cpu" and self.on_device is not None:
            generator.set_state(self.on_device)
        elif generator.device.type == "cpu" or self.value.numel() == generator.get_state().numel():
            generator.set_state(self.value)
        else:
            generator.manual_seed(torch.Generator().set_state(self.value).initial_seed())


class Stream:
    """The use of one random number generator by a tape: nothing is drawn, and every reseeding is noticed.

    While a tape records, the generator holds a *marker*: a state that says only at which position of its stream it is.

        construction           entry     randn()   normal_()   manual_seed(5)   rand()
        position               0         1         2           3                4
        states[position]       a State   op 0      op 7        a State          op 9
        the generator holds    marker 0  marker 1  marker 2    marker 3         marker 4

    Whoever saves and restores states inside the construction (``torch.random.fork_rng``) does so with markers, so the
    next op begins at an earlier position; whoever seeds leaves a state that is not a marker: a new position. Between
    recordings the generator keeps the last marker, so the next recording goes on from there unless someone seeded or
    drew. A marker equals no state before, or "goes on from the first recording" and "seeded with the same number
    again" could not be told apart.
    """

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator
        self.states: list[State | int] = []
        digest = hashlib.sha256()  # so that ranks and runs that began in the same state have the same markers
        hash_bytes(digest, generator.get_state())
        self._base = int.from_bytes(digest.digest()[:7], "big")  # a range in which no seed falls by accident

    @property
    def is_default(self) -> bool:
        """Whether this is torch's default generator."""
        return self.generator is torch.default_generator

    def marked(self) -> int | None:
        """Return the position whose marker the generator holds; None if it was seeded, or numbers were drawn."""
        position = self.generator.initial_seed() - self._base
        known = 0 <= position < len(self.states)
        marker = torch.Generator(self.generator.device).manual_seed(self._base + position)
        return position if known and torch.equal(self.generator.get_state(), marker.get_state()) else None

    def enter(self) -> int:
        """Return the position where the generator is, which may be new, and give it that marker."""
        position = self.marked()
        if position is None:
            on_device = dispatch.accelerator_state() if self.is_default else None
            position = self._add(State(self.generator.get_state(), on_device))
        return position

    def draw(self, op: int) -> int:
        """Note that this op draws; return the position before it."""
        before = self.enter()
        self._add(op)
        return before

    def leave(self) -> int:
        """Return the last position, and give the generator its true state if that needs no replay."""
        position = self.enter()
        state = self.states[position]
        if isinstance(state, State):
            self.generator.set_state(state.value)
        return position

    def _add(self, state: State | int) -> int:
        self.states.append(state)
        self.generator.manual_seed(self._base + len(self.states) - 1)
        return len(self.states) - 1


def hash_bytes(digest: Any, tensor: Tensor) -> None:
    """Add a tensor of bytes to a hash; without numpy, and without a copy of CPU memory."""
    tensor = tensor.cpu()
    if tensor.numel():
        digest.update((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr()))
