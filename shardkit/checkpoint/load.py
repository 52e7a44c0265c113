"""load_checkpoint: load a checkpoint of any known kind into a model, its optimizer and its
scheduler.
"""

from __future__ import annotations

import operator
import os
import pickle
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shardkit.checkpoint import directory
from shardkit.checkpoint.background import pending
from shardkit.checkpoint.byte_ranges import Part, part_of
from shardkit.checkpoint.dcp import DCP_NAME, DcpDirectory
from shardkit.checkpoint.format import INDEX, SUFFIX, find_tensors
from shardkit.checkpoint.native import NativeCheckpoint
from shardkit.checkpoint.source import (
    Contents,
    Quantized,
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
from shardkit.shards import as_sharded
from shardkit.state.load import (
    KeyMap,
    LoadPlan,
    Request,
    among_floats,
    plan_load,
    rename,
    writable,
)
from shardkit.state.model import ModelState, model_state, parameter_names, trainable_state
from shardkit.state.optimizer import (
    OptimizerState,
    optimizers_of,
    renamed_state,
    tensor_leaves,
    with_leaves,
)
from shardkit.state.optimizer_load import check_names, install, plan_state


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
    generator that was equal on all ranks continues, and others are left as they are; an ``extra``
    that differed is rank 0's, with a warning, and :func:`load_extras` returns all. Ranks may load
    different models, such as pipeline stages: together they must take every tensor.

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
    # 1. Every rank opens the checkpoint.
    with raise_on_all_ranks(groups, CheckpointError, call="load_checkpoint"):
        pending().wait()  # here, since a rank whose program has waited does not raise
        names = parameter_names(model)
        shapes = {name: param.shape for param, name in names.items()}
        source = open_checkpoint(Path(path), shapes, with_optimizer=optimizer is not None)
        contents = source.contents
        state = _wanted(contents, model, request)
        new_names = [rename(name, key_map) for name in contents.model]
        has_here = [int(name in state.tensors or name in state.others) for name in new_names]
    same: dict[str, Any] = {
        "optimizer": optimizer is not None,
        "strict": strict,
        "random": random,
        "verify": verify,
    }
    if isinstance(source, NativeCheckpoint):  # of two steps, all else would be equal
        same["manifest at path"] = source.created
    for name, value in contents.model.items():
        if isinstance(value, Stored):
            same[f"{name} at path"] = repr(value)
    check_equal(same, groups, CheckpointError)
    # 2. A pipeline stage leaves out what only the models of other stages have.
    of_other_stages: set[str | None] = set()
    if new_names:
        has_any = max_over_ranks(has_here, groups)
        for new_name, is_here, is_anywhere in zip(new_names, has_here, has_any, strict=True):
            if is_anywhere and not is_here:
                of_other_stages.add(new_name)
    # 3. Everything is compared before anything is changed.
    with raise_on_all_ranks(groups, CheckpointError):
        if optimizer is not None and contents.optimizer is None:
            raise CheckpointError(f"{path} has no optimizer. Leave the argument out.")
        if scheduler is not None and contents.scheduler is None:
            raise CheckpointError(f"{path} has no scheduler. Leave the argument out.")
        model_plan = _plan_model(contents, state, of_other_stages, request)
        check_stored_ties(source, model_plan, state.tensors, request)
        targets, others = [], {}
        for name, stored_name in model_plan.copies.items():
            if name in state.tensors:
                targets.append((contents.model[stored_name].key, state.tensors[name]))
            else:
                others[name] = contents.model[stored_name]
        others = read_values(source, others)
        if optimizer is not None:
            optimizers = optimizers_of(optimizer)
            shards: dict[str, Part] = {}
            if isinstance(source, NativeCheckpoint):
                shards = source.quantized(number, len(ranks))
            optimizer_state, moments = _plan_optimizer(
                optimizers, names, source, shards, request, of_other_stages
            )
            targets += moments
    if verify and isinstance(source, NativeCheckpoint):
        source.verify(groups, number, len(ranks))
    # 4. Each rank reads the bytes of its own shards.
    extra = None
    with raise_on_all_ranks(groups, CheckpointError), torch.no_grad():
        source.read(targets)
        if others:
            model.load_state_dict(others, strict=False)
        if optimizer is not None:
            install(optimizers, names, optimizer_state, exact=True)
        if scheduler is not None:
            scheduler.load_state_dict(contents.scheduler)
        if isinstance(source, NativeCheckpoint):
            extra = source.resume(number, len(ranks), random)
    return extra


def load_extras(path: str | os.PathLike[str]) -> list[Any]:
    """Return what each rank gave :func:`save_checkpoint` as ``extra``, in the order of ranks.
    Local.

    For a world of another size than the one that saved, where :func:`load_checkpoint` returns rank
    0's on every rank: to divide what the ranks had, such as the positions of data loaders.

    Raises:
        CheckpointError: there is no checkpoint of :func:`save_checkpoint` at ``path``.
    """
    return NativeCheckpoint(directory.find(Path(path))).extras()


def open_checkpoint(
    path: Path, shapes: Shapes | None = None, with_optimizer: bool = True
) -> Source:
    """Open a checkpoint, of the kind that its files show; ``shapes`` are as for
    :class:`TorchFiles`. Local.
    """
    try:
        place = directory.find(path)
        if (place / directory.MANIFEST).is_file():
            return NativeCheckpoint(place)
        if (place / DCP_NAME).is_file():
            return DcpDirectory(place)
        names = [place.name]
        if place.is_dir():
            names = sorted(file.name for file in place.iterdir())
        if any(name.endswith((SUFFIX, INDEX)) for name in names):
            return Safetensors(find_tensors(place))
        sets = rank_files(place)
        if not sets and place.suffix in SUFFIXES and place.is_file():
            sets = {"": [place]}
        if sets:
            return TorchFiles(place, sets, shapes, with_optimizer)
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
    raise CheckpointError(
        f"{path} is not a checkpoint (files: {listing(names) or 'none'}). A checkpoint has "
        f"{directory.MANIFEST} (shardkit), {DCP_NAME} (torch.distributed.checkpoint) or *{SUFFIX}, "
        f"or is a file of torch.save ({', '.join(SUFFIXES)}). Pass the path of one checkpoint, "
        "latest_checkpoint() of a directory of several, or one file with a full model."
    )


# ---- models --------------------------------------------------------------------------------------


def _wanted(contents: Contents, model: nn.Module, request: Request) -> ModelState:
    """Return the state to load: all of the model's, or with ``trainable_only`` what trains now or
    was saved.
    """
    state = writable(model_state(model))
    on_meta = [name for name, tensor in state.tensors.items() if tensor.is_meta]
    if on_meta:
        raise CheckpointError(
            f"{listing(on_meta)} is on meta. Values are read into existing memory. Call "
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
    return replace(state, tensors=wanted, others=trains.others)


def _plan_model(
    contents: Contents, state: ModelState, of_other_stages: set[str | None], request: Request
) -> LoadPlan:
    """Match the names of the checkpoint with the model's."""
    offered = {}
    for name, value in contents.model.items():
        new = rename(name, request.key_map)
        # Values that are not tensors, such as a step count, are ignored where the model has none.
        is_known = isinstance(value, Stored) or new in state.others
        if is_known and new not in of_other_stages:
            offered[name] = value
    wanted: dict[str, object] = {**state.tensors, **dict.fromkeys(state.others)}
    if not contents.model and contents.optimizer is not None:  # a file of an optimizer alone
        wanted = {}
    plan = plan_load(wanted, offered, request)
    refuse_subclasses({name: state.tensors[name] for name in plan.copies if name in state.tensors})
    return plan


# ---- optimizers ----------------------------------------------------------------------------------


def _plan_optimizer(
    optimizers: list[Optimizer],
    names: Mapping[nn.Parameter, str],
    source: Source,
    shards: Mapping[str, Part],
    request: Request,
    of_other_stages: set[str | None],
) -> tuple[OptimizerState, list[tuple[Any, Tensor]]]:
    """Return the state to install in optimizers, which need not have stepped; and its tensors to
    fill, with keys. Local; changes nothing.

    Existing state of the same shape and dtype is filled in place. New state is placed as by
    ``load_full_optimizer_state_dict``. Of quantized state this rank's ``shards`` are taken over.
    """

    def own_name(name: str) -> str | None:
        new = rename(name, request.key_map)
        return None if new in of_other_stages else new

    assert source.contents.optimizer is not None
    saved = renamed_state(by_name(source.contents.optimizer, list(names.values())), own_name)
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
    state, targets = plan_state(optimizers, names, saved["state"])
    stored = tensor_leaves(saved["state"], Stored)
    moments = [(stored[path].key, target) for path, target in targets.items()]
    params = {fqn: param for param, fqn in names.items()}

    def quantized(path: str, leaf: Quantized) -> Tensor:
        param = params[path.split("/")[1]]
        own, own_box = part_of(param)
        shard, box = shards.get(leaf.key, (own, None))
        if box != own_box:
            raise CheckpointError(
                f"{request.where} has {leaf.key} quantized in blocks of each rank's shard. Load "
                "it on as many ranks and the same mesh as saved it, or load the model without the "
                "optimizer."
            )
        shard = shard.to(own.device)
        return as_sharded(shard, param) if isinstance(param, DTensor) else shard

    state = with_leaves(state, quantized, Quantized)
    param_groups = read_values(source, saved["param_groups"])
    return {"state": state, "param_groups": param_groups}, moments
