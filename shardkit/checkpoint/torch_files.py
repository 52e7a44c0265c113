"""Files of ``torch.save``: one file, such as FSDP1's FULL_STATE_DICT, or one for each rank.

Files such as ``model_world_size_2_rank_0.pt`` and ``checkpoint_rank1.pt``, as verl and training
guides write them, have the shards of one rank each: of FSDP2 (DTensors), of FSDP1's
SHARDED_STATE_DICT (ShardedTensors), or of its LOCAL_STATE_DICT (flat parameters). All files are
mapped, so each rank of any world reads only what it needs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardkit._torch import local_tensor
from shardkit.checkpoint.byte_ranges import full_box, part_of
from shardkit.checkpoint.source import Contents, Stored, contents_of
from shardkit.errors import CheckpointError, listing
from shardkit.shards import Box, box_at, common, covers, inside, local_value

SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".tar")
_NAME = re.compile(r"(|.*[_.-])rank[_-]?(\d{1,6})")
_OPTIMIZER = "optim"
_FLAT = "_flat_param"
_NOT_READ = ("extra", "rng", "sched")  # as file names begin
Shapes: TypeAlias = Mapping[str, torch.Size]  # of the model's parameters, in order
# a box of a tensor, and a function that loads it
_Chunk: TypeAlias = "tuple[Box, Callable[[], Tensor]]"


class TorchFiles:
    """Open files of ``torch.save``. Reading needs neither the world that wrote them nor a process
    group.

    ``sets`` are the files of all ranks, by the start of their names, as from :func:`rank_files`; a
    lone file is under "". ``shapes`` are those of the model's parameters, in order, for FSDP1's
    flat parameters.
    """

    def __init__(
        self,
        path: Path,
        sets: Mapping[str, list[Path]],
        shapes: Shapes | None,
        with_optimizer: bool,
    ) -> None:
        self._where, self._shapes, self._chunks = str(path), shapes, dict[str, list[_Chunk]]()
        self.contents = Contents({})
        for name in sorted(sets, key=lambda name: _OPTIMIZER in name):  # the model first
            if self.contents.model and not with_optimizer:
                continue
            tree = self._merged([_load(file) for file in sets[name]], (name,))
            contents = contents_of(tree)
            if self.contents.model:
                contents = replace(self.contents, optimizer=contents.optimizer)
            self.contents = contents

    def _merged(self, trees: list[Any], path: tuple[str, ...]) -> Any:
        """Merge the values of all ranks, with a :class:`Stored` for each tensor."""
        first, key = trees[0], ".".join(path).removeprefix(".")
        if isinstance(first, Mapping):
            if any(str(name).endswith(_FLAT) for name in first):
                trees = [self._by_parameter(trees, key)]
            merged: dict[Any, Any] = {}
            for tree in trees:
                for name in tree:
                    if name not in merged:
                        values = [other[name] for other in trees if name in other]
                        merged[name] = self._merged(values, (*path, str(name)))
            return merged
        if not isinstance(first, Tensor):
            return first
        shape, parts = _parts(trees, key)
        self._chunks[key] = [(box, part.detach) for box, part in parts.items()]
        return Stored(next(iter(parts.values())).dtype, shape, key)

    def _by_parameter(self, trees: list[Any], key: str) -> dict[Any, Any]:
        """Return FSDP1's LOCAL_STATE_DICT with each flat parameter replaced by the unit's
        parameters, which are runs of it.

        A flat parameter is the parameters of a unit, without those of the units inside it, in the
        model's order, and zeros at the end. With ``use_orig_params=True`` its parameters start at
        multiples of 16 bytes, and are listed by name too.
        """
        if self._shapes is None:
            raise CheckpointError(
                f"{self._where} is FSDP1's LOCAL_STATE_DICT. Flat parameters do not store the "
                "shapes of parameters, so the model must give them. Load it with "
                "load_checkpoint(path, model), and save that."
            )
        units: dict[str, list[str]] = {}
        by_name: dict[Any, Any] = {}
        for name, value in trees[0].items():
            if name.endswith(_FLAT):
                units[name.removesuffix(_FLAT)] = []
            else:
                by_name[name] = value
        for name in self._shapes:
            outer = [unit for unit in units if name.startswith(unit)]
            if outer:
                units[max(outer, key=len)].append(name)
        for unit, names in units.items():
            shards: list[Tensor] = []
            for tree in trees:
                flat = tree[unit + _FLAT]
                if isinstance(flat, _ShardedPieces):
                    shards += [piece.detach() for piece, _ in flat.pieces]
                else:
                    shards.append(flat.detach())
            # With use_orig_params=True.
            is_listed = not by_name.keys().isdisjoint(names)
            alignment = 16 // shards[0].element_size() if is_listed else 1
            end = 0
            for name in names:
                start, shape = -(-end // alignment) * alignment, self._shapes[name]
                end = start + shape.numel()
                stored = Stored(shards[0].dtype, shape, f"{key}.{name}")
                by_name[name] = stored
                load = partial(_run, shards, start, shape)
                self._chunks[stored.key] = [(full_box(shape), load)]
            total = sum(shard.numel() for shard in shards)
            if not end <= total <= end + max(len(trees) - 1, 1):
                raise CheckpointError(
                    f"{self._where}: {listing(names)} has {total} elements in the files, and {end} "
                    "here. The shards of all ranks must add up to the model's parameters, unit by "
                    "unit. Load into the model that was saved, with its parameters in the same "
                    "order, or save FULL_STATE_DICT."
                )
        return by_name

    @torch.no_grad()
    def read(self, targets: Iterable[tuple[str, Tensor]]) -> None:
        """Copy into each target its part of the tensor of its key. Local."""
        for key, target in targets:
            part, part_box = part_of(target)
            for box, load in self._chunks[key]:
                shared = common(part_box, box)
                if shared is None:
                    continue
                values = local_value(load())
                inside(part, part_box, shared).copy_(inside(values, box, shared))


def rank_files(path: Path) -> dict[str, list[Path]]:
    """Return the files of all ranks in a directory, or of the set of one file, by the start of
    their names. Local.

    Files of generators and schedulers, such as verl's ``extra_state_*``, are left out.
    """
    directory = path if path.is_dir() else path.parent
    sets: dict[str, dict[int, Path]] = {}
    for file in sorted(directory.iterdir()):
        match = _NAME.fullmatch(file.stem)
        if match and file.suffix in SUFFIXES and not match[1].startswith(_NOT_READ):
            sets.setdefault(match[1], {})[int(match[2])] = file
    complete: dict[str, list[Path]] = {}
    for name, files in sets.items():
        if not path.is_dir() and path not in files.values():
            continue
        # Of ranks after these the files may be missing too: their shards are missed then.
        missing = [str(rank) for rank in range(max(files)) if rank not in files]
        if missing:
            raise CheckpointError(
                f"{directory} has {name}*, and the files of ranks {listing(missing)} are missing. "
                "Fetch them: all are needed."
            )
        complete[name] = [files[rank] for rank in sorted(files)]
    optimizers = [name for name in complete if _OPTIMIZER in name]
    if len(optimizers) > 1 or len(complete) - len(optimizers) > 1:
        raise CheckpointError(
            f"{path} has {listing(f'{name}*' for name in complete)}. A directory must have the "
            "files of one model and its optimizer, saved by one world. Pass one of the files: its "
            "set is read."
        )
    return complete


def _load(file: Path) -> Mapping[Any, Any]:
    """Map a file, with FSDP1's ShardedTensors as :class:`_ShardedPieces`."""
    with torch.serialization.safe_globals(_SHELLS):
        tree: Mapping[Any, Any] = torch.load(file, weights_only=True, map_location="cpu", mmap=True)
    return tree


# ---- one tensor of all ranks ---------------------------------------------------------------------


def _parts(values: list[Any], key: str) -> tuple[torch.Size, dict[Box, Tensor]]:
    """Return the shape of a tensor, and the parts of all ranks, which must fill it."""
    first = values[0]
    shape: torch.Size = first.shape
    parts: dict[Box, Tensor] = {}
    if isinstance(first, _ShardedPieces):
        shape = first.size_of_full
        for value in values:
            for piece, box in value.pieces:
                parts[box] = piece
    elif isinstance(first, DTensor):
        for rank, value in enumerate(values):
            # A DTensor may be read in another world, or without one: its mesh says where it was.
            coordinates = (value.device_mesh.mesh == rank).nonzero().tolist()
            parts[box_at(value, tuple(coordinates[0]))] = local_tensor(value)
    else:
        parts[full_box(shape)] = first
        for value in values:
            # Flat pieces of FSDP1's own optimizer may have one shape on all ranks. Buffers may
            # differ in their values.
            is_piece = _OPTIMIZER in key and not torch.equal(value, first)
            if value.shape != shape or is_piece:
                raise _refused(key, "is a plain tensor that differs between ranks")
    if not covers(parts, shape):
        raise _refused(key, "is not filled, each element once, by its parts in the files")
    return shape, parts


def _refused(key: str, problem: str) -> CheckpointError:
    return CheckpointError(
        f"{key} {problem}. Shards are read from the files of all ranks, as DTensors, "
        "ShardedTensors or FSDP1's flat parameters, and an optimizer of FSDP1 by name, from "
        "FSDP.optim_state_dict(model, optimizer). Pass the directory, with rank_<number> at the "
        "end of the files' names; or pass the model's file alone."
    )


# ---- FSDP1 ---------------------------------------------------------------------------------------


class _Shell:
    """The attributes of a pickled object, without its class."""

    def __new__(cls, *args: Any) -> _Shell:
        return super().__new__(cls)

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, tuple):  # of slots; or of TensorProperties, which is not needed
            state = state[1] if len(state) == 2 else {}
        self.__dict__.update(state)


class _ShardedPieces(Tensor):
    """A ShardedTensor of FSDP1 as its file has it; torch's own class requires the process group
    that wrote it.
    """

    size_of_full: torch.Size
    pieces: list[tuple[Tensor, Box]]  # this rank's parts, and where they lie

    def __setstate__(self, state: Any) -> None:
        shards, metadata, *_ = state
        self.size_of_full = torch.Size(metadata.size)
        self.pieces = []
        for shard in shards:
            place = shard.metadata
            box = tuple(zip(place.shard_offsets, place.shard_sizes, strict=True))
            self.pieces.append((shard.tensor, box))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Refuse all operations, since it has no values of its own."""
        if func is torch.ops.aten.detach.default:  # by torch.load
            return args[0]
        raise NotImplementedError(func)


def _attribute(owner: Any, name: str) -> type[_Shell]:
    """Replace ``getattr``, by which nested classes are pickled."""
    return _Shell


_SHARD = "torch.distributed._shard"
_CLASSES = (
    f"{_SHARD}.sharded_tensor.shard.Shard",
    f"{_SHARD}.metadata.ShardMetadata",
    f"{_SHARD}.sharding_spec.chunk_sharding_spec.ChunkShardingSpec",
    f"{_SHARD}.sharding_spec.api.EnumerableShardingSpec",
    f"{_SHARD}.sharded_tensor.metadata.MEM_FORMAT_ENCODING",
    f"{_SHARD}.sharded_tensor.metadata.ShardedTensorMetadata",
    f"{_SHARD}.sharded_tensor.metadata.TensorProperties",
    "torch.distributed.remote_device._remote_device",
)
_SHELLS: list[Any] = [
    (_ShardedPieces, f"{_SHARD}.sharded_tensor.api.ShardedTensor"),
    (_attribute, "builtins.getattr"),
    (_attribute, "__builtin__.getattr"),
    *((_Shell, name) for name in _CLASSES),
]


def _run(shards: list[Tensor], start: int, shape: torch.Size) -> Tensor:
    """Return a parameter, in new memory, that starts in a flat one which lies in shards."""
    parts = []
    for shard in shards:
        end = start + shape.numel()  # both count from the start of this shard, and may be negative
        parts.append(shard[max(start, 0) : max(end, 0)])
        start -= shard.numel()
    return torch.cat(parts).view(shape)
