"""Weights in the hub's layout: each rank reads and writes its own bytes of files, or full tensors
are streamed.
"""

from __future__ import annotations

import copy
import os
import re
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardkit.boxes import BUCKET, gather, model_group
from shardkit.checkpoint.byte_ranges import (
    Part,
    flush_directory,
    flush_file,
    header_parts,
    part_of,
    write_parts,
)
from shardkit.checkpoint.directory import MANIFEST, clear, draft_of, put_back, rename_draft
from shardkit.checkpoint.format import (
    MAX_FILE_BYTES,
    Location,
    NewFile,
    Spec,
    find_tensors,
    plan_files,
)
from shardkit.checkpoint.hub import (
    USED,
    Group,
    HubFiles,
    base_of,
    check_8bit,
    is_pretrained,
    plain_class,
    plan_save,
    unsaved_names,
    unwrapped,
)
from shardkit.checkpoint.save import check_complete, check_savable, described, parts_to_write
from shardkit.checkpoint.source import Safetensors, check_stored_ties, refuse_subclasses
from shardkit.errors import CheckpointError, ShardkitError, listing
from shardkit.ranks import (
    Groups,
    check_equal,
    groups_of,
    one_group,
    own_rank,
    raise_on_all_ranks,
    sum_over_ranks,
)
from shardkit.state.load import (
    IncompatibleKeys,
    KeyMap,
    LoadMemory,
    Request,
    live_state,
    plan_load,
)
from shardkit.state.model import first_names, model_state, sharded_tensors, state_to_gather

# The files that a save writes into a directory, including those of an earlier save of more files.
_OURS = re.compile(
    r"(adapter_)?model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?|(generation_|adapter_)?config\.json"
)


def load_pretrained(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    key_map: KeyMap | None = None,
    dtype: torch.dtype | None = None,
    strict: bool = True,
) -> IncompatibleKeys:
    """Load a model's weights from safetensors files: those of Hugging Face, of ``save_checkpoint``,
    or any other.

    Each rank reads the bytes of its own shards, straight into them. For a model of transformers 5
    the conversions of its ``from_pretrained`` apply, one group of tensors at a time, except with
    ``key_map`` and to files of ``save_checkpoint``. A ``PeftModel`` also loads the files of its
    base, with ``strict=False``, since they have no adapters. In place, and parameters stay the same
    objects; **collective** over the ranks of the model's meshes, local for a plain model.

    Tensors that transformers never saves (``_keys_to_ignore_on_save``), such as sinusoidal
    positions, may be missing. On meta, parameters and persistent buffers get the values in the
    files; other tensors the values of the construction, recorded by ``init_on_meta``, or else of
    the model's own initializers.

    Args:
        model: plain, or sharded by any ``fully_shard`` calls, on meta or with values.
        path: a safetensors file, an index (``*.safetensors.index.json``), or a directory that has
            either, such as a snapshot of the hub.
        key_map: from names in the files to FQNs of the model: a function (None leaves the tensor
            out), a dict of whole names, or pairs of a regular expression and its replacement, of
            which the first match is applied, such as ``[("^transformer\\.", "model.")]``.
        dtype: the new dtype of floating-point parameters and buffers that are loaded; None keeps
            the model's. It takes new memory, so pass it before the first forward, and before the
            optimizer is built.
        strict: every parameter and persistent buffer must be in the files, and every tensor in the
            files in the model; one name of a tied tensor is enough, and several must have equal
            values. False leaves names alone that only one side has, and takes the first of
            different values with a warning.

    Returns:
        ``missing_keys`` and ``unexpected_keys``, as ``nn.Module.load_state_dict``; both empty when
        strict.

    Raises:
        CheckpointError: on every rank: files break a rule of their format; names, shapes or dtypes
            do not fit (all are listed); or ranks see different files. Nothing was changed, unless
            the disk failed while values were read.
        ShardkitError: on every rank: a meta tensor would get no value, or hooks on ``state_dict()``
            replace tensors.
    """
    groups = groups_of(model)
    request = Request(os.fspath(path), strict, key_map)
    with raise_on_all_ranks(groups, CheckpointError, call="load_pretrained"):
        tensors = live_state(model).tensors
        locations = find_tensors(Path(path))
        base = model
        if key_map is None:
            base, tensors = base_of(model, tensors, locations)
        source = _open_files(base, tensors, locations, request)
        dtypes = {}
        for name, tensor in tensors.items():
            dtypes[name] = tensor.dtype if not tensor.is_floating_point() else dtype or tensor.dtype
        wanted = {}
        unsaved = unsaved_names(model)
        for name, tensor in tensors.items():
            if name in source.contents.model or name not in unsaved:
                wanted[name] = tensor
        plan = plan_load(wanted, source.contents.model, request, dtypes)
        if not plan.copies:
            raise CheckpointError(
                f"{path} has no tensor of the model, such as {listing(tensors, 1)}. It has "
                f"{listing(source.contents.model, 1)}. Pass key_map= to rename."
            )
        refuse_subclasses({name: tensors[name] for name in plan.copies})
        check_stored_ties(source, plan, tensors, request)
        memory = LoadMemory(model, tensors, {name: dtypes[name] for name in plan.copies})
        stored = {name: source.contents.model[other] for name, other in plan.copies.items()}
    same: dict[str, Any] = {"missing and unexpected": plan.keys, "the rest": memory.digest}
    check_equal(same | stored, groups, CheckpointError)
    with raise_on_all_ranks(groups, CheckpointError):
        source.read([(stored[name].key, memory.of(tensors[name])) for name in stored])
        memory.compute()
    memory.install()
    if isinstance(source, HubFiles):
        setattr(base, USED, source.used)
    return plan.keys


def _open_files(
    model: nn.Module,
    tensors: Mapping[str, Tensor],
    locations: Mapping[str, Location],
    request: Request,
) -> Safetensors | HubFiles:
    """Open files by the names in them, or a transformers model's by the names of its ``tensors``.
    Local.
    """
    if request.key_map is not None:
        return Safetensors(locations)
    check_8bit(locations, tensors, request.where)
    directories = {location.file.parent for location in locations.values()}
    if not is_pretrained(model) or any((path / MANIFEST).is_file() for path in directories):
        return Safetensors(locations)
    return HubFiles(model, tensors, locations)


# ---- saving --------------------------------------------------------------------------------------


def save_pretrained(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    max_shard_size: int = MAX_FILE_BYTES,
    dtype: torch.dtype | None = None,
    overwrite: bool = False,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Save a model of transformers 5 or peft as its own ``save_pretrained`` does, for
    ``from_pretrained`` and others.

    **Collective**: every rank of the world, or of ``group``, calls it with its shards of the same
    model. The directory gets ``model.safetensors`` in the hub's names, with the conversions of
    ``from_pretrained`` undone, or several files with ``model.safetensors.index.json``;
    ``config.json`` and ``generation_config.json``; for a peft model ``adapter_model.safetensors``
    and ``adapter_config.json``. Each rank writes its own bytes; those converted together, such as
    the experts of a layer, are gathered and written by the ranks in turn. The directory is renamed
    into its place when all ranks have succeeded; other files in it stay.

    Args:
        model: plain, or sharded by any ``fully_shard`` calls.
        path: the directory.
        max_shard_size: bytes of tensors in a file; a larger tensor has a file to itself.
        dtype: convert floating-point tensors to this dtype while writing, such as
            ``torch.bfloat16``; None keeps theirs.
        overwrite: replace the model that is there.
        group: the ranks that hold the model; None: all.

    Raises:
        CheckpointError: on every rank, with existing files unchanged: it is another kind of model,
            a tensor cannot be saved, a model or a checkpoint is there, ranks pass different
            arguments, or writing failed on some rank.

    Examples:
        >>> save_pretrained(model, "out", dtype=torch.bfloat16)
        >>> AutoModelForCausalLM.from_pretrained("out")
    """
    place = Path(path).resolve()
    draft = draft_of(place)
    groups, ranks = one_group(group)
    is_first = own_rank() == ranks[0]
    with raise_on_all_ranks(groups, CheckpointError, call="save_pretrained"):
        if is_first:
            put_back(place)
            _check_place(place, overwrite)
            clear(place)
        if dtype is not None and not dtype.is_floating_point:
            raise CheckpointError(f"dtype must be a floating-point dtype, got {dtype}.")
        export = plan_export(model)
        check_savable(export.sources)
        files, locations = plan_files(draft, export.stem, export.specs(dtype), max_shard_size)
    same = {"path": str(place), "overwrite": overwrite, "dtype": dtype, "files": len(files)}
    same |= {f"tensor {name}": described(tensor) for name, tensor in export.sources.items()}
    check_equal(same, groups, CheckpointError)
    try:
        _write(files, locations, export, groups, ranks)
        with raise_on_all_ranks(groups, CheckpointError):
            if is_first:
                export.write_configs(draft, dtype)
                for file in draft.rglob("*"):
                    if file.is_file():
                        flush_file(file)
                _carry_over(place, draft)
                rename_draft(place, replace=place.exists())
    finally:
        if is_first:
            clear(place)


def _check_place(place: Path, overwrite: bool) -> None:
    if (place / MANIFEST).exists():
        raise CheckpointError(
            f"path must not be a checkpoint, and {place} is one. A model is never written into a "
            "checkpoint, whose manifest lists all of its files. Use another path."
        )
    if place.exists() and not overwrite:
        there = sorted(file.name for file in place.iterdir() if _OURS.fullmatch(file.name))
        if there:
            raise CheckpointError(
                f"{place} has {listing(there)}. A model is replaced only on request. Use another "
                "path, or pass overwrite=True."
            )


def _carry_over(place: Path, draft: Path) -> None:
    """Link the files in a directory that are not of a model into the draft that replaces it."""

    def ours(directory: str, names: list[str]) -> list[str]:
        return [name for name in names if Path(directory) == place and _OURS.fullmatch(name)]

    if place.exists():
        shutil.copytree(
            place, draft, symlinks=True, ignore=ours, copy_function=_link, dirs_exist_ok=True
        )
    for directory, _, _ in os.walk(draft):
        flush_directory(Path(directory))


def _link(source: str, target: str) -> None:
    if os.path.exists(target):  # written by this save, such as the code of a model
        return
    try:
        os.link(source, target)
    except OSError:  # a file system without hard links
        shutil.copy2(source, target)


@dataclass
class Export:
    """A model in the hub's layout."""

    stem: str  # the start of the names of its files
    model: Any  # unwrapped
    sources: dict[str, Tensor]  # by the model's names
    renamed: dict[str, str]  # the hub's names of those that are written as they are
    groups: list[Group]  # of those that are converted

    def specs(self, dtype: torch.dtype | None) -> dict[str, Spec]:
        """Return what the files hold, by the hub's names."""
        tensors = {new: self.sources[name] for name, new in self.renamed.items()}
        for group in self.groups:
            for name, new in group.hub_names.items():
                tensors[new] = group.targets[name]
        specs = {}
        for name, tensor in tensors.items():
            cast = dtype if tensor.is_floating_point() else None
            specs[name] = Spec(cast or tensor.dtype, tensor.shape)
        return specs

    def write_configs(self, place: Path, dtype: torch.dtype | None) -> None:
        """Write the JSON files that tell how to build the model. Local."""
        model = self.model
        if self.stem == "adapter_model":
            config, base = copy.copy(next(iter(model.peft_config.values()))), model.get_base_model()
            if not config.base_model_name_or_path:
                config.base_model_name_or_path = vars(base).get("name_or_path") or None
            config.inference_mode = True
            auto_mapping = None
            if config.task_type is None:
                base_class = plain_class(base)
                auto_mapping = {
                    "base_model_class": base_class.__name__,
                    "parent_library": base_class.__module__,
                }
            config.save_pretrained(place, auto_mapping_dict=auto_mapping)
            return
        config = copy.copy(vars(model)["config"])
        # which from_pretrained and inference engines look for
        config.architectures = [plain_class(model).__name__]
        config.dtype = str(dtype or model.dtype).removeprefix("torch.")
        config.save_pretrained(place)
        if model.can_generate():
            model.generation_config.save_pretrained(place)
        if model.is_remote_code():
            code = sys.modules["transformers"].dynamic_module_utils
            code.custom_object_save(model, place, config=config)


def plan_export(model: nn.Module) -> Export:
    """Plan a transformers or peft model in the hub's layout. Local, pure; raises for other and
    quantized models.
    """
    tensors = model_state(model).tensors
    bare: Any = unwrapped(model)
    if "peft" in sys.modules and isinstance(bare, sys.modules["peft"].PeftModel):
        return _export_adapter(bare, tensors)
    if not is_pretrained(model) or getattr(bare, "_hf_peft_config_loaded", False):
        raise CheckpointError(
            f"model must be of transformers 5, or of peft, got {plain_class(bare).__name__}. Use "
            "save_checkpoint."
        )
    if any(".base_layer." in name for name in tensors):
        raise CheckpointError(
            "model has adapters of peft in it, and names that no other program knows. Pass the "
            "PeftModel, for the adapter, or merge it first: model.merge_and_unload()."
        )
    if getattr(bare, "hf_quantizer", None) is not None:
        raise CheckpointError(
            "model is quantized by transformers. Only transformers knows the layout of its "
            "weights. Save the parameters that train, with peft."
        )
    # Of the names of a tied tensor, that is kept which transformers does not tie to another.
    tied = getattr(bare, "all_tied_weights_keys", None) or {}
    first = first_names({name: tensors[name] for name in sorted(tensors, key=tied.__contains__)})
    unsaved = unsaved_names(model)
    sources = {}
    for name, tensor in tensors.items():
        if first[name] == name and name not in unsaved:
            sources[name] = tensor
    return Export("model", bare, sources, *plan_save(bare, sources))


def _export_adapter(model: Any, tensors: Mapping[str, Tensor]) -> Export:
    """Find by stand-ins on meta which tensors peft saves, and by which names."""
    if len(model.peft_config) != 1:
        raise CheckpointError(
            f"model must have one adapter, and has {', '.join(model.peft_config)}. A directory "
            "holds one. Delete all but one, and save."
        )
    ((adapter, config),) = model.peft_config.items()
    if config.is_prompt_learning:
        raise CheckpointError(
            "model learns prompts. peft computes what it saves of them. Call "
            "model.save_pretrained inside `with full_params(model):`."
        )
    stand_ins = {
        name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        for name, tensor in tensors.items()
    }
    names = {id(stand_in): name for name, stand_in in stand_ins.items()}
    saved = sys.modules["peft"].get_peft_model_state_dict(model, stand_ins, adapter)
    renamed = {names[id(stand_in)]: new for new, stand_in in saved.items()}
    return Export("adapter_model", model, {name: tensors[name] for name in renamed}, renamed, [])


def _write(
    files: list[NewFile],
    locations: Mapping[str, Location],
    export: Export,
    groups: Groups,
    ranks: list[int],
) -> None:
    """Fill all files: each rank with its own parts of tensors, and in turn with what conversions
    make. Collective.
    """
    counts = {file.path: 0 for file in files}

    def write(parts: Iterable[tuple[Location, Part]]) -> None:
        written = write_parts(files, parts, turn=own_rank(), flush=False)
        for path, (count, _) in written.items():
            counts[path] += count

    with raise_on_all_ranks(groups, CheckpointError):
        files[0].path.parent.mkdir(parents=True, exist_ok=True)
        renamed = {new: export.sources[name] for name, new in export.renamed.items()}
        parts = list(parts_to_write(renamed, locations, dict.fromkeys(renamed, ranks[0])))
        if own_rank() == ranks[0]:
            parts += header_parts(files)
        write(parts)
    for turn, group in enumerate(export.groups):
        full = _gathered({name: export.sources[name] for name, _ in group.sources}, turn, ranks)
        with raise_on_all_ranks(groups, CheckpointError):
            if full is not None:
                made = group.convert(full.__getitem__)
                write([(locations[group.hub_names[name]], part_of(made[name])) for name in made])
    with raise_on_all_ranks(groups, CheckpointError):
        for path, count in counts.items():
            if count:
                flush_file(path)
    check_complete(files, sum_over_ranks(list(counts.values()), groups))


def _gathered(
    tensors: Mapping[str, Tensor], turn: int, ranks: list[int]
) -> dict[str, Tensor] | None:
    """Return full tensors on the CPU of the rank whose turn it is, and None on the others.
    Collective.
    """
    # of which the first rank's are written
    if not any(isinstance(tensor, DTensor) for tensor in tensors.values()):
        if own_rank() != ranks[0]:
            return None
        return {name: tensor.detach().cpu() for name, tensor in tensors.items()}
    holders = model_group(tensors.values())
    first = turn % len(holders.ranks)
    holders = replace(holders, ranks=holders.ranks[first:] + holders.ranks[:first])
    full = dict(gather(tensors.items(), holders, device=torch.device("cpu")))
    # Of slices of a mesh, each with the full tensors, the one with the lowest rank writes.
    return full if holders.is_root and ranks[0] in holders.ranks else None


# ---- streaming -----------------------------------------------------------------------------------


def named_full_tensors(
    model: nn.Module,
    *,
    names: Literal["model", "hub"] = "model",
    bucket_bytes: int = BUCKET,
    rank0_only: bool = False,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Yield ``(name, full tensor)`` for all parameters and persistent buffers, for example to an
    inference engine.

    The tensors are copies, in the model's order; those that the hub has in another form come last.
    Besides what was yielded, one bucket is held, or what one conversion takes and makes, such as
    the experts of a layer. **Collective**, once a bucket: every rank must iterate to the end, or
    stop at the same tensor.

    Args:
        model: any module, sharded or not; for ``names="hub"`` of transformers 5 or peft.
        names: ``"model"``: FQNs, tied tensors under each of theirs. ``"hub"``: the names and the
            tensors of the files that the plain model's ``save_pretrained`` would write, as vLLM and
            SGLang expect them; each once.
        bucket_bytes: how much is gathered at once, by default 64 MiB; a larger tensor is gathered
            by itself.
        rank0_only: yield only on the lowest rank that holds a part of the model; the others must
            iterate too.
        device: the device of the tensors; None: where they are gathered, the device of the shards
            or of their mesh.
        dtype: of floating-point tensors; None keeps theirs. Cast before sending if that is smaller.

    Raises:
        ShardkitError: on every rank, as :func:`full_state_dict` and, for ``names="hub"``,
            :func:`save_pretrained`.

    Examples:
        >>> for name, tensor in named_full_tensors(model, names="hub", dtype=torch.bfloat16):
        ...     engine.update_weight(name, tensor)
    """
    groups = groups_of(model)
    with raise_on_all_ranks(groups, call="named_full_tensors"):
        if names not in ("model", "hub"):
            raise ShardkitError(f'names must be "model" or "hub", got {names!r}.')
        if not isinstance(bucket_bytes, int):
            raise ShardkitError(f"bucket_bytes must be a number of bytes, got {bucket_bytes!r}.")
        state = state_to_gather(model)
        export = plan_export(model) if names == "hub" else None
    same = {
        "names": names,
        "bucket_bytes": bucket_bytes,
        "rank0_only": rank0_only,
        "dtype": str(dtype),
        **sharded_tensors(state),
    }
    check_equal(same, groups)
    tensors = state.tensors
    new_names: dict[str, list[str]] = {}  # under which each tensor is yielded
    if export is None:
        for name, first in first_names(tensors).items():
            new_names.setdefault(first, []).append(name)
    else:
        tensors = export.sources
        new_names = {name: [new] for name, new in export.renamed.items()}
    ranks = model_group(tensors.values())

    def full_tensors(fqns: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        return gather(
            [(name, tensors[name]) for name in fqns],
            ranks,
            everywhere=not rank0_only,
            dtype=dtype,
            device=None if device is None else torch.device(device),
            bucket_bytes=bucket_bytes,
        )

    for name, full in full_tensors(new_names):
        waiting = dict.fromkeys(reversed(new_names[name]), full)
        del full  # what was yielded is not held
        while waiting:
            yield waiting.popitem()
    for group in [] if export is None else export.groups:
        fulls = dict(full_tensors(name for name, _ in group.sources))
        if fulls:
            made = group.convert(fulls.pop)
            while made:
                target = next(iter(made))
                yield group.hub_names[target], made.pop(target).contiguous()
