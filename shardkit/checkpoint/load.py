"""load_checkpoint: load a checkpoint of any known kind into a model, its optimizer and its scheduler."""

from __future__ import annotations

import logging
import operator
import os
import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shardkit._torch.dispatch import tree_leaves
from shardkit.checkpoint import dcp, directory
from shardkit.checkpoint.agreement import own_rank, ranks_of, world
from shardkit.checkpoint.asynchronous import finish_pending, wait_pending
from shardkit.checkpoint.chunks import refuse_subclasses
from shardkit.checkpoint.dcp import DcpDirectory
from shardkit.checkpoint.format import INDEX, SUFFIX, locate
from shardkit.checkpoint.native import NativeCheckpoint, Safetensors, resume_random
from shardkit.checkpoint.source import Contents, Source, Stored, by_name, check_stored_ties, is_stored, read_values
from shardkit.checkpoint.torch_files import SUFFIXES, TorchFiles, rank_files
from shardkit.errors import CheckpointError, listing, message
from shardkit.ranks import together
from shardkit.shards import as_sharded, local_value
from shardkit.state.model import ModelState, is_extra, model_state, parameter_names, trainable_state
from shardkit.state.optimizer import (
    OptimizerState,
    group_names,
    is_quantized,
    optimizers_of,
    renamed_state,
    sharded_optimizer_state_dict,
)
from shardkit.state.optimizer_load import install, mismatches, room_for, with_rooms
from shardkit.state.plan import (
    KeyMap,
    Request,
    among_floats,
    plan_load,
    raise_listed,
    rename,
)

logger = logging.getLogger("shardkit")


def load_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | Iterable[Optimizer] | None = None,
    scheduler: Any = None,
    *,
    key_map: KeyMap | None = None,
    strict: bool = True,
    cast: bool = False,
    random: bool = True,
    verify: bool = True,
    allow_pickle: bool = False,
    group: dist.ProcessGroup | None = None,
) -> Any:
    """Load a checkpoint into a model, its optimizer and its scheduler, in place, in any world and on any mesh.

    **Collective**: every rank of the world, or of ``group``, calls it, and reads the bytes of its own shards. ``path``
    may be a checkpoint of :func:`save_checkpoint`; a directory of ``torch.distributed.checkpoint``; a file of
    ``torch.save``, or a directory of such files from each rank (``*_rank_0.pt``); a safetensors file, its index, or a
    directory of either. ``docs/checkpoints.md`` lists what FSDP1 and others write.

    With as many ranks as saved, each gets its own random generators back. Else a generator that was equal on all ranks
    continues, and others are seeded by rank, reproducibly.

    Args:
        path: of the checkpoint.
        model: sharded or plain, with values (materialize it first); they are overwritten.
        optimizer: one, or several of different parameters; they need not have stepped.
        scheduler: anything with ``load_state_dict``.
        key_map: from names in the checkpoint to the model's, for model and optimizer, as for :func:`load_pretrained`.
        strict: raise for names that only one side has, and for different values of one tied tensor. False leaves such
            names alone, and takes the first value with a warning.
        cast: convert floating-point tensors of the model to their dtype in the model; else other dtypes are an error.
        random: restore the random generators, if the checkpoint has them.
        verify: read everything once before anything is changed, and compare checksums, if the checkpoint has them.
        allow_pickle: unpickle whatever DCP directories and files of ``torch.save`` hold, which runs any code in them.
            False reads tensors and plain data, and runs nothing.
        group: the ranks that hold the model, as for :func:`save_checkpoint`; None: all.

    Returns:
        what was saved as ``extra``; None if nothing was, or if another program wrote the checkpoint.

    Raises:
        CheckpointError: on every rank: the checkpoint is damaged, of no known kind, or does not fit, with all
            differences at once. Nothing was changed, unless the disk failed while values were read.
    """
    wait_pending()
    groups, ranks = world(group), ranks_of(world(group))
    with together(groups, CheckpointError, call="load_checkpoint") as poll:
        finish_pending()  # here, since a rank whose program has waited does not raise
        request = Request(str(path), strict, key_map, among_floats if cast else operator.eq)
        load = _plan(model, optimizer, scheduler, request, allow_pickle, ranks)
        same = {"optimizer": optimizer is not None, "strict": strict, "random": random, "verify": verify}
        poll.same = same | {"what is at path": _described(load.source.contents)}
    if verify and isinstance(load.source, NativeCheckpoint):
        load.source.verify(groups)
    with together(groups, CheckpointError):
        load.run(model, scheduler)
        if random:
            resume_random(load.source.contents.random, ranks.index(own_rank()), len(ranks))
    return load.source.contents.extra


@dataclass
class _Load:
    """What is read, and where it goes."""

    source: Source
    targets: list[tuple[str, Tensor]]  # of the model, with keys
    others: dict[str, Any]  # of the model: values that are not tensors
    check: Callable[[], None]  # reads ties
    optimizer: _OptimizerLoad | None

    @torch.no_grad()
    def run(self, model: nn.Module, scheduler: Any) -> None:
        """Read everything into its place. Local."""
        self.check()
        self.source.read([*self.targets, *(self.optimizer.targets if self.optimizer is not None else [])])
        if self.others:
            model.load_state_dict(self.others, strict=False)
        if self.optimizer is not None:
            self.optimizer.apply()
        if scheduler is not None:
            scheduler.load_state_dict(self.source.contents.scheduler)


def _plan(
    model: nn.Module, optimizer: Any, scheduler: Any, request: Request, allow_pickle: bool, ranks: Sequence[int]
) -> _Load:
    """Open a checkpoint, and match it with model, optimizer and scheduler. Local; changes nothing."""
    shapes = {name: param.shape for param, name in parameter_names(model).items()}
    source = open_checkpoint(Path(request.where), allow_pickle=allow_pickle, shapes=shapes)
    contents = source.contents
    if optimizer is not None and contents.no_optimizer:
        raise CheckpointError(contents.no_optimizer)
    pairs = {"optimizer": (optimizer, contents.optimizer), "scheduler": (scheduler, contents.scheduler)}
    if absent := [name for name, (given, saved) in pairs.items() if given is not None and saved is None]:
        raise CheckpointError(message(request.where, f"has no {' and no '.join(absent)}", "", "Leave the argument out"))
    wanted = _wanted(contents, model, request, own_rank() == ranks[0])
    targets, others, check = _model_targets(source, wanted, request)
    load = None if optimizer is None else _plan_optimizer(model, optimizer, source, request)
    return _Load(source, targets, others, check, load)


def open_checkpoint(
    path: Path, *, allow_pickle: bool = False, shapes: Mapping[str, torch.Size] | None = None
) -> Source:
    """Open a checkpoint, of the kind that its files show. Local.

    Args:
        path: of the checkpoint.
        allow_pickle: as for :func:`load_checkpoint`.
        shapes: of the model's parameters, if there is a model; FSDP1's flat parameters have no shapes of their own.

    Raises:
        CheckpointError: it is of no known kind, or damaged.
    """
    try:
        return _opened(directory.find(path), allow_pickle, shapes)
    except CheckpointError:
        raise
    except Exception as error:  # anything may be in foreign files
        rule, fix = "", "Fetch the file again, or load an earlier checkpoint"
        if isinstance(error, pickle.UnpicklingError):
            rule = "Only tensors and plain data are unpickled, since pickles can run code"
            fix = "Save state dicts; or pass allow_pickle=True if you trust the author"
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise CheckpointError(message(str(path), f"cannot be read ({reason})", rule, fix)) from error


def _opened(path: Path, allow_pickle: bool, shapes: Mapping[str, torch.Size] | None) -> Source:
    if (path / directory.NAME).is_file():
        return NativeCheckpoint(path, allow_pickle=allow_pickle)
    if (path / dcp.NAME).is_file():
        return DcpDirectory(path, allow_pickle=allow_pickle)
    names = sorted(each.name for each in path.iterdir()) if path.is_dir() else [path.name]
    if any(name.endswith((SUFFIX, INDEX)) for name in names):
        return Safetensors({"model": locate(path)})
    sets = rank_files(path) or ({"": [path]} if path.suffix in SUFFIXES and path.is_file() else {})
    if sets:
        return TorchFiles(path, sets, shapes, allow_pickle=allow_pickle)
    problem, fix = f"holds {listing(names) or 'nothing'}", "Pass the path of a checkpoint"
    if inner := [name for name in names if (path / name / directory.NAME).is_file()]:
        problem, fix = f"holds the checkpoints {listing(inner)}", "Pass one, or latest_checkpoint() of the directory"
    elif files := [name for name in names if name.endswith(SUFFIXES)]:
        problem, fix = f"holds {listing(files)}", "Pass one of the files, if it has the full model"
    rule = f"A checkpoint has {directory.NAME} (shardkit), {dcp.NAME} (torch.distributed.checkpoint) or *{SUFFIX}, or "
    raise CheckpointError(message(str(path), problem, f"{rule}is a file of torch.save ({', '.join(SUFFIXES)})", fix))


def _described(contents: Contents) -> dict[str, Any]:
    """Return what must be equal on all ranks."""
    model = {name: repr(value) for name, value in contents.model.items() if is_stored(value)}
    plain = (Stored, int, float, str)  # the repr of other values may contain their address
    return model | {"optimizer": [repr(v) for v in tree_leaves(contents.optimizer) if isinstance(v, plain)]}


# ---- models ----------------------------------------------------------------------------------------------------


def _wanted(contents: Contents, model: nn.Module, request: Request, is_first: bool) -> ModelState:
    """Return the state to load: all of the model's, or with ``trainable_only`` what trains now or was saved."""
    state = model_state(model)
    if meta := [name for name, tensor in state.tensors.items() if tensor.is_meta]:
        rule = "Values are read into existing memory"
        raise CheckpointError(message(listing(meta), "is on meta", rule, "Call shardkit.materialize(model) first"))
    if not contents.trainable_only:
        return state
    trains, there = trainable_state(state), {rename(name, request.key_map) for name in contents.model}
    wanted = {n: t for n, t in state.tensors.items() if n in trains.tensors or n in there}
    if is_first:
        text = "%s was saved with trainable_only=True: %d frozen tensors are left unchanged"
        logger.warning(text, request.where, len(state.tensors) - len(wanted))
    return replace(state, tensors=wanted, others=trains.others)


def _model_targets(
    source: Source, state: ModelState, request: Request
) -> tuple[list[tuple[str, Tensor]], dict[str, Any], Callable[[], None]]:
    """Return the model's tensors to fill, with keys; its other values; and a check that reads. Changes nothing."""
    found = source.contents.model
    if not found:  # a file of an optimizer alone
        return [], {}, lambda: None
    names = {name: rename(name, request.key_map) for name in found}
    # Extra state that key_map gives a name that the model does not have keeps its own.
    values = [name for name in found if is_extra(name) or not is_stored(found[name])]
    taken = set(names.values())
    names |= {name: name for name in values if names[name] not in state.others and name not in taken}
    offered = {name: value for name, value in found.items() if is_stored(value) or names[name] in state.others}
    wanted = state.tensors | dict.fromkeys(state.others)
    plan = plan_load(wanted, offered, replace(request, key_map=names.get))
    refuse_subclasses({name: state.tensors[name] for name in plan.copies if name in state.tensors})
    targets = [(found[key].key, state.tensors[name]) for name, key in plan.copies.items() if name in state.tensors]
    others = {name: found[key] for name, key in plan.copies.items() if name not in state.tensors}
    return targets, read_values(source, others), partial(check_stored_ties, source, plan, state.tensors, request)


# ---- optimizers -------------------------------------------------------------------------------------------------


@dataclass
class _OptimizerLoad:
    """What is read for optimizers."""

    optimizers: list[Optimizer]
    names: dict[nn.Parameter, str]  # the FQN of each parameter of the model
    state: OptimizerState  # by FQN, with tensors that are to be filled
    targets: list[tuple[str, Tensor]] = field(default_factory=list)  # memory to read into, with keys
    quantized: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # state, and the memory with its values

    @torch.no_grad()
    def apply(self) -> None:
        """Give each optimizer its state and its groups their options. Local; the targets are filled."""
        for into, values in self.quantized:
            local_value(into).copy_(local_value(values))
        install(self.optimizers, self.names, self.state, exact=True)


def _plan_optimizer(
    model: nn.Module, optimizer: Optimizer | Iterable[Optimizer], source: Source, request: Request
) -> _OptimizerLoad:
    """Match the stored state with an optimizer, which need not have stepped. Local; changes nothing.

    Existing state of the same shape and dtype is filled in place. New state is placed as by
    ``load_full_optimizer_state_dict``. Values are quantized where the optimizer has quantized state, or would make it
    in its first step, if the saved state was quantized too.
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
    raise_listed(f"{request.where} (optimizer)", problems, rule, fix, CheckpointError)
    kept = set(chain.from_iterable(own))
    entries = {fqn: entry for fqn, entry in found["state"].items() if fqn in kept}
    load = _OptimizerLoad(optimizers, names, {"param_groups": read_values(source, found["param_groups"])})
    present = sharded_optimizer_state_dict(model, optimizers, initialize=source.contents.quantized)["state"]

    def place(fqn: str, path: str, leaf: Stored, there: Tensor | None) -> Tensor:
        if there is not None and is_quantized(there):
            room = torch.empty(local_value(there).shape, dtype=leaf.dtype)
            values = as_sharded(room, there) if isinstance(there, DTensor) else room
            load.quantized.append((there, values))
        else:
            if there is None or (there.shape, there.dtype) != (leaf.shape, leaf.dtype):
                there = room_for(params[fqn], path, leaf, there)
            values = there
        load.targets.append((leaf.key, values))
        return there

    load.state["state"] = with_rooms(entries, present, place, is_stored)
    return load
