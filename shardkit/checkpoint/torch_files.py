"""Files of ``torch.save``: one file, such as FSDP1's FULL_STATE_DICT, or one for each rank.

Files such as ``model_world_size_2_rank_0.pt`` and ``checkpoint_rank1.pt``, as verl and training guides write them, have
the shards of one rank each: of FSDP2 (DTensors), of FSDP1's SHARDED_STATE_DICT (ShardedTensors), or of its
LOCAL_STATE_DICT (flat parameters). All files are mapped, so each rank of any world reads only what it needs.

A flat parameter is the parameters of a unit, without those of the units inside it, in the model's order, padded with
zeros at the end; each rank has one run of it. Their sizes come from the model. With ``use_orig_params=True`` each rank
has its run of each parameter by name, without padding.
"""

from __future__ import annotations

import itertools
import logging
import pickle
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardkit._torch import local_tensor
from shardkit._torch.dispatch import tree_leaves
from shardkit.checkpoint.chunks import covers, full_box
from shardkit.checkpoint.read import Chunk, fill
from shardkit.checkpoint.source import Contents, Stored, contents_of
from shardkit.checkpoint.transfer import Progress
from shardkit.errors import CheckpointError, listing, message
from shardkit.shards import Box, box_at

SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".tar")
_NAME = re.compile(r"(?:(.*?)[_.-])?(?:world_size_(\d{1,6})[_.-])?rank[_-]?(\d{1,6})")
_OPTIMIZER = "optim"
_FLAT = "_flat_param"
_BESIDE = ("extra", "rng", "random", "sched", "trainer")  # names of files that are not read
Shapes: TypeAlias = Mapping[str, torch.Size]  # of the model's parameters, in order
_Trees: TypeAlias = Sequence[Mapping[Any, Any]]  # the state dict of each rank


class TorchFiles:
    """Open files of ``torch.save``. Reading needs neither the world that wrote them nor a process group.

    Args:
        path: for messages.
        sets: the files of each rank, by the start of their names, as from :func:`rank_files`; a lone file under "".
        shapes: of the model's parameters, in order, for FSDP1's flat parameters; None if they are not known.
        allow_pickle: unpickle other objects than tensors and plain data, which can run code.

    Raises:
        CheckpointError: the pieces of a tensor do not fill it, or flat parameters do not fit the model.
    """

    def __init__(
        self, path: Path, sets: Mapping[str, list[Path]], shapes: Shapes | None = None, *, allow_pickle: bool
    ) -> None:
        self._where, self._shapes, self._pieces = str(path), shapes, dict[str, list[Chunk]]()
        try:
            self._open(sets, allow_pickle)
        except (TypeError, ValueError, AttributeError, IndexError, KeyError, RuntimeError) as error:  # foreign files
            rule = "Each file has the shards of one rank, from torch.save of a sharded state dict"
            problem = f"has files that cannot be read ({type(error).__name__}: {error})"
            raise CheckpointError(
                message(self._where, problem, rule, "Pass the directory of one save, or a file of torch.save")
            ) from error

    def _open(self, sets: Mapping[str, list[Path]], allow_pickle: bool) -> None:
        trees: dict[str, list[Any]] = {name: [_load(f, allow_pickle) for f in files] for name, files in sets.items()}
        others = [name for name in sets if _OPTIMIZER not in name]
        self.contents: Contents = Contents({})
        leaves = [leaf for name in others for leaf in tree_leaves(trees[name])]
        for name in others:
            self.contents = contents_of(self._merged(trees[name], (name,)), self._where)
        for name in sets.keys() - others:
            own = trees[name]
            numbered = any(type(key) is int for tree in own for key in tree.get("state", {}))
            try:
                if numbered and any(isinstance(leaf, _ShardedPieces) for leaf in leaves):
                    own = _flat_optimizer(own, self._shapes, self._where)
                self.contents.optimizer = contents_of(self._merged(own, (name,)), self._where).optimizer
            except CheckpointError as error:
                if not self.contents.model:
                    raise
                self.contents.no_optimizer = str(error)

    def _merged(self, trees: list[Any], path: tuple[str, ...]) -> Any:
        """Merge the trees of all ranks, with a :class:`Stored` for each tensor."""
        first = trees[0]
        if isinstance(first, Mapping):
            trees = [each if isinstance(each, Mapping) else {} for each in trees]
            if any(map(_is_flat, trees[0])):
                trees = list(_flat_parameters(trees, self._shapes, self._where))
            keys = dict.fromkeys(key for tree in trees for key in tree)
            return {k: self._merged([t[k] for t in trees if k in t], (*path, str(k))) for k in keys}
        key = ".".join(path).removeprefix(".")
        if isinstance(first, _Runs):
            self._pieces[key] = [(full_box(first.shape), first.full)]
            return Stored(first.parts[0].dtype, first.shape, key)
        if not isinstance(first, Tensor):
            return first
        shape, parts = _parts(trees, key)
        self._pieces[key] = [(box, part.detach) for box, part in parts.items()]
        return Stored(next(iter(parts.values())).dtype, shape, key)

    def read(self, targets: Iterable[tuple[str, Tensor]], progress: Progress | None = None) -> None:
        """Copy into each target its part of the pieces of its key. Local."""
        fill(targets, self._pieces.__getitem__)


def rank_files(path: Path) -> dict[str, list[Path]]:
    """Return the files of all ranks in a directory, or of the set of one file, by the start of their names. Local.

    Files of generators and schedulers, such as verl's ``extra_state_*``, are left out.

    Raises:
        CheckpointError: files of some ranks are missing, or there is more than one set for the model or the optimizer.
    """
    directory = path if path.is_dir() else path.parent
    sets: dict[tuple[str, str], dict[int, Path]] = {}
    for file in sorted(directory.iterdir()):
        named = _NAME.fullmatch(file.stem) if file.suffix in SUFFIXES else None
        if named is not None:
            sets.setdefault((named[1] or "", named[2] or ""), {})[int(named[3])] = file
    if not path.is_dir():
        sets = {key: files for key, files in sets.items() if path in files.values()}
    sets = {key: files for key, files in sets.items() if (len(files) > 1 or key[1]) and not key[0].startswith(_BESIDE)}
    kinds = [_OPTIMIZER in name for name, _ in sets]
    if len(set(kinds)) < len(kinds) or len({world for _, world in sets}) > 1:
        names = listing(f"{name}_*{world}" for name, world in sets)
        rule = "A directory must have the files of one model and its optimizer, saved by one world"
        raise CheckpointError(message(str(path), f"has {names}", rule, "Pass one of the files: its set is read"))
    for (_, world), files in sets.items():
        if missing := [str(rank) for rank in range(int(world or max(files) + 1)) if rank not in files]:
            name, rule = next(iter(files.values())).name, "The files of all ranks are needed"
            problem = f"has {name}, and the files of ranks {listing(missing)} are missing"
            raise CheckpointError(message(str(directory), problem, rule, "Fetch the missing files"))
    return {name: [files[rank] for rank in sorted(files)] for (name, _), files in sets.items()}


# ---- one tensor of all ranks ------------------------------------------------------------------------------------


def _parts(values: list[Any], key: str) -> tuple[torch.Size, dict[Box, Tensor]]:
    """Return the shape of a tensor, and the parts of all ranks.

    Raises:
        CheckpointError: they are not the parts of one tensor.
    """
    first = values[0]
    if any(type(each) is not type(first) for each in values) and not all(type(v) is Tensor for v in values):
        raise _refused(key, "differs in type between ranks")
    if isinstance(first, _ShardedPieces):
        shape, parts = first.size_of_whole, [part for each in values for part in each.pieces]
    elif isinstance(first, DTensor):
        shape, parts = first.shape, [(local_tensor(v), _box(v, r, key)) for r, v in enumerate(values)]
    else:
        if any(each.shape != first.shape for each in values):
            problem = "is a plain tensor with a different shape on each rank, as in FSDP1's optimizer.state_dict()"
            raise _refused(key, problem)
        return first.shape, {full_box(first.shape): first}
    solid = {box: part for part, box in parts if all(size for _, size in box)}
    fits = all(list(part.shape) == [size for _, size in box] for box, part in solid.items())
    if not parts or not fits or not covers(solid, shape):
        if len(values) == 1:
            rule = "The file of a rank is read together with those of all other ranks"
            fix = "Pass the directory that has them, with rank_<number> at the end of their names"
            raise CheckpointError(message(key, "is the shard of one rank", rule, fix))
        raise _refused(key, "is not filled, each element once, by the pieces of the ranks")
    return shape, {box: part for part, box in parts}


def _box(tensor: DTensor, rank: int, key: str) -> Box:
    """Return the box of the rank that wrote a DTensor; it may be read in another world, or without one."""
    at = (tensor.device_mesh.mesh == rank).nonzero().tolist()
    if len(at) != 1 or any(place.is_partial() for place in tensor.placements):
        raise _refused(key, "is a partial sum, or on a mesh without the rank of its file")
    return box_at(tensor, tuple(at[0]))


def _refused(key: str, problem: str) -> CheckpointError:
    rule = "Files of ranks hold DTensors, ShardedTensors, FSDP1's flat parameters, and equal plain tensors"
    fix = "Save a DCP directory, and the optimizer by FSDP.optim_state_dict; or pass one of the model's files"
    return CheckpointError(message(key, problem, rule, fix))


# ---- FSDP1 ------------------------------------------------------------------------------------------------------


class _Shell:
    """The attributes of a pickled object, without its class."""

    def __new__(cls, *args: Any) -> _Shell:
        return super().__new__(cls)

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, tuple):  # of slots; or of TensorProperties, which starts with the dtype
            state = state[1] if len(state) == 2 else {"dtype": state[0]}
        self.__dict__.update(state)


class _ShardedPieces(Tensor):
    """A ShardedTensor of FSDP1 as its file has it; torch's own class requires the process group that wrote it."""

    size_of_whole: torch.Size
    pieces: list[tuple[Tensor, Box]]  # this rank's parts, and where they lie

    def __setstate__(self, state: Any) -> None:
        shards, metadata, *_ = state
        self.size_of_whole = torch.Size(metadata.size)
        places = [(shard.tensor, shard.metadata) for shard in shards]
        self.pieces = [(t, tuple(zip(at.shard_offsets, at.shard_sizes, strict=True))) for t, at in places]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Refuse all operations, since it has no values of its own."""
        if func is torch.ops.aten.detach.default:  # by torch.load
            return args[0]
        raise NotImplementedError(func)


@dataclass(frozen=True)
class _Runs:
    """A tensor as runs of its elements, one after the other, mapped from files."""

    shape: torch.Size
    parts: list[Tensor]

    def full(self) -> Tensor:
        """Return the tensor, in new memory."""
        return torch.cat([part.flatten() for part in self.parts]).view(self.shape)


def _is_flat(key: object) -> bool:
    """Whether a key of a state dict is that of a flat parameter."""
    return str(key).rpartition(".")[2] == _FLAT


def _flat_parameters(trees: _Trees, shapes: Shapes | None, where: str) -> list[dict[Any, Any]]:
    """Return state dicts with flat parameters replaced by the runs of their parameters. Local, pure.

    Raises:
        CheckpointError: sizes are not known, or do not fit.
    """
    if shapes is None:
        raise _needs_model(where, "is FSDP1's LOCAL_STATE_DICT")
    units: dict[str, list[str]] = {key.removesuffix(_FLAT): [] for key in trees[0] if _is_flat(key)}
    for name in shapes:
        around = [unit for unit in units if name.startswith(unit)]
        if around:
            units[max(around, key=len)].append(name)
    runs: dict[str, _Runs] = {}
    for unit, names in units.items():
        if any(name in tree for name in names for tree in trees):  # use_orig_params=True
            found = {name: [tree[name].detach() for tree in trees if name in tree] for name in names}
        else:
            found = _cut(trees, unit, [(name, shapes[name]) for name in names])
        for name in names:
            runs[name] = _checked_runs(found.get(name, []), shapes[name], f"{where}: {name}")
    return [{key: value for key, value in tree.items() if not _is_flat(key)} | runs for tree in trees]


def _flat_optimizer(trees: _Trees, shapes: Shapes | None, where: str) -> list[dict[Any, Any]]:
    """Return ``optimizer.state_dict()`` of all ranks by name, with runs, as one state dict. Local, pure.

    Raises:
        CheckpointError: as :func:`_flat_parameters`; or the parameters were flat, so that numbers count units.
    """
    if shapes is None:
        raise _needs_model(where, "has an optimizer of FSDP1, by number and in runs")
    names, groups = list(shapes), trees[0]["param_groups"]
    if [number for group in groups for number in group["params"]] != list(range(len(names))):
        problem = f"has an optimizer that does not number the model's {len(names)} parameters in order"
        rule = "With use_orig_params=False FSDP1 numbers units, and files of shards do not list their parameters"
        fix = "Save FSDP.optim_state_dict(model, optimizer), or load the model alone"
        raise CheckpointError(message(where, problem, rule, fix))
    state: dict[str, dict[str, Any]] = {}
    for number, name in enumerate(names):
        entries = [tree["state"][number] for tree in trees if number in tree["state"]]
        for key in dict.fromkeys(key for each in entries for key in each):
            values = [each[key] for each in entries if key in each]
            is_run = isinstance(values[0], Tensor) and values[0].ndim > 0
            what = f"{where}: {key} of {name}"
            state.setdefault(name, {})[key] = _checked_runs(values, shapes[name], what) if is_run else values[0]
    named = [{**group, "params": [names[number] for number in group["params"]]} for group in groups]
    return [{"state": state, "param_groups": named}]


def _cut(trees: _Trees, unit: str, sizes: list[tuple[str, torch.Size]]) -> dict[str, list[Tensor]]:
    """Return the runs of each parameter in a unit's flat one, as views; nothing where sizes do not fit."""
    flat = [tree[unit + _FLAT] for tree in trees]
    pieces = [[part for part, _ in each.pieces] if isinstance(each, _ShardedPieces) else [each] for each in flat]
    shards = [part.detach() for each in pieces for part in each]
    padding = sum(shard.numel() for shard in shards) - sum(size.numel() for _, size in sizes)
    if not 0 <= padding < max(len(trees), 2):
        return {}
    found: dict[str, list[Tensor]] = {name: [] for name, _ in sizes}
    ends = itertools.accumulate(size.numel() for _, size in sizes)
    for (name, size), stop in zip(sizes, ends, strict=True):
        first = 0
        for shard in shards:
            low, high = max(stop - size.numel() - first, 0), min(stop - first, shard.numel())
            if low < high:
                found[name].append(shard[low:high])
            first += shard.numel()
    return found


def _checked_runs(parts: list[Tensor], shape: torch.Size, what: str) -> _Runs:
    count = sum(part.numel() for part in parts)
    if count != shape.numel() or any(part.ndim != 1 for part in parts):
        rule = "The pieces of all ranks must add up to the model's parameters, unit by unit"
        fix = "Load into the model that was saved, with its parameters in the same order, or save FULL_STATE_DICT"
        problem = f"has {count} elements in the files, and {shape.numel()} here"
        raise CheckpointError(message(what, problem, rule, fix))
    return _Runs(shape, parts)


def _needs_model(where: str, problem: str) -> CheckpointError:
    rule = "Flat parameters do not store the shapes of parameters, so the model must give them"
    fix = "Load it with load_checkpoint(path, model, ...), and save that; to load a model without its optimizer, pass "
    return CheckpointError(message(where, problem, rule, f"{fix}one of the model's files"))


# ---- one file ---------------------------------------------------------------------------------------------------


def _load(file: Path, allow_pickle: bool) -> Mapping[Any, Any]:
    """Map a file of ``torch.save``, with FSDP1's ShardedTensors as :class:`_ShardedPieces`.

    Raises:
        CheckpointError: it is another file, holds other objects than tensors and plain data, or is not a dict.
    """
    with open(file, "rb") as opened:
        is_zip = opened.read(4) == b"PK\x03\x04"  # since torch 1.6; the only form that can be mapped
    try:
        try:
            with torch.serialization.safe_globals(_SHELLS), _quiet_meshes():
                tree = torch.load(file, map_location="cpu", weights_only=True, mmap=is_zip)
        except pickle.UnpicklingError:
            if not allow_pickle:
                raise
            tree = torch.load(file, map_location="cpu", weights_only=False, mmap=is_zip)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, AttributeError, KeyError, TypeError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        rule = "Only tensors and plain data are loaded from files of torch.save, since pickles can run code"
        fix = "Save state dicts, sharded ones as a DCP directory; or pass allow_pickle=True if you trust the file"
        raise CheckpointError(message(str(file), f"cannot be loaded: {reason}", rule, fix)) from error
    if not isinstance(tree, Mapping):
        rule = "A checkpoint is a dict of tensors, or of such dicts"
        fix = "Save model.state_dict() rather than the model"
        raise CheckpointError(message(str(file), f"holds a {type(tree).__name__}", rule, fix))
    return tree


def _attribute(owner: Any, name: str) -> type[_Shell]:
    """Replace ``getattr``, by which nested classes are pickled."""
    return _Shell


_SHARD = "torch.distributed._shard"
_SHELLS: list[Any] = [
    (_ShardedPieces, f"{_SHARD}.sharded_tensor.api.ShardedTensor"),
    (_attribute, "builtins.getattr"),
    (_attribute, "__builtin__.getattr"),
    (_Shell, f"{_SHARD}.sharded_tensor.shard.Shard"),
    (_Shell, f"{_SHARD}.metadata.ShardMetadata"),
    (_Shell, f"{_SHARD}.sharding_spec.chunk_sharding_spec.ChunkShardingSpec"),
    (_Shell, f"{_SHARD}.sharding_spec.api.EnumerableShardingSpec"),
    (_Shell, f"{_SHARD}.sharded_tensor.metadata.MEM_FORMAT_ENCODING"),
    (_Shell, f"{_SHARD}.sharded_tensor.metadata.ShardedTensorMetadata"),
    (_Shell, f"{_SHARD}.sharded_tensor.metadata.TensorProperties"),
    (_Shell, "torch.distributed.remote_device._remote_device"),
]


@contextmanager
def _quiet_meshes() -> Iterator[None]:
    """Silence what a DeviceMesh logs when it is unpickled without its process groups (torch 2.13)."""
    logger = logging.getLogger("torch.distributed.device_mesh")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before
