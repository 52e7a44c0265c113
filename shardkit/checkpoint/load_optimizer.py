"""Plan how an optimizer's state is read from a checkpoint, and give it to the optimizer."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shardkit.checkpoint.chunks import common, inside, part_of
from shardkit.checkpoint.inner import MARK, Pending, SavedShard, lies_alike, pending, saved_shards
from shardkit.checkpoint.native import Safetensors
from shardkit.checkpoint.source import Source, Stored, by_name, is_stored, read_values
from shardkit.errors import CheckpointError, listing, message
from shardkit.shards import as_sharded
from shardkit.state.names import parameter_names
from shardkit.state.optimizer import (
    OptimizerState,
    group_names,
    initial_state,
    optimizers_of,
    renamed_state,
    sharded_optimizer_state_dict,
    tensor_leaves,
    with_leaves,
)
from shardkit.state.optimizer_load import install, mismatches, room_for, with_rooms
from shardkit.state.plan import Request, Spec, raise_listed, rename
from shardkit.state.quantized import VALUES, is_quantized
from shardkit.state.routes import local_of
from shardkit.state.wire import copy_into

logger = logging.getLogger("shardkit")


@dataclass(frozen=True)
class Requantized:
    """State that is read as values, then quantized like this optimizer's own."""

    into: Tensor
    saved: str | list[SavedShard]  # the key of values, or quantized shards

    def tensor(self) -> Tensor:
        """Return the tensor, which :meth:`fill` has filled."""
        return self.into

    @torch.no_grad()
    def fill(self, source: Source) -> None:
        """Read the values, and write them into the tensor. Local."""
        local = local_of(self.into)
        room = torch.empty(local.shape, dtype=VALUES, device=local.device)
        target = as_sharded(room, self.into) if isinstance(self.into, DTensor) else room
        if isinstance(self.saved, str):
            source.read([(self.saved, target)])
        else:
            assert isinstance(source, Safetensors), "DCP files have no quantized shards"
            box = part_of(target)[1]
            for shard in self.saved:
                shared = common(box, shard.box)
                assert shared is not None, "planned for this part"
                inside(room, box, shared).copy_(inside(shard.values(source), shard.box, shared))
        copy_into(local, room)


@dataclass
class OptimizerLoad:
    """What is read for optimizers."""

    optimizers: list[Optimizer]
    names: dict[nn.Parameter, str]  # the FQN of each parameter of the model
    state: OptimizerState  # by FQN, with tensors that are to be filled
    targets: list[tuple[str, Tensor]] = field(default_factory=list)  # these tensors, with their keys
    requantized: list[Requantized] = field(default_factory=list)  # those that are read by themselves

    def quantize(self, source: Source, *, tells: bool) -> None:
        """Read and quantize, one tensor at a time, what was saved in other shards. Local."""
        for each in self.requantized:
            each.fill(source)
        if tells and (count := sum(is_quantized(each.into) for each in self.requantized)):
            problem, rule = f"{count} tensors of its state were quantized again", "Blocks follow shards"
            fix = "They were saved in other shards, or by another optimizer: expect one more rounding"
            logger.warning(message("optimizer", problem, rule, fix))

    def apply(self) -> None:
        """Give each optimizer its state and its groups their options. Local; the tensors are filled."""
        kinds = (Pending, Requantized)
        state = with_leaves(self.state, lambda _, each: each.tensor(), lambda value: isinstance(value, kinds))
        install(self.optimizers, self.names, state, exact=True)


def plan_optimizer(
    model: nn.Module, optimizer: Optimizer | Iterable[Optimizer], source: Source, request: Request
) -> OptimizerLoad:
    """Match the stored state with an optimizer, which need not have stepped. Local; changes nothing.

    Existing state of the same shape and dtype is filled in place. New state is placed as by
    ``load_full_optimizer_state_dict``.
    """
    names, optimizers = parameter_names(model), optimizers_of(optimizer)
    params = {fqn: param for param, fqn in names.items()}
    stored = by_name(dict(source.contents.optimizer or {}), list(params))
    found = renamed_state(stored, partial(rename, key_map=request.key_map))
    own = [fqns for each in optimizers for fqns in group_names(each, names)]
    problems = mismatches(own, found)
    if not request.strict:
        problems = {kind: names for kind, names in problems.items() if kind not in ("missing", "unexpected")}
    rule = "The optimizer must have the parameters and groups that were saved; nothing was changed"
    fix = "Build it as before, with the same parameters frozen, "
    fix += "or pass strict=False to leave out parameters that only one side has"
    raise_listed(f"{request.where}: optimizer", problems, rule, fix, CheckpointError)
    kept = set(chain.from_iterable(own))
    entries = {fqn: entry for fqn, entry in found["state"].items() if fqn in kept}
    load = OptimizerLoad(optimizers, names, {"param_groups": read_values(source, found["param_groups"])})
    load.state["state"] = _placed(model, entries, params, load, request.where)
    return load


def _placed(
    model: nn.Module, entries: dict[str, Any], params: dict[str, nn.Parameter], load: OptimizerLoad, where: str
) -> dict[str, Any]:
    """Return the stored state with memory for each tensor, and add that to what is read. Local."""
    misfits: dict[str, list[str]] = {}  # the FQNs that have each problem
    moved: set[str] = set()  # the FQNs of which quantized state was saved in other shards
    for fqn, entry in entries.items():
        try:
            if not all(lies_alike(each, params[fqn], "") for each in tensor_leaves(entry, _is_marked).values()):
                moved.add(fqn)
        except CheckpointError as error:
            misfits.setdefault(str(error).lstrip(": "), []).append(fqn)
    # Then the state that a step would make is made, to see what is quantized here, and in which blocks.
    differs = bool(moved) or any(_makes_other_state(each, load.names, entries) for each in load.optimizers)
    present = sharded_optimizer_state_dict(model, load.optimizers, initialize=differs)["state"]

    def place(fqn: str, path: str, leaf: Any, there: Tensor | None) -> object:
        try:
            return _place(params[fqn], path, leaf, there, load)
        except CheckpointError as error:
            misfits.setdefault(str(error).lstrip(": "), []).append(fqn)
            return None

    state = with_rooms(entries, present, place, lambda value: is_stored(value) or _is_marked(value))
    if misfits:
        lines = [f"{where}: optimizer state of {listing(dict.fromkeys(f))}: {text}" for text, f in misfits.items()]
        raise CheckpointError("\n".join(lines))
    return state


def _makes_other_state(optimizer: Optimizer, names: dict[nn.Parameter, str], entries: dict[str, Any]) -> bool:
    """Whether an optimizer makes state of other classes than was saved, as AdamW does; by one parameter. Local.

    Parameters are sharded as they were. Damaged descriptions are left to :func:`_place`.
    """
    for param in (param for group in optimizer.param_groups for param in group["params"]):
        leaves = tensor_leaves(entries.get(names[param], {}), _is_marked)
        try:
            saved = {path: pending(leaf, param, "")[0] for path, leaf in leaves.items()}
        except CheckpointError:
            continue
        if any(each.context is not None for each in saved.values()):
            made = optimizer.state.get(param) or initial_state(optimizer, [param]).get(param, {})
            own = tensor_leaves(made)
            return not all(each.fits(own.get(path)) for path, each in saved.items())
    return False


def _place(param: nn.Parameter, path: str, leaf: Any, present: Tensor | None, load: OptimizerLoad) -> object:
    if _is_marked(leaf) and lies_alike(leaf, param, ""):
        made, rows = pending(leaf, param, "")
        if made.fits(present):
            load.targets.extend(rows)
            return made
    spec = leaf if isinstance(leaf, Stored) else Spec(VALUES, param.shape)
    if _is_marked(leaf) or is_quantized(present):
        into = room_for(param, path, spec, None) if present is None else present
        saved = leaf.key if isinstance(leaf, Stored) else saved_shards(leaf, param, "")
        load.requantized.append(Requantized(into, saved))
        return load.requantized[-1]
    if present is None or (present.shape, present.dtype) != (leaf.shape, leaf.dtype):
        present = room_for(param, path, leaf, present)
    load.targets.append((leaf.key, present))
    return present


def _is_marked(value: object) -> bool:
    """Whether it describes a tensor subclass."""
    return isinstance(value, dict) and MARK in value
