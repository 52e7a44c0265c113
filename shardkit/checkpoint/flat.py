"""What FSDP1 saves in pieces: ShardedTensors, LOCAL_STATE_DICT, and ``optimizer.state_dict()`` of sharded parameters.

A flat parameter has what a unit holds beside the units inside of it, in the model's order, and zeros at the end; each
rank has one run of it. Sizes are the model's. With ``use_orig_params=True`` each rank has its run of each parameter by
name, without zeros.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from shardkit.errors import CheckpointError, message
from shardkit.shards import Box

FLAT = "_flat_param"
Shapes: TypeAlias = Mapping[str, torch.Size]  # of the model's parameters, in order
Trees: TypeAlias = Sequence[Mapping[Any, Any]]  # of each rank


class ShardedPieces(Tensor):
    """A ShardedTensor of FSDP1, as its file has it. torch's own class wants the process group that wrote it.

    Attributes:
        size_of_whole: of the full tensor.
        pieces: what the rank has of it, each with where it lies.
    """

    size_of_whole: torch.Size
    pieces: list[tuple[Tensor, Box]]

    def __setstate__(self, state: Any) -> None:
        shards, metadata, *_ = state
        self.size_of_whole = torch.Size(metadata.size)
        places = [(shard.tensor, shard.metadata) for shard in shards]
        self.pieces = [(t, tuple(zip(at.shard_offsets, at.shard_sizes, strict=True))) for t, at in places]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Called for whatever is computed with it: there are pieces, and no values."""
        if func is torch.ops.aten.detach.default:  # by torch.load
            return args[0]
        raise NotImplementedError(func)


@dataclass(frozen=True)
class Runs:
    """A tensor as runs of its elements, one after the other.

    Attributes:
        shape: of the tensor.
        parts: the runs, mapped from files.
    """

    shape: torch.Size
    parts: list[Tensor]

    def full(self) -> Tensor:
        """The tensor, in new memory."""
        return torch.cat([part.flatten() for part in self.parts]).view(self.shape)


def is_flat(trees: Trees) -> bool:
    """Whether these are state dicts with flat parameters."""
    return any(_is_flat(key) for key in trees[0])


def parameters(trees: Trees, shapes: Shapes | None, where: str) -> list[dict[Any, Any]]:
    """The state dicts with :class:`Runs` on each rank in the place of flat parameters. Local, pure.

    Raises:
        CheckpointError: sizes are not known, or do not fit.
    """
    if shapes is None:
        raise _unknown(where, "it is FSDP1's LOCAL_STATE_DICT")
    units: dict[str, list[str]] = {key.removesuffix(FLAT): [] for key in trees[0] if _is_flat(key)}
    for name in shapes:
        around = [unit for unit in units if name.startswith(unit)]
        if around:
            units[max(around, key=len)].append(name)
    runs: dict[str, Runs] = {}
    for unit, names in units.items():
        if any(name in tree for name in names for tree in trees):  # use_orig_params=True
            found = {name: [tree[name].detach() for tree in trees if name in tree] for name in names}
        else:
            found = _cut(trees, unit, [(name, shapes[name]) for name in names])
        for name in names:
            runs[name] = _checked(found.get(name, []), shapes[name], f"{where}: {name}")
    return [{key: value for key, value in tree.items() if not _is_flat(key)} | runs for tree in trees]


def optimizer_states(trees: Trees, shapes: Shapes | None, where: str) -> list[dict[Any, Any]]:
    """``optimizer.state_dict()`` of all ranks with names for numbers and :class:`Runs` for runs. Local, pure.

    Raises:
        CheckpointError: as :func:`parameters`; or the parameters were flat, so that numbers count units.
    """
    if shapes is None:
        raise _unknown(where, "its optimizer is FSDP1's, by number and in runs")
    names, groups = list(shapes), trees[0]["param_groups"]
    if [number for group in groups for number in group["params"]] != list(range(len(names))):
        problem = f"its optimizer does not number the model's {len(names)} parameters in order"
        rule = "With use_orig_params=False FSDP1 numbers units, and a file of shards does not say what is in which"
        raise CheckpointError(
            message(where, problem, rule, "Save FSDP.optim_state_dict(model, optimizer), or load the model alone")
        )
    state: dict[str, dict[str, Any]] = {}
    for number, name in enumerate(names):
        entries = [tree["state"][number] for tree in trees if number in tree["state"]]
        for key in dict.fromkeys(key for each in entries for key in each):
            values = [each[key] for each in entries if key in each]
            is_run = isinstance(values[0], Tensor) and values[0].ndim > 0
            what = f"{where}: {key} of {name}"
            state.setdefault(name, {})[key] = _checked(values, shapes[name], what) if is_run else values[0]
    named = [{**group, "params": [names[number] for number in group["params"]]} for group in groups]
    return [{"state": state, "param_groups": named}]


def _is_flat(key: object) -> bool:
    return str(key).rpartition(".")[2] == FLAT


def _cut(trees: Trees, unit: str, sizes: list[tuple[str, torch.Size]]) -> dict[str, list[Tensor]]:
    """The runs of each parameter in a unit's flat one, as views; nothing where sizes do not fit."""
    flat = [tree[unit + FLAT] for tree in trees]
    pieces = [[part for part, _ in each.pieces] if isinstance(each, ShardedPieces) else [each] for each in flat]
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


def _checked(parts: list[Tensor], shape: torch.Size, what: str) -> Runs:
    count = sum(part.numel() for part in parts)
    if count != shape.numel() or any(part.ndim != 1 for part in parts):
        rule = "The runs of all ranks are the elements of the model's parameter, and a unit's are those of its own"
        fix = "Load into the model that was saved, with its parameters in their order, or save FSDP1's FULL_STATE_DICT"
        problem = f"{count} elements in the runs of the files, {shape.numel()} here"
        raise CheckpointError(message(what, problem, rule, fix))
    return Runs(shape, parts)


def _unknown(where: str, problem: str) -> CheckpointError:
    rule = "Flat parameters have no shapes; those are the model's"
    fix = "Load it with load_checkpoint(path, model, ...), which knows them, and save that; of a model and its "
    fix += "optimizer, one of the model's files stands for its set alone"
    return CheckpointError(message(where, problem, rule, fix))
