"""Tensor subclasses on disk: saved as the plain tensors that they are made of, and rebuilt from them.

The protocol is torch's own, which torch.compile uses: ``__tensor_flatten__`` and ``__tensor_unflatten__``. Blocks of
quantised values follow the shards of the ranks that made them. So an inner tensor of a shard is written as a row of a
tensor that has one row for each shard, with the dims of the mesh axes that cut in front: a DTensor like any other.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from shardkit import _torch
from shardkit.checkpoint.plain import decode, encode
from shardkit.errors import CheckpointError, message
from shardkit.ranks import Groups, gather_by_rank, together
from shardkit.shards import around, as_sharded, local_value
from shardkit.state.optimizer import tensor_leaves, with_leaves

MARK = "__tensor_flatten__"  # the key of a subclass's description, beside its inner tensors
_PLAIN = "plain"  # the inner name of a shard that is a plain tensor where others are not, as small ones are

Records = dict[str, list[int]]  # descriptions of shards, in JSON, each with the numbers of the shards that are so


# ---- one shard ------------------------------------------------------------------------------------------------


def _parts(tensor: Tensor, prefix: str = "") -> dict[str, Tensor]:
    """The plain tensors inside of a subclass, by attribute; of one inside of another by a dotted path."""
    if not _torch.is_wrapper(tensor):
        return {prefix or _PLAIN: tensor}
    found: dict[str, Tensor] = {}
    for name in tensor.__tensor_flatten__()[0]:  # type: ignore[attr-defined]
        found |= _parts(getattr(tensor, name), f"{prefix}.{name}" if prefix else name)
    return found


def _context(tensor: Tensor, path: str) -> Any:
    """What a subclass is besides its inner tensors: class, shape, stride, its own context, and those inside of it."""
    if not _torch.is_wrapper(tensor):
        return None
    names, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    cls = f"{type(tensor).__module__}.{type(tensor).__qualname__}"
    inner = {name: _context(getattr(tensor, name), path) for name in names}
    return [cls, list(tensor.shape), list(tensor.stride()), encode(context, path)[0], inner]


def _rebuilt(context: Any, parts: Mapping[str, Tensor], prefix: str = "") -> Tensor:
    """The subclass again. Nothing is imported: its class is one that the program has."""
    if context is None:
        return parts[prefix or _PLAIN]
    name, shape, stride, own, inner = context
    values = {key: _rebuilt(each, parts, f"{prefix}.{key}" if prefix else key) for key, each in inner.items()}
    made: Tensor = _loaded_class(name).__tensor_unflatten__(  # type: ignore[attr-defined]
        values, decode(own, {}), torch.Size(shape), tuple(stride)
    )
    return made


def _loaded_class(name: str) -> type[Tensor]:
    classes: list[type[Tensor]] = [Tensor]
    for cls in classes:
        classes += cls.__subclasses__()
    for cls in reversed(classes):
        if f"{cls.__module__}.{cls.__qualname__}" == name and hasattr(cls, "__tensor_unflatten__"):
            return cls
    rule = "A tensor subclass is rebuilt by its own class, and loading a checkpoint imports nothing"
    raise CheckpointError(message("optimizer", f"it has state of {name}", rule, "Import the library that it is of"))


# ---- all shards -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Grid:
    """How the shards of a tensor lie.

    Attributes:
        axes: of its mesh, those that cut it.
        sizes: ranks along each.
        cuts: the placements on these axes.
        number: of this rank's shard, counted row by row.
    """

    axes: tuple[int, ...]
    sizes: tuple[int, ...]
    cuts: tuple[str, ...]
    number: int


def _grid(name: str, tensor: Tensor) -> _Grid:
    if not isinstance(tensor, DTensor):
        return _Grid((), (), (), 0)
    if any(place.is_partial() for place in tensor.placements):
        raise CheckpointError(message(name, "Partial", "A sum over ranks has no value of its own", "Redistribute it"))
    axes = [axis for axis, place in enumerate(tensor.placements) if hasattr(place, "dim")]
    number = 0
    for axis in axes:
        number = number * tensor.device_mesh.size(axis) + tensor.device_mesh.get_local_rank(axis)
    sizes = tuple(tensor.device_mesh.size(axis) for axis in axes)
    return _Grid(tuple(axes), sizes, tuple(str(tensor.placements[axis]) for axis in axes), number)


def _row(part: Tensor, shapes: list[list[int]]) -> Tensor:
    """An inner tensor as its row: as it is where all shards have its shape, else flat and filled up. No copy if so."""
    if len(shapes) == 1 and list(part.shape) == shapes[0]:
        return part
    flat = part.new_zeros(max(torch.Size(shape).numel() for shape in shapes))
    flat[: part.numel()] = part.reshape(-1)
    return flat


def _stacked(row: Tensor, like: Tensor, grid: _Grid) -> Tensor:
    """The tensor of all rows, of which this rank has one. A view."""
    if not isinstance(like, DTensor):
        return row
    places = [
        Shard(grid.axes.index(axis)) if axis in grid.axes else Replicate() for axis in range(like.device_mesh.ndim)
    ]
    local = row[(None,) * len(grid.axes)]
    shape = torch.Size([*grid.sizes, *row.shape])
    return around(local, like.device_mesh, places, shape, torch.empty(shape, device="meta").stride())


def _all_records(
    tensors: Mapping[str, Tensor], groups: Groups, describe: Callable[[str, Tensor], Any]
) -> dict[str, Records]:
    """For each name under which any rank has a subclass, what all its shards are. Collective."""
    wrapped = _merged({name: {} for name, each in tensors.items() if _torch.is_wrapper(local_value(each))}, groups)
    own: dict[str, Records] = {}
    with together(groups, CheckpointError):
        for name in sorted(wrapped.keys() & tensors.keys()):
            text = json.dumps(describe(name, local_value(tensors[name])))
            own[name] = {text: [_grid(name, tensors[name]).number]}
    return _merged(own, groups)


def _merged(own: dict[str, Records], groups: Groups) -> dict[str, Records]:
    """The records of all ranks that the groups reach together. Collective."""
    merged: dict[str, dict[str, set[int]]] = {}
    for of_rank in gather_by_rank(own, groups).values() if groups else [own]:
        for name, records in of_rank.items():
            found = merged.setdefault(name, {})
            for text, numbers in records.items():
                found.setdefault(text, set()).update(numbers)
    return {name: {text: sorted(each[text]) for text in sorted(each)} for name, each in sorted(merged.items())}


def _parts_spec(local: Tensor) -> dict[str, Any]:
    return {name: [encode(part.dtype, "")[0], list(part.shape)] for name, part in _parts(local).items()}


def _rows(name: str, tensor: Tensor, records: Iterable[Mapping[str, Any]]) -> dict[str, tuple[Tensor, Tensor]]:
    """For each inner tensor of any shard: this rank's own (empty where it has none) and its row."""
    local, found = local_value(tensor), list(records)
    parts = _parts(local)
    rows = {}
    for key in sorted({key for each in found for key in each}):
        specs = [each.get(key) for each in found]
        dtypes = [spec[0] for spec in specs if spec is not None]
        if any(each != dtypes[0] for each in dtypes):
            rule = "The shards of a tensor hold the same kinds of inner tensors"
            raise CheckpointError(message(name, f"{key} has several dtypes", rule, "Leave it out"))
        shapes = [[0] if spec is None else spec[1] for spec in specs]
        distinct = [shape for at, shape in enumerate(shapes) if shape not in shapes[:at]]
        part = parts[key] if key in parts else torch.empty(0, dtype=decode(dtypes[0], {}), device=local.device)
        rows[key] = (part, _row(part.detach(), distinct))
    return rows


# ---- models: by name, in place --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Flat:
    """Tensors as files have them.

    Attributes:
        tensors: plain ones and DTensors of plain ones; those inside of a subclass under ``name.attribute``.
        copies: inner tensors that are in rows of other shapes, with these.
    """

    tensors: dict[str, Tensor]
    copies: list[tuple[Tensor, Tensor]]

    @torch.no_grad()
    def write_back(self) -> None:
        """Put what was read into rows where it belongs. Local."""
        for part, row in self.copies:
            part.copy_(row[: part.numel()].view(part.shape))


def has_subclass(tensors: Iterable[Tensor]) -> bool:
    """Whether any is of a subclass on this rank. Local."""
    return any(_is_wrapped(tensor) for tensor in tensors)


def _is_wrapped(tensor: Tensor) -> bool:
    local = _torch.local_tensor(tensor) if isinstance(tensor, DTensor) else tensor
    return _torch.is_wrapper(local)


def flattened(tensors: Mapping[str, Tensor], groups: Groups) -> Flat:
    """The tensors of a model by what they are made of; live memory. Collective over ``groups``.

    The same object under several names stays one under several names. Needless where no rank has a subclass. Raises a
    CheckpointError on every rank for partial sums.
    """
    records = _all_records(tensors, groups, lambda _, local: _parts_spec(local))
    made: dict[int, dict[str, Tensor]] = {}
    flat = Flat({}, [])
    for name, tensor in tensors.items():
        if id(tensor) not in made and name not in records:
            made[id(tensor)] = {"": _bare(tensor)}
        elif id(tensor) not in made:
            rows, grid = _rows(name, tensor, map(json.loads, records[name])), _grid(name, tensor)
            flat.copies.extend((part, row) for part, row in rows.values() if row.shape != part.shape)
            made[id(tensor)] = {f".{key}": _stacked(row, tensor, grid) for key, (_, row) in rows.items()}
        flat.tensors.update({f"{name}{suffix}": each for suffix, each in made[id(tensor)].items()})
    return flat


def _bare(tensor: Tensor) -> Tensor:
    """The tensor itself, unless it wraps a plain one."""
    if not _is_wrapped(tensor):
        return tensor
    return _torch.with_local(tensor, local_value(tensor)) if isinstance(tensor, DTensor) else local_value(tensor)


# ---- optimizers: by description, made again -------------------------------------------------------------------


def flattened_tree(tree: Any, groups: Groups) -> Any:
    """Nested dicts with a dict in the place of each subclass: its inner tensors and, under ``MARK``, what it is.

    **Collective** over ``groups``. Needless where no rank has one. Raises a CheckpointError on every rank for a
    subclass whose context is not plain data, and for partial sums.
    """
    leaves = {_dotted(path): leaf for path, leaf in tensor_leaves(tree).items()}
    records = _all_records(leaves, groups, lambda path, local: [_context(local, path), _parts_spec(local)])

    def change(path: str, tensor: Tensor) -> Any:
        if (found := records.get(path := _dotted(path))) is None:
            return _bare(tensor)
        grid, rows = _grid(path, tensor), _rows(path, tensor, (json.loads(text)[1] for text in found))
        about = {"shape": list(tensor.shape), "grid": grid.sizes, "cuts": grid.cuts, "shards": found}
        return {MARK: json.dumps(about), **{key: _stacked(row, tensor, grid) for key, (_, row) in rows.items()}}

    return with_leaves(tree, change)


def _dotted(path: str) -> str:
    return path.strip("/").replace("/", ".")


@dataclass(frozen=True)
class Pending:
    """A subclass that is rebuilt once its inner tensors are read.

    Attributes:
        like: the parameter that it is state of, and lies as.
        context: what it is on this rank.
        shapes: of its inner tensors.
        rows: to be read, by inner name.
    """

    like: Tensor
    context: Any
    shapes: dict[str, list[int]]
    rows: dict[str, Tensor]

    def tensor(self) -> Tensor:
        """The subclass, or the DTensor of it."""
        sizes = {key: torch.Size(shape) for key, shape in self.shapes.items()}
        parts = {key: self.rows[key].reshape(-1)[: size.numel()].view(size) for key, size in sizes.items()}
        local = _rebuilt(self.context, parts)
        return as_sharded(local, self.like) if isinstance(self.like, DTensor) else local


def pending(value: Mapping[str, Any], like: Tensor, path: str) -> tuple[Pending, list[tuple[str, Tensor]]]:
    """What a description of :func:`flattened_tree` stands for, and the tensors to fill for it, with their keys. Local.

    Args:
        value: the description, with :class:`Stored` for tensors.
        like: the parameter.
        path: of the state, for messages.

    Raises:
        CheckpointError: it was saved in other shards than this parameter's, or is damaged, or of an unknown class.
    """
    try:
        about = json.loads(value[MARK])
        grid = _grid(path, like)
        is_whole = not any(size > 1 for size in (*grid.sizes, *about["grid"]))
        lies_alike = (tuple(about["grid"]), tuple(about["cuts"])) == (grid.sizes, grid.cuts)
        if about["shape"] != list(like.shape) or not (is_whole or lies_alike):
            raise CheckpointError(_other_shards(path, about, grid))
        text = next(text for text, numbers in about["shards"].items() if grid.number in numbers)
        context, specs = json.loads(text)
        if context is not None:
            _loaded_class(context[0])
        rows, targets = {}, []
        for key in specs:
            stored = value[key]
            row = torch.empty(stored.shape[len(about["grid"]) :], dtype=stored.dtype, device=local_value(like).device)
            rows[key] = row
            targets.append((stored.key, row[(None,) * len(about["grid"])] if is_whole else _stacked(row, like, grid)))
    except (ValueError, KeyError, TypeError, IndexError, StopIteration, AttributeError) as error:
        problem = f"a description that no save writes ({type(error).__name__}: {error})"
        raise CheckpointError(message(path, problem, "It was changed since", "Use another checkpoint")) from None
    return Pending(like, context, {key: spec[1] for key, spec in specs.items()}, rows), targets


def _other_shards(path: str, about: Mapping[str, Any], grid: _Grid) -> str:
    def words(sizes: Iterable[int], cuts: Iterable[str]) -> str:
        return " and ".join(f"{cut} on {size} ranks" for cut, size in zip(cuts, sizes, strict=True)) or "whole"

    saved, here = words(about["grid"], about["cuts"]), words(grid.sizes, grid.cuts)
    rule = "Quantised state is in blocks of its shards, so it is loaded in the shards that it was saved in"
    fix = "Load on the layout that saved, or load the model alone and start with a fresh optimizer"
    return message(path, f"saved as {saved}, here {here}", rule, fix)
