"""The tape: what ordinary construction computes, as plain records of aten calls.

A tensor on the tape is a ``View``: which storage, and where in it. That is all that views, in-place initializers,
deep copies and ties need to be exact, because two tensors share memory here just when they share it in an
ordinary construction.
"""

from __future__ import annotations

import ctypes
import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from shardkit import _torch

# One count for all tapes, so that tapes can be joined: a storage has the same number in each.
_storage_ids = itertools.count()
_serials = itertools.count()

# How an op writes to a view. "update" keeps or reads what was there (mul_, index_put_); "part" overwrites the
# view without reading it; "whole" does so and the view is all of its storage, so the old content is dead.
UPDATE, PART, WHOLE = "update", "part", "whole"


@dataclass(frozen=True, slots=True)
class View:
    """A tensor on the tape. Sizes, strides and offset are in elements of ``dtype``."""

    storage: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    conj: bool = False
    neg: bool = False

    def of(self, storage: torch.UntypedStorage) -> Tensor:
        """Return the tensor with this view of a real or meta storage, which must be large enough."""
        tensor = torch.empty(0, dtype=self.dtype, device=storage.device)
        tensor.set_(storage, self.offset, self.size, self.stride)
        tensor = tensor.conj() if self.conj else tensor
        return _torch.neg_view(tensor) if self.neg else tensor

    def num_bytes(self) -> int:
        """Bytes that a storage needs so that this view fits."""
        if 0 in self.size:
            return 0
        last = self.offset + sum((n - 1) * s for n, s in zip(self.size, self.stride, strict=True))
        return (last + 1) * self.dtype.itemsize

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
    random: bool = False
    generator: torch.Generator | None = None  # None with random=True: torch's default generator
    # Where the generator was put by the user since the last random op: a state, or the number of random ops
    # after which it had stood where it was put back to (fork_rng, get_rng_state and set_rng_state).
    reset: Tensor | int | None = None
    value: Tensor | None = None
    source: Tensor | None = None  # whose memory ``value`` is; None when it is a copy
    version: int = 0  # of the source, to notice a later change

    def is_stale(self) -> bool:
        """Return whether this is a constant that was changed since it was recorded."""
        return self.source is not None and _torch.version_of(self.source) != self.version


@dataclass(slots=True)
class Stream:
    """The use of one generator by a tape."""

    generator: torch.Generator | None  # None: torch's default one
    entry: Tensor | Tape  # its state at first use; a Tape: where that earlier tape leaves it
    entry_on_device: Tensor | None = None  # state of the accelerator's default generator, if it had one by then
    end: Tensor | int = 0  # the state at the end: itself, or a number of random ops as in Op.reset
    final: Tensor | None = None  # the true state at the end, once replayed


class Tape:
    """Everything that one ``init_on_meta`` recorded, kept alive by the modules that were built in it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device  # torch's default device during the recording
        self.serial = next(_serials)
        self.ops: list[Op] = []
        self.storages: dict[int, torch.UntypedStorage] = {}  # strong: a freed one's identity would be reused
        self._ids: dict[int, int] = {}
        self.parents: set[Tape] = set()  # earlier tapes whose storages this one uses
        self.predecessors: set[Tape] = set()  # earlier tapes that this one's generators go on from
        self.streams: dict[int, Stream] = {}  # by id of the generator
        _live.add(self)

    def add(self, storage: torch.UntypedStorage) -> int:
        """Add a storage, and return its number."""
        number = next(_storage_ids)
        self.storages[number] = storage
        self._ids[id(storage)] = number
        return number

    def find(self, storage: torch.UntypedStorage) -> int | None:
        """Return the number of a storage, or None if it is not on this tape."""
        return self._ids.get(id(storage))

    def update_digest(self, digest: Any, numbers: dict[int, int], *, with_entry: bool) -> None:
        """Add to a hash what decides the values: the ops, with storages renamed by ``numbers``, and entry states."""

        def plain(leaf: Any) -> Any:
            if isinstance(leaf, View):
                return (numbers[leaf.storage], leaf.size, leaf.stride, leaf.offset, leaf.dtype, leaf.conj, leaf.neg)
            return "generator" if isinstance(leaf, torch.Generator) else leaf

        for op in self.ops:
            name = getattr(op.func, "__name__", None)
            outs = map_leaves(plain, op.outs)
            digest.update(repr((name, map_leaves(plain, op.args), map_leaves(plain, op.kwargs), outs)).encode())
            for tensor in (op.value, op.reset):
                if isinstance(tensor, Tensor):
                    hash_bytes(digest, tensor)
                else:
                    digest.update(repr(tensor).encode())
        for stream in self.streams.values() if with_entry else ():
            if isinstance(stream.entry, Tensor):
                hash_bytes(digest, stream.entry)

    def num_bytes(self, number: int) -> int:
        """Return the size of a storage in bytes at the end of the recording."""
        return self.storages[number].nbytes()


_live: weakref.WeakSet[Tape] = weakref.WeakSet()


def find_storage(tensor: Tensor) -> tuple[Tape, int] | None:
    """Return the tape with a meta tensor's storage, and the storage's number there."""
    storage = tensor.untyped_storage()
    found = ((tape, tape.find(storage)) for tape in list(_live))
    return next(((tape, number) for tape, number in found if number is not None), None)


def view_of(tensor: Tensor, number: int) -> View:
    """Return a tensor as a View of the storage with that number."""
    place = (tuple(tensor.size()), tensor.stride(), int(tensor.storage_offset()))
    return View(number, *place, tensor.dtype, tensor.is_conj(), tensor.is_neg())


def closure(tapes: Iterable[Tape], *, chained: bool) -> list[Tape]:
    """Return the tapes and all tapes whose storages they use, in the order of recording.

    With ``chained`` also those whose replay gives the states that the others' generators begin with.
    """
    todo, found = list(tapes), set[Tape]()
    while todo:
        tape = todo.pop()
        if tape not in found:
            found.add(tape)
            todo += [*tape.parents, *(tape.predecessors if chained else ())]
    return sorted(found, key=lambda tape: tape.serial)


def map_leaves(fn: Callable[[Any], Any], tree: Any) -> Any:
    """Apply ``fn`` to every leaf of nested lists, tuples and dicts: the only containers in aten calls."""
    if isinstance(tree, (list, tuple)):
        return type(tree)(map_leaves(fn, item) for item in tree)
    if isinstance(tree, dict):
        return {key: map_leaves(fn, item) for key, item in tree.items()}
    return fn(tree)


def hash_bytes(digest: Any, tensor: Tensor) -> None:
    """Add a tensor of bytes to a hash; without numpy, and without a copy of CPU memory."""
    tensor = tensor.cpu()
    if tensor.numel():
        digest.update((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr()))


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
    """Which elements of each storage are written after running a tape's ops in order.

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
        """Return whether every element of the view is defined."""
        written = self._written[view.storage]
        if written is None:
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
