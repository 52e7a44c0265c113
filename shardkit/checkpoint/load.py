"""load_checkpoint: load a checkpoint of any known kind into a model, its optimizer and its scheduler."""

from __future__ import annotations

import logging
import operator
import os
import pickle
from collections.abc import Callable, Iterable
from dataclasses import replace
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
from shardkit.checkpoint import directory
from shardkit.checkpoint.asynchronous import own_rank, pending, ranks_of, world
from shardkit.checkpoint.chunks import refuse_subclasses
from shardkit.checkpoint.format import INDEX, SUFFIX, locate
from shardkit.checkpoint.native import DCP_NAME, DcpDirectory, NativeCheckpoint, Safetensors, resume_random
from shardkit.checkpoint.source import Contents, Source, Stored, by_name, check_stored_ties, read_values
from shardkit.checkpoint.torch_files import SUFFIXES, Shapes, TorchFiles, rank_files
from shardkit.errors import CheckpointError, listing, message
from shardkit.ranks import together
from shardkit.shards import as_sharded, local_value
from shardkit.state.load import KeyMap, Request, among_floats, plan_load, raise_listed, rename, writable
from shardkit.state.model import ModelState, model_state, parameter_names, trainable_state
from shardkit.state.optimizer import (
    OptimizerState,
    group_names,
    is_quantized,
    optimizers_of,
    renamed_state,
    sharded_optimizer_state_dict,
)
from shardkit.state.optimizer_load import install, mismatches, other_classes, room_for, with_rooms

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
    group: dist.ProcessGroup | None = None,
) -> Any:
    """Load a checkpoint into a model, its optimizer and its scheduler, in place, in any world and on any mesh.

    **Collective**: every rank of the world, or of ``group``, calls it, and reads the bytes of its own shards. ``path``
    may be a checkpoint of :func:`save_checkpoint`; a directory of ``torch.distributed.checkpoint``; a file of
    ``torch.save``, or a directory of such files from each rank (``*_rank_0.pt``); a safetensors file, its index, or a
    directory of either. ``docs/saving-and-loading.md`` lists what FSDP1 and others write.

    With as many ranks as saved, each gets its own random generators back. Else a generator that was equal on all ranks
    continues, and others are seeded by rank, reproducibly.

    Args:
        path: of the checkpoint.
        model: sharded or plain, with values (materialize it first); they are overwritten.
        optimizer: one, or several of different parameters, of the classes that were saved; they need not have stepped.
        scheduler: anything with ``load_state_dict``.
        key_map: from names in the checkpoint to the model's, for model and optimizer, as for :func:`load_pretrained`.
        strict: raise for names that only one side has, and for different values of one tied tensor. False leaves such
            names alone, and takes the first value with a warning.
        cast: convert floating-point tensors of the model to their dtype in the model; else other dtypes are an error.
        random: restore the random generators, if the checkpoint has them.
        verify: read everything once before anything is changed, and compare checksums, if the checkpoint has them.
        group: the ranks that hold the model, as for :func:`save_checkpoint`; None: all.

    Returns:
        what was saved as ``extra``; None if nothing was, or if another program wrote the checkpoint.

    Raises:
        CheckpointError: on every rank: the checkpoint is damaged, of no known kind, or does not fit, with all
            differences at once. Nothing was changed, unless the disk failed while values were read.
    """
    pending().error()
    groups, ranks = world(group), ranks_of(world(group))
    with together(groups, CheckpointError, call="load_checkpoint") as poll:
        pending().wait()  # here, since a rank whose program has waited does not raise
        request = Request(str(path), strict, key_map, among_floats if cast else operator.eq)
        shapes = {name: param.shape for param, name in parameter_names(model).items()}
        source = open_checkpoint(Path(path), shapes, with_optimizer=optimizer is not None)
        read = _plan(source, model, optimizer, scheduler, request, own_rank() == ranks[0])
        same = {"optimizer": optimizer is not None, "strict": strict, "random": random, "verify": verify}
        poll.same = same | {"what is at path": _described(source.contents)}
    if verify and isinstance(source, NativeCheckpoint):
        source.verify(groups)
    with together(groups, CheckpointError):
        read()
        if random:
            resume_random(source.contents.random, ranks.index(own_rank()), len(ranks))
    return source.contents.extra


def _plan(
    source: Source, model: nn.Module, optimizer: Any, scheduler: Any, request: Request, is_first: bool
) -> Callable[[], None]:
    """Match a checkpoint with what it is loaded into; return a function that reads it all. Local; changes nothing."""
    contents = source.contents
    pairs = {"optimizer": (optimizer, contents.optimizer), "scheduler": (scheduler, contents.scheduler)}
    if absent := [name for name, (given, saved) in pairs.items() if given is not None and saved is None]:
        raise CheckpointError(message(request.where, f"has no {' and no '.join(absent)}", "", "Leave the argument out"))
    state = _wanted(contents, model, request, is_first)
    targets, others, check_ties = _model_targets(source, state, request)
    moments, finish = _plan_optimizer(model, optimizer, source, request) if optimizer is not None else ([], None)

    @torch.no_grad()
    def read() -> None:
        check_ties()
        source.read([*targets, *moments])
        if others:
            model.load_state_dict(others, strict=False)
        if finish is not None:
            finish()
        if scheduler is not None:
            scheduler.load_state_dict(contents.scheduler)

    return read


def open_checkpoint(path: Path, shapes: Shapes | None = None, with_optimizer: bool = True) -> Source:
    """Open a checkpoint, of the kind that its files show; ``shapes`` are as for :class:`TorchFiles`. Local."""
    try:
        return _opened(directory.find(path), shapes, with_optimizer)
    except CheckpointError:
        raise
    except Exception as error:  # anything may be in foreign files
        rule, fix = "", "Fetch the file again, or load an earlier checkpoint"
        if isinstance(error, pickle.UnpicklingError):
            rule = "Only tensors and plain data are unpickled, since pickles can run code"
            fix = "If you trust the author, load it with torch.load(weights_only=False), and save its state dicts alone"
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise CheckpointError(message(str(path), f"cannot be read ({reason})", rule, fix)) from error


def _opened(path: Path, shapes: Shapes | None, with_optimizer: bool) -> Source:
    if (path / directory.NAME).is_file():
        return NativeCheckpoint(path)
    if (path / DCP_NAME).is_file():
        return DcpDirectory(path)
    names = sorted(each.name for each in path.iterdir()) if path.is_dir() else [path.name]
    if any(name.endswith((SUFFIX, INDEX)) for name in names):
        return Safetensors({"model": locate(path)})
    if sets := rank_files(path) or ({"": [path]} if path.suffix in SUFFIXES and path.is_file() else {}):
        return TorchFiles(path, sets, shapes, with_optimizer)
    rule = f"A checkpoint has {directory.NAME} (shardkit), {DCP_NAME} (torch.distributed.checkpoint) or *{SUFFIX}, or "
    rule += f"is a file of torch.save ({', '.join(SUFFIXES)})"
    fix = "Pass the path of one checkpoint, latest_checkpoint() of a directory of several, or one file with a full "
    fix += "model"
    raise CheckpointError(message(str(path), f"holds {listing(names) or 'nothing'}", rule, fix))


def _described(contents: Contents) -> dict[str, Any]:
    """Return what must be equal on all ranks."""
    model = {name: repr(value) for name, value in contents.model.items() if isinstance(value, Stored)}
    plain = (Stored, int, float, str)  # the repr of other values may contain their address
    return model | {"optimizer": [repr(v) for v in tree_leaves(contents.optimizer) if isinstance(v, plain)]}


# ---- models ----------------------------------------------------------------------------------------------------


def _wanted(contents: Contents, model: nn.Module, request: Request, is_first: bool) -> ModelState:
    """Return the state to load: all of the model's, or with ``trainable_only`` what trains now or was saved."""
    state = writable(model_state(model))
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
    offered = {name: value for name, value in found.items() if isinstance(value, Stored) or names[name] in state.others}
    wanted = state.tensors | dict.fromkeys(state.others)
    plan = plan_load(wanted, offered, replace(request, key_map=names.get))
    refuse_subclasses({name: state.tensors[name] for name in plan.copies if name in state.tensors})
    targets = [(found[key].key, state.tensors[name]) for name, key in plan.copies.items() if name in state.tensors]
    others = {name: found[key] for name, key in plan.copies.items() if name not in state.tensors}
    return targets, read_values(source, others), partial(check_stored_ties, source, plan, state.tensors, request)


# ---- optimizers -------------------------------------------------------------------------------------------------


def _plan_optimizer(
    model: nn.Module, optimizer: Optimizer | Iterable[Optimizer], source: Source, request: Request
) -> tuple[list[tuple[str, Tensor]], Callable[[], None]]:
    """Return what to read for an optimizer, which need not have stepped, with keys; and a function that installs it.

    Existing state of the same shape and dtype is filled in place. New state is placed as by
    ``load_full_optimizer_state_dict``. Values are quantized where the optimizer has quantized state, or would make it
    in its first step, if the saved state was quantized too. Local; changes nothing.
    """
    names, optimizers = parameter_names(model), optimizers_of(optimizer)
    params = {fqn: param for param, fqn in names.items()}
    stored = by_name(dict(source.contents.optimizer or {}), list(params))
    found = renamed_state(stored, partial(rename, key_map=request.key_map))
    own = [fqns for each in optimizers for fqns in group_names(each, names)]
    problems = mismatches(own, found)
    if not request.strict:
        problems = {kind: names for kind, names in problems.items() if kind not in ("missing", "unexpected")}
    problems["of another class"] = other_classes(optimizers, own, found)
    rule = "The optimizer must have the class, parameters and groups that were saved; nothing was changed"
    fix = "Build it as before, with the same parameters frozen, or load the model without it, "
    fix += "or pass strict=False to leave out parameters that only one side has"
    raise_listed(f"{request.where} (optimizer)", problems, rule, fix, CheckpointError)
    kept = set(chain.from_iterable(own))
    entries = {fqn: entry for fqn, entry in found["state"].items() if fqn in kept}
    groups = read_values(source, found["param_groups"])
    targets: list[tuple[str, Tensor]] = []
    quantized: list[tuple[Tensor, Tensor]] = []  # state, and the memory with its values
    present = sharded_optimizer_state_dict(model, optimizers, initialize=source.contents.quantized)["state"]

    def place(fqn: str, path: str, leaf: Stored, there: Tensor | None) -> Tensor:
        if there is not None and is_quantized(there):
            room = torch.empty(local_value(there).shape, dtype=leaf.dtype)
            values = as_sharded(room, there) if isinstance(there, DTensor) else room
            quantized.append((there, values))
        else:
            if there is None or (there.shape, there.dtype) != (leaf.shape, leaf.dtype):
                there = room_for(params[fqn], path, leaf, there)
            values = there
        targets.append((leaf.key, values))
        return there

    rooms = with_rooms(entries, present, place)
    state: OptimizerState = {"param_groups": groups, "state": rooms}

    def finish() -> None:
        for into, values in quantized:
            local_value(into).copy_(local_value(values))
        install(optimizers, names, state, exact=True)

    return targets, finish
