"""Tensors that stand for boxes of others: what stacking, splitting and transposing would move, without moving it.

On a :class:`Moved`, another library's conversion reads and writes nothing; what comes out says which box of which
source lies where. So a rank reads what its part of the result comes from, or writes what its part of a source becomes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from shardkit import _torch
from shardkit.checkpoint.pieces import Part, inside, whole
from shardkit.shards import Box

_aten = torch.ops.aten


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
        if (where := _common(self.where, box)) is None:
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
        for _ in range(view.ndim - len(old)):
            view = view.squeeze(-1)
        for at, dim in enumerate(self.dims):
            view = view.unsqueeze(at) if dim is None else view
        return view


def _common(one: Box, other: Box) -> Box | None:
    starts = [max(a, b) for (a, _), (b, _) in zip(one, other, strict=True)]
    stops = [min(a + m, b + n) for (a, m), (b, n) in zip(one, other, strict=True)]
    box = tuple((start, stop - start) for start, stop in zip(starts, stops, strict=True))
    return box if all(length > 0 for _, length in box) else None


@dataclass(frozen=True, eq=False)
class Computed:
    """The result of an operation that is more than moving boxes: computed when it is needed, from whole tensors."""

    op: Callable[..., Tensor]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def value(self, fetch: Callable[[Any], Tensor]) -> Tensor:
        """The whole result; ``fetch`` gives a whole source."""
        return self.op(*_each(self.args, lambda tensor: tensor.value(fetch)), **self.kwargs)

    def origins(self) -> Iterator[Any]:
        """The sources that it comes from."""
        found: list[Moved] = []
        _each(self.args, found.append)
        return (origin for tensor in found for origin in tensor.origins())


class Moved(Tensor):
    """A tensor on meta, and the boxes that it is made of. Its dtype is its sources': casting does nothing."""

    pieces: tuple[Piece, ...]

    @staticmethod
    def of(source: Any, dtype: torch.dtype, shape: Sequence[int]) -> Moved:
        """All of a source."""
        return _moved(dtype, shape, [Piece(whole(shape), source, whole(shape), tuple(range(len(shape))))])

    def value(self, fetch: Callable[[Any], Tensor]) -> Tensor:
        """The whole tensor, in new memory; ``fetch`` gives a whole source."""
        full = torch.empty(tuple(self.shape), dtype=self.dtype)
        for piece in self.pieces:
            part = piece.source.value(fetch) if isinstance(piece.source, Computed) else fetch(piece.source)
            view = inside(full, whole(full.shape), piece.where)
            view.copy_(piece.as_result(inside(part, whole(part.shape), piece.box)))
        return full

    @property
    def is_computed(self) -> bool:
        """Whether a part of it is not moved but computed."""
        return any(isinstance(piece.source, Computed) for piece in self.pieces)

    def origins(self) -> Iterator[Any]:
        """The sources that it comes from, a source for each piece."""
        for piece in self.pieces:
            yield from piece.source.origins() if isinstance(piece.source, Computed) else (piece.source,)

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
        move = _MOVES.get(op)
        made = NotImplemented if move is None else move(*args, **(kwargs or {}))
        return _computed(op, args, kwargs or {}) if made is NotImplemented else made


def _moved(dtype: torch.dtype, shape: Sequence[int], pieces: Iterable[Piece]) -> Moved:
    made = torch.empty(tuple(shape), dtype=dtype, device="meta").as_subclass(Moved)
    made.pieces = tuple(pieces)
    return made


def _computed(op: Any, args: Any, kwargs: dict[str, Any]) -> Moved:
    like = op(*_each(args, lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")), **kwargs)
    if not isinstance(like, Tensor):
        raise NotImplementedError(f"{op} of a weight that is read or written in parts")
    return Moved.of(Computed(op, tuple(args), kwargs), like.dtype, like.shape)


def _each(args: Iterable[Any], change: Callable[[Any], Any]) -> list[Any]:
    """The arguments of an operation with its tensors changed; they may be in lists."""
    return [
        change(arg) if isinstance(arg, Moved) else _each(arg, change) if isinstance(arg, (list, tuple)) else arg
        for arg in args
    ]


# ---- the operations that only move -----------------------------------------------------------------------------


def _same(tensor: Moved, *_: Any, **__: Any) -> Moved:
    return _moved(tensor.dtype, tensor.shape, tensor.pieces)


def _narrow(tensor: Moved, dim: int, start: int, length: int) -> Moved:
    dim %= tensor.ndim
    box = (*whole(tensor.shape)[:dim], (start, length), *whole(tensor.shape)[dim + 1 :])
    found = (piece.within(box) for piece in tensor.pieces)
    return _moved(tensor.dtype, [n for _, n in box], [_shifted(piece, dim, -start) for piece in found if piece])


def _shifted(piece: Piece, dim: int, by: int) -> Piece:
    start, length = piece.where[dim]
    return replace(piece, where=(*piece.where[:dim], (start + by, length), *piece.where[dim + 1 :]))


def _permute(tensor: Moved, order: Sequence[int]) -> Moved:
    order = [dim % tensor.ndim for dim in order]
    pieces = [
        replace(piece, where=tuple(piece.where[at] for at in order), dims=tuple(piece.dims[at] for at in order))
        for piece in tensor.pieces
    ]
    return _moved(tensor.dtype, [tensor.shape[at] for at in order], pieces)


def _transpose(tensor: Moved, one: int, other: int) -> Moved:
    order = list(range(tensor.ndim))
    order[one], order[other] = order[other], order[one]
    return _permute(tensor, order)


def _squeeze(tensor: Moved, dim: int) -> Moved:
    dim %= tensor.ndim
    if tensor.shape[dim] != 1:
        return _same(tensor)
    return _permute(tensor, [at for at in range(tensor.ndim) if at != dim])


def _unsqueeze(tensor: Moved, dim: int) -> Moved:
    dim %= tensor.ndim + 1
    pieces = [
        replace(
            piece,
            where=(*piece.where[:dim], (0, 1), *piece.where[dim:]),
            dims=(*piece.dims[:dim], None, *piece.dims[dim:]),
        )
        for piece in tensor.pieces
    ]
    return _moved(tensor.dtype, [*tensor.shape[:dim], 1, *tensor.shape[dim:]], pieces)


def _split(tensor: Moved, sizes: Sequence[int], dim: int = 0) -> list[Moved]:
    starts = [sum(sizes[:at]) for at in range(len(sizes))]
    return [_narrow(tensor, dim, start, size) for start, size in zip(starts, sizes, strict=True)]


def _split_evenly(tensor: Moved, size: int, dim: int = 0) -> list[Moved]:
    total = tensor.shape[dim]
    return _split(tensor, [min(size, total - start) for start in range(0, total, size)], dim)


def _unbind(tensor: Moved, dim: int = 0) -> list[Moved]:
    return [_squeeze(_narrow(tensor, dim, index, 1), dim) for index in range(tensor.shape[dim])]


def _cat(tensors: Sequence[Moved], dim: int = 0) -> Moved:
    if not all(isinstance(each, Moved) and each.dtype == tensors[0].dtype for each in tensors):
        return cast(Moved, NotImplemented)
    dim %= tensors[0].ndim
    starts = [sum(each.shape[dim] for each in tensors[:at]) for at in range(len(tensors))]
    pieces = [_shifted(p, dim, start) for each, start in zip(tensors, starts, strict=True) for p in each.pieces]
    shape = list(tensors[0].shape)
    shape[dim] = sum(each.shape[dim] for each in tensors)
    return _moved(tensors[0].dtype, shape, pieces)


def _stack(tensors: Sequence[Moved], dim: int = 0) -> Moved:
    return _cat([_unsqueeze(each, dim) for each in tensors], dim)


_MOVES: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys([_aten.alias.default, _aten.detach.default, _aten.clone.default, _torch.TO_COPY], _same),
    _aten.split.Tensor: _split_evenly,
    _aten.split_with_sizes.default: _split,
    _aten.unbind.int: _unbind,
    _aten.squeeze.dim: _squeeze,
    _aten.transpose.int: _transpose,
    _aten.cat.default: _cat,
    _aten.stack.default: _stack,
}
