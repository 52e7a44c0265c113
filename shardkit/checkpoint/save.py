"""save_checkpoint: write the full training state into one directory, from all ranks in parallel.

1. Each rank collects its state: live tensors, and plain data.
2. The ranks compare what they have. Pipeline stages, which hold different tensors, exchange their
  names.
3. Each rank plans the same files, and writes its own bytes into them.
4. The first rank writes the manifest, and renames the directory.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shardkit.checkpoint import directory
from shardkit.checkpoint.background import (
    SaveHandle,
    background_groups,
    copied_to_host,
    pending,
    start_in_background,
)
from shardkit.checkpoint.byte_ranges import Part, bytes_sum, part_of, write_bytes, write_parts
from shardkit.checkpoint.format import NAMES, Entry, NewFile, Spec, plan_files
from shardkit.checkpoint.random_state import random_states
from shardkit.checkpoint.source import pack, refuse_subclasses, unpack
from shardkit.errors import CheckpointError, ShardkitError, listing
from shardkit.ranks import (
    Groups,
    check_equal,
    digest,
    extremes,
    from_first,
    gather_by_rank,
    one_group,
    own_rank,
    raise_on_all_ranks,
    sum_over_ranks,
)
from shardkit.shards import device_of, is_first_replica, local_value, misplaced
from shardkit.state.model import check_scales, first_names, model_state, trainable_state
from shardkit.state.optimizer import (
    sharded_optimizer_state_dict,
    tensor_leaves,
    with_leaves,
)
from shardkit.state.optimizer_load import options_by_name

STATE = "state.pt"
RANKS = "ranks"  # the stem of the file, and the name of the tensor in it
FIRST = b""  # for the extra of a rank that gave none, and gets the first rank's
_MOST = 1 << 62  # more than any sum or digest


@dataclass
class Snapshot:
    """What one save writes."""

    tensors: dict[str, Tensor]  # live, by "model/<FQN>" and "optimizer/<path in its state>"
    plain: dict[str, Any]  # the rest, with a tensor on meta in the place of each
    own: dict[str, bytes] = field(default_factory=dict)  # what may differ between ranks, packed
    row: Part | None = None  # this rank's part of the bytes of all ranks, where they differ


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
    with raise_on_all_ranks(groups, CheckpointError, call="save_checkpoint"):
        pending().wait()  # here, since a rank whose program has waited does not raise
        if keep is not None and (type(keep) is not int or keep < 1):
            raise CheckpointError(
                "keep must be the number of checkpoints to keep, including this one, got "
                f"{keep!r}. Pass keep=3, for example, or None for all."
            )
        if own_rank() == ranks[0]:
            directory.prepare(place, overwrite, keep)
        snapshot = _collect(model, optimizer, scheduler, trainable_only)
        is_given = extra is not None or own_rank() == ranks[0]
        snapshot.own = {"extra": pack(extra, "extra") if is_given else FIRST}
        for kind, state in random_states().items():
            snapshot.own[kind] = pack(state, kind)
    same = {"path": str(place), "async_": async_, "overwrite": overwrite, "keep": keep}
    same |= {"trainable_only": trainable_only, "optimizer": optimizer is not None}
    same |= {"scheduler": snapshot.plain["scheduler"]}
    check_equal(same, groups, CheckpointError)
    owners = _agree(snapshot, groups, ranks)
    with raise_on_all_ranks(groups, CheckpointError):
        files, parts = plan_checkpoint(place, snapshot, owners)
        state = pack(snapshot.plain, "the state") if own_rank() == ranks[0] else b""
        if async_:
            copies = copied_to_host((values for _, (values, _) in parts), model)
            parts = [
                (entry, (copy, box)) for (entry, (_, box)), copy in zip(parts, copies, strict=True)
            ]
    if async_:
        groups = background_groups(groups)
    write = partial(
        write_checkpoint, place, files, parts, state, groups=groups, ranks=ranks, keep=keep
    )
    if async_:
        return start_in_background(write)
    write()
    return SaveHandle()


# ---- 1. collect ----------------------------------------------------------------------------------


def _collect(model: nn.Module, optimizer: Any, scheduler: Any, trainable_only: bool) -> Snapshot:
    """Collect the current state, as live tensors. Local."""
    whole = model_state(model)
    state = trainable_state(whole) if trainable_only else whole
    check_scales(model, state)
    first = first_names(state.tensors)
    named = None
    if optimizer is not None:
        named = sharded_optimizer_state_dict(model, optimizer)
        if trainable_only:
            for name, tensor in whole.tensors.items():
                if not tensor.requires_grad:
                    named["state"].pop(name, None)
    snapshot = make_snapshot({name: state.tensors[name] for name in first.values()}, named)
    snapshot.plain |= {
        "extra_state": state.others,
        "ties": {name: other for name, other in first.items() if name != other},
        "trainable_only": trainable_only,
        "scheduler": None if scheduler is None else scheduler.state_dict(),
    }
    pack(snapshot.plain, "the scheduler, or extra state of the model,")
    check_savable({key.partition("/")[2]: tensor for key, tensor in snapshot.tensors.items()})
    return snapshot


def make_snapshot(model: Mapping[str, Tensor], optimizer: dict[str, Any] | None) -> Snapshot:
    """Return the tensors by their keys, and their stand-ins. Local."""
    tensors = {f"model/{name}": tensor for name, tensor in model.items()}
    for path, tensor in tensor_leaves(optimizer).items():
        tensors[optimizer_key(path)] = tensor.detach()
    plain = {
        "model": {name: _stand_in(tensor) for name, tensor in model.items()},
        "optimizer": with_leaves(optimizer, lambda _, tensor: _stand_in(tensor)),
    }
    return Snapshot(tensors, plain)


def optimizer_key(place: str) -> str:
    """Return the key of a tensor at a place of :func:`tensor_leaves` in an optimizer's state."""
    return f"optimizer/{place[1:].replace('/', '.')}"


def _stand_in(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def check_savable(tensors: Mapping[str, Tensor]) -> None:
    """Raise for tensors that a safetensors file cannot hold. Local."""
    refuse_subclasses(tensors)
    problems = []
    for key, tensor in tensors.items():
        local = local_value(tensor)
        if local.is_meta:
            problem = (
                "on the meta device; call shardkit.materialize(model), or load_pretrained, before"
            )
        elif local.layout != torch.strided or local.is_quantized:
            problem = str(local.layout)
        elif tensor.dtype not in NAMES:
            problem = str(tensor.dtype)
        elif isinstance(tensor, DTensor) and any(place.is_partial() for place in tensor.placements):
            problem = "Partial: its value is a sum over ranks"
        else:
            problem = misplaced(tensor) if isinstance(tensor, DTensor) else ""
        if problem:
            problems.append(f"{key} ({problem})")
    if problems:
        raise CheckpointError(f"tensors cannot be saved: {listing(problems)}.")


# ---- 2. agree ------------------------------------------------------------------------------------


def _agree(snapshot: Snapshot, groups: Groups, ranks: Sequence[int]) -> dict[str, int]:
    """Add what other ranks have to the plain data; return the first rank that has each tensor.
    Collective.
    """
    table = {key: described(tensor) for key, tensor in snapshot.tensors.items()}
    options = repr((snapshot.plain["optimizer"] or {}).get("param_groups"))
    lows, highs = [], []
    for value in ([table, options], *snapshot.own.values()):
        is_compared = value != FIRST
        lows.append(digest(value) if is_compared else _MOST)
        highs.append(digest(value) if is_compared else -_MOST)
    lows, highs = extremes(lows, highs, groups)
    same_tensors = lows[0] == highs[0]
    shared = {}
    for (name, data), low, high in zip(snapshot.own.items(), lows[1:], highs[1:], strict=True):
        if low == high:
            shared[name] = data
    snapshot.plain["shared"] = shared
    if len(shared) < len(snapshot.own):
        rest = {name: data for name, data in snapshot.own.items() if name not in shared}
        row = bytearray(pack(rest, "extra"))
        sizes = list(gather_by_rank(len(row), groups).values())
        start = sum(sizes[: ranks.index(own_rank())])
        snapshot.row = torch.frombuffer(row, dtype=torch.uint8), ((start, len(row)),)
        snapshot.plain["sizes"] = sizes

    owners = dict.fromkeys(table, ranks[0])
    if not same_tensors:
        owners = _merge_stages(snapshot, digest([table, options]), groups)
    on_slices = []
    for key in owners:
        tensor = snapshot.tensors.get(key)
        is_on_all = isinstance(tensor, DTensor) and tensor.device_mesh.size() == len(ranks)
        if not same_tensors or (isinstance(tensor, DTensor) and not is_on_all):
            on_slices.append(key)
    if on_slices:
        _check_replicas(snapshot.tensors, on_slices, groups)
    return owners


def described(tensor: Tensor) -> str:
    """Return a tensor's shape, dtype and placements, which are equal on all ranks of a stage."""
    return f"{tuple(tensor.shape)} {tensor.dtype} {getattr(tensor, 'placements', 'plain')}"


def _merge_stages(snapshot: Snapshot, stage_id: int, groups: Groups) -> dict[str, int]:
    """Merge the plain data of all stages, each sent by its first rank; return the first rank of
    each tensor.
    """
    first_ranks: dict[int, int] = {}
    for rank, found in gather_by_rank(stage_id, groups).items():
        first_ranks.setdefault(found, rank)
    own, owners = pack(snapshot.plain, "the state").hex(), dict[str, int]()
    merged: dict[str, Any] = {}
    for rank in sorted(first_ranks.values()):
        group: Any = groups[0] or dist.group.WORLD
        source = dist.get_group_rank(group, rank)
        stage = unpack(bytes.fromhex(from_first(own, groups, source)))
        if not merged:
            merged = stage | {"model": {}, "extra_state": {}}
            if stage["optimizer"] is not None:
                merged["optimizer"] = {"state": {}, "param_groups": []}
        for name, spec in stage["model"].items():
            known = merged["model"].setdefault(name, spec)
            if (known.shape, known.dtype) != (spec.shape, spec.dtype):
                raise CheckpointError(
                    f"{name} has shape {tuple(spec.shape)} and {spec.dtype} on rank {rank}, and "
                    f"{tuple(known.shape)} and {known.dtype} on another. Ranks that hold different "
                    "tensors must give them different names, as with "
                    'nn.ModuleDict({f"stage{n}": module}).'
                )
            owners.setdefault(f"model/{name}", rank)
        merged["ties"] |= stage["ties"]
        merged["extra_state"] |= stage["extra_state"]
        if stage["optimizer"] is not None:
            _merge_optimizer(merged["optimizer"], stage["optimizer"], rank)
            for place in tensor_leaves(stage["optimizer"]):
                owners.setdefault(optimizer_key(place), rank)
    snapshot.plain |= {key: merged[key] for key in ("model", "ties", "extra_state", "optimizer")}
    return owners


def _merge_optimizer(merged: dict[str, Any], stage: dict[str, Any], rank: int) -> None:
    known = options_by_name(merged)
    merged["state"] |= stage["state"]
    for group in stage["param_groups"]:
        for name in group["params"]:
            options = known.get(name, group) | {"params": group["params"]}
            if repr(options) != repr(group):
                raise CheckpointError(
                    f"{name} has other options in the optimizer of rank {rank} than before it."
                )
        merged["param_groups"].append(group)


def _check_replicas(tensors: Mapping[str, Tensor], keys: Sequence[str], groups: Groups) -> None:
    """Raise if meshes that each have one of these tensors in full have different values of it.
    Collective.
    """
    sums = torch.zeros(len(keys), dtype=torch.int64)
    by_mesh: dict[DeviceMesh, list[int]] = {}
    for number, key in enumerate(keys):
        tensor = tensors.get(key)
        if isinstance(tensor, DTensor):
            by_mesh.setdefault(tensor.device_mesh, []).append(number)
            local = local_value(tensor)
            if is_first_replica(tensor) and local.numel():
                sums[number] = local.contiguous().view(-1).view(torch.uint8).sum(dtype=torch.int64)
    for mesh, numbers in by_mesh.items():
        total = sums[numbers].to(device_of(mesh))
        for group in mesh.get_all_groups():
            dist.all_reduce(total, group=group)
        sums[numbers] = total.cpu()
    lows, highs = [], []  # of a rank without the tensor they change nothing
    for key, total in zip(keys, sums.tolist(), strict=True):
        is_here = isinstance(tensors.get(key), DTensor)
        lows.append(total if is_here else _MOST)
        highs.append(total if is_here else -_MOST)
    lows, highs = extremes(lows, highs, groups)
    differ = []
    for key, low, high in zip(keys, lows, highs, strict=True):
        if low < high:
            differ.append(key.partition("/")[2])
    if differ:
        raise CheckpointError(
            f"{len(differ)} tensors are full on several meshes, with different values: "
            f"{listing(differ)}. A tensor whose parts differ between ranks must be one DTensor on "
            "a mesh of all of these ranks, as by DTensor.from_local(part, mesh['ep'], [Shard(0)]) "
            "before fully_shard; or give the parts different names."
        )


# ---- 3. plan -------------------------------------------------------------------------------------


def plan_checkpoint(
    path: Path, snapshot: Snapshot, owners: Mapping[str, int]
) -> tuple[list[NewFile], list[tuple[Entry, Part]]]:
    """Return all files of a checkpoint, and this rank's parts of them. Local, pure."""
    draft = directory.draft_of(path)
    specs: dict[str, dict[str, Spec]] = {"model": {}, "optimizer": {}}
    for name, stand_in in snapshot.plain["model"].items():
        specs["model"][name] = Spec(stand_in.dtype, stand_in.shape)
    for place, stand_in in tensor_leaves(snapshot.plain["optimizer"]).items():
        specs["optimizer"][optimizer_key(place).partition("/")[2]] = Spec(
            stand_in.dtype, stand_in.shape
        )
    files: list[NewFile] = []
    entries: dict[str, Entry] = {}
    for section, own in specs.items():
        if own or section == "model":
            planned, found = plan_files(draft, section, own)
            files += planned
            entries |= {f"{section}/{name}": entry for name, entry in found.items()}
    parts = list(parts_to_write(snapshot.tensors, entries, owners))
    if snapshot.row is not None:
        spec = Spec(torch.uint8, torch.Size([sum(snapshot.plain["sizes"])]))
        planned, found = plan_files(draft, RANKS, {RANKS: spec})
        files += planned
        parts.append((found[RANKS], snapshot.row))
    return files, parts


def parts_to_write(
    tensors: Mapping[str, Tensor], entries: Mapping[str, Entry], owners: Mapping[str, int]
) -> Iterator[tuple[Entry, Part]]:
    """Yield this rank's parts that no other rank writes: of the first replica, on the mesh of the
    owner. Local.
    """
    lowest: dict[DeviceMesh, int] = {}  # DeviceMesh.mesh is made anew each time (torch 2.13)
    for key, tensor in tensors.items():
        at = own_rank()
        if isinstance(tensor, DTensor):
            mesh = tensor.device_mesh
            if mesh not in lowest:
                lowest[mesh] = int(mesh.mesh.min())
            at = lowest[mesh]
        is_replica = isinstance(tensor, DTensor) and not is_first_replica(tensor)
        if key in entries and at == owners[key] and not is_replica:
            yield entries[key], part_of(tensor)


# ---- 4. write ------------------------------------------------------------------------------------


def write_checkpoint(
    path: Path,
    files: Sequence[NewFile],
    parts: Sequence[tuple[Entry, Part]],
    state: bytes,
    *,
    groups: Groups,
    ranks: Sequence[int],
    keep: int | None = None,
) -> None:
    """Write everything into a hidden directory, and rename it when all ranks have. Collective over
    ``groups``.
    """
    draft, is_first = directory.draft_of(path), own_rank() == ranks[0]
    try:
        with raise_on_all_ranks(groups, CheckpointError):
            draft.mkdir(parents=True, exist_ok=True)
            written = write_parts(files, parts, create=is_first, turn=own_rank())
            if is_first:
                write_bytes(draft / STATE, state)
        numbers = [number for file in files for number in written[file.path]]
        totals = sum_over_ranks(numbers, groups)
        with raise_on_all_ranks(groups, CheckpointError):
            if is_first:
                listed = {STATE: (len(state), bytes_sum(state, 0))}
                for file, count, checksum in zip(files, totals[::2], totals[1::2], strict=True):
                    listed[file.path.name] = file.size, checksum
                    if count != file.size:
                        raise CheckpointError(
                            f"{file.path.name}: {count:,} of {file.size:,} bytes were written. "
                            "Each byte is written once. Report this, with the model's meshes and "
                            "placements."
                        )
                directory.commit(path, listed, len(ranks))
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
