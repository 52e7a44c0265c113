"""save_pretrained: write a model in the hub's layout, from all ranks in parallel."""

from __future__ import annotations

import copy
import os
import re
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardkit.checkpoint import directory, manifest
from shardkit.checkpoint.agreement import on_each, own_rank, ranks_of, world
from shardkit.checkpoint.chunks import Part, flush_files, full_box
from shardkit.checkpoint.format import File, Spec, lay_out
from shardkit.checkpoint.hub import (
    Group,
    described_config,
    is_adapted,
    is_pretrained,
    plain_class,
    plan_save,
    unwrapped,
)
from shardkit.checkpoint.write import (
    MAX_SHARD_SIZE,
    Written,
    check_written,
    create_files,
    described,
    laid_out,
    owned,
    write_parts,
    written_dtype,
)
from shardkit.errors import CheckpointError, listing, message
from shardkit.ranks import Groups, agree, together
from shardkit.state.boxes import gather, model_group
from shardkit.state.full_params import full_params
from shardkit.state.names import model_state

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
    them. Each rank writes its own bytes of tensors that are only renamed, and its own experts of stacked ones; what
    else a conversion changes is gathered on the first rank, one group of tensors at a time. The directory is renamed
    into its place when all ranks have succeeded; other files in it stay. The model is unchanged.

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
    with _full_prompts(model), together(groups, CheckpointError, call="save_pretrained") as poll:
        _check_place(place, overwrite)
        export = _export(model)
        laid_out(export.sources, export.name, max_shard_size, dtype)  # checks that files can hold them
        files = lay_out(export.specs(dtype), export.name, max_shard_size)
        poll.own = directory.draw_token()  # the highest is of all
    compared = {"path": str(place), "overwrite": overwrite, "dtype": str(dtype), "files": [file.name for file in files]}
    compared["model"] = {name: described(tensor) for name, tensor in export.sources.items()}
    agree(compared, groups, "save_pretrained", CheckpointError)
    is_first = own_rank() == ranks_of(groups)[0]
    with directory.temporary_directory(place, poll.any, is_first=is_first) as draft:
        with together(groups, CheckpointError):
            draft.mkdir(parents=True, exist_ok=True)
            if is_first:
                directory.clear_stale(place, poll.any)
                create_files(draft, files)
        _write(draft, files, export, groups)
        with together(groups, CheckpointError):
            if is_first:
                export.write_configs(draft, dtype)
                flush_files(each for each in draft.rglob("*") if each.is_file())
                directory.carry_over(place, draft, lambda name: _OURS.fullmatch(name) is not None)
                directory.commit(place, poll.any, replace=True)


def _check_place(place: Path, overwrite: bool) -> None:
    if place.exists() and not place.is_dir():
        raise CheckpointError(message("path", f"must be a directory, and {place} is a file", "", "Use another path"))
    if (place / manifest.NAME).exists():
        rule = "A model is never written into a checkpoint, whose manifest lists all of its files"
        raise CheckpointError(
            message("path", f"must not be a checkpoint, and {place} is one", rule, "Use another path")
        )
    there = sorted(each.name for each in place.iterdir() if _OURS.fullmatch(each.name)) if place.exists() else []
    if there and not overwrite:
        rule, fix = "A model is replaced only on request", "Use another path, or pass overwrite=True"
        raise CheckpointError(message(str(place), f"has {listing(there)}", rule, fix))


# ---- what is written -------------------------------------------------------------------------------------------


class _Export(NamedTuple):
    """A model in the hub's layout."""

    name: str  # the start of the names of its files
    model: Any  # unwrapped
    sources: dict[str, Tensor]  # by the model's names
    renamed: dict[str, str]  # the hub's names of those that are written as they are
    groups: list[tuple[Group, dict[str, str]]]  # of those that are converted, with the hub's names

    def specs(self, dtype: torch.dtype | None) -> dict[str, Spec]:
        """Return what the files hold, by the hub's names."""
        tensors = {new: self.sources[name] for name, new in self.renamed.items()}
        tensors |= {new: group.targets[name] for group, names in self.groups for name, new in names.items()}
        return {name: Spec(written_dtype(tensor, dtype), tensor.shape) for name, tensor in tensors.items()}

    def write_configs(self, place: Path, dtype: torch.dtype | None) -> None:
        """Write the JSON files that tell how to build the model. Local."""
        model = self.model
        if self.name == "adapter_model":
            config, base = copy.copy(next(iter(model.peft_config.values()))), model.get_base_model()
            config.base_model_name_or_path = config.base_model_name_or_path or vars(base).get("name_or_path") or None
            config.inference_mode = True
            auto = {"base_model_class": plain_class(base).__name__, "parent_library": plain_class(base).__module__}
            config.save_pretrained(place, auto_mapping_dict=auto if config.task_type is None else None)
            return
        config = described_config(model, dtype or model.dtype)
        config.save_pretrained(place)
        if model.can_generate():
            model.generation_config.save_pretrained(place)
        if model.is_remote_code():
            sys.modules["transformers"].dynamic_module_utils.custom_object_save(model, place, config=config)


def _export(model: nn.Module) -> _Export:
    """Plan a transformers or peft model in the hub's layout. Local, pure.

    Raises:
        CheckpointError: it is another model, is quantized, or has several adapters.
    """
    bare: Any = unwrapped(model)
    tensors = model_state(model).tensors
    if is_adapted(model):
        return _export_adapter(bare, tensors)
    if not is_pretrained(model) or getattr(bare, "_hf_peft_config_loaded", False):
        problem = f"must be of transformers 5, or of peft, got {plain_class(bare).__name__}"
        raise CheckpointError(message("model", problem, "", "Use save_checkpoint"))
    if getattr(bare, "hf_quantizer", None) is not None:
        rule, fix = "Only transformers knows the layout of its weights", "Save the parameters that train, with peft"
        raise CheckpointError(message("model", "is quantized by transformers", rule, fix))
    tied = getattr(bare, "all_tied_weights_keys", None) or {}  # names that transformers ties to others, which are kept
    kept_first = sorted(tensors, key=lambda name: name in tied)
    first = {id(tensors[name]): name for name in reversed(kept_first)}
    ignored = getattr(bare, "_keys_to_ignore_on_save", None) or ()
    sources = {name: t for name, t in tensors.items() if first[id(t)] == name and name not in ignored}
    return _Export("model", bare, sources, *plan_save(bare, sources))


def _export_adapter(model: Any, tensors: Mapping[str, Tensor]) -> _Export:
    """Find by stand-ins on meta which tensors peft saves, and by which names."""
    if len(model.peft_config) != 1:
        problem = f"must have one adapter, and has {', '.join(model.peft_config)}"
        raise CheckpointError(message("model", problem, "A directory holds one", "Delete all but one, and save"))
    adapter = next(iter(model.peft_config))
    stand_ins = {name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for name, tensor in tensors.items()}
    names = {id(each): name for name, each in stand_ins.items()}
    saved = sys.modules["peft"].get_peft_model_state_dict(model, stand_ins, adapter)
    prompts = {new: each.detach().clone() for new, each in saved.items() if id(each) not in names}
    renamed = {names[id(each)]: new for new, each in saved.items() if new not in prompts}
    sources = {name: tensors[name] for name in renamed} | prompts
    return _Export("adapter_model", model, sources, renamed | {name: name for name in prompts}, [])


def _full_prompts(model: nn.Module) -> AbstractContextManager[object]:
    """Gather what peft computes the prompts from that it saves, as for prefix tuning. Collective."""
    encoder = getattr(unwrapped(model), "prompt_encoder", None) if is_adapted(model) else None
    return full_params(encoder) if encoder is not None else nullcontext()


# ---- how it is written -----------------------------------------------------------------------------------------


def _write(draft: Path, files: list[File], export: _Export, groups: Groups) -> None:
    """Fill all files, each rank with what its own parts of the sources become. Collective."""
    ranks = ranks_of(groups)
    split = [(group, names) for group, names in export.groups if _is_split(group, export.sources)]
    written: list[Written] = []

    def write_own() -> dict[str, tuple[int, int]]:
        mine = owned(export.sources, ranks)
        parts = [(new, mine[name]) for name, new in export.renamed.items() if name in mine]
        for group, names in split:
            parts += _own_rows(group, names, mine, export.sources)
        written = write_parts(draft, files, parts)
        flush_files(draft / f.name for f in files if not f.tensors.keys().isdisjoint(written))
        return written

    written += on_each(write_own, groups).values()
    for group, names in (each for each in export.groups if each not in split):
        sources = [(name, export.sources[name]) for name, _ in group.sources]
        if any(isinstance(tensor, DTensor) for _, tensor in sources):
            on = model_group(tensor for _, tensor in sources)
            full = dict(gather(sources, on, device=torch.device("cpu")))
        else:  # each rank of the group has them, whether or not that is the world
            full = {name: tensor.detach().cpu() for name, tensor in sources}

        def write_group(group: Group = group, names: dict[str, str] = names, full: Any = full) -> dict[str, Any]:
            made = group.convert(full.__getitem__) if own_rank() == ranks[0] else {}
            parts = [(names[name], (value, full_box(value.shape))) for name, value in made.items()]
            return write_parts(draft, files, parts)

        written += on_each(write_group, groups).values()
    check_written(
        {name: spec.shape.numel() for name, spec in export.specs(None).items()}, [{"": each} for each in written]
    )


def _is_split(group: Group, sources: Mapping[str, Tensor]) -> bool:
    """Whether each rank can convert its own rows: all sources are sharded alike on dim 0, or are plain."""
    tensors = [sources[name] for name, _ in group.sources]
    places = {(each.device_mesh, each.placements) if isinstance(each, DTensor) else None for each in tensors}
    on_rows = all(getattr(place, "dim", 0) == 0 for each in places if each is not None for place in each[1])
    return group.unstacks and on_rows and len(places) == len({each.shape[0] for each in tensors}) == 1


def _own_rows(
    group: Group, names: Mapping[str, str], mine: Mapping[str, Part], sources: Mapping[str, Tensor]
) -> list[tuple[str, Part]]:
    """Return what this rank's rows of stacked sources become, by the hub's names. Local."""
    first = group.sources[0][0]
    if first not in mine or not mine[first][0].numel():
        return []
    every, (start, count) = sources[first].shape[0], mine[first][1][0]
    values = list(group.convert(lambda name: mine[name][0]).values())
    targets = list(names.values())  # those of all rows of one source, then those of the next
    found = []
    for number, value in enumerate(values):
        source, row = divmod(number, count)
        found.append((targets[source * every + start + row], (value, full_box(value.shape))))
    return found
