"""A file for each rank, as verl and training guides write them with ``torch.save`` of sharded state dicts.

``model_world_size_2_rank_0.pt``, ``checkpoint_rank1.pt`` and their like: in each the shards of one rank, of FSDP2
(DTensors), of FSDP1's SHARDED_STATE_DICT (ShardedTensors), or of its LOCAL_STATE_DICT (flat parameters). All files are
mapped, so each rank of any world reads what it needs of each.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardkit import _torch
from shardkit._torch import tree_leaves
from shardkit.checkpoint import flat
from shardkit.checkpoint.fsdp1 import SUFFIXES, ShardedPieces, loaded
from shardkit.checkpoint.owners import fingerprint
from shardkit.checkpoint.pieces import inside, part_of, whole
from shardkit.checkpoint.source import Contents, Stored, contents_of, local_bytes
from shardkit.checkpoint.transfer import Meter, Progress
from shardkit.errors import CheckpointError, listing, message
from shardkit.shards import Box, box_at

_NAME = re.compile(r"(?:(.*?)[_.-])?(?:world_size_(\d{1,6})[_.-])?rank[_-]?(\d{1,6})")
_OPTIMIZER = "optim"
_BESIDE = ("extra", "rng", "random", "sched", "trainer")  # generators and the like, which are not read


@dataclass(frozen=True)
class Pieces:
    """A tensor of which the files have pieces.

    Attributes:
        shape: of the whole.
        parts: each with where it lies.
    """

    shape: torch.Size
    parts: list[tuple[Tensor, Box]]

    @property
    def dtype(self) -> torch.dtype:
        """Of all parts."""
        return self.parts[0][0].dtype


class RankFiles:
    """The files of all ranks, open. Reading needs neither the world that wrote them nor a process group.

    Args:
        path: for messages.
        sets: by what they begin with, the files of each rank, as from :func:`rank_files`.
        shapes: of the model's parameters, in order, for what FSDP1 keeps flat; None: not known.
        allow_pickle: as for files of ``torch.save``.

    Raises:
        CheckpointError: their pieces do not fill a tensor, or flat ones do not fit the model.
    """

    def __init__(
        self, path: Path, sets: Mapping[str, list[Path]], shapes: flat.Shapes | None, *, allow_pickle: bool = False
    ) -> None:
        self._where, self._shapes, self._tensors = str(path), shapes, dict[str, Pieces | flat.Runs]()
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
        self._has_sharded = any(isinstance(leaf, ShardedPieces) for name in others for leaf in tree_leaves(trees[name]))
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
        key = ".".join(path)
        self._tensors[key] = found = first if isinstance(first, flat.Runs) else _pieces(trees, key)
        return Stored(found.parts[0].dtype if isinstance(found, flat.Runs) else found.dtype, found.shape, key)

    @torch.no_grad()
    def read(self, targets: Iterable[tuple[str, Tensor]], progress: Progress | None = None) -> None:
        """Copy into each target what it has of the pieces of its key. Local."""
        wanted = list(targets)
        meter = Meter(progress, sum(local_bytes(target) for _, target in wanted))
        for key, target in wanted:
            (into, box), found = part_of(target), self._tensors[key]
            whole_of = [(found.full(), whole(found.shape))] if isinstance(found, flat.Runs) else found.parts
            for piece, at in whole_of:
                shared = _shared(box, at)
                if shared is not None:
                    inside(into, box, shared).copy_(inside(piece, at, shared))
            meter.add(into.nbytes)


def rank_files(path: Path) -> dict[str, list[Path]]:
    """The files of all ranks in a directory, or those that belong together with one, by what they begin with. Local.

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


def _dict(file: Path, allow_pickle: bool) -> dict[Any, Any]:
    tree = loaded(file, allow_pickle)
    if not isinstance(tree, Mapping):
        rule, fix = "A file for each rank has its state dict", "Save model.state_dict() of each rank"
        raise CheckpointError(message(str(file), f"it holds a {type(tree).__name__}", rule, fix))
    return dict(tree)


def _pieces(values: list[Any], key: str) -> Pieces:
    """What all ranks have of one tensor.

    Raises:
        CheckpointError: it does not make one tensor.
    """
    first = values[0]
    if any(type(each) is not type(first) for each in values) and not all(type(v) is Tensor for v in values):
        raise _refused(key, "ranks have it as different kinds")
    if isinstance(first, ShardedPieces):
        shape, parts = first.size_of_whole, [part for each in values for part in each.pieces]
    elif isinstance(first, DTensor):
        shape, parts = first.shape, [(_torch.local_tensor(v), _box(v, r, key)) for r, v in enumerate(values)]
    else:
        if any(each.shape != first.shape for each in values):
            rule = "it is plain, of a shape of its own on each rank, as FSDP1's optimizer.state_dict() is"
            raise _refused(key, rule)
        return Pieces(first.shape, [(first.detach(), whole(first.shape))])
    parts = [(part.detach(), box) for part, box in parts]
    distinct = list({box: part for part, box in parts if all(size for _, size in box)})
    fits = all(list(part.shape) == [size for _, size in box] for part, box in parts if part.numel())
    if not fits or fingerprint(distinct, shape) != fingerprint([whole(shape)], shape):
        raise _refused(key, "the pieces of the ranks do not fill it, each element once")
    return Pieces(shape, [(part, box) for part, box in {box: (part, box) for part, box in parts}.values()])


def _box(tensor: DTensor, rank: int, key: str) -> Box:
    """Where the part of the rank that wrote a DTensor lies; it may be read in another world, or in none."""
    at = (tensor.device_mesh.mesh == rank).nonzero().tolist()
    if len(at) != 1 or any(place.is_partial() for place in tensor.placements):
        raise _refused(key, "it is a partial sum, or lies on a mesh without the rank of its file")
    return box_at(tensor, tuple(at[0]))


def _shared(one: Box, other: Box) -> Box | None:
    """What two boxes have in common."""
    found = []
    for (a, m), (b, n) in zip(one, other, strict=True):
        start, stop = max(a, b), min(a + m, b + n)
        if stop <= start:
            return None
        found.append((start, stop - start))
    return tuple(found)


def _refused(key: str, problem: str) -> CheckpointError:
    rule = "Files of ranks have DTensors, ShardedTensors or FSDP1's flat parameters, and plain tensors that are alike"
    fix = "Save a DCP directory, and the optimizer by FSDP.optim_state_dict; or pass a file of the model's set alone"
    return CheckpointError(message(key, problem, rule, fix))
