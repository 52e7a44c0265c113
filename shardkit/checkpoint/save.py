"""save_checkpoint: write the full training state into one directory, from all ranks in parallel.

1. Each rank collects its state: live tensors, and plain data.
2. The ranks find out what is equal on all of them. Pipeline stages, which hold different tensors,
  exchange their names.
3. Each rank plans the same files, and its own parts of them.
4. Each rank writes its parts. The first one writes the manifest, and renames the directory.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shardkit._torch import is_wrapper
from shardkit.checkpoint import directory
from shardkit.checkpoint.background import (
    SaveHandle,
    background_groups,
    copied_to_host,
    pending,
    start_in_background,
)
from shardkit.checkpoint.byte_ranges import Part, header_parts, part_of, write_parts
from shardkit.checkpoint.format import NAMES, Location, NewFile, Spec, plan_files
from shardkit.checkpoint.random_state import random_states
from shardkit.checkpoint.source import pack, refuse_subclasses, unpack
from shardkit.errors import CheckpointError, ShardkitError, listing
from shardkit.ranks import (
    Groups,
    check_equal,
    digest,
    equal_on_all,
    from_first,
    gather_by_rank,
    one_group,
    own_rank,
    raise_on_all_ranks,
    sum_over_ranks,
)
from shardkit.shards import is_first_replica, local_value, misplaced
from shardkit.state.model import check_scales, first_names, model_state, trainable_state
from shardkit.state.optimizer import (
    sharded_optimizer_state_dict,
    tensor_leaves,
    with_leaves,
)
from shardkit.state.optimizer_load import options_by_name

STATE = "state.pt"
RANKS = "ranks"  # the stem of the file for what differs between ranks, and the tensor in it


@dataclass
class Snapshot:
    """What one save writes."""

    tensors: dict[str, Tensor]  # live, by "model/<FQN>" and "optimizer/<path in its state>"
    specs: dict[str, tuple[torch.dtype, torch.Size]]  # of these, and those of other stages
    plain: dict[str, Any]  # what state.pt holds, with an empty tensor in the place of each
    quantized: list[str]  # keys of optimizer state that torchao has quantized on this rank


def save_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | Iterable[Optimizer] | None = None,
    scheduler: Any = None,
    *,
    extra: Any = None,
    async_: bool = False,
    overwrite: bool = False,
    keep: int | None = None,
    trainable_only: bool = False,
    group: dist.ProcessGroup | None = None,
) -> SaveHandle:
    """Save a model, its optimizer and the rest of the training state into the directory ``path``,
    atomically.

    **Collective**: every rank of the world, or of ``group``, calls it with its shards of the model,
    and sees the same file system. Each rank writes its own bytes; nothing is gathered. An earlier
    checkpoint at ``path`` stays until the new one is complete and on the disk, whenever processes
    are killed. The random generators of every rank are saved too. ``docs/saving-and-loading.md``
    has the files.

    Pipeline stages save into one directory: the names of their tensors must be those of the whole
    model, or differ between stages, as with ``nn.ModuleDict({f"stage{n}": module})``.

    Args:
        path: the directory of this one checkpoint, such as ``runs/step-100``.
        model: plain, or sharded by any ``fully_shard`` calls.
        optimizer: one, or several of different parameters.
        scheduler: anything with a ``state_dict()`` of plain data, such as torch's schedulers.
        extra: plain data and plain tensors, such as ``{"step": 100}``, which ``load_checkpoint``
            returns; each rank's own, such as the state of its data loader. A rank that gives None
            gets the first rank's.
        async_: return when the state is copied to CPU memory, kept for the next save, and write it
            in a thread.
        overwrite: replace a checkpoint at ``path``.
        keep: then delete all but the newest ``keep`` checkpoints beside it whose names differ only
            in numbers; never one with files of yours.
        trainable_only: leave out frozen parameters, and buffers and extra state of modules without
            trainable ones.
        group: the ranks that hold the model; None: all.

    Returns:
        a handle; :meth:`SaveHandle.wait` returns when the checkpoint is complete, at once without
        ``async_``.

    Raises:
        CheckpointError: on every rank, with any earlier checkpoint unchanged: something cannot be
            saved, ranks pass different arguments, or writing failed on some rank, now or in the
            previous background save.
    """
    pending().error()
    place = Path(path).absolute()
    groups, ranks = one_group(group)
    is_first = own_rank() == ranks[0]
    with raise_on_all_ranks(groups, CheckpointError, call="save_checkpoint"):
        pending().wait()  # here, since a rank whose program has waited does not raise
        if keep is not None and (type(keep) is not int or keep < 1):
            raise CheckpointError(
                "keep must be the number of checkpoints to keep, including this one, got "
                f"{keep!r}. Pass keep=3, for example, or None for all."
            )
        if is_first:
            directory.prepare(place, overwrite)
        snapshot = _collect(model, optimizer, scheduler, trainable_only)
        own: dict[str, bytes | None] = {"extra": None}  # what may differ between ranks
        if extra is not None or is_first:
            own["extra"] = pack(extra, "extra")
        for kind, generator_state in random_states().items():
            own[kind] = pack(generator_state, kind)
    same = {
        "path": str(place),
        "async_": async_,
        "overwrite": overwrite,
        "keep": keep,
        "trainable_only": trainable_only,
        "optimizer": optimizer is not None,
        "scheduler": snapshot.plain["scheduler"],
    }
    check_equal(same, groups, CheckpointError)
    digests = _digests(snapshot, own)
    equal = equal_on_all(digests, groups)
    if snapshot.quantized or "number of quantized" not in equal:  # some rank has quantized state
        shards = _take_quantized(snapshot, groups)
        with raise_on_all_ranks(groups, CheckpointError):
            own["quantized"] = pack(shards, "the optimizer")
    if "tensors" in equal:
        owners = dict.fromkeys(snapshot.tensors, ranks[0])
        on_slices = []
        for key, tensor in snapshot.tensors.items():
            if isinstance(tensor, DTensor) and tensor.device_mesh.size() < len(ranks):
                on_slices.append(key)
    else:
        owners = _merge_stages(snapshot, digests["tensors"], groups)
        on_slices = list(owners)
    if on_slices:
        _check_replicas(snapshot.tensors, on_slices, groups)
    row = _divide(snapshot, own, equal, groups, ranks)
    with raise_on_all_ranks(groups, CheckpointError):
        files, parts = _plan_checkpoint(place, snapshot, owners, row)
        if async_:
            copies = copied_to_host((values for _, (values, _) in parts), model)
            for number, (location, (_, box)) in enumerate(parts):
                parts[number] = location, (copies[number], box)
        state = pack(snapshot.plain, "the state") if is_first else b""
        files.append(NewFile(directory.draft_of(place) / STATE, state, len(state)))
        if is_first:
            parts += header_parts(files)
    if async_:
        groups = background_groups(groups)
    write = partial(write_checkpoint, place, files, parts, groups=groups, ranks=ranks, keep=keep)
    if async_:
        return start_in_background(write)
    write()
    return SaveHandle()


# ---- 1. collect ----------------------------------------------------------------------------------


def _collect(model: nn.Module, optimizer: Any, scheduler: Any, trainable_only: bool) -> Snapshot:
    """Collect the current state, as live tensors. Local."""
    full_state = model_state(model)
    state = trainable_state(full_state) if trainable_only else full_state
    check_scales(model, state)
    first = first_names(state.tensors)
    tensors = {f"model/{name}": state.tensors[name] for name in first.values()}

    optimizer_state = None
    if optimizer is not None:
        optimizer_state = sharded_optimizer_state_dict(model, optimizer)
        if trainable_only:
            for name, tensor in full_state.tensors.items():
                if not tensor.requires_grad:
                    optimizer_state["state"].pop(name, None)
        for place, tensor in tensor_leaves(optimizer_state).items():
            tensors[f"optimizer/{optimizer_name(place)}"] = tensor.detach()

    empty = torch.empty(0)  # one for all, since to pickle a tensor takes time
    plain = {
        "optimizer": with_leaves(optimizer_state, lambda _, tensor: empty),
        "extra_state": state.others,
        "ties": {name: other for name, other in first.items() if name != other},
        "trainable_only": trainable_only,
        "scheduler": None if scheduler is None else scheduler.state_dict(),
    }
    pack(plain, "the scheduler, or extra state of the model,")
    quantized, others = [], {}
    for key, tensor in tensors.items():
        if key.startswith("optimizer/") and is_wrapper(local_value(tensor)):
            quantized.append(key)
        else:
            others[key.partition("/")[2]] = tensor
    check_savable(others)
    specs = {key: (tensor.dtype, tensor.shape) for key, tensor in tensors.items()}
    return Snapshot(tensors, specs, plain, quantized)


def optimizer_name(place: str) -> str:
    """Return the name in files of a tensor at a place of :func:`tensor_leaves` in an optimizer's
    state.
    """
    return place[1:].replace("/", ".")


def check_savable(tensors: Mapping[str, Tensor]) -> None:
    """Raise for tensors that a safetensors file cannot hold. Local."""
    refuse_subclasses(tensors)
    problems = []
    for name, tensor in tensors.items():
        local, problem = local_value(tensor), ""
        if local.is_meta:
            problem = (
                "on the meta device; call shardkit.materialize(model), or load_pretrained, before"
            )
        elif local.layout != torch.strided or local.is_quantized:
            problem = str(local.layout)
        elif tensor.dtype not in NAMES:
            problem = str(tensor.dtype)
        elif isinstance(tensor, DTensor):
            problem = misplaced(tensor)
            if any(placement.is_partial() for placement in tensor.placements):
                problem = "Partial: its value is a sum over ranks"
        if problem:
            problems.append(f"{name} ({problem})")
    if problems:
        raise CheckpointError(f"tensors cannot be saved: {listing(problems)}.")


# ---- 2. agree ------------------------------------------------------------------------------------


def _take_quantized(snapshot: Snapshot, groups: Groups) -> dict[str, Part]:
    """Take the optimizer state that any rank has quantized out of the snapshot, and return this
    rank's shards of it. Collective.

    Its blocks are of one shard, so that ranks save their own. torchao leaves a shard plain that has
    no whole blocks, so that ranks tell each other what is quantized.
    """
    keys: set[str] = set()
    for keys_there in gather_by_rank(snapshot.quantized, groups).values():
        keys.update(keys_there)
    snapshot.plain["quantized"] = sorted(keys)
    shards = {}
    for key in sorted(keys & snapshot.tensors.keys()):
        shards[key] = part_of(snapshot.tensors.pop(key))
        del snapshot.specs[key]
    return shards


def _digests(snapshot: Snapshot, own: Mapping[str, bytes | None]) -> dict[str, int | None]:
    """Return a number for whatever may be equal on all ranks; None where this rank has none.
    Local.
    """
    table = {key: described(tensor) for key, tensor in snapshot.tensors.items()}
    options = repr((snapshot.plain["optimizer"] or {}).get("param_groups"))
    digests: dict[str, int | None] = {
        "tensors": digest([table, options]),
        "number of quantized": len(snapshot.quantized),
    }
    for kind, data in own.items():
        digests[kind] = None if data is None else digest(hashlib.sha256(data).hexdigest())
    return digests


def _divide(
    snapshot: Snapshot,
    own: Mapping[str, bytes | None],
    equal: set[str],
    groups: Groups,
    ranks: Sequence[int],
) -> Part | None:
    """Put what is equal on all ranks into the plain data. The rest of all ranks is one tensor of
    bytes, in the order of ranks: return this rank's part of it. Collective.
    """
    snapshot.plain["shared"] = {kind: data for kind, data in own.items() if kind in equal}
    differing = {kind: data for kind, data in own.items() if kind not in equal}
    if not differing:
        return None
    content = bytearray(pack(differing, "extra"))
    sizes = list(gather_by_rank(len(content), groups).values())
    snapshot.plain["sizes"] = sizes
    snapshot.specs[f"{RANKS}/{RANKS}"] = torch.uint8, torch.Size([sum(sizes)])
    start = sum(sizes[: ranks.index(own_rank())])
    return torch.frombuffer(content, dtype=torch.uint8), ((start, len(content)),)


def described(tensor: Tensor) -> str:
    """Return what is equal on all ranks of a stage: shape, dtype, placements, number of ranks."""
    text = f"{tuple(tensor.shape)} {tensor.dtype}"
    if isinstance(tensor, DTensor):
        text += f" {tensor.placements} on {tensor.device_mesh.size()} ranks"
    return text


def _merge_stages(snapshot: Snapshot, stage_id: int | None, groups: Groups) -> dict[str, int]:
    """Merge what all stages have, each sent by its first rank; return the first rank of each
    tensor.
    """
    first_ranks: dict[int | None, int] = {}
    for rank, id_there in gather_by_rank(stage_id, groups).items():
        first_ranks.setdefault(id_there, rank)
    own_data = pack([snapshot.specs, snapshot.plain], "the state").hex()
    owners: dict[str, int] = {}
    all_specs: dict[str, tuple[torch.dtype, torch.Size]] = {}
    merged: dict[str, Any] = {"ties": {}, "extra_state": {}, "optimizer": None}
    for rank in sorted(first_ranks.values()):
        group: Any = groups[0] or dist.group.WORLD
        source = dist.get_group_rank(group, rank)
        specs, stage = unpack(bytes.fromhex(from_first(own_data, groups, source)))
        for key, spec in specs.items():
            known = all_specs.setdefault(key, spec)
            if known != spec:
                raise CheckpointError(
                    f"{key.partition('/')[2]} has shape {tuple(spec[1])} and {spec[0]} on rank "
                    f"{rank}, and {tuple(known[1])} and {known[0]} on another. Ranks that hold "
                    "different tensors must give them different names, as with "
                    'nn.ModuleDict({f"stage{n}": module}).'
                )
            owners.setdefault(key, rank)
        merged["ties"] |= stage["ties"]
        merged["extra_state"] |= stage["extra_state"]
        if stage["optimizer"] is None:
            continue
        optimizer = merged["optimizer"] = merged["optimizer"] or {"state": {}, "param_groups": []}
        options = options_by_name(optimizer)
        for param_group in stage["optimizer"]["param_groups"]:
            for name in param_group["params"]:
                known_options = options.get(name, param_group) | {"params": param_group["params"]}
                if repr(known_options) != repr(param_group):
                    raise CheckpointError(
                        f"{name} has other options in the optimizer of rank {rank} than before it."
                    )
        optimizer["param_groups"] += stage["optimizer"]["param_groups"]
        optimizer["state"] |= stage["optimizer"]["state"]
    snapshot.specs = all_specs
    snapshot.plain |= merged
    return owners


def _check_replicas(tensors: Mapping[str, Tensor], keys: Sequence[str], groups: Groups) -> None:
    """Raise if meshes that each have one of these tensors in full have different values of it.
    Collective.
    """
    by_mesh: dict[DeviceMesh, dict[str, int]] = {}
    for key in keys:
        tensor = tensors.get(key)
        if isinstance(tensor, DTensor):
            local, own_sum = local_value(tensor), 0
            if is_first_replica(tensor) and local.numel():
                flat = local.contiguous().view(-1).view(torch.uint8)
                own_sum = int(flat.sum(dtype=torch.int64))
            by_mesh.setdefault(tensor.device_mesh, {})[key] = own_sum
    totals: dict[str, int | None] = dict.fromkeys(keys)  # None where this rank has no part of it
    for mesh, sums in by_mesh.items():
        of_mesh = sum_over_ranks(list(sums.values()), mesh.get_all_groups())
        totals |= dict(zip(sums, of_mesh, strict=True))
    equal = equal_on_all(totals, groups)
    differing = [key.partition("/")[2] for key in keys if key not in equal]
    if differing:
        raise CheckpointError(
            f"{len(differing)} tensors are full on several meshes, with different values: "
            f"{listing(differing)}. A tensor whose parts differ between ranks must be one DTensor "
            "on a mesh of all of these ranks, as by DTensor.from_local(part, mesh['ep'], "
            "[Shard(0)]) before fully_shard; or give the parts different names."
        )


# ---- 3. plan -------------------------------------------------------------------------------------


def _plan_checkpoint(
    path: Path, snapshot: Snapshot, owners: Mapping[str, int], row: Part | None
) -> tuple[list[NewFile], list[tuple[Location, Part]]]:
    """Return all files of a checkpoint but state.pt, and this rank's parts of them. Local, pure."""
    draft = directory.draft_of(path)
    files: list[NewFile] = []
    locations: dict[str, Location] = {}
    for section in ("model", "optimizer", RANKS):
        specs = {}
        for key, spec in snapshot.specs.items():
            if key.startswith(f"{section}/"):
                specs[key.removeprefix(f"{section}/")] = Spec(*spec)
        if specs or section == "model":
            section_files, in_section = plan_files(draft, section, specs)
            files += section_files
            for name, location in in_section.items():
                locations[f"{section}/{name}"] = location
    parts = list(parts_to_write(snapshot.tensors, locations, owners))
    if row is not None:
        parts.append((locations[f"{RANKS}/{RANKS}"], row))
    return files, parts


def parts_to_write(
    tensors: Mapping[str, Tensor], locations: Mapping[str, Location], owners: Mapping[str, int]
) -> Iterator[tuple[Location, Part]]:
    """Yield this rank's parts that no other rank writes: of the first replica, on the mesh of the
    owner. Local.
    """
    first_ranks: dict[DeviceMesh, int] = {}  # of each mesh, whose ``mesh`` takes time (torch 2.13)
    for key, tensor in tensors.items():
        # Of a plain tensor the owner writes everything. A DTensor's shards are written by the ranks
        # of its first replica, if its mesh is the owner's.
        is_writer = own_rank() == owners[key]
        if isinstance(tensor, DTensor):
            mesh = tensor.device_mesh
            if mesh not in first_ranks:
                first_ranks[mesh] = int(mesh.mesh.min())
            is_writer = first_ranks[mesh] == owners[key] and is_first_replica(tensor)
        if is_writer:
            yield locations[key], part_of(tensor)


# ---- 4. write ------------------------------------------------------------------------------------


def write_checkpoint(
    path: Path,
    files: Sequence[NewFile],
    parts: Sequence[tuple[Location, Part]],
    *,
    groups: Groups,
    ranks: Sequence[int],
    keep: int | None,
) -> None:
    """Write everything into a hidden directory, and rename it when all ranks have. Collective over
    ``groups``.
    """
    draft, is_first = directory.draft_of(path), own_rank() == ranks[0]
    try:
        with raise_on_all_ranks(groups, CheckpointError):
            draft.mkdir(parents=True, exist_ok=True)
            written = write_parts(files, parts, turn=own_rank())
        numbers: list[int] = []
        for file in files:
            numbers += written[file.path]
        totals = sum_over_ranks(numbers, groups)
        with raise_on_all_ranks(groups, CheckpointError):
            if is_first:
                check_complete(files, totals[::2])
                sums = {}
                for file, checksum in zip(files, totals[1::2], strict=True):
                    sums[file.path.name] = file.size, checksum
                directory.commit(path, sums, len(ranks))
    except BaseException as error:
        if is_first:
            shutil.rmtree(draft, ignore_errors=True)
        if isinstance(error, Exception) and not isinstance(error, ShardkitError):
            # From the disk, in a process alone; or from a rank that died, or a group that was
            # destroyed.
            raise CheckpointError(
                f"save_checkpoint failed ({type(error).__name__}: {error}). Any earlier checkpoint "
                "is unchanged. See the cause, and wait() for a save in the background before "
                "destroy_process_group()."
            ) from error
        raise
    if is_first:
        directory.clear(path)
        if keep is not None:
            directory.rotate(path, keep)


def check_complete(files: Sequence[NewFile], counts: Sequence[int]) -> None:
    """Raise unless the ranks together wrote each byte of each file once. Pure."""
    for file, count in zip(files, counts, strict=True):
        if count != file.size:
            raise CheckpointError(
                f"{file.path.name}: {count:,} of {file.size:,} bytes were written. Each byte is "
                "written once. Report this, with the model's meshes and placements."
            )
