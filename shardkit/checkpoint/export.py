"""save_pretrained: a model as the hub has it, written by all ranks at once."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardkit.checkpoint import directory, manifest
from shardkit.checkpoint.agreement import agree, world
from shardkit.checkpoint.format import Layout, Spec, lay_out
from shardkit.checkpoint.hub import exported
from shardkit.checkpoint.moved import Moved
from shardkit.checkpoint.owners import check_written, owned
from shardkit.checkpoint.pieces import Part, inside, whole
from shardkit.checkpoint.write import MAX_SHARD_SIZE, checked_layout, described, make_files, write_parts, written_dtype
from shardkit.errors import CheckpointError, listing, message
from shardkit.ranks import Groups, together
from shardkit.state.names import model_state
from shardkit.state.routes import routes_of
from shardkit.state.transfer import Want, gathered

# What a save writes into a directory; of an older one of more files too.
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

    **Collective**: every rank of the world, or of ``group``, calls it, with its shards of the same model. In the
    directory: ``model.safetensors`` under the hub's names, with the conversions of ``from_pretrained`` undone, or
    several files with ``model.safetensors.index.json``; ``config.json`` and ``generation_config.json``. Of a peft model
    ``adapter_model.safetensors`` and ``adapter_config.json``. ``from_pretrained``, peft and inference engines read
    them. Every rank writes its own bytes, at once; weights that a conversion permutes in other ways than by stacking,
    splitting and transposing are gathered, one at a time. The directory is renamed into its place when all ranks have
    succeeded; files in it that are none of these stay. The model is unchanged.

    Args:
        model: sharded by FSDP2, by whomever, or plain.
        path: the directory.
        max_shard_size: bytes of tensors in a file; a larger tensor has one to itself.
        dtype: what floating-point tensors are converted to on the way, such as ``torch.bfloat16``; None: as they are.
        overwrite: replace the model that is there.
        group: the ranks that hold the model; None: all.

    Raises:
        CheckpointError: on every rank; it is another kind of model, a tensor cannot be saved, a model or a checkpoint
            is there, ranks pass different arguments, or writing failed on some rank. What was there is untouched.

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
        checked_layout(sources, export.name, max_shard_size, {}, dtype)
        specs = {name: Spec(written_dtype(each, dtype), each.shape) for name, each in export.tensors.items()}
        layout = lay_out(specs, export.name, max_shard_size, {"format": "pt"})
    said = {name: described(tensor) for name, tensor in sources.items()}
    files = {"files": layout.names, "dtype": str(dtype)}
    agree({"path": str(place), "overwrite": overwrite, "model": said} | files, groups, "save_pretrained")
    with directory.temporary_directory(place, groups) as draft:
        _write(draft, layout, export.tensors, sources, groups)
        with together(groups, CheckpointError):
            if draft.is_first:
                export.write_configs(draft.directory, dtype)
                for each in draft.directory.rglob("*"):
                    if each.is_file():
                        directory.flush_file(each)
                directory.carry_over(place, draft.directory, lambda name: _OURS.fullmatch(name) is not None)
                directory.commit(place, draft.token, replace=True)


def _check_place(place: Path, overwrite: bool) -> None:
    if place.exists() and not place.is_dir():
        raise CheckpointError(message("path", f"{place} is a file", "It is a directory", "Use another path"))
    if (place / manifest.NAME).exists():
        rule = "A checkpoint stays what its manifest says"
        raise CheckpointError(message("path", f"{place} is a checkpoint", rule, "Use another path"))
    there = sorted(each.name for each in place.iterdir() if _OURS.fullmatch(each.name)) if place.exists() else []
    if there and not overwrite:
        rule, fix = "A model is replaced only when that is asked for", "Use another path, or pass overwrite=True"
        raise CheckpointError(message("path", f"{place} has {listing(there)}", rule, fix))


def _write(
    draft: directory.Draft,
    layout: Layout,
    tensors: Mapping[str, Moved],
    sources: Mapping[str, Tensor],
    groups: Groups,
) -> None:
    """Write all files, each rank what its own pieces of the sources become. Collective."""
    (place, _, is_first), mine = draft, owned(sources, groups)
    with together(groups, CheckpointError):
        if is_first:
            make_files(place, layout, flush=True)
    with together(groups, CheckpointError):
        parts = [(name, part) for name, tensor in tensors.items() for part in _parts(tensor, mine)]
        write_parts(place, layout, parts, flush=True)
        done = [(name, box) for name, (_, box) in parts]
    for name, tensor in tensors.items():
        if tensor.is_computed:
            full = tensor.value(lambda source: _gathered(source, sources))
            with together(groups, CheckpointError):
                if is_first:
                    write_parts(place, layout, [(name, (full, whole(full.shape)))], flush=True)
                    done.append((name, whole(full.shape)))
    check_written(tensors, done, {}, groups)


def _parts(tensor: Moved, mine: Mapping[str, Part]) -> Iterator[Part]:
    """What this rank's pieces of the sources are of a tensor; none of what is computed."""
    for piece in () if tensor.is_computed else tensor.pieces:
        if piece.source in mine:
            values, box = mine[piece.source]
            if (found := piece.inverse.within(box)) is not None:
                yield found.inverse.as_result(inside(values, box, found.where)), found.box


def _gathered(name: str, sources: Mapping[str, Tensor]) -> Tensor:
    """A whole source, on every rank. Collective."""
    want = Want(everywhere=True, device=torch.device("cpu"))
    return dict(gathered([(name, sources[name])], routes_of(sources.values()), want))[name]
