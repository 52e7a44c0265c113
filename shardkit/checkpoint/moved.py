"""Tensors that stand for boxes of others: what stacking, splitting and transposing would move, without moving it.

On a :class:`Moved`, another library's conversion reads and writes nothing; what comes out says which box of which
source lies where. So a rank reads what its part of the result comes from, or writes what its part of a source becomes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeAlias

import torch
from torch import Tensor

from shardkit import _torch
from shardkit.checkpoint.pieces import Part, common, inside, whole
from shardkit.shards import Box

_aten = torch.ops.aten
_JOINS = (_aten.cat.default, _aten.stack.default)
_COPIES = (_aten.clone.default, _torch.TO_COPY)
Fetch: TypeAlias = Callable[[Any], Tensor]  # gives a whole source


@dataclass(frozen=True)
class Piece:
    """Attributes:
    where: it lies in the result.
    source: what it is a box of: whatever the caller names its tensors by, or a :class:`Computed`.
    box: in the source.
    dims: the source's dim of each dim of the result; None for a new one, of size 1. A dim that is not among them has
        one element in the box.
    """

    where: Box
    source: Any
    box: Box
    dims: tuple[int | None, ...]

    @property
    def inverse(self) -> Piece:
        """The same with the result as the source."""
        dims = (self.dims.index(dim) if dim in self.dims else None for dim in range(len(self.box)))
        return Piece(self.box, self.source, self.where, tuple(dims))

    def within(self, box: Box) -> Piece | None:
        """What of it lies in a box of the result."""
        if (where := common(self.where, box)) is None:
            return None
        cut = list(self.box)
        for (old, _), (start, length), dim in zip(self.where, where, self.dims, strict=True):
            if dim is not None:
                cut[dim] = (cut[dim][0] + start - old, length)
        return replace(self, where=where, box=tuple(cut))

    def as_result(self, view: Tensor) -> Tensor:
        """A view of the shape of ``box`` as one of the shape of ``where``."""
        old = [dim for dim in self.dims if dim is not None]
        view = view.permute([*old, *(dim for dim in range(len(self.box)) if dim not in old)])
        return view.view([length for _, length in self.where])  # which differs in dims of size 1 only


@dataclass(frozen=True, eq=False)
class Computed:
    """A tensor that is more than moved boxes: computed when it is needed, from whole sources."""

    tensor: Moved

    def value(self, fetch: Fetch) -> Tensor:
        """The whole result."""
        return self.tensor.value(fetch)


@dataclass(frozen=True, eq=False)
class _Memory:
    """What a tensor and its views would lie in, one element after the other.

    Attributes:
        shape: of all of it.
        value: gives it.
        inputs: the tensors that it comes from.
        key: the source that it is.
        parts: where which input lies in it, where it is these.
    """

    shape: torch.Size
    value: Callable[[Fetch], Tensor]
    inputs: tuple[Moved, ...] = ()
    key: Any = None
    parts: tuple[tuple[Box, Moved], ...] = ()


class Moved(Tensor):
    """A tensor on meta, and the memory that it is a view of. Its dtype is its sources': casting does nothing."""

    plain: Tensor
    memory: _Memory

    @staticmethod
    def of(source: Any, dtype: torch.dtype, shape: Sequence[int]) -> Moved:
        """All of a source."""
        memory = _Memory(torch.Size(shape), lambda fetch: fetch(source), key=source)
        return _view(torch.empty(memory.shape, dtype=dtype, device="meta"), memory)

    def value(self, fetch: Fetch) -> Tensor:
        """The whole tensor; ``fetch`` gives a whole source."""
        full = self.memory.value(fetch).contiguous()
        return full.as_strided(self.plain.shape, self.plain.stride(), self.plain.storage_offset())

    @cached_property
    def pieces(self) -> list[Piece]:
        """The boxes that it is made of."""
        found = _box_of(self.plain, self.memory.shape)
        if found is None or not (self.memory.parts or self.memory.key is not None):
            every = whole(self.shape)
            return [Piece(every, Computed(self), every, tuple(range(self.ndim)))]
        box, dims = found
        if self.memory.key is not None:
            return [Piece(whole(self.shape), self.memory.key, box, dims)] if self.numel() else []
        moved = (_shifted(piece, at) for at, part in self.memory.parts for piece in part.pieces)
        inner = (piece.within(box) for piece in moved)
        return [
            Piece(
                tuple((0, 1) if dim is None else (at.where[dim][0] - box[dim][0], at.where[dim][1]) for dim in dims),
                at.source,
                at.box,
                tuple(None if dim is None else at.dims[dim] for dim in dims),
            )
            for at in inner
            if at is not None
        ]

    @property
    def is_computed(self) -> bool:
        """Whether a part of it is not moved but computed."""
        return any(isinstance(piece.source, Computed) for piece in self.pieces)

    def origins(self) -> Iterator[Any]:
        """The sources that it comes from."""
        if self.memory.key is not None:
            yield self.memory.key
        for tensor in self.memory.inputs:
            yield from tensor.origins()

    def sources_of(self, part: Part) -> Iterator[tuple[Any, Part]]:
        """What to read into a part of this tensor: each source, and its box with the memory that it goes to."""
        values, box = part
        for piece in self.pieces:
            if (found := piece.within(box)) is not None:
                yield found.source, (found.inverse.as_result(inside(values, box, found.where)), found.box)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, op: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        inputs: list[Moved] = []
        _each(args, inputs.append)
        alike = isinstance(args[0], (list, tuple)) and {type(each) for each in args[0]} == {Moved}
        if op in _JOINS and alike and len({each.dtype for each in inputs}) == 1:
            dim = args[1] if len(args) > 1 else 0
            dim %= inputs[0].ndim + (op is _aten.stack.default)
            return _joined([each.unsqueeze(dim) for each in inputs] if op is _aten.stack.default else inputs, dim)
        if op in _COPIES:
            return _joined(inputs, 0) if inputs[0].ndim else inputs[0]
        made = op(*_each(args, lambda tensor: tensor.plain), **(kwargs or {}))
        if op.is_view:
            views = [_view(each, inputs[0].memory) for each in (made if isinstance(made, (list, tuple)) else [made])]
            return views if isinstance(made, (list, tuple)) else views[0]
        if not isinstance(made, Tensor) or _torch.schema(op).is_mutable:
            raise NotImplementedError(f"{op} of a weight that is read or written in parts")

        def value(fetch: Fetch) -> Tensor:
            return op(*_each(args, lambda tensor: tensor.value(fetch)), **(kwargs or {}))  # type: ignore[no-any-return]

        return _new(_Memory(made.shape, value, tuple(inputs)), made.dtype)


def _view(plain: Tensor, memory: _Memory) -> Moved:
    made = plain.as_subclass(Moved)
    made.plain, made.memory = plain, memory
    return made


def _new(memory: _Memory, dtype: torch.dtype) -> Moved:
    return _view(torch.empty(memory.shape, dtype=dtype, device="meta"), memory)


def _joined(tensors: Sequence[Any], dim: int) -> Moved:
    """Tensors one after the other along a dim."""
    shape = list(tensors[0].shape)
    ends = list(itertools.accumulate(each.shape[dim] for each in tensors))
    shape[dim], dtype = ends[-1], tensors[0].dtype
    boxes = [
        (*whole(each.shape)[:dim], (end - each.shape[dim], each.shape[dim]), *whole(each.shape)[dim + 1 :])
        for each, end in zip(tensors, ends, strict=True)
    ]
    parts = tuple(zip(boxes, tensors, strict=True))

    def value(fetch: Fetch) -> Tensor:
        return torch.cat([each.value(fetch) for each in tensors], dim)

    return _new(_Memory(torch.Size(shape), value, tuple(tensors), parts=parts), dtype)


def _each(args: Iterable[Any], change: Callable[[Any], Any]) -> list[Any]:
    """The arguments of an operation with its tensors changed; they may be in lists."""
    return [
        change(arg) if isinstance(arg, Moved) else _each(arg, change) if isinstance(arg, (list, tuple)) else arg
        for arg in args
    ]


def _shifted(piece: Piece, by: Box) -> Piece:
    where = ((start + first, length) for (start, length), (first, _) in zip(piece.where, by, strict=True))
    return replace(piece, where=tuple(where))


def _box_of(view: Tensor, shape: torch.Size) -> tuple[Box, tuple[int | None, ...]] | None:
    """Which box a view is of memory of this shape, and its dim of each dim of the view; None where it is no box."""
    starts, sizes, dims, at = [], [1] * len(shape), [], view.storage_offset()
    strides = torch.empty(shape, device="meta").stride()
    for stride in strides:
        starts.append(at // stride)
        at %= stride
    for size, stride in zip(view.shape, view.stride(), strict=True):
        fits = [dim for dim, own in enumerate(strides) if own == stride and shape[dim] > 1 and sizes[dim] == 1]
        if size != 1 and not (fits and starts[fits[0]] + size <= shape[fits[0]]):
            return None
        dims.append(None if size == 1 else fits[0])
        if size != 1:
            sizes[fits[0]] = size
    return tuple(zip(starts, sizes, strict=True)), tuple(dims)
