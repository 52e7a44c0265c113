"""load_checkpoint: load a checkpoint of any known kind into a model, its optimizer and its
scheduler.
"""

from __future__ import annotations

import logging
import operator
import os
import pickle
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from shardkit._torch.dispatch import tree_leaves
from shardkit.checkpoint import directory
from shardkit.checkpoint.background import pending
from shardkit.checkpoint.dcp import DCP_NAME, DcpDirectory
from shardkit.checkpoint.format import INDEX, SUFFIX, find_tensors
from shardkit.checkpoint.native import NativeCheckpoint
from shardkit.checkpoint.source import (
    Contents,
    Safetensors,
    Source,
    Stored,
    by_name,
    check_stored_ties,
    read_values,
    refuse_subclasses,
)
from shardkit.checkpoint.torch_files import SUFFIXES, Shapes, TorchFiles, rank_files
from shardkit.errors import CheckpointError, listing
from shardkit.ranks import check_equal, max_over_ranks, one_group, own_rank, raise_on_all_ranks
from shardkit.state.load import (
    KeyMap,
    Request,
    among_floats,
    plan_load,
    rename,
    writable,
)
from shardkit.state.model import ModelState, model_state, parameter_names, trainable_state
from shardkit.state.optimizer import (
    optimizers_of,
    renamed_state,
    tensor_leaves,
)
from shardkit.state.optimizer_load import check_names, install, plan_state

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
    """Load a checkpoint into a model, its optimizer and its scheduler, in place, in any world and
    on any mesh.

    **Collective**: every rank of the world, or of ``group``, calls it, and reads the bytes of its
    own shards. ``path`` may be a checkpoint of :func:`save_checkpoint`; a directory of
    ``torch.distributed.checkpoint``; a file of ``torch.save``, or a directory of such files from
    each rank (``*_rank_0.pt``); a safetensors file, its index, or a directory of either.
    ``docs/saving-and-loading.md`` lists what FSDP1 and others write.

    With as many ranks as saved, each gets its own random generators and ``extra`` back. Else a
    generator that was equal on all ranks continues, and others are seeded by rank, reproducibly; an
    ``extra`` that differed is rank 0's, with a warning, and :func:`load_extras` returns all. Ranks
    may load different models, such as pipeline stages: together they must take every tensor.

    Args:
        path: of the checkpoint.
        model: sharded or plain, with values (materialize it first); they are overwritten.
        optimizer: one, or several of different parameters, of the classes that were saved; they
            need not have stepped.
        scheduler: anything with ``load_state_dict``.
        key_map: from names in the checkpoint to the model's, for model and optimizer, as for
            :func:`load_pretrained`.
        strict: raise for names that only one side has, and for different values of one tied tensor.
            False leaves such names alone, and takes the first value with a warning.
        cast: convert floating-point tensors of the model to their dtype in the model; else other
            dtypes are an error.
        random: restore the random generators, if the checkpoint has them.
        verify: read everything once before anything is changed, and compare checksums, if the
            checkpoint has them.
        group: the ranks that hold the model, as for :func:`save_checkpoint`; None: all.

    Returns:
        what was saved as ``extra``; None if nothing was, or if another program wrote the
        checkpoint.

    Raises:
        CheckpointError: on every rank: the checkpoint is damaged, of no known kind, or does not
            fit, with all differences at once. Nothing was changed, unless the disk failed while
            values were read.
    """
    pending().error()
    groups, ranks = one_group(group)
    number = ranks.index(own_rank())
    request = Request(str(path), strict, key_map, among_floats if cast else operator.eq)
    with raise_on_all_ranks(groups, CheckpointError, call="load_checkpoint"):
        pending().wait()  # here, since a rank whose program has waited does not raise
        shapes = {name: param.shape for param, name in parameter_names(model).items()}
        source = open_checkpoint(Path(path), shapes, with_optimizer=optimizer is not None)
        state = _wanted(source.contents, model, request, number == 0)
        names = [rename(name, key_map) for name in source.contents.model]
        is_here = [name in state.tensors or name in state.others for name in names]
        contents = _described(source.contents)
    same = {
        "optimizer": optimizer is not None,
        "strict": strict,
        "random": random,
        "verify": verify,
    }
    same |= {f"what is at path of {name}": value for name, value in contents.items()}
    check_equal(same, groups, CheckpointError)
    is_anywhere = max_over_ranks([int(here) for here in is_here], groups)
    elsewhere = set()  # what other ranks load, such as other stages of a pipeline
    for name, here, there in zip(names, is_here, is_anywhere, strict=True):
        if there > here:
            elsewhere.add(name)
    with raise_on_all_ranks(groups, CheckpointError):
        read = _plan(source, model, state, optimizer, scheduler, request, elsewhere)
    if verify and isinstance(source, NativeCheckpoint):
        source.verify(groups, number, len(ranks))
    extra = None
    with raise_on_all_ranks(groups, CheckpointError):
        read()
        if isinstance(source, NativeCheckpoint):
            extra = source.resume(number, len(ranks), random)
    return extra


def load_extras(path: str | os.PathLike[str]) -> list[Any]:
    """Return what each rank gave :func:`save_checkpoint` as ``extra``, in the order of ranks. Local.

    For a world of another size than the one that saved, where :func:`load_checkpoint` returns rank
    0's on every rank: to divide what the ranks had, such as the positions of data loaders.

    Raises:
        CheckpointError: there is no checkpoint of :func:`save_checkpoint` at ``path``.
    """
    pending().error()
    source = open_checkpoint(Path(path))
    if not isinstance(source, NativeCheckpoint):
        raise CheckpointError(f"{path} was not written by save_checkpoint, so it has no extra.")
    return source.extras()


def _plan(
    source: Source,
    model: nn.Module,
    state: ModelState,
    optimizer: Any,
    scheduler: Any,
    request: Request,
    elsewhere: set[str | None],
) -> Callable[[], None]:
    """Match a checkpoint with what it is loaded into; return a function that reads it all. Local;
    changes nothing.
    """
    contents = source.contents
    if optimizer is not None and contents.optimizer is None:
        raise CheckpointError(f"{request.where} has no optimizer. Leave the argument out.")
    if scheduler is not None and contents.scheduler is None:
        raise CheckpointError(f"{request.where} has no scheduler. Leave the argument out.")
    targets, others, check_ties = _plan_model(source, state, request, elsewhere)
    moments: list[tuple[str, torch.Tensor]] = []
    finish = None
    if optimizer is not None:
        moments, finish = _plan_optimizer(model, optimizer, source, request, elsewhere)

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


def open_checkpoint(
    path: Path, shapes: Shapes | None = None, with_optimizer: bool = True
) -> Source:
    """Open a checkpoint, of the kind that its files show; ``shapes`` are as for
    :class:`TorchFiles`. Local.
    """
    try:
        return _opened(directory.find(path), shapes, with_optimizer)
    except CheckpointError:
        raise
    except Exception as error:  # anything may be in foreign files
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        fix = "Fetch the file again, or load an earlier checkpoint."
        if isinstance(error, pickle.UnpicklingError):
            fix = (
                "Only tensors and plain data are unpickled, since pickles can run code. If you "
                "trust the author, load it with torch.load(weights_only=False), and save its "
                "state dicts alone."
            )
        raise CheckpointError(f"{path} cannot be read ({reason}). {fix}") from error


def _opened(path: Path, shapes: Shapes | None, with_optimizer: bool) -> Source:
    if (path / directory.MANIFEST).is_file():
        return NativeCheckpoint(path)
    if (path / DCP_NAME).is_file():
        return DcpDirectory(path)
    names = sorted(each.name for each in path.iterdir()) if path.is_dir() else [path.name]
    if any(name.endswith((SUFFIX, INDEX)) for name in names):
        return Safetensors(find_tensors(path))
    if sets := rank_files(path):
        return TorchFiles(path, sets, shapes, with_optimizer)
    if path.suffix in SUFFIXES and path.is_file():
        return TorchFiles(path, {"": [path]}, shapes, with_optimizer)
    raise CheckpointError(
        f"{path} holds {listing(names) or 'nothing'}. A checkpoint has {directory.MANIFEST} "
        f"(shardkit), {DCP_NAME} (torch.distributed.checkpoint) or *{SUFFIX}, or is a file of "
        f"torch.save ({', '.join(SUFFIXES)}). Pass the path of one checkpoint, latest_checkpoint() "
        "of a directory of several, or one file with a full model."
    )


def _described(contents: Contents) -> dict[str, Any]:
    """Return what must be equal on all ranks."""
    model = {
        name: repr(value) for name, value in contents.model.items() if isinstance(value, Stored)
    }
    plain = (Stored, int, float, str)  # the repr of other values may contain their address
    return model | {
        "optimizer": [repr(v) for v in tree_leaves(contents.optimizer) if isinstance(v, plain)]
    }


# ---- models --------------------------------------------------------------------------------------


def _wanted(contents: Contents, model: nn.Module, request: Request, is_first: bool) -> ModelState:
    """Return the state to load: all of the model's, or with ``trainable_only`` what trains now or
    was saved.
    """
    state = writable(model_state(model))
    if meta := [name for name, tensor in state.tensors.items() if tensor.is_meta]:
        raise CheckpointError(
            f"{listing(meta)} is on meta. Values are read into existing memory. Call "
            "shardkit.materialize(model) first."
        )
    if not contents.trainable_only:
        return state
    trains = trainable_state(state)
    saved = {rename(name, request.key_map) for name in contents.model}
    wanted = {}
    for name, tensor in state.tensors.items():
        if name in trains.tensors or name in saved:
            wanted[name] = tensor
    if is_first:
        text = "%s was saved with trainable_only=True: %d frozen tensors are left unchanged"
        logger.warning(text, request.where, len(state.tensors) - len(wanted))
    return replace(state, tensors=wanted, others=trains.others)


def _plan_model(
    source: Source, state: ModelState, request: Request, elsewhere: set[str | None]
) -> tuple[list[tuple[str, Tensor]], dict[str, Any], Callable[[], None]]:
    """Return the model's tensors to fill, with keys; its other values; and a check that reads.
    Changes nothing.
    """
    found = source.contents.model
    if not found:  # a file of an optimizer alone
        return [], {}, lambda: None
    names = {name: rename(name, request.key_map) for name in found}
    offered = {}
    for name, value in found.items():
        if names[name] not in elsewhere and (
            isinstance(value, Stored) or names[name] in state.others
        ):
            offered[name] = value
    wanted = state.tensors | dict.fromkeys(state.others)
    plan = plan_load(wanted, offered, replace(request, key_map=names.get))
    targets, others = [], {}
    for name, key in plan.copies.items():
        if name in state.tensors:
            targets.append((found[key].key, state.tensors[name]))
        else:
            others[name] = found[key]
    refuse_subclasses({name: state.tensors[name] for name in plan.copies if name in state.tensors})
    check = partial(check_stored_ties, source, plan, state.tensors, request)
    return targets, read_values(source, others), check


# ---- optimizers ----------------------------------------------------------------------------------


def _plan_optimizer(
    model: nn.Module,
    optimizer: Optimizer | Iterable[Optimizer],
    source: Source,
    request: Request,
    elsewhere: set[str | None],
) -> tuple[list[tuple[str, Tensor]], Callable[[], None]]:
    """Return what to read for an optimizer, which need not have stepped, with keys; and a function
    that installs it.

    Existing state of the same shape and dtype is filled in place. New state is placed as by
    ``load_full_optimizer_state_dict``. Local; changes nothing.
    """
    names, optimizers = parameter_names(model), optimizers_of(optimizer)

    def own_name(name: str) -> str | None:
        new = rename(name, request.key_map)
        return None if new in elsewhere else new

    saved = renamed_state(
        by_name(dict(source.contents.optimizer or {}), [*names.values()]), own_name
    )
    fix = (
        "Build it as before, with the same parameters frozen, or load the model without it, or "
        "pass strict=False to leave out parameters that only one side has"
    )
    check_names(
        optimizers,
        names,
        saved,
        subject=f"{request.where} (optimizer)",
        fix=fix,
        strict=request.strict,
        error=CheckpointError,
    )
    state, memory = plan_state(optimizers, names, saved["state"])
    stored = tensor_leaves(saved["state"], Stored)
    targets = [(stored[path].key, target) for path, target in memory.items()]
    groups = read_values(source, saved["param_groups"])

    def finish() -> None:
        install(optimizers, names, {"state": state, "param_groups": groups}, exact=True)

    return targets, finish
