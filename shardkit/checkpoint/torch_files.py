"""Files of ``torch.save``: one, as FSDP1's FULL_STATE_DICT and plain programs leave, or one for each rank.

``model_world_size_2_rank_0.pt``, ``checkpoint_rank1.pt`` and their like, as verl and training guides write them, have
the shards of one rank each: of FSDP2 (DTensors), of FSDP1's SHARDED_STATE_DICT (ShardedTensors), or of its
LOCAL_STATE_DICT (flat parameters). All files are mapped, so each rank of any world reads what it needs of each.
"""

from __future__ import annotations

import logging
import pickle
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardkit import _torch
from shardkit.checkpoint import flat
from shardkit.checkpoint.dcp import Shell
from shardkit.checkpoint.owners import fingerprint
from shardkit.checkpoint.pieces import whole
from shardkit.checkpoint.read import Piece, fill
from shardkit.checkpoint.source import Contents, Stored, contents_of
from shardkit.checkpoint.transfer import Progress
from shardkit.errors import CheckpointError, listing, message
from shardkit.shards import Box, box_at

SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".tar")
_NAME = re.compile(r"(?:(.*?)[_.-])?(?:world_size_(\d{1,6})[_.-])?rank[_-]?(\d{1,6})")
_OPTIMIZER = "optim"
_BESIDE = ("extra", "rng", "random", "sched", "trainer")  # generators and the like, which are not read


class TorchFiles:
    """Files of ``torch.save``, open. Reading needs neither the world that wrote them nor a process group.

    Args:
        path: for messages.
        sets: by what they begin with, the files of each rank, as from :func:`rank_files`; a lone file under "".
        shapes: of the model's parameters, in order, for what FSDP1 keeps flat; None: not known.
        allow_pickle: unpickle what is neither a tensor nor plain data, which can run code.

    Raises:
        CheckpointError: their pieces do not fill a tensor, or flat ones do not fit the model.
    """

    def __init__(
        self, path: Path, sets: Mapping[str, list[Path]], shapes: flat.Shapes | None = None, *, allow_pickle: bool
    ) -> None:
        self._where, self._shapes, self._pieces = str(path), shapes, dict[str, list[Piece]]()
        try:
            self._open(sets, allow_pickle)
        except (
            TypeError,
            ValueError,
            AttributeError,
            IndexError,
            KeyError,
            RuntimeError,
        ) as error:  # anyone wrote them
            rule = "A file for each rank has the shards that torch.save of a sharded state dict writes"
            problem = f"its files cannot be read ({type(error).__name__}: {error})"
            raise CheckpointError(message(self._where, problem, rule, "Use another checkpoint")) from error

    def _open(self, sets: Mapping[str, list[Path]], allow_pickle: bool) -> None:
        trees = {name: [_dict(file, allow_pickle) for file in files] for name, files in sets.items()}
        others = [name for name in sets if _OPTIMIZER not in name]
        self.contents: Contents = Contents({})
        leaves = (leaf for name in others for leaf in _torch.tree_leaves(trees[name]))
        self._has_sharded = any(isinstance(leaf, flat.ShardedPieces) for leaf in leaves)
        for name in others:
            self.contents = contents_of(self._merged(trees[name], (name,)), self._where)
        for name in sets.keys() - others:
            try:
                self.contents.optimizer = self._optimizer(trees[name], name)
            except CheckpointError as error:
                if not self.contents.model:
                    raise
                self.contents.no_optimizer = str(error)

    def _optimizer(self, trees: list[Any], name: str) -> dict[str, Any] | None:
        numbered = [key for tree in trees for key in tree.get("state", {}) if type(key) is int]
        if self._has_sharded and numbered:
            trees = flat.optimizer_states(trees, self._shapes, self._where)
        return contents_of(self._merged(trees, (name,)), self._where).optimizer

    def _merged(self, trees: list[Any], path: tuple[str, ...]) -> Any:
        """One tree of those of all ranks, with a :class:`Stored` for what they have pieces of."""
        first = trees[0]
        if isinstance(first, Mapping):
            trees = [each if isinstance(each, Mapping) else {} for each in trees]
            if flat.is_flat(trees):
                trees = list(flat.parameters(trees, self._shapes, self._where))
            keys = dict.fromkeys(key for tree in trees for key in tree)
            return {k: self._merged([t[k] for t in trees if k in t], (*path, str(k))) for k in keys}
        if not isinstance(first, (Tensor, flat.Runs)):
            return first
        key = ".".join(path).removeprefix(".")
        if isinstance(first, flat.Runs):
            self._pieces[key] = [(whole(first.shape), first.full)]
            return Stored(first.parts[0].dtype, first.shape, key)
        shape, parts = _parts(trees, key)
        self._pieces[key] = [(box, part.detach) for box, part in parts.items()]
        return Stored(next(iter(parts.values())).dtype, shape, key)

    def read(self, targets: Iterable[tuple[str, Tensor]], progress: Progress | None = None) -> None:
        """Copy into each target what it has of the pieces of its key. Local."""
        fill(targets, self._pieces.__getitem__, progress)


def rank_files(path: Path) -> dict[str, list[Path]]:
    """The files of all ranks in a directory, or those that belong together with one, by what they begin with. Local.

    Generators, schedulers and the like, such as verl's ``extra_state_*``, are left out.

    Raises:
        CheckpointError: files of some ranks are missing, or it is not clear which are meant.
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
        rule = "A directory has the files of one model and its optimizer, written by one world"
        raise CheckpointError(message(str(path), f"it has {names}", rule, "Pass one of the files: its set is read"))
    for (_, world), files in sets.items():
        if missing := [str(rank) for rank in range(int(world or max(files) + 1)) if rank not in files]:
            name, rule = next(iter(files.values())).name, "Each rank wrote one file, and all are needed"
            problem = f"beside {name} the files of ranks {listing(missing)} are missing"
            raise CheckpointError(message(str(directory), problem, rule, "Fetch them"))
    return {name: [files[rank] for rank in sorted(files)] for (name, _), files in sets.items()}


# ---- one tensor of all ranks ------------------------------------------------------------------------------------


def _parts(values: list[Any], key: str) -> tuple[torch.Size, dict[Box, Tensor]]:
    """The shape of a tensor, and what all ranks have of it.

    Raises:
        CheckpointError: it does not make one tensor.
    """
    first = values[0]
    if any(type(each) is not type(first) for each in values) and not all(type(v) is Tensor for v in values):
        raise _refused(key, "ranks have it as different kinds")
    if isinstance(first, flat.ShardedPieces):
        shape, parts = first.size_of_whole, [part for each in values for part in each.pieces]
    elif isinstance(first, DTensor):
        shape, parts = first.shape, [(_torch.local_tensor(v), _box(v, r, key)) for r, v in enumerate(values)]
    else:
        if any(each.shape != first.shape for each in values):
            problem = "it is plain, of a shape of its own on each rank, as FSDP1's optimizer.state_dict() is"
            raise _refused(key, problem)
        return first.shape, {whole(first.shape): first}
    solid = {box: part for part, box in parts if all(size for _, size in box)}
    fits = all(list(part.shape) == [size for _, size in box] for box, part in solid.items())
    if not parts or not fits or fingerprint(solid, shape) != fingerprint([whole(shape)], shape):
        if len(values) == 1:
            rule = "A file for each rank is read with those of all others"
            fix = "Pass the directory that has them, with rank_<number> at the end of their names"
            raise CheckpointError(message(key, "it is the shard of one rank", rule, fix))
        raise _refused(key, "the pieces of the ranks do not fill it, each element once")
    return shape, {box: part for part, box in parts}


def _box(tensor: DTensor, rank: int, key: str) -> Box:
    """Where the part of the rank that wrote a DTensor lies; it may be read in another world, or in none."""
    at = (tensor.device_mesh.mesh == rank).nonzero().tolist()
    if len(at) != 1 or any(place.is_partial() for place in tensor.placements):
        raise _refused(key, "it is a partial sum, or lies on a mesh without the rank of its file")
    return box_at(tensor, tuple(at[0]))


def _refused(key: str, problem: str) -> CheckpointError:
    rule = "Files of ranks have DTensors, ShardedTensors or FSDP1's flat parameters, and plain tensors that are alike"
    fix = "Save a DCP directory, and the optimizer by FSDP.optim_state_dict; or pass a file of the model's set alone"
    return CheckpointError(message(key, problem, rule, fix))


# ---- one file ---------------------------------------------------------------------------------------------------


def _dict(file: Path, allow_pickle: bool) -> Mapping[Any, Any]:
    tree = _loaded(file, allow_pickle)
    if not isinstance(tree, Mapping):
        rule = "A checkpoint is a dict of tensors, or of such dicts"
        fix = "Save model.state_dict() rather than the model"
        raise CheckpointError(message(str(file), f"it holds a {type(tree).__name__}", rule, fix))
    return tree


def _loaded(file: Path, allow_pickle: bool) -> Any:
    """What is in a file of ``torch.save``, mapped; FSDP1's ShardedTensors as :class:`flat.ShardedPieces`.

    Raises:
        CheckpointError: it is not such a file, or holds other than tensors and plain data.
    """
    with open(file, "rb") as opened:
        is_zip = opened.read(4) == b"PK\x03\x04"  # since torch 1.6; the only form that can be mapped
    try:
        try:
            with torch.serialization.safe_globals(_SHELLS), _quiet_meshes():
                return torch.load(file, map_location="cpu", weights_only=True, mmap=is_zip)
        except pickle.UnpicklingError:
            if not allow_pickle:
                raise
            return torch.load(file, map_location="cpu", weights_only=False, mmap=is_zip)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, AttributeError, KeyError, TypeError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        rule = "Loaded are files of torch.save with tensors and plain data, since pickles can run code"
        fix = "Save state dicts, with SHARDED ones as a DCP directory; or pass allow_pickle=True if you trust it"
        raise CheckpointError(message(str(file), f"torch.load says: {reason}", rule, fix)) from error


def _attribute(owner: Any, name: str) -> type[Shell]:
    """In the place of ``getattr``, by which a nested class is pickled."""
    return Shell


_SHARD = "torch.distributed._shard"
_SHELLS: list[Any] = [
    (flat.ShardedPieces, f"{_SHARD}.sharded_tensor.api.ShardedTensor"),
    (_attribute, "builtins.getattr"),
    (_attribute, "__builtin__.getattr"),
    (Shell, f"{_SHARD}.sharded_tensor.shard.Shard"),
    (Shell, f"{_SHARD}.metadata.ShardMetadata"),
    (Shell, f"{_SHARD}.sharding_spec.chunk_sharding_spec.ChunkShardingSpec"),
    (Shell, f"{_SHARD}.sharding_spec.api.EnumerableShardingSpec"),
    (Shell, f"{_SHARD}.sharded_tensor.metadata.MEM_FORMAT_ENCODING"),
    (Shell, f"{_SHARD}.sharded_tensor.metadata.ShardedTensorMetadata"),
    (Shell, f"{_SHARD}.sharded_tensor.metadata.TensorProperties"),
    (Shell, "torch.distributed.remote_device._remote_device"),
]


@contextmanager
def _quiet_meshes() -> Iterator[None]:
    """Silence what a DeviceMesh logs when it is unpickled where its process groups are not there (torch 2.13)."""
    logger = logging.getLogger("torch.distributed.device_mesh")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before
