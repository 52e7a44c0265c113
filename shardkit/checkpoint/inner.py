"""Save tensor subclasses as their inner plain tensors, and rebuild them.

The protocol is torch's own, which torch.compile uses: ``__tensor_flatten__`` and ``__tensor_unflatten__``. Blocks of
quantized values depend on how the tensor was sharded. So each inner tensor is saved as an ordinary DTensor with one row
for each shard: its first dims are the mesh axes that shard the tensor.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from shardkit import _torch
from shardkit.checkpoint.chunks import common, full_box, part_of
from shardkit.checkpoint.native import Safetensors
from shardkit.checkpoint.plain import decode, encode
from shardkit.errors import CheckpointError, message
from shardkit.ranks import Groups, gather_by_rank, together
from shardkit.shards import Box, around, as_sharded, cut_box, local_value
from shardkit.state.optimizer import tensor_leaves, with_leaves
from shardkit.state.plan import Spec
from shardkit.state.quantized import turns_into_values, values_of

MARK = "__tensor_flatten__"  # the key of a subclass's description, next to its inner tensors
_PLAIN = "plain"  # the inner name of a shard that is a plain tensor while others are not, such as a small one

Records = dict[str, list[int]]  # descriptions in JSON, each with the numbers of the shards that it describes


# ---- one shard ------------------------------------------------------------------------------------------------


def _parts(tensor: Tensor, prefix: str = "") -> dict[str, Tensor]:
    """Return the plain tensors inside a subclass, by attribute, or by dotted path if subclasses are nested."""
    if not _torch.is_wrapper(tensor):
        return {prefix or _PLAIN: tensor}
    found: dict[str, Tensor] = {}
    for name in tensor.__tensor_flatten__()[0]:  # type: ignore[attr-defined]
        found |= _parts(getattr(tensor, name), f"{prefix}.{name}" if prefix else name)
    return found


def _context(tensor: Tensor, path: str) -> Any:
    """Return a subclass's class, shape, stride and context, and the same of its inner tensors."""
    if not _torch.is_wrapper(tensor):
        return None
    names, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    cls = _class_name(type(tensor))
    inner = {name: _context(getattr(tensor, name), path) for name in names}
    return [cls, list(tensor.shape), list(tensor.stride()), encode(context, path)[0], inner]


def _rebuilt(context: Any, parts: Mapping[str, Tensor], prefix: str = "") -> Tensor:
    """Rebuild a subclass, of a class that the program has imported."""
    if context is None:
        return parts[prefix or _PLAIN]
    name, shape, stride, own, inner = context
    values = {key: _rebuilt(each, parts, f"{prefix}.{key}" if prefix else key) for key, each in inner.items()}
    made: Tensor = _loaded_class(name).__tensor_unflatten__(  # type: ignore[attr-defined]
        values, decode(own, {}), torch.Size(shape), tuple(stride)
    )
    return made


def _class_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _loaded_class(name: str) -> type[Tensor]:
    classes: list[type[Tensor]] = [Tensor]
    for cls in classes:
        classes += cls.__subclasses__()
    for cls in reversed(classes):
        if _class_name(cls) == name and hasattr(cls, "__tensor_unflatten__"):
            return cls
    rule = "A tensor subclass is rebuilt by its own class, and loading a checkpoint imports nothing"
    raise CheckpointError(message("optimizer", f"it has state of {name}", rule, "Import the library of this class"))


# ---- all shards -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Grid:
    """How a tensor is sharded."""

    axes: tuple[int, ...]  # the axes of its mesh that shard it
    sizes: tuple[int, ...]  # ranks along each
    cuts: tuple[str, ...]  # the placements on these axes
    number: int  # of this rank's shard, in row-major order

    def __str__(self) -> str:
        return _cuts_text(self.sizes, self.cuts)


def _cuts_text(sizes: Iterable[int], cuts: Iterable[str]) -> str:
    return " and ".join(f"{cut} on {size} ranks" for cut, size in zip(cuts, sizes, strict=True)) or "whole"


def _grid(name: str, tensor: Tensor) -> _Grid:
    if not isinstance(tensor, DTensor):
        return _Grid((), (), (), 0)
    if any(place.is_partial() for place in tensor.placements):
        rule = "Its values are known only after a reduction over ranks"
        raise CheckpointError(message(name, "it is Partial", rule, "Redistribute it to Shard or Replicate"))
    axes = [axis for axis, place in enumerate(tensor.placements) if hasattr(place, "dim")]
    number = 0
    for axis in axes:
        number = number * tensor.device_mesh.size(axis) + tensor.device_mesh.get_local_rank(axis)
    sizes = tuple(tensor.device_mesh.size(axis) for axis in axes)
    return _Grid(tuple(axes), sizes, tuple(str(tensor.placements[axis]) for axis in axes), number)


def _stacked(row: Tensor, like: Tensor, grid: _Grid) -> Tensor:
    """Return the tensor of all rows, of which this rank has one. A view."""
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
    """Return the descriptions of all shards, for each name under which any rank has a subclass. Collective."""

    def gathered(own: Any) -> list[Any]:
        return list(gather_by_rank(own, groups).values()) if groups else [own]

    wrapped = [name for name, tensor in tensors.items() if _torch.is_wrapper(local_value(tensor))]
    names = {name for of_rank in gathered(wrapped) for name in of_rank}
    own: dict[str, tuple[str, int]] = {}
    with together(groups, CheckpointError):
        for name in sorted(names & tensors.keys()):
            text = json.dumps(describe(name, local_value(tensors[name])))
            own[name] = (text, _grid(name, tensors[name]).number)
    records: dict[str, dict[str, set[int]]] = {}
    for of_rank in gathered(own):
        for name, (text, number) in of_rank.items():
            records.setdefault(name, {}).setdefault(text, set()).add(number)
    return {name: {text: sorted(each[text]) for text in sorted(each)} for name, each in sorted(records.items())}


def _parts_spec(local: Tensor) -> dict[str, Any]:
    return {name: [encode(part.dtype, "")[0], list(part.shape)] for name, part in _parts(local).items()}


def _rows(name: str, tensor: Tensor, records: Iterable[Mapping[str, Any]]) -> dict[str, tuple[Tensor, Tensor]]:
    """Return, for each inner tensor of any shard, this rank's (empty if it has none) and its row."""
    local, found = local_value(tensor), list(records)
    parts = _parts(local)
    rows = {}
    for key in sorted({key for each in found for key in each}):
        specs = [each.get(key) for each in found]
        dtypes = [spec[0] for spec in specs if spec is not None]
        if any(each != dtypes[0] for each in dtypes):
            rule = "An inner tensor must have the same dtype in all shards"
            raise CheckpointError(message(name, f"{key} has several dtypes", rule, "Leave it out"))
        shapes = [[0] if spec is None else spec[1] for spec in specs]
        part = parts[key] if key in parts else torch.empty(0, dtype=decode(dtypes[0], {}), device=local.device)
        part = row = part.detach()
        if any(shape != list(part.shape) for shape in shapes):  # then rows are flat and padded copies
            row = part.new_zeros(max(torch.Size(shape).numel() for shape in shapes))
            row[: part.numel()] = part.reshape(-1)
        rows[key] = (part, row)
    return rows


# ---- models: by name, in place --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Flat:
    """Tensors as files have them."""

    tensors: dict[str, Tensor]  # without subclasses, whose inner tensors are under ``name.attribute``
    copies: list[tuple[Tensor, Tensor]]  # inner tensors with their rows, where these are copies

    @torch.no_grad()
    def write_back(self) -> None:
        """Copy the values that were read into rows back into the inner tensors. Local."""
        for part, row in self.copies:
            part.copy_(row[: part.numel()].view(part.shape))


def has_subclass(tensors: Iterable[Tensor]) -> bool:
    """Whether any tensor is a subclass on this rank. Local."""
    locals_ = (_torch.local_tensor(tensor) if isinstance(tensor, DTensor) else tensor for tensor in tensors)
    return any(map(_torch.is_wrapper, locals_))


def flattened(tensors: Mapping[str, Tensor], groups: Groups) -> Flat:
    """Replace a model's subclasses by their inner tensors, in live memory. Collective over ``groups``.

    Ties stay. Not needed if no rank has a subclass. Raises a CheckpointError on every rank for partial sums.
    """
    records = _all_records(tensors, groups, lambda _, local: _parts_spec(local))
    made: dict[int, dict[str, Tensor]] = {}
    flat = Flat({}, [])
    for name, tensor in tensors.items():
        if id(tensor) not in made and name not in records:
            made[id(tensor)] = {"": _bare(tensor)}
        elif id(tensor) not in made:
            rows, grid = _rows(name, tensor, map(json.loads, records[name])), _grid(name, tensor)
            flat.copies.extend((part, row) for part, row in rows.values() if row is not part)
            made[id(tensor)] = {f".{key}": _stacked(row, tensor, grid) for key, (_, row) in rows.items()}
        flat.tensors.update({f"{name}{suffix}": each for suffix, each in made[id(tensor)].items()})
    return flat


def _bare(tensor: Tensor) -> Tensor:
    """Return the plain tensor that a tensor wraps, or the tensor itself."""
    if not has_subclass([tensor]):
        return tensor
    return _torch.with_local(tensor, local_value(tensor)) if isinstance(tensor, DTensor) else local_value(tensor)


# ---- optimizers: by description, rebuilt ----------------------------------------------------------------------


def flattened_tree(tree: Any, groups: Groups) -> Any:
    """Replace each subclass in nested dicts by a dict of its inner tensors, described under ``MARK``.

    **Collective** over ``groups``. Not needed if no rank has a subclass. Raises a CheckpointError on every rank for a
    subclass whose context is not plain data, and for partial sums.
    """

    def dotted(path: str) -> str:
        return path.strip("/").replace("/", ".")

    leaves = {dotted(path): leaf for path, leaf in tensor_leaves(tree).items()}
    records = _all_records(leaves, groups, lambda path, local: [_context(local, path), _parts_spec(local)])

    def change(path: str, tensor: Tensor) -> Any:
        if (found := records.get(path := dotted(path))) is None:
            return _bare(tensor)
        grid, rows = _grid(path, tensor), _rows(path, tensor, (json.loads(text)[1] for text in found))
        about = {"shape": list(tensor.shape), "grid": grid.sizes, "cuts": grid.cuts, "shards": found}
        return {MARK: json.dumps(about), **{key: _stacked(row, tensor, grid) for key, (_, row) in rows.items()}}

    return with_leaves(tree, change)


@dataclass(frozen=True)
class Pending:
    """A subclass that is rebuilt when its inner tensors have been read."""

    like: Tensor  # the parameter that it belongs to, and is placed as
    context: Any  # on this rank
    shapes: dict[str, list[int]]  # of its inner tensors
    rows: dict[str, Tensor]  # to be read, by inner name

    def tensor(self) -> Tensor:
        """Rebuild the subclass, or the DTensor of it."""
        sizes = {key: torch.Size(shape) for key, shape in self.shapes.items()}
        parts = {key: self.rows[key].reshape(-1)[: size.numel()].view(size) for key, size in sizes.items()}
        local = _rebuilt(self.context, parts)
        return as_sharded(local, self.like) if isinstance(self.like, DTensor) else local

    def fits(self, present: Tensor | None) -> bool:
        """Whether the optimizer's own state here, as far as it is known, is of the class that was saved. Local."""
        own = Tensor if present is None or not _torch.is_wrapper(local_value(present)) else type(local_value(present))
        return present is None or (own is Tensor if self.context is None else _class_name(own) == self.context[0])


def pending(value: Mapping[str, Any], like: Tensor, path: str) -> tuple[Pending, list[tuple[str, Tensor]]]:
    """Return a subclass that :func:`flattened_tree` described, and the tensors to fill for it, with keys. Local.

    Args:
        value: the description, with :class:`Stored` for tensors.
        like: the parameter.
        path: of the state, for messages.

    The parameter must be sharded as it was, see :func:`lies_alike`.

    Raises:
        CheckpointError: the description is damaged, or of an unknown class.
    """
    with _described(path):
        about = json.loads(value[MARK])
        grid = _grid(path, like)
        text = next(text for text, numbers in about["shards"].items() if grid.number in numbers)
        context, specs = json.loads(text)
        if context is not None:
            _loaded_class(context[0])
        rows, targets = {}, []
        for key in specs:
            stored = value[key]
            row = torch.empty(stored.shape[len(about["grid"]) :], dtype=stored.dtype, device=local_value(like).device)
            rows[key] = row
            alone = not any(size > 1 for size in grid.sizes)
            targets.append((stored.key, row[(None,) * len(about["grid"])] if alone else _stacked(row, like, grid)))
    return Pending(like, context, {key: spec[1] for key, spec in specs.items()}, rows), targets


# ---- optimizers: in other shards ------------------------------------------------------------------------------


@dataclass(frozen=True)
class SavedShard:
    """A shard that :func:`flattened_tree` described, of which this rank needs the values."""

    box: Box  # in the full tensor
    context: Any
    keys: dict[str, str]  # in the checkpoint, by inner name
    rows: dict[str, tuple[Spec, Box]]  # one row of the saved tensor, and where it lies in that
    shapes: dict[str, torch.Size]  # of the inner tensors

    def values(self, source: Safetensors) -> Tensor:
        """Read the shard, on the CPU. Local."""
        rows = {name: (torch.empty([n for _, n in at], dtype=spec.dtype), at) for name, (spec, at) in self.rows.items()}
        source.read_parts((self.keys[name], row) for name, row in rows.items())
        parts = {name: rows[name][0].reshape(-1)[: size.numel()].view(size) for name, size in self.shapes.items()}
        return values_of(_rebuilt(self.context, parts))


def lies_alike(value: Mapping[str, Any], like: Tensor, path: str) -> bool:
    """Whether a parameter is sharded as it was when :func:`flattened_tree` described its state. Local."""
    with _described(path):
        about, grid = json.loads(value[MARK]), _grid(path, like)
        if about["shape"] != list(like.shape):
            raise ValueError(f"of shape {about['shape']}, here {list(like.shape)}")
        is_whole = not any(size > 1 for size in (*grid.sizes, *about["grid"]))
        return is_whole or (tuple(about["grid"]), tuple(about["cuts"])) == (grid.sizes, grid.cuts)


def saved_shards(value: Mapping[str, Any], like: Tensor, path: str) -> list[SavedShard]:
    """Return the saved shards that overlap this rank's part of a parameter. Local.

    Raises a CheckpointError for a damaged description, and for a class that does not turn into values.
    """
    own, found = part_of(like)[1], []
    with _described(path):
        about = json.loads(value[MARK])
        for text, numbers in about["shards"].items():
            context, specs = json.loads(text)
            if context is not None and not turns_into_values(_loaded_class(context[0])):
                problem = f"saved as {_cuts_text(about['grid'], about['cuts'])}, here {_grid(path, like)}"
                rule = f"State of {context[0]}, which has no dequantize(), can only be loaded in the same shards"
                fix = "Load on the layout that saved, or load the model alone and start with a fresh optimizer"
                raise CheckpointError(message(path, problem, rule, fix))
            shapes = {name: torch.Size(shape) for name, (_, shape) in specs.items()}
            for index in (_index(number, about["grid"]) for number in numbers):
                box = _cut(about["shape"], about["grid"], about["cuts"], index)
                if common(own, box) is None:
                    continue
                if [size for _, size in box] != (context[1] if context is not None else list(shapes[_PLAIN])):
                    raise ValueError(f"shard {index} has another shape than its cuts")
                at = tuple((each, 1) for each in index)
                rows = {name: (value[name], at + full_box(value[name].shape[len(at) :])) for name in specs}
                found.append(SavedShard(box, context, {name: value[name].key for name in specs}, rows, shapes))
    return found


def _index(number: int, sizes: Sequence[int]) -> list[int]:
    """Return where a shard lies in the grid."""
    index: list[int] = []
    for size in reversed(sizes):
        number, at = divmod(number, size)
        index.insert(0, at)
    return index


def _cut(shape: Sequence[int], sizes: Sequence[int], cuts: Sequence[str], index: Sequence[int]) -> Box:
    """Return a shard's part of the full tensor; ``cuts`` are texts of placements, of which strided ones come last."""
    found = [(int(re.findall(r"\d+", cut)[0]), size, at) for cut, size, at in zip(cuts, sizes, index, strict=True)]
    return cut_box(shape, [found[axis] for axis in sorted(range(len(cuts)), key=lambda axis: cuts[axis][0] == "_")])


@contextmanager
def _described(path: str) -> Iterator[None]:
    """Raise a CheckpointError where a description cannot be read."""
    try:
        yield
    except (ValueError, KeyError, TypeError, IndexError, StopIteration, AttributeError) as error:
        problem = f"its description cannot be read ({type(error).__name__}: {error})"
        rule = "save_checkpoint does not write such a description: the file was changed"
        raise CheckpointError(message(path, problem, rule, "Use another checkpoint")) from None
