"""Files of ``torch.save``: one file, such as FSDP1's FULL_STATE_DICT, or one for each rank.

Files such as ``model_world_size_2_rank_0.pt`` and ``checkpoint_rank1.pt``, as verl and training
guides write them, have the shards of one rank each: of FSDP2 (DTensors), of FSDP1's
SHARDED_STATE_DICT (ShardedTensors), or of its LOCAL_STATE_DICT (flat parameters). All files are
mapped, so each rank of any world reads only what it needs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardkit._torch import is_wrapper, local_tensor
from shardkit.checkpoint.byte_ranges import full_box, part_of
from shardkit.checkpoint.source import Contents, Stored, contents_of
from shardkit.errors import CheckpointError, listing
from shardkit.shards import Box, box_at, common, covers, inside, local_value

SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".tar")
_NAME = re.compile(r"(?:(.*?)[_.-])?(?:world_size_(\d{1,6})[_.-])?rank[_-]?(\d{1,6})")
_OPTIMIZER = "optim"
_FLAT = "_flat_param"
_BESIDE = ("extra", "rng", "random", "sched", "trainer")  # names of files that are not read
Shapes: TypeAlias = Mapping[str, torch.Size]  # of the model's parameters, in order
# its box in its tensor, and a function that loads it
_Chunk: TypeAlias = "tuple[Box, Callable[[], Tensor]]"
_Trees: TypeAlias = Sequence[Mapping[Any, Any]]  # the state dict of each rank


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
        self.contents: Contents = Contents({})
        for name in sorted(sets, key=lambda name: _OPTIMIZER in name):  # the model first
            if with_optimizer or not self.contents.model:
                found = contents_of(
                    self._merged([_load(file) for file in sets[name]], (name,)), self._where
                )
                self.contents = (
                    replace(self.contents, optimizer=found.optimizer)
                    if self.contents.model
                    else found
                )

    def _merged(self, trees: list[Any], path: tuple[str, ...]) -> Any:
        """Merge the trees of all ranks, with a :class:`Stored` for each tensor."""
        first, key = trees[0], ".".join(path).removeprefix(".")
        if isinstance(first, Mapping):
            if any(str(name).endswith(_FLAT) for name in first):
                trees = [first := _by_parameter(trees, self._shapes, self._where)]
            keys = dict.fromkeys(key for tree in trees for key in tree)
            return {k: self._merged([t[k] for t in trees if k in t], (*path, str(k))) for k in keys}
        if isinstance(first, _Run):
            self._chunks[key] = [(full_box(first.shape), first.full)]
            return Stored(first.shards[0].dtype, first.shape, key)
        if not isinstance(first, Tensor):
            return first
        shape, parts = _parts(trees, key)
        self._chunks[key] = [(box, part.detach) for box, part in parts.items()]
        return Stored(next(iter(parts.values())).dtype, shape, key)

    @torch.no_grad()
    def read(self, targets: Iterable[tuple[str, Tensor]]) -> None:
        """Copy into each target its part of the tensor of its key; of quantized tensors their
        values. Local.
        """
        for key, into, box in [(key, *part_of(target)) for key, target in targets]:
            for at, load in self._chunks[key]:
                if (shared := common(box, at)) is not None:
                    loaded = local_value(load())
                    values = loaded.dequantize() if is_wrapper(loaded) else loaded
                    inside(into, box, shared).copy_(inside(values, at, shared))


def rank_files(path: Path) -> dict[str, list[Path]]:
    """Return the files of all ranks in a directory, or of the set of one file, by the start of
    their names. Local.

    Files of generators and schedulers, such as verl's ``extra_state_*``, are left out.
    """
    directory = path if path.is_dir() else path.parent
    sets: dict[tuple[str, str], dict[int, Path]] = {}
    for file in sorted(directory.iterdir()):
        named = _NAME.fullmatch(file.stem) if file.suffix in SUFFIXES else None
        if named is not None and not (named[1] or "").startswith(_BESIDE):
            sets.setdefault((named[1] or "", named[2] or ""), {})[int(named[3])] = file
    if not path.is_dir():
        sets = {key: files for key, files in sets.items() if path in files.values()}
    sets = {key: files for key, files in sets.items() if len(files) > 1 or key[1]}
    kinds = [_OPTIMIZER in name for name, _ in sets]
    if len(set(kinds)) < len(kinds) or len({world for _, world in sets}) > 1:
        names = listing(f"{name}_*{world}" for name, world in sets)
        raise CheckpointError(
            f"{path} has {names}. A directory must have the files of one model and its optimizer, "
            "saved by one world. Pass one of the files: its set is read."
        )
    for (name, world), files in sets.items():
        missing = set(range(int(world or max(files) + 1))) - files.keys()
        if missing:
            raise CheckpointError(
                f"{directory} has {name}_*{world}, and the files of ranks "
                f"{listing(map(str, sorted(missing)))} are missing. Fetch them: all are needed."
            )
    return {name: [files[rank] for rank in sorted(files)] for (name, _), files in sets.items()}


def _load(file: Path) -> Mapping[Any, Any]:
    """Map a file, with FSDP1's ShardedTensors as :class:`_ShardedPieces`."""
    with torch.serialization.safe_globals(_SHELLS):
        tree = torch.load(file, weights_only=True, map_location="cpu", mmap=True)
    if not isinstance(tree, Mapping):
        raise CheckpointError(
            f"{file} holds a {type(tree).__name__}. A checkpoint is a dict of tensors, or of such "
            "dicts. Save model.state_dict() rather than the model."
        )
    return tree


# ---- one tensor of all ranks ---------------------------------------------------------------------


def _parts(values: list[Any], key: str) -> tuple[torch.Size, dict[Box, Tensor]]:
    """Return the shape of a tensor, and the parts of all ranks, which must fill it."""
    first = values[0]
    if isinstance(first, _ShardedPieces):
        shape, parts = (
            first.size_of_full,
            {box: part for each in values for part, box in each.pieces},
        )
    elif isinstance(first, DTensor):
        shape, parts = (
            first.shape,
            {_box(each, rank, key): local_tensor(each) for rank, each in enumerate(values)},
        )
    else:
        shape, parts = first.shape, {full_box(first.shape): first}
        # Runs of FSDP1's own optimizer may have one shape on all ranks; buffers may differ in their
        # values.
        if any(
            each.shape != shape or (_OPTIMIZER in key and not torch.equal(each, first))
            for each in values
        ):
            raise _refused(key, "is a plain tensor that differs between ranks")
    if not covers(parts, shape):
        raise _refused(key, "is not filled, each element once, by its parts in the files")
    return shape, parts


def _box(tensor: DTensor, rank: int, key: str) -> Box:
    """Return the box of the rank that wrote a DTensor; it may be read in another world, or without
    one.
    """
    at = (tensor.device_mesh.mesh == rank).nonzero().tolist()
    if len(at) != 1 or any(place.is_partial() for place in tensor.placements):
        raise _refused(key, "is a partial sum, or on a mesh without the rank of its file")
    return box_at(tensor, tuple(at[0]))


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
        places = [(shard.tensor, shard.metadata) for shard in shards]
        self.pieces = [
            (t, tuple(zip(at.shard_offsets, at.shard_sizes, strict=True))) for t, at in places
        ]

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


@dataclass(frozen=True)
class _Run:
    """A parameter as a run of the elements of a flat one, which the ranks hold one
    after the other.
    """

    shape: torch.Size
    shards: list[Tensor]
    start: int

    def full(self) -> Tensor:
        """Return the parameter, in new memory."""
        start, parts = self.start, []
        for shard in self.shards:
            parts.append(shard[max(start, 0) : max(start + self.shape.numel(), 0)])
            start -= shard.numel()
        return torch.cat(parts).view(self.shape)


def _by_parameter(trees: _Trees, shapes: Shapes | None, where: str) -> dict[Any, Any]:
    """Return a state dict with each flat parameter replaced by the runs of the unit's parameters.
    Local, pure.

    A flat parameter is the parameters of a unit, without those of the units inside it, in the
    model's order, and zeros at the end. With ``use_orig_params=True`` its parameters start at
    multiples of 16 bytes, and are listed by name too.
    """
    if shapes is None:
        raise CheckpointError(
            f"{where} is FSDP1's LOCAL_STATE_DICT. Flat parameters do not store the shapes of "
            "parameters, so the model must give them. Load it with load_checkpoint(path, model), "
            "and save that."
        )
    units: dict[str, list[str]] = {
        key.removesuffix(_FLAT): [] for key in trees[0] if key.endswith(_FLAT)
    }
    found = {key: value for key, value in trees[0].items() if not key.endswith(_FLAT)}
    for name in shapes:
        if around := [unit for unit in units if name.startswith(unit)]:
            units[max(around, key=len)].append(name)
    for unit, names in units.items():
        flat = [tree[unit + _FLAT] for tree in trees]
        pieces = [
            [part for part, _ in each.pieces] if isinstance(each, _ShardedPieces) else [each]
            for each in flat
        ]
        shards = [part.detach() for of_rank in pieces for part in of_rank]
        step, end = 16 // shards[0].element_size() if found.keys() & names else 1, 0
        for name in names:
            start = -(-end // step) * step
            found[name] = _Run(shapes[name], shards, start)
            end = start + shapes[name].numel()
        total = sum(shard.numel() for shard in shards)
        if not end <= total <= end + max(len(trees) - 1, 1):
            raise CheckpointError(
                f"{where}: {listing(names)} has {total} elements in the files, and {end} here. The "
                "shards of all ranks must add up to the model's parameters, unit by unit. Load "
                "into the model that was saved, with its parameters in the same order, or save "
                "FULL_STATE_DICT."
            )
    return found
