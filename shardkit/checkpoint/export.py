"""save_pretrained: write a model in the hub's layout, from all ranks in parallel."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardkit.checkpoint import directory, manifest
from shardkit.checkpoint.agreement import on_each, ranks_of, world
from shardkit.checkpoint.chunks import Part, full_box, inside
from shardkit.checkpoint.format import File, Spec, lay_out
from shardkit.checkpoint.hub import exported
from shardkit.checkpoint.moved import Moved
from shardkit.checkpoint.owners import check_copies, check_written, copies, owned
from shardkit.checkpoint.transfer import flush_files
from shardkit.checkpoint.write import MAX_SHARD_SIZE, create_files, described, laid_out, write_parts, written_dtype
from shardkit.errors import CheckpointError, listing, message
from shardkit.ranks import Groups, agree, together
from shardkit.state.names import model_state
from shardkit.state.routes import routes_of
from shardkit.state.transfer import Want, gathered

# The files that a save writes into a directory, including those of an earlier save of more files.
_OURS = re.compile(
    r"(adapter_)?model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?|(generation_|adapter_)?config\.json"
)


def save_pretrained(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    max_shard_size: int = MAX_SHARD_SIZE,
    dtype: torch.dtype | None = None,
    overwrite: bool = False,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Save a model of transformers 5 or peft as its own ``save_pretrained`` does, without gathering it.

    **Collective**: every rank of the world, or of ``group``, calls it with its shards of the same model. The directory
    gets ``model.safetensors`` in the hub's names, with the conversions of ``from_pretrained`` undone, or several files
    with ``model.safetensors.index.json``; ``config.json`` and ``generation_config.json``; for a peft model
    ``adapter_model.safetensors`` and ``adapter_config.json``. ``from_pretrained``, peft and inference engines read
    them. Each rank writes its own bytes; weights that a conversion does more with than stack, split and transpose are
    gathered, one at a time. The directory is renamed into its place when all ranks have succeeded; other files in it
    stay. The model is unchanged.

    Args:
        model: plain, or sharded by any ``fully_shard`` calls.
        path: the directory.
        max_shard_size: bytes of tensors in a file; a larger tensor has a file to itself.
        dtype: convert floating-point tensors to this dtype while writing, such as ``torch.bfloat16``; None keeps
            theirs.
        overwrite: replace the model that is there.
        group: the ranks that hold the model; None: all.

    Raises:
        CheckpointError: on every rank: it is another kind of model, a tensor cannot be saved, a model or a checkpoint
            is there, ranks pass different arguments, or writing failed on some rank. Existing files are unchanged.

    Example:
        >>> save_pretrained(model, "out", dtype=torch.bfloat16)
        >>> AutoModelForCausalLM.from_pretrained("out")
    """
    place, groups = Path(path).absolute(), world(group)
    with together(groups, CheckpointError, call="save_pretrained"):
        _check_place(place, overwrite)
        tensors = model_state(model).tensors
        export = exported(model, tensors)
        sources = {name: tensors[name] for each in export.tensors.values() for name in each.origins()}
        laid_out(sources, export.name, max_shard_size, {}, dtype)
        specs = {name: Spec(written_dtype(each, dtype), each.shape) for name, each in export.tensors.items()}
        layout = lay_out(specs, export.name, max_shard_size, {"format": "pt"})
    compared = {
        "path": str(place),
        "overwrite": overwrite,
        "dtype": str(dtype),
        "files": [file.name for file in layout],
    }
    compared["model"] = {name: described(tensor) for name, tensor in sources.items()}
    agree(compared, groups, "save_pretrained", CheckpointError)
    with directory.temporary_directory(place, groups, lambda made: create_files(made, layout)) as draft:
        _write(draft, layout, export.tensors, sources, groups)
        with together(groups, CheckpointError):
            if draft.is_first:
                export.write_configs(draft.directory, dtype)
                flush_files(each for each in draft.directory.rglob("*") if each.is_file())
                directory.carry_over(place, draft.directory, lambda name: _OURS.fullmatch(name) is not None)
                directory.commit(place, draft.token, replace=True)


def _check_place(place: Path, overwrite: bool) -> None:
    if place.exists() and not place.is_dir():
        raise CheckpointError(message("path", f"{place} is a file", "It must be a directory", "Use another path"))
    if (place / manifest.NAME).exists():
        rule = "A model is never written into a checkpoint, whose manifest lists all of its files"
        raise CheckpointError(message("path", f"{place} is a checkpoint", rule, "Use another path"))
    there = sorted(each.name for each in place.iterdir() if _OURS.fullmatch(each.name)) if place.exists() else []
    if there and not overwrite:
        rule, fix = "A model is replaced only on request", "Use another path, or pass overwrite=True"
        raise CheckpointError(message("path", f"{place} has {listing(there)}", rule, fix))


def _write(
    draft: directory.Draft,
    files: list[File],
    tensors: Mapping[str, Moved],
    sources: Mapping[str, Tensor],
    groups: Groups,
) -> None:
    """Write all files, each rank what its own parts of the sources become. Collective."""
    (place, _, is_first), ranks = draft, ranks_of(groups)

    def write() -> tuple[Any, Any]:
        mine = owned(sources, ranks)
        parts = [(name, part) for name, tensor in tensors.items() for part in _parts(tensor, mine)]
        written = write_parts(place, files, parts)
        flush_files(place / file.name for file in files)
        return written, copies(sources, ranks)

    reports = on_each(write, groups).values()
    check_copies(copied for _, copied in reports)
    simple = {name: tensor.numel() for name, tensor in tensors.items() if not tensor.is_computed}
    check_written(simple, (written for written, _ in reports))
    for name, tensor in tensors.items():
        if tensor.is_computed:
            full = tensor.value(lambda source: _gathered(source, sources))
            with together(groups, CheckpointError):
                if is_first:
                    write_parts(place, files, [(name, (full, full_box(full.shape)))])


def _parts(tensor: Moved, mine: Mapping[str, Part]) -> Iterator[Part]:
    """Yield what this rank's parts of the sources become in a tensor that is not computed."""
    for piece in () if tensor.is_computed else tensor.pieces:
        if piece.source in mine:
            values, box = mine[piece.source]
            if (found := piece.inverse.within(box)) is not None:
                yield found.inverse.as_result(inside(values, box, found.where)), found.box


def _gathered(name: str, sources: Mapping[str, Tensor]) -> Tensor:
    """Gather a source on every rank. Collective."""
    want = Want(everywhere=True, device=torch.device("cpu"))
    return dict(gathered([(name, sources[name])], routes_of(sources.values()), want))[name]
