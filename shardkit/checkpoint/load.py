"""load_checkpoint: from whatever kind of checkpoint into a model and what trains it."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from shardkit._torch import tree_leaves
from shardkit.checkpoint import dcp, directory, manifest, random_state
from shardkit.checkpoint.agreement import agree, connected, world
from shardkit.checkpoint.asynchronous import finish_pending
from shardkit.checkpoint.dcp import DcpDirectory
from shardkit.checkpoint.format import INDEX, SUFFIX
from shardkit.checkpoint.inner import MARK, Flat, Pending, flattened, has_subclass, pending
from shardkit.checkpoint.own import OwnDirectory, Safetensors
from shardkit.checkpoint.progress import Progress
from shardkit.checkpoint.read import locate
from shardkit.checkpoint.source import Contents, Source, Stored, by_name, holds_same
from shardkit.checkpoint.torch_files import SUFFIXES, TorchFiles, rank_files
from shardkit.errors import CheckpointError, listing, message
from shardkit.ranks import together
from shardkit.state.names import ModelState, model_state, parameter_names, trainable_state
from shardkit.state.optimizer import (
    OptimizerState,
    group_names,
    optimizers_of,
    renamed_state,
    sharded_optimizer_state_dict,
    with_leaves,
)
from shardkit.state.optimizer_load import install, mismatches, room_for, with_rooms
from shardkit.state.place import check_memory
from shardkit.state.plan import (
    KeyMap,
    Request,
    among_floats,
    check_key_map,
    check_ties,
    exactly,
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
    """Load a checkpoint into a model, in place, and into what trains it, in any world and on any mesh.

    **Collective**: every rank of the world, or of ``group``, calls it. Each rank reads the bytes of its own shards;
    nothing is sent between ranks but whether one of them failed. What is read is recognised by what is there: a
    checkpoint of :func:`save_checkpoint`; a directory of ``torch.distributed.checkpoint``, such as FSDP1's
    SHARDED_STATE_DICT or any other; a file of ``torch.save``, such as FSDP1's FULL_STATE_DICT, with the optimizer's
    state by FQN or by number; a directory of such files from each rank (``*_rank_0.pt``), such as verl's, of DTensors,
    FSDP1's ShardedTensors or its LOCAL_STATE_DICT; a safetensors file, its index, or a directory of either.

    With as many ranks as saved, each gets its own random generators back. With another number, the generators that
    were alike on all ranks go on, and others are seeded by rank: different from each other, and the same each time.
    An accelerator's state is left out where there is none of that kind.

    Args:
        path: what :func:`save_checkpoint` was given, or as above.
        model: sharded or plain; its parameters and buffers are overwritten. Not on meta: materialize it before.
        optimizer: one, or several of different parameters; a fresh one is as good as one that has stepped.
        scheduler: anything with ``load_state_dict``.
        key_map: from names in the checkpoint to the model's, also for the optimizer's state; see
            :func:`shardkit.checkpoint.read_tensors`.
        strict: names of parameters and buffers that only one side has are errors, as are different values for what is
            one tied tensor here; else they are left alone, and the first is taken with a warning.
        cast: convert floating-point tensors of the model to the dtype that they have there; else that is an error.
        random: restore the random generators, where the checkpoint has them.
        verify: read everything once before anything is changed, and compare checksums, where the checkpoint has them.
        allow_pickle: unpickle whatever DCP directories and files of ``torch.save`` hold, which runs any code that their
            author put there. False reads tensors and plain data, and runs nothing.
        group: the ranks that hold the model, as for :func:`save_checkpoint`; None: all.

    Returns:
        what was saved as ``extra``; None if nothing was, or if the checkpoint is not shardkit's.

    Raises:
        CheckpointError: on every rank; what is at ``path`` is damaged, of no known kind, or does not fit, with all
            that does not listed at once. Nothing was changed, unless the disk failed half-way.

    Example:
        >>> step = load_checkpoint("runs/step-100", model, optimizer, scheduler)["step"]
    """
    finish_pending()
    groups = world(group)
    rank, world_size = (dist.get_rank(group), dist.get_world_size(group)) if groups else (0, 1)
    with ExitStack() as held, connected(groups, "load_checkpoint"):
        with together(groups, CheckpointError, call="load_checkpoint") as poll:
            shapes = {name: param.shape for param, name in parameter_names(model).items()}
            source = open_checkpoint(Path(path), held, allow_pickle=allow_pickle, shapes=shapes)
            request = Request(str(path), strict, key_map, among_floats if cast else exactly)
            state = _asked(source.contents, _writable(model), request, rank)
            poll.own = has_subclass(state.tensors.values())
        asked = {"optimizer": optimizer is not None, "strict": strict, "random": random, "verify": verify}
        agree(asked | {"what is at path": _described(source.contents)}, groups, "load_checkpoint")
        flat = flattened(state.tensors, groups) if poll.any else Flat(state.tensors, [])
        with together(groups, CheckpointError):
            contents = source.contents
            _check_present(contents, optimizer, scheduler, request.where)
            targets, others, check = _model_targets(source, replace(state, tensors=flat.tensors), request)
            load = None if optimizer is None else plan_optimizer(model, optimizer, contents.optimizer or {}, request)
        if verify and isinstance(source, OwnDirectory):
            source.verify(groups, rank, world_size)
        with together(groups, CheckpointError):
            check()
            _carry_out(source, model, targets, others, load, scheduler)
            flat.write_back()
            if random:
                random_state.resume(contents.random, rank, world_size)
    return contents.extra


def open_checkpoint(
    path: Path, held: ExitStack, *, allow_pickle: bool = False, shapes: Mapping[str, torch.Size] | None = None
) -> Source:
    """The source at a path. Local; of a checkpoint of shardkit it holds the lock that keeps rotation away.

    ``shapes`` are those of the model's parameters, where it is known; FSDP1's flat ones do without their own.

    Raises:
        CheckpointError: it is of no known kind, or damaged.
    """
    path = directory.find(path)
    if path.is_dir() and (path / manifest.NAME).exists():
        held.enter_context(directory.locked(path / manifest.NAME))
        return OwnDirectory(path, allow_pickle=allow_pickle)
    if path.is_dir() and (path / dcp.NAME).exists():
        return DcpDirectory(path, allow_pickle=allow_pickle)
    names = sorted(each.name for each in path.iterdir()) if path.is_dir() else [path.name]
    if any(name.endswith((SUFFIX, INDEX)) for name in names):
        return Safetensors({"model": locate(path)})
    sets = rank_files(path) if path.exists() else {}
    if not sets and path.suffix in SUFFIXES and path.is_file():
        sets = {"": [path]}
    if sets:
        return TorchFiles(path, sets, shapes, allow_pickle=allow_pickle)
    raise CheckpointError(_unknown(path, names))


def _described(contents: Contents) -> dict[str, Any]:
    """What ranks must see alike."""
    model = {name: repr(value) for name, value in contents.model.items() if isinstance(value, Stored)}
    plain = (Stored, int, float, str)  # what else there is may print its address
    return model | {"optimizer": [repr(v) for v in tree_leaves(contents.optimizer) if isinstance(v, plain)]}


def _unknown(path: Path, names: list[str]) -> str:
    inner = [name for name in names if (path / name / manifest.NAME).exists()]
    if inner:
        problem, fix = f"it holds the checkpoints {listing(inner)}", "Pass one, or latest_checkpoint() of the directory"
    elif files := [name for name in names if name.endswith(SUFFIXES)]:
        problem, fix = f"it holds {listing(files)}", "Pass one of the files, if it has the whole model"
    else:
        problem, fix = f"it holds {listing(names) or 'nothing'}", "Pass the path of a checkpoint"
    torchs = f"{dcp.NAME} (torch.distributed.checkpoint)"
    rule = f"A checkpoint has {manifest.NAME} (shardkit), {torchs} or *{SUFFIX}, or "
    return message(str(path), problem, f"{rule}is a file of torch.save ({', '.join(SUFFIXES)})", fix)


def _check_present(contents: Contents, optimizer: Any, scheduler: Any, where: str) -> None:
    wanted = {"optimizer": (optimizer, contents.optimizer), "scheduler": (scheduler, contents.scheduler)}
    absent = [name for name, (given, saved) in wanted.items() if given is not None and saved is None]
    if optimizer is not None and contents.no_optimizer:
        raise CheckpointError(contents.no_optimizer)
    if absent:
        rule = "What is asked for must be there"
        raise CheckpointError(message(where, f"it has no {' and no '.join(absent)}", rule, "Leave the argument out"))


def _writable(model: nn.Module) -> ModelState:
    """The model's state, which has memory."""
    state = model_state(model)
    if meta := [name for name, tensor in state.tensors.items() if tensor.is_meta]:
        rule = "Values are read into memory that is there"
        raise CheckpointError(message(listing(meta), "on meta", rule, "Call shardkit.materialize(model) before"))
    check_memory(state)
    return state


def _asked(contents: Contents, state: ModelState, request: Request, rank: int) -> ModelState:
    """What a checkpoint is asked for: all of the model's state, or where it has what trained, that and what trains."""
    if not contents.trainable_only:
        return state
    trains, there = trainable_state(state), {rename(name, request.key_map) for name in contents.model}
    inner = {name.rpartition(".")[0] for name in there if name is not None}  # of subclasses, saved by attribute
    new = [name for name in trains.tensors if name not in there and name not in inner]
    if request.strict and new:
        rule = "What trains now and was frozen when it was saved is not in it"
        fix = "Freeze it as it was, or pass strict=False to leave it as it is, with new optimizer state"
        problem = f"it was saved with trainable_only=True, and has no {listing(new)}"
        raise CheckpointError(message(request.where, problem, rule, fix))
    asked = {n: t for n, t in state.tensors.items() if n in trains.tensors or n in there or n in inner}
    if rank == 0:
        left = len(state.tensors) - len(asked)
        logger.warning(
            "%s was saved with trainable_only=True: %d frozen tensors are left as they are", request.where, left
        )
    return replace(state, tensors=asked, others=trains.others)


def _model_targets(
    source: Source, state: ModelState, request: Request
) -> tuple[list[tuple[str, Tensor]], dict[str, Any], Callable[[], None]]:
    """Which tensors of the model to fill from what, its other values, and a check that reads. Changes nothing."""
    found = source.contents.model
    if not found:  # a file of an optimizer alone
        return [], {}, lambda: None
    check_key_map(request.key_map, request.error)
    names = _renamed(found, state, request)
    offered = {name: value for name, value in found.items() if isinstance(value, Stored) or names[name] in state.others}
    plan = plan_load(state.tensors | state.others, offered, replace(request, key_map=names.get))

    def are_equal(name: str, *names: str) -> bool:
        keys = [found[each].key for each in names]
        return holds_same(state.tensors[name], lambda rooms: source.read(zip(keys, rooms, strict=True)))

    targets = [(found[key].key, state.tensors[name]) for name, key in plan.copies.items() if name in state.tensors]
    others = {n: found[key] for n, key in plan.copies.items() if not isinstance(found[key], Stored)}
    return targets, others, partial(check_ties, plan, are_equal, request)


def _renamed(found: Mapping[str, object], state: ModelState, request: Request) -> dict[str, str | None]:
    """What ``key_map`` makes of each name. Extra state that it maps to nothing in the model keeps its own name."""
    names = {name: rename(name, request.key_map) for name in found}
    taken = set(names.values())
    lost = [n for n, new in names.items() if not isinstance(found[n], Stored) and new not in state.others]
    return names | {name: name for name in lost if name not in taken}


@torch.no_grad()
def _carry_out(
    source: Source,
    model: nn.Module,
    targets: list[tuple[str, Tensor]],
    others: dict[str, Any],
    optimizer: OptimizerLoad | None,
    scheduler: Any,
) -> None:
    """Change everything. Local."""
    progress = Progress("load")
    # The optimizer's first: DCP files show what is quantised only as it is read, and here nothing is changed yet.
    source.read([*(optimizer.targets if optimizer is not None else []), *targets], progress)
    progress.close()
    if others:
        model.load_state_dict(others, strict=False)
    if optimizer is not None:
        optimizer.apply()
    if scheduler is not None:
        scheduler.load_state_dict(source.contents.scheduler)


# ---- optimizers ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OptimizerLoad:
    """What will be loaded."""

    optimizers: list[Optimizer]
    names: dict[nn.Parameter, str]  # the FQN of each parameter of the model
    state: OptimizerState  # by FQN, with tensors that are to be filled
    targets: list[tuple[str, Tensor]]  # these, with the keys of what fills them

    def apply(self) -> None:
        """Give each optimizer its state and its groups their options. Local; the tensors are filled."""
        state = with_leaves(self.state, lambda _, each: each.tensor(), lambda value: isinstance(value, Pending))
        install(self.optimizers, self.names, state, exact=True)


def plan_optimizer(
    model: nn.Module, optimizer: Optimizer | Iterable[Optimizer], stored: Mapping[str, Any], request: Request
) -> OptimizerLoad:
    """Match what is stored with an optimizer, fresh or not. Local; changes nothing.

    State that the optimizer has already is filled in place, where shape and dtype are the same. New state is placed as
    ``load_full_optimizer_state_dict`` does.
    """
    names, optimizers = parameter_names(model), optimizers_of(optimizer)
    params = {fqn: param for param, fqn in names.items()}
    found = renamed_state(by_name(dict(stored), list(params)), partial(rename, key_map=request.key_map))
    current = sharded_optimizer_state_dict(model, optimizers)
    _check_optimizer([fqns for each in optimizers for fqns in group_names(each, names)], found, request)
    targets: list[tuple[str, Tensor]] = []
    misfits: dict[str, list[str]] = {}  # the FQNs that have each problem

    def place(fqn: str, path: str, leaf: Any, present: Tensor | None) -> object:
        if not isinstance(leaf, Stored):
            try:
                made, rows = pending(leaf, params[fqn], "")
            except CheckpointError as error:
                misfits.setdefault(str(error), []).append(fqn)
                return None
            targets.extend(rows)
            return made
        if present is None or (present.shape, present.dtype) != (leaf.shape, leaf.dtype):
            present = room_for(params[fqn], path, leaf, present)
        targets.append((leaf.key, present))
        return present

    def option(_: str, leaf: Stored) -> Tensor:
        targets.append((leaf.key, torch.empty(leaf.shape, dtype=leaf.dtype)))
        return targets[-1][1]

    own = {
        fqn: entry for fqn, entry in found["state"].items() if any(fqn in g["params"] for g in current["param_groups"])
    }
    state = with_rooms(own, current["state"], place, _is_leaf)
    groups = with_leaves(found["param_groups"], option, lambda value: isinstance(value, Stored))
    if misfits:
        found = {text.lstrip(": "): listing(dict.fromkeys(fqns)) for text, fqns in misfits.items()}
        lines = [f"{request.where}: optimizer state of {fqns}: {text}" for text, fqns in found.items()]
        raise CheckpointError("\n".join(lines))
    return OptimizerLoad(optimizers, names, {"state": state, "param_groups": groups}, targets)


def _is_leaf(value: object) -> bool:
    return isinstance(value, Stored) or (isinstance(value, dict) and MARK in value)


def _check_optimizer(own: list[list[str]], found: OptimizerState, request: Request) -> None:
    problems = mismatches(own, found)
    if not request.strict:
        problems = {kind: names for kind, names in problems.items() if kind not in ("missing", "unexpected")}
    rule = "An optimizer is loaded into one of the same parameters and groups; nothing was changed"
    fix = "Build it as it was built, with the same parameters frozen, "
    fix += "or pass strict=False to leave out what one side lacks"
    raise_listed(f"{request.where}: optimizer", problems, rule, fix, CheckpointError)
