"""save_checkpoint: everything that training goes on from, into one directory, written by all ranks at once."""

from __future__ import annotations

import hashlib
import json
import os
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
from shardkit.checkpoint.agreement import agree, world
from shardkit.checkpoint.asynchronous import SaveHandle, background_groups, finish_pending, staging_of, start_pending
from shardkit.checkpoint.hub import config_text
from shardkit.checkpoint.inner import flattened, flattened_tree, has_subclass
from shardkit.checkpoint.manifest import FORMATS, FileEntry, Manifest
from shardkit.checkpoint.owners import owned
from shardkit.checkpoint.plain import decode, dumps, encode, leaves_of
from shardkit.checkpoint.progress import Progress
from shardkit.checkpoint.write import WrittenFile, described, write_shards
from shardkit.errors import CheckpointError, listing, message
from shardkit.ranks import Groups, all_gather_bytes, together
from shardkit.shards import local_value
from shardkit.state.complete import check_complete
from shardkit.state.names import ModelState, first_names, model_state, trainable_state
from shardkit.state.optimizer import sharded_optimizer_state_dict, tensor_leaves

STATE = "state.json"


@dataclass(frozen=True)
class Content:
    """What one save writes.

    Attributes:
        model: tensors by FQN, live or copied; tied ones are one object.
        optimizer: tensors of the optimizer by path.
        rest: tensors of the scheduler, of ``extra`` and of the random generators, which the first rank writes.
        plain: everything else, encoded.
        layout: digest of how the model's tensors lie on the ranks.
        meshes: shapes and names of the meshes that they are on.
        trainable_only: whether frozen parameters are left out.
        config: the text of the model's ``config.json``, or nothing.
    """

    model: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    rest: dict[str, Tensor]
    plain: dict[str, Any]
    layout: str = ""
    meshes: list[dict[str, Any]] = field(default_factory=list)
    trainable_only: bool = False
    config: str = ""


# Writes the tensors of a content into a directory; returns the entries of its files. Collective.
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
    """Save a model, and what its training goes on from, into the directory ``path``; whole, or not at all.

    **Collective**: every rank of the world, or of ``group``, calls it, with its shards of the same model. Nothing is
    gathered: every rank writes its own bytes, and the save fails unless together they wrote every element once. All
    ranks must see the same file system. Everything goes into a hidden directory beside ``path`` that is flushed to the
    disk and renamed last, when all ranks have succeeded; so ``path`` is whole whenever the processes were killed, and
    what was there before stays until then.

    In the directory: ``model.safetensors`` (above 5 GB several, with an index, as Hugging Face has them), which
    ``safetensors.torch.load_file`` and ``from_pretrained`` read, ``optimizer.safetensors``, ``state.safetensors`` and
    ``state.json`` with the rest, ``config.json`` where the model has a ``config`` as those of transformers, and
    ``manifest.json`` with sizes and checksums. None of them is a pickle. For
    ``format="dcp"`` model and optimizer are in DCP's files, for ``torch.distributed.checkpoint.load``; quantised
    optimizer state, which that would not find, is refused.

    The random generators of Python and torch are saved with it, those of every rank.

    Args:
        path: of this one checkpoint, such as ``runs/step-100``.
        model: any model: sharded by FSDP2, by whomever, or plain.
        optimizer: one, or several of different parameters.
        scheduler: anything with a ``state_dict()`` of plain data, as torch's schedulers.
        extra: plain data and plain tensors, such as ``{"step": 100}``; rank 0's is saved, and ``load_checkpoint``
            returns it.
        format: ``"safetensors"`` or ``"dcp"``.
        async_: return as soon as the state is copied to CPU memory (as much as this rank's shards, kept for the next
            save), and write it in a thread.
        overwrite: replace a checkpoint that is at ``path``: the files that shardkit wrote. What else is in the
            directory is carried over; a name that the save itself needs is refused.
        keep: delete all but the newest ``keep`` checkpoints beside this one that are named like it up to numbers, once
            it is complete; never one that is being loaded, nor files that shardkit did not write.
        trainable_only: leave out frozen parameters, such as an adapter's base: save what has ``requires_grad``, the
            buffers and extra state of the modules that hold it directly, and its optimizer state. Nothing else is
            read or copied. :func:`load_checkpoint` knows, and leaves the rest of the model as it is.
        group: the ranks that hold the model; None: all. Ranks that hold different models, such as pipeline stages,
            pass one group for each, and each its own ``path``, such as ``runs/stage-0/step-100``.

    Returns:
        a handle; :meth:`SaveHandle.wait` returns when the checkpoint is complete, at once without ``async_``.

    Raises:
        CheckpointError: on every rank; something cannot be saved (nothing is written), ranks pass different arguments
            or models (named, with the ranks), or writing failed on some rank (with its reason), now or in the
            background save before. What was there before is untouched.

    Example:
        >>> save_checkpoint(f"runs/step-{step}", model, optimizer, scheduler, extra={"step": step}, keep=3)
    """
    finish_pending(keep_group=async_)
    place, groups = Path(path).absolute(), world(group)
    with together(groups, CheckpointError, call="save_checkpoint") as poll:
        check_destination(place, format, overwrite, keep)
        state, named = model_state(model), None
        if optimizer is not None:
            named = sharded_optimizer_state_dict(model, optimizer)
        if trainable_only:
            state, named = trainable_state(state), _trainable(named, state)
        check_complete(model, state)
        if format == "dcp":
            _refuse_quantised(tensor_leaves(named))
        poll.own = has_subclass([*state.tensors.values(), *tensor_leaves(named).values()])
        content = None if poll.own else _content(state, named, scheduler, extra)
    if poll.any:
        state = replace(state, tensors=flattened(state.tensors, groups).tensors)
        named = flattened_tree(named, groups)
        with together(groups, CheckpointError):
            content = _content(state, named, scheduler, extra)
    assert content is not None, "made by one of the two"
    content = replace(content, trainable_only=trainable_only, config="" if trainable_only else config_text(model))
    options = {"path": str(place), "format": format, "async_": async_, "overwrite": overwrite, "keep": keep}
    options["trainable_only"] = trainable_only
    agree(options | _described(content), groups, "save_checkpoint", _SAME)
    content = _with_random_states(content, groups)
    if not async_:
        commit_checkpoint(place, format, content, groups, overwrite=overwrite, keep=keep)
        return SaveHandle()
    background = background_groups(groups)
    with together(groups, CheckpointError):
        copy = _staged(content, model)
    return start_pending(lambda: commit_checkpoint(place, format, copy, background, overwrite=overwrite, keep=keep))


_SAME = "Pass the same on all ranks; ranks that hold different models, such as pipeline stages, save with group="


def _described(content: Content) -> dict[str, Any]:
    """What ranks must agree on of what is saved, by the argument that it is from."""
    plain = content.plain
    return {
        "model": {name: described(tensor) for name, tensor in content.model.items()},
        "meshes": content.meshes,
        "optimizer": {name: described(tensor) for name, tensor in content.optimizer.items()}
        | dict(leaves_of(plain["optimizer"])),
        "scheduler": dict(leaves_of(plain["scheduler"])),
    }


# ---- what is saved ----------------------------------------------------------------------------------------------


def check_destination(path: Path, format: str, overwrite: bool, keep: int | None) -> None:
    """Raise unless a checkpoint may be written to ``path``. Local."""
    if format not in FORMATS:
        raise CheckpointError(message("format", f"is {format!r}", f"It is one of {', '.join(FORMATS)}", "Use one"))
    directory.check_keep(keep)
    if not path.name:
        raise CheckpointError(message("path", f"is {path}", "It names the checkpoint's own directory", "Add a name"))
    if not path.exists() or (path.is_dir() and not any(path.iterdir())):
        return
    if not (path / manifest.NAME).is_file():
        rule = "Only a checkpoint of shardkit is ever replaced"
        raise CheckpointError(message("path", f"{path} is not a checkpoint", rule, "Use another path"))
    if not overwrite:
        rule = "A checkpoint is replaced only when that is asked for"
        raise CheckpointError(message("path", f"{path} exists", rule, "Use another path, or pass overwrite=True"))
    manifest.written_files(path)


def _trainable(named: Any, state: ModelState) -> Any:
    """An optimizer's state without that of parameters that are frozen."""
    if named is None:
        return None
    frozen = {name for name, tensor in state.tensors.items() if not tensor.requires_grad}
    return {**named, "state": {name: entry for name, entry in named["state"].items() if name not in frozen}}


def _content(state: ModelState, named: Any, scheduler: Any, extra: Any) -> Content:
    """The state as it is now: live tensors, none of them a subclass. Local."""
    others, other_tensors = encode(state.others, "model")
    encoded, optimizer_tensors = encode(named, "", sharded=True)
    given = {"scheduler": None if scheduler is None else scheduler.state_dict(), "extra": extra}
    rest, rest_tensors = encode(given, "")
    _refuse_opaque({**state.tensors, **optimizer_tensors})
    meshes, layout = _layout(state.tensors)
    ties = {name: first for name, first in first_names(state.tensors).items() if name != first}
    # Detached one by one, so that each is written under its own name; in the model one object is a tie.
    return Content(
        model=dict(state.tensors),
        optimizer={name: tensor.detach() for name, tensor in optimizer_tensors.items()},
        rest={name: tensor.detach() for name, tensor in (other_tensors | rest_tensors).items()},
        plain={"model": others, "optimizer": encoded, **rest, "ties": ties},
        layout=layout,
        meshes=meshes,
    )


def _refuse_opaque(tensors: Mapping[str, Tensor]) -> None:
    """Raise for tensors that are neither plain memory nor made of inner tensors that are."""
    opaque = {name: type(local_value(tensor)) for name, tensor in tensors.items()}
    named = [f"{name} ({cls.__name__})" for name, cls in opaque.items() if _torch.has_own_dispatch(cls)]
    if named:
        rule = "A tensor subclass is saved by its inner tensors, which __tensor_flatten__ names"
        fix = "Leave it out, or give the class __tensor_flatten__ and __tensor_unflatten__"
        raise CheckpointError(message("tensors", listing(named), rule, fix))


def _refuse_quantised(state: Mapping[str, Tensor]) -> None:
    """Raise for optimizer state that ``dcp.load`` would not find: it is saved by its inner tensors."""
    if named := [name for name, tensor in state.items() if _torch.is_wrapper(local_value(tensor))]:
        rule = "format='dcp' is for torch's dcp.load, which does not find state that is saved by its inner tensors"
        problem = f"quantised optimizer state: {listing(named)}"
        raise CheckpointError(message("format", problem, rule, 'Use format="safetensors", and load_checkpoint'))


def _layout(tensors: Mapping[str, Tensor]) -> tuple[list[dict[str, Any]], str]:
    """The meshes of a model, and a digest of how its tensors lie on them."""
    found = dict.fromkeys(tensor.device_mesh for tensor in tensors.values() if isinstance(tensor, DTensor))
    meshes = [{"shape": list(mesh.shape), "names": list(mesh.mesh_dim_names or ())} for mesh in found]
    rows = [
        [name, str(tensor.dtype), list(tensor.shape), str(getattr(tensor, "placements", "plain"))]
        for name, tensor in tensors.items()
    ]
    return meshes, hashlib.sha256(json.dumps([meshes, rows]).encode()).hexdigest()


def _with_random_states(content: Content, groups: Groups) -> Content:
    """The same with the random generators of all ranks. Collective."""
    own = json.dumps({kind: state.hex() for kind, state in random_state.states().items()}).encode()
    of_ranks = [json.loads(each) for each in (all_gather_bytes(own, groups[0]) if groups else [own])]
    kinds = [kind for kind in of_ranks[0] if all(kind in each for each in of_ranks)]
    random = {kind: [bytes.fromhex(each[kind]) for each in of_ranks] for kind in kinds}
    encoded, tensors = encode(random_state.as_tensors(random), "random")
    return replace(content, rest=content.rest | tensors, plain=content.plain | {"random": encoded})


def _staged(content: Content, model: nn.Module) -> Content:
    """A copy in CPU memory that is used again. Local."""
    sections = {"model": content.model, "optimizer": content.optimizer, "rest": content.rest}
    flat = {f"{section}/{name}": tensor for section, part in sections.items() for name, tensor in part.items()}
    copies = staging_of(model).copy(flat)
    copied: Any = {section: {name: copies[f"{section}/{name}"] for name in part} for section, part in sections.items()}
    return replace(content, **copied)


# ---- how it is written ------------------------------------------------------------------------------------------


def commit_checkpoint(
    path: Path,
    format: str,
    content: Content,
    groups: Groups,
    *,
    overwrite: bool = False,
    keep: int | None = None,
    writer: Writer | None = None,
) -> None:
    """Write everything into a temporary directory, and rename it into its place. Collective over ``groups``."""
    with directory.temporary_directory(path, groups) as (temporary, token, is_first):
        files = (writer or _WRITERS[format])(temporary, content, groups)
        with together(groups, CheckpointError):
            if is_first:
                files |= _write_rest(path, temporary, content)
                world_size = dist.get_world_size(groups[0]) if groups else 1
                about = (format, world_size, content.meshes, content.layout, files)
                found = Manifest(*about, trainable_only=content.trainable_only)
                directory.write_file(temporary / manifest.NAME, found.to_bytes())
                directory.commit(path, token, replace=overwrite)
    if keep is not None and is_first:
        directory.rotate(path, keep)


def _write_rest(path: Path, temporary: Path, content: Content) -> dict[str, FileEntry]:
    """State and configuration, and what others put into the checkpoint that is replaced. Local: the first rank."""
    files = write_section(temporary, "state", content.rest, []) if content.rest else {}
    old, written = manifest.written_files(path), [STATE]
    directory.write_file(temporary / STATE, dumps(content.plain))
    directory.carry_over(path, temporary, lambda name: name in old)
    if content.config and not (temporary / manifest.CONFIG).exists():
        directory.write_file(temporary / manifest.CONFIG, content.config.encode())
        written.append(manifest.CONFIG)
    return files | {name: manifest.entry_of(temporary / name) for name in written}


def write_section(temporary: Path, name: str, tensors: dict[str, Tensor], groups: Groups) -> dict[str, FileEntry]:
    """One group of safetensors files, with their entries. Collective."""
    progress, sums = Progress(f"save {name}"), dict[str, int]()
    written = write_shards(temporary, tensors, groups, name, flush=True, progress=progress, sums=sums)
    progress.close()
    with together(groups, CheckpointError):
        return entries_of(temporary, written, sums)


def entries_of(place: Path, written: Iterable[WrittenFile], sums: Mapping[str, int]) -> dict[str, FileEntry]:
    """What the manifest says of safetensors files, given the checksums of their tensors. Local."""
    return {
        file.name: manifest.entry_of(place / file.name, file.head, {name: sums.get(name, 0) for name in file.tensors})
        for file in written
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


_WRITERS: dict[str, Writer] = {"safetensors": _write_safetensors, "dcp": _write_dcp}
