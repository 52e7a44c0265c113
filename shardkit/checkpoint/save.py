"""save_checkpoint: write the full training state into one directory, from all ranks in parallel."""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shardkit import _torch
from shardkit.checkpoint import dcp, directory, manifest, random_state
from shardkit.checkpoint.agreement import world
from shardkit.checkpoint.asynchronous import (
    SaveHandle,
    background_groups,
    copies_of,
    finish_pending,
    start_pending,
)
from shardkit.checkpoint.format import File
from shardkit.checkpoint.hub import config_text
from shardkit.checkpoint.inner import flattened, flattened_tree, has_subclass
from shardkit.checkpoint.manifest import FORMATS, FileEntry, Manifest
from shardkit.checkpoint.owners import owned
from shardkit.checkpoint.plain import decode, dumps, encode, leaves_of
from shardkit.checkpoint.transfer import ProgressLine
from shardkit.checkpoint.write import described, write_shards
from shardkit.errors import CheckpointError, listing, message
from shardkit.ranks import Groups, agree, all_gather_bytes, together
from shardkit.shards import local_value
from shardkit.state.complete import check_complete
from shardkit.state.names import ModelState, first_names, model_state, trainable_state
from shardkit.state.optimizer import sharded_optimizer_state_dict, tensor_leaves

STATE = "state.json"


@dataclass(frozen=True)
class Content:
    """What one save writes."""

    model: dict[str, Tensor]  # by FQN, live or copied; tied ones are one object
    optimizer: dict[str, Tensor]  # by path in the state
    rest: dict[str, Tensor]  # of the scheduler, of extra and of the random generators; the first rank writes them
    plain: dict[str, Any]  # everything else, encoded
    layout: str = ""  # digest of how the model's tensors lie on the ranks
    meshes: list[dict[str, Any]] = field(default_factory=list)  # shapes and axis names of the model's meshes
    trainable_only: bool = False  # whether frozen parameters are left out
    config: str = ""  # the text of the model's config.json


# Writes the tensors of a content into a directory, and returns the entries of its files. Collective.
Writer: TypeAlias = Callable[[Path, Content, Groups], dict[str, FileEntry]]


def save_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | Iterable[Optimizer] | None = None,
    scheduler: Any = None,
    *,
    extra: Any = None,
    format: str = "safetensors",
    async_: bool = False,
    overwrite: bool = False,
    keep: int | None = None,
    trainable_only: bool = False,
    group: dist.ProcessGroup | None = None,
) -> SaveHandle:
    """Save a model, its optimizer and the rest of the training state into the directory ``path``, atomically.

    **Collective**: every rank of the world, or of ``group``, calls it with its shards of the same model. All ranks must
    see the same file system. Nothing is gathered: each rank writes its own bytes, and the save fails unless together
    they wrote every element once. The files are written into a hidden directory beside ``path`` and flushed, and the
    directory is renamed when all ranks have succeeded. So ``path`` is complete whenever the processes were killed, and
    an earlier checkpoint stays until then.

    The directory has ``model.safetensors`` (above 5 GB several files with an index, as on Hugging Face), which
    ``safetensors.torch.load_file`` and ``from_pretrained`` read; ``optimizer.safetensors``; ``state.safetensors`` and
    ``state.json`` with the rest; ``config.json`` if the model has a transformers ``config``; and ``manifest.json`` with
    sizes and checksums. None of them is a pickle. With ``format="dcp"`` model and optimizer are in DCP files, for
    ``torch.distributed.checkpoint.load``; quantized optimizer state, which that would not find, is refused.

    The random generators of Python and torch are saved for every rank.

    Args:
        path: the directory of this one checkpoint, such as ``runs/step-100``.
        model: plain, or sharded by any ``fully_shard`` calls.
        optimizer: one, or several of different parameters.
        scheduler: anything with a ``state_dict()`` of plain data, such as torch's schedulers.
        extra: plain data and plain tensors, such as ``{"step": 100}``; rank 0's is saved, and ``load_checkpoint``
            returns it.
        format: ``"safetensors"`` or ``"dcp"``.
        async_: return as soon as the state is copied to CPU memory (as much as this rank's shards, reused by the next
            save), and write it in a thread.
        overwrite: replace the files that shardkit wrote if there is a checkpoint at ``path``. Other files in the
            directory are carried over; it is an error if the save needs the name of one.
        keep: after the save, delete all but the newest ``keep`` checkpoints beside this one whose names differ from
            its own only in numbers; never one that is being loaded, nor files that shardkit did not write.
        trainable_only: leave out frozen parameters, such as the base of an adapter: save only parameters with
            ``requires_grad``, the buffers and extra state of the modules that hold them directly, and their optimizer
            state. Frozen parameters are neither read nor copied, and :func:`load_checkpoint` leaves them unchanged.
        group: the ranks that hold the model; None: all. Ranks that hold different models, such as pipeline stages,
            pass one group for each model, and each group its own ``path``, such as ``runs/stage-0/step-100``.

    Returns:
        a handle; :meth:`SaveHandle.wait` returns when the checkpoint is complete, at once without ``async_``.

    Raises:
        CheckpointError: on every rank: something cannot be saved (nothing is written), ranks pass different arguments
            or models (listed by rank), or writing failed on some rank (with its reason), now or in the previous
            background save. An earlier checkpoint is unchanged.

    Example:
        >>> save_checkpoint(f"runs/step-{step}", model, optimizer, scheduler, extra={"step": step}, keep=3)
    """
    finish_pending(keep_group=async_)
    place, groups = Path(path).absolute(), world(group)
    with together(groups, CheckpointError, call="save_checkpoint") as poll:
        replaces = check_destination(place, format, overwrite, keep)
        state, named = _live_state(model, optimizer, trainable_only)
        leaves = tensor_leaves(named)
        checked = leaves if format == "dcp" else {}
        if quantized := [name for name, tensor in checked.items() if _torch.is_wrapper(local_value(tensor))]:
            rule = "torch's dcp.load does not find quantized state, since it is saved by its inner tensors"
            problem, fix = f"quantized optimizer state: {listing(quantized)}", 'Use format="safetensors"'
            raise CheckpointError(message("format", problem, rule, f"{fix}, and load_checkpoint"))
        poll.own = has_subclass([*state.tensors.values(), *leaves.values()])
        content = None if poll.own else _content(state, named, scheduler, extra)
    if poll.any:
        state = replace(state, tensors=flattened(state.tensors, groups).tensors)
        named = flattened_tree(named, groups)
        with together(groups, CheckpointError):
            content = _content(state, named, scheduler, extra)
    assert content is not None, "set by one of the two"
    content = replace(content, trainable_only=trainable_only, config="" if trainable_only else config_text(model))
    options = {"path": str(place), "format": format, "async_": async_, "overwrite": overwrite, "keep": keep}
    options |= {"trainable_only": trainable_only} | _compared(content)
    fix = "Pass the same on all ranks; ranks that hold different models, such as pipeline stages, save with group="
    agree(options, groups, "save_checkpoint", CheckpointError, fix)
    content = _with_random_states(content, groups)
    if not async_:
        commit_checkpoint(place, format, content, groups, replaces=replaces, keep=keep)
        return SaveHandle()
    background = background_groups(groups)
    with together(groups, CheckpointError):
        copy = _staged(content, model)
    return start_pending(lambda: commit_checkpoint(place, format, copy, background, replaces=replaces, keep=keep))


def _compared(content: Content) -> dict[str, Any]:
    """Return what must be equal on all ranks, by argument."""
    plain = content.plain
    optimizer = {name: described(tensor) for name, tensor in content.optimizer.items()}
    return {
        "model": {name: described(tensor) for name, tensor in content.model.items()},
        "meshes": content.meshes,
        "optimizer": optimizer | dict(leaves_of(plain["optimizer"])),
        "scheduler": dict(leaves_of(plain["scheduler"])),
    }


# ---- what is saved ----------------------------------------------------------------------------------------------


def check_destination(path: Path, format: str, overwrite: bool, keep: int | None) -> bool:
    """Raise unless a checkpoint may be written to ``path``; return whether it may replace what is there. Local."""
    if format not in FORMATS:
        rule = f"It must be one of {', '.join(FORMATS)}"
        raise CheckpointError(message("format", f"is {format!r}", rule, 'Use format="safetensors"'))
    if keep is not None and (type(keep) is not int or keep < 1):
        rule = "It must be the number of checkpoints to keep, including this one: 1 or more, or None for all"
        raise CheckpointError(message("keep", f"is {keep!r}", rule, "Pass keep=3, for example"))
    if not path.name:
        rule = "It must be the directory of this one checkpoint"
        raise CheckpointError(message("path", f"is {path}", rule, f"Pass {path / 'step-1'}, for example"))
    if not path.exists() or (path.is_dir() and not any(path.iterdir())):
        return overwrite
    if not (path / manifest.NAME).is_file():
        rule = "Only a checkpoint of shardkit is ever replaced"
        raise CheckpointError(message("path", f"{path} is not a checkpoint", rule, "Use another path"))
    written = manifest.written_files(path) - {manifest.NAME}
    # Rotation leaves a manifest alone beside files of others, which are carried over.
    if not overwrite and any(os.path.lexists(path / name) for name in written):
        rule = "A checkpoint is replaced only on request"
        raise CheckpointError(message("path", f"{path} exists", rule, "Use another path, or pass overwrite=True"))
    return True


def _live_state(model: nn.Module, optimizer: Any, trainable_only: bool) -> tuple[ModelState, Any]:
    """Return the live state of the model and of its optimizer, if there is one. Local."""
    state = model_state(model)
    named = None if optimizer is None else sharded_optimizer_state_dict(model, optimizer)
    if trainable_only:
        frozen = {name for name, tensor in state.tensors.items() if not tensor.requires_grad}
        state = trainable_state(state)
        if named is not None:
            named["state"] = {name: entry for name, entry in named["state"].items() if name not in frozen}
    check_complete(model, state)
    return state, named


def _content(state: ModelState, named: Any, scheduler: Any, extra: Any) -> Content:
    """Collect the current state, as live tensors without subclasses. Local."""
    others, other_tensors = encode(state.others, "model")
    encoded, optimizer_tensors = encode(named, "", sharded=True)
    given = {"scheduler": None if scheduler is None else scheduler.state_dict(), "extra": extra}
    rest, rest_tensors = encode(given, "")
    opaque = {name: type(local_value(tensor)) for name, tensor in {**state.tensors, **optimizer_tensors}.items()}
    if unfit := [f"{name} ({cls.__name__})" for name, cls in opaque.items() if _torch.has_own_dispatch(cls)]:
        rule = "A tensor subclass is saved by its inner tensors, which __tensor_flatten__ names"
        fix = "Leave it out, or give the class __tensor_flatten__ and __tensor_unflatten__"
        raise CheckpointError(message("tensors", listing(unfit), rule, fix))
    found = dict.fromkeys(tensor.device_mesh for tensor in state.tensors.values() if isinstance(tensor, DTensor))
    meshes = [{"shape": list(mesh.shape), "names": list(mesh.mesh_dim_names or ())} for mesh in found]
    rows = [
        [name, str(tensor.dtype), list(tensor.shape), str(getattr(tensor, "placements", "plain"))]
        for name, tensor in state.tensors.items()
    ]
    ties = {name: first for name, first in first_names(state.tensors).items() if name != first}
    # Detached one by one, so that each is written under its own name; in the model, one object is a tie.
    return Content(
        model=dict(state.tensors),
        optimizer={name: tensor.detach() for name, tensor in optimizer_tensors.items()},
        rest={name: tensor.detach() for name, tensor in (other_tensors | rest_tensors).items()},
        plain={"model": others, "optimizer": encoded, **rest, "ties": ties},
        layout=hashlib.sha256(json.dumps([meshes, rows]).encode()).hexdigest(),
        meshes=meshes,
    )


def _with_random_states(content: Content, groups: Groups) -> Content:
    """Add the random generators of all ranks. Collective."""
    own = json.dumps({kind: state.hex() for kind, state in random_state.states().items()}).encode()
    of_ranks = [json.loads(each) for each in (all_gather_bytes(own, groups[0]) if groups else [own])]
    kinds = [kind for kind in of_ranks[0] if all(kind in each for each in of_ranks)]
    random = {kind: [bytes.fromhex(each[kind]) for each in of_ranks] for kind in kinds}
    encoded, tensors = encode(random_state.as_tensors(random), "random")
    return replace(content, rest=content.rest | tensors, plain=content.plain | {"random": encoded})


def _staged(content: Content, model: nn.Module) -> Content:
    sections = {"model": content.model, "optimizer": content.optimizer, "rest": content.rest}
    flat = {f"{section}/{name}": tensor for section, part in sections.items() for name, tensor in part.items()}
    copies = copies_of(model).copy(flat)
    copied: Any = {section: {name: copies[f"{section}/{name}"] for name in part} for section, part in sections.items()}
    return replace(content, **copied)


# ---- how it is written ------------------------------------------------------------------------------------------


def commit_checkpoint(
    path: Path,
    format: str,
    content: Content,
    groups: Groups,
    *,
    replaces: bool = False,
    keep: int | None = None,
    writer: Writer | None = None,
) -> None:
    """Write everything into a temporary directory, and rename it to ``path``. Collective over ``groups``."""
    if writer is None:
        writer = _write_dcp if format == "dcp" else _write_safetensors
    with directory.temporary_directory(path, groups) as draft:
        files = writer(draft.directory, content, groups)
        with together(groups, CheckpointError):
            if draft.is_first:
                files |= _write_rest(path, draft.directory, content)
                world_size = dist.get_world_size(groups[0]) if groups else 1
                about = (format, world_size, content.meshes, content.layout, files)
                found = Manifest(*about, trainable_only=content.trainable_only)
                directory.write_file(draft.directory / manifest.NAME, found.to_bytes())
                directory.commit(path, draft.token, replace=replaces)
    if keep is not None and draft.is_first:
        directory.rotate(path, keep)


def _write_rest(path: Path, temporary: Path, content: Content) -> dict[str, FileEntry]:
    """Write state and configuration, and carry over files of others from ``path``. Local: the first rank calls it."""
    files = write_section(temporary, "state", content.rest, []) if content.rest else {}
    old, written = manifest.written_files(path), [STATE]
    directory.write_file(temporary / STATE, dumps(content.plain))
    directory.carry_over(path, temporary, lambda name: name in old)
    if content.config and not (temporary / manifest.CONFIG).exists():
        directory.write_file(temporary / manifest.CONFIG, content.config.encode())
        written.append(manifest.CONFIG)
    return files | {name: manifest.entry_of(temporary / name) for name in written}


def write_section(temporary: Path, name: str, tensors: dict[str, Tensor], groups: Groups) -> dict[str, FileEntry]:
    """Write one group of safetensors files, and return their entries. Collective."""
    progress, sums = ProgressLine(f"save {name}"), dict[str, int]()
    written = write_shards(temporary, tensors, groups, name, flush=True, progress=progress, sums=sums)
    progress.close()
    return entries_of(written, sums)


def entries_of(files: Iterable[File], sums: Mapping[str, int]) -> dict[str, FileEntry]:
    """Return the manifest's entries of safetensors files, given the checksums of their tensors."""
    return {
        file.name: FileEntry(
            file.bytes, len(file.head), zlib.crc32(file.head), {name: sums.get(name, 0) for name in file.tensors}
        )
        for file in files
    }


def _write_safetensors(temporary: Path, content: Content, groups: Groups) -> dict[str, FileEntry]:
    files = write_section(temporary, "model", content.model, groups)
    return files | (write_section(temporary, "optimizer", content.optimizer, groups) if content.optimizer else {})


def _write_dcp(temporary: Path, content: Content, groups: Groups) -> dict[str, FileEntry]:
    tree: dict[str, Any] = {"model": {name: tensor.detach() for name, tensor in content.model.items()}}
    if content.plain["optimizer"] is not None:
        tree["optimizer"] = decode(content.plain["optimizer"], content.optimizer)
    owned(content.model | content.optimizer, groups)  # torch writes one of several copies, so they must be equal
    return dcp.write(temporary, tree, groups)
