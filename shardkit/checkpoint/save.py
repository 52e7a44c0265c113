"""save_checkpoint: write the full training state into one directory, from all ranks in parallel."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shardkit._torch import with_local
from shardkit.checkpoint import dcp, directory, manifest, random_state
from shardkit.checkpoint.agreement import on_each, ranks_of, world
from shardkit.checkpoint.asynchronous import (
    SaveHandle,
    background_groups,
    copies_of,
    finish_pending,
    start_pending,
    wait_pending,
)
from shardkit.checkpoint.chunks import part_of, refuse_subclasses
from shardkit.checkpoint.format import File
from shardkit.checkpoint.hub import config_text
from shardkit.checkpoint.manifest import FORMATS, FileEntry, Manifest
from shardkit.checkpoint.owners import check_copies, check_written, copies
from shardkit.checkpoint.plain import decode, dumps, encode, leaves_of
from shardkit.checkpoint.transfer import ProgressLine, flush_files
from shardkit.checkpoint.write import Layout, create_files, described, laid_out, write_own, write_parts
from shardkit.errors import CheckpointError, message
from shardkit.ranks import Groups, together
from shardkit.shards import as_sharded, local_value
from shardkit.state.names import check_scales, first_names, model_state, trainable_state
from shardkit.state.optimizer import is_quantized, sharded_optimizer_state_dict

STATE = "state.json"


@dataclass(frozen=True)
class Content:
    """What one save writes."""

    model: dict[str, Tensor]  # by FQN, live or copied; tied ones are one object
    optimizer: dict[str, Tensor]  # by path in the state
    rest: dict[str, Tensor]  # of the scheduler and of extra; the first rank writes them
    plain: dict[str, Any]  # everything else, encoded
    layouts: dict[str, Layout] = field(default_factory=dict)  # of safetensors files: model and optimizer
    random: dict[str, str] = field(default_factory=dict)  # this rank's generators
    quantized: bool = False  # whether optimizer state is quantized on this rank
    meshes: list[dict[str, Any]] = field(default_factory=list)  # shapes and axis names of the model's meshes
    trainable_only: bool = False  # whether frozen parameters are left out
    config: str = ""  # the text of the model's config.json

    def compared(self) -> dict[str, Any]:
        """Return what must be equal on all ranks, by argument."""
        optimizer = {name: described(tensor) for name, tensor in self.optimizer.items()}
        return {
            "model": {name: described(tensor) for name, tensor in self.model.items()},
            "meshes": self.meshes,
            "optimizer": optimizer | dict(leaves_of(self.plain["optimizer"])),
            "scheduler": dict(leaves_of(self.plain["scheduler"])),
        }


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
    ``torch.distributed.checkpoint.load``.

    The random generators of Python and torch are saved for every rank. Quantized optimizer state, such as torchao's, is
    saved as its values.

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
        overwrite: replace the files that shardkit wrote if there is a checkpoint at ``path``; they are deleted in a
            thread, for which the next save or load waits. Other files in the directory are carried over; it is an error
            if the save needs the name of one.
        keep: after the save, likewise, delete all but the newest ``keep`` checkpoints beside this one whose names
            differ from its own only in numbers; never one that is being loaded, or has files of others.
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
    wait_pending()
    place, groups = Path(path).absolute(), world(group)
    with together(groups, CheckpointError, call="save_checkpoint") as poll:
        finish_pending()  # here, since a rank whose program has waited does not raise
        replaces = check_destination(place, format, overwrite, keep)
        content = _collected(model, optimizer, scheduler, extra, format, trainable_only)
        options = {"path": str(place), "format": format, "async_": async_, "overwrite": overwrite, "keep": keep}
        poll.same = options | {"trainable_only": trainable_only} | content.compared()
        poll.fix = "Pass the same; ranks that hold different models, such as pipeline stages, save with group="
        content = _staged(content, model) if async_ else content
    write = partial(commit_checkpoint, place, format, content, replaces=replaces, keep=keep)
    if not async_:
        write(groups)
        return SaveHandle()
    background = background_groups(groups)
    return start_pending(lambda: write(background))


# ---- what is saved ----------------------------------------------------------------------------------------------


def check_destination(path: Path, format: str, overwrite: bool, keep: int | None) -> bool:
    """Raise unless a checkpoint may be written to ``path``; return whether it may replace what is there. Local."""
    if format not in FORMATS:
        raise CheckpointError(message("format", f"must be one of {FORMATS}, got {format!r}", "", "Use 'safetensors'"))
    if keep is not None and (type(keep) is not int or keep < 1):
        problem = f"must be the number of checkpoints to keep, including this one, got {keep!r}"
        raise CheckpointError(message("keep", problem, "", "Pass keep=3, for example, or None for all"))
    if not path.exists() or (path.is_dir() and not any(path.iterdir())):
        return overwrite
    if not (path / manifest.NAME).is_file():
        rule = "Only a checkpoint of shardkit is ever replaced"
        raise CheckpointError(message("path", f"{path} is not a checkpoint", rule, "Use another path"))
    if not overwrite:
        raise CheckpointError(message("path", f"{path} exists", "", "Use another path, or pass overwrite=True"))
    return True


def _collected(
    model: nn.Module, optimizer: Any, scheduler: Any, extra: Any, format: str, trainable_only: bool
) -> Content:
    """Collect the current state, as live tensors. Local."""
    state = model_state(model)
    named = None if optimizer is None else sharded_optimizer_state_dict(model, optimizer)
    if trainable_only:
        frozen = {name for name, tensor in state.tensors.items() if not tensor.requires_grad}
        state = trainable_state(state)
        if named is not None:
            named["state"] = {name: entry for name, entry in named["state"].items() if name not in frozen}
    check_scales(model, state)
    others, rest = encode(state.others, "model")
    encoded, tensors = encode(named, "", sharded=True)
    given = {"scheduler": None if scheduler is None else scheduler.state_dict(), "extra": extra}
    beside, beside_tensors = encode(given, "")
    # Detached one by one, so that each is written under its own name; in the model, one object is a tie.
    moments = {n: plain_values(each) if is_quantized(each) else each.detach() for n, each in tensors.items()}
    refuse_subclasses(state.tensors | moments)
    found = dict.fromkeys(tensor.device_mesh for tensor in state.tensors.values() if isinstance(tensor, DTensor))
    ties = {name: first for name, first in first_names(state.tensors).items() if name != first}
    content = Content(
        model=dict(state.tensors),
        optimizer=moments,
        rest={name: tensor.detach() for name, tensor in (rest | beside_tensors).items()},
        plain={"model": others, "optimizer": encoded, **beside, "ties": ties},
        quantized=any(map(is_quantized, tensors.values())),
        random={kind: each.hex() for kind, each in random_state.states().items()},
        meshes=[{"shape": list(mesh.shape), "names": list(mesh.mesh_dim_names or ())} for mesh in found],
        trainable_only=trainable_only,
        config="" if trainable_only else config_text(model),
    )
    laid_out(content.rest, "state")  # all of it is checked now
    return replace(content, layouts=_layouts(content, format))


def _layouts(content: Content, format: str) -> dict[str, Layout]:
    sections = {"model": content.model, "optimizer": content.optimizer} if format == "safetensors" else {}
    return {key: laid_out(part, key) for key, part in sections.items() if part or key == "model"}


def plain_values(tensor: Tensor) -> Tensor:
    """Return the values of quantized optimizer state, on the CPU. Local."""
    values = local_value(tensor).dequantize().to("cpu", tensor.dtype)
    return as_sharded(values, tensor) if isinstance(tensor, DTensor) else values


def _staged(content: Content, model: nn.Module) -> Content:
    """Return it with copies in CPU memory. Local."""
    sections = {"model": content.model, "optimizer": content.optimizer, "rest": content.rest}
    flat = {f"{key}/{name}": tensor for key, part in sections.items() for name, tensor in part.items()}
    made = copies_of(model).copy(flat)
    copied: Any = {key: {name: made[f"{key}/{name}"] for name in part} for key, part in sections.items()}
    laid = content.layouts.items()
    layouts = {key: Layout({name: copied[key][name] for name in old.tensors}, old.files) for key, old in laid}
    return replace(content, layouts=layouts, **copied)


# ---- how it is written ------------------------------------------------------------------------------------------


def commit_checkpoint(
    path: Path,
    format: str,
    content: Content,
    groups: Groups,
    *,
    replaces: bool = False,
    keep: int | None = None,
) -> None:
    """Write everything into a temporary directory, and rename it to ``path``. Collective over ``groups``.

    Ranks wait for each other three times: when the first has made the files, when all have written and flushed their
    parts, and when it has written the rest, flushed and renamed.
    """
    layouts = content.layouts or _layouts(content, format)  # a conversion has none yet

    def prepare(place: Path) -> None:
        create_files(place, [file for layout in layouts.values() for file in layout.files])

    def write() -> dict[str, Any]:
        report: dict[str, Any] = {"random": content.random, "quantized": content.quantized, "written": {}}
        for section, layout in layouts.items():
            progress = ProgressLine(f"save {section}")
            report["written"][section] = write_own(draft.directory, layout, ranks, progress, flush=True)
            progress.close()
        return report | {"copies": copies(content.model | content.optimizer, ranks)}

    files = dict[str, FileEntry]()
    with directory.temporary_directory(path, groups, prepare) as draft:
        ranks = ranks_of(groups)
        if format == "dcp":
            files = dcp.write(draft.directory, _dcp_tree(content), groups)
        reports = on_each(write, groups)
        with together(groups, CheckpointError):
            if draft.is_first:
                check_copies(each["copies"] for each in reports.values())
                for section, layout in layouts.items():
                    sizes = {name: tensor.numel() for name, tensor in layout.tensors.items()}
                    sums = check_written(sizes, (each["written"][section] for each in reports.values()))
                    files |= entries_of(layout.files, sums)
                by_rank = dist.get_process_group_ranks(groups[0]) if groups else ranks
                rest = _write_rest(path, draft.directory, content, [reports[rank] for rank in by_rank])
                about = (format, len(ranks), content.meshes, files | rest)
                found = Manifest(*about, trainable_only=content.trainable_only)
                (draft.directory / manifest.NAME).write_bytes(found.to_bytes())
                flush_files(draft.directory / name for name in (*rest, manifest.NAME))
                directory.commit(path, draft.token, replace=replaces, keep=keep)


def entries_of(files: Iterable[File], sums: Mapping[str, int]) -> dict[str, FileEntry]:
    """Return the manifest's entries of safetensors files, given the checksums of their tensors."""
    return {
        file.name: FileEntry(
            file.bytes, len(file.head), zlib.crc32(file.head), {name: sums.get(name, 0) for name in file.tensors}
        )
        for file in files
    }


def _write_rest(path: Path, temporary: Path, content: Content, reports: list[dict[str, Any]]) -> dict[str, FileEntry]:
    """Write the first rank's state, and carry over files of others from ``path``. Local; not flushed."""
    kinds = [kind for kind in reports[0]["random"] if all(kind in each["random"] for each in reports)]
    random = {kind: [bytes.fromhex(each["random"][kind]) for each in reports] for kind in kinds}
    encoded, tensors = encode(random_state.as_tensors(random), "random")
    plain = {"random": encoded, "quantized": any(each["quantized"] for each in reports)} | content.plain
    layout = laid_out(content.rest | tensors, "state")
    create_files(temporary, layout.files)
    parts = ((name, part_of(tensor)) for name, tensor in layout.tensors.items())
    sums = {name: total for name, (_, total) in write_parts(temporary, layout.files, parts).items()}
    small, old = {STATE: dumps(plain)}, manifest.written_files(path)
    directory.carry_over(path, temporary, lambda name: name in old)
    if content.config and not (temporary / manifest.CONFIG).exists():
        small[manifest.CONFIG] = content.config.encode()
    for name, data in small.items():
        with open(temporary / name, "xb") as file:
            file.write(data)
    return entries_of(layout.files, sums) | {name: manifest.entry_of(temporary / name) for name in small}


def _dcp_tree(content: Content) -> dict[str, Any]:
    """Return what ``dcp.save`` is given: tensors without subclasses, in nested dicts."""

    def bare(tensor: Tensor) -> Tensor:
        local = local_value(tensor)
        return with_local(tensor, local) if isinstance(tensor, DTensor) else local

    tree: dict[str, Any] = {"model": {name: bare(tensor) for name, tensor in content.model.items()}}
    if content.plain["optimizer"] is not None:
        tree["optimizer"] = decode(content.plain["optimizer"], content.optimizer)
    return tree
