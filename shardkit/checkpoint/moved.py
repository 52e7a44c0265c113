"""Tensors without values that record which boxes of which sources stacking, splitting and transposing move where.

Another library's conversion of :class:`Moved` tensors reads and writes nothing. Its results say which box of which
source lies where, so a rank reads only what its part of a result comes from, or writes what its part of a source
becomes.
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
from shardkit.checkpoint.chunks import Part, common, full_box, inside
from shardkit.shards import Box

_aten = torch.ops.aten
_JOINS = (_aten.cat.default, _aten.stack.default)
_COPIES = (_aten.clone.default, _torch.TO_COPY)
Fetch: TypeAlias = Callable[[Any], Tensor]  # returns a full source


@dataclass(frozen=True)
class Piece:
    """A box of a source, and where it lies in a result."""

    where: Box
    source: Any  # the caller's name of the source, or a computed Moved
    box: Box  # in the source
    # The source's dim of each dim of the result; None for a new one, of size 1. In the box, the other dims of the
    # source have one element.
    dims: tuple[int | None, ...]

    @property
    def inverse(self) -> Piece:
        """Result and source exchanged."""
        dims = (self.dims.index(dim) if dim in self.dims else None for dim in range(len(self.box)))
        return Piece(self.box, self.source, self.where, tuple(dims))

    def within(self, box: Box) -> Piece | None:
        """Return the part of it that is in a box of the result."""
        if (where := common(self.where, box)) is None:
            return None
        cut = list(self.box)
        for (old, _), (start, length), dim in zip(self.where, where, self.dims, strict=True):
            if dim is not None:
                cut[dim] = (cut[dim][0] + start - old, length)
        return replace(self, where=where, box=tuple(cut))

    def as_result(self, view: Tensor) -> Tensor:
        """Return a view of the shape of ``box`` in the shape of ``where``."""
        old = [dim for dim in self.dims if dim is not None]
        view = view.permute([*old, *(dim for dim in range(len(self.box)) if dim not in old)])
        return view.view([length for _, length in self.where])  # differs only in dims of size 1


@dataclass(frozen=True, eq=False)
class _Memory:
    """The contiguous memory of a tensor and its views."""

    shape: torch.Size
    value: Callable[[Fetch], Tensor]  # returns all of it
    inputs: tuple[Moved, ...] = ()  # the tensors that it is computed from
    key: Any = None  # the source that it is, if it is one
    parts: tuple[tuple[Box, Moved], ...] = ()  # the inputs and their boxes, if it consists of them


class Moved(Tensor):
    """A tensor on meta, with the memory that it is a view of. Its dtype is its sources': casting does nothing."""

    plain: Tensor
    memory: _Memory

    @staticmethod
    def of(source: Any, dtype: torch.dtype, shape: Sequence[int]) -> Moved:
        """Return a tensor that is all of a source."""
        return _new(_Memory(torch.Size(shape), lambda fetch: fetch(source), key=source), dtype)

    @staticmethod
    def constant(tensor: Tensor) -> Moved:
        """Return a tensor that is computed from no source."""
        return _new(_Memory(tensor.shape, lambda _: tensor), tensor.dtype)

    def value(self, fetch: Fetch) -> Tensor:
        """Compute the full tensor; ``fetch`` returns a full source."""
        full = self.memory.value(fetch).contiguous()
        return full.as_strided(self.plain.shape, self.plain.stride(), self.plain.storage_offset())

    @cached_property
    def pieces(self) -> list[Piece]:
        """The boxes that it consists of; all of itself if it is computed."""
        found = _box_of(self.plain, self.memory.shape)
        if found is None or not (self.memory.parts or self.memory.key is not None):
            every = full_box(self.shape)
            return [Piece(every, self, every, tuple(range(self.ndim)))]
        box, dims = found
        if self.memory.key is not None:
            return [Piece(full_box(self.shape), self.memory.key, box, dims)] if self.numel() else []
        moved = []
        for by, part in self.memory.parts:
            for piece in part.pieces:
                where = ((start + first, n) for (start, n), (first, _) in zip(piece.where, by, strict=True))
                moved.append(replace(piece, where=tuple(where)))
        return [
            Piece(
                tuple((0, 1) if dim is None else (at.where[dim][0] - box[dim][0], at.where[dim][1]) for dim in dims),
                at.source,
                at.box,
                tuple(None if dim is None else at.dims[dim] for dim in dims),
            )
            for piece in moved
            if (at := piece.within(box)) is not None
        ]

    @property
    def is_computed(self) -> bool:
        """Whether a part of it is computed rather than moved."""
        return any(isinstance(piece.source, Moved) for piece in self.pieces)

    def origins(self) -> Iterator[Any]:
        """Yield the sources that it comes from."""
        if self.memory.key is not None:
            yield self.memory.key
        for tensor in self.memory.inputs:
            yield from tensor.origins()

    def sources_of(self, part: Part) -> Iterator[tuple[Any, Part]]:
        """Yield the sources to read into a part of this tensor, each with its box and the memory to read it into."""
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
    ends = list(itertools.accumulate(each.shape[dim] for each in tensors))
    shape, dtype = list(tensors[0].shape), tensors[0].dtype
    shape[dim] = ends[-1]
    boxes = [
        (*full_box(each.shape)[:dim], (end - each.shape[dim], each.shape[dim]), *full_box(each.shape)[dim + 1 :])
        for each, end in zip(tensors, ends, strict=True)
    ]
    parts = tuple(zip(boxes, tensors, strict=True))

    def value(fetch: Fetch) -> Tensor:
        return torch.cat([each.value(fetch) for each in tensors], dim)

    return _new(_Memory(torch.Size(shape), value, tuple(tensors), parts=parts), dtype)


def _each(args: Iterable[Any], change: Callable[[Any], Any]) -> list[Any]:
    """Return the arguments of an operation with ``change`` applied to its tensors, which may be in lists."""
    return [
        change(arg) if isinstance(arg, Moved) else _each(arg, change) if isinstance(arg, (list, tuple)) else arg
        for arg in args
    ]


def _box_of(view: Tensor, shape: torch.Size) -> tuple[Box, tuple[int | None, ...]] | None:
    """Return the box that a view is of memory of this shape, and the memory's dim of each dim, or None."""
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
