"""load_pretrained: weights from safetensors files into a model, each rank reading only what it needs."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardkit.checkpoint.agreement import agree
from shardkit.checkpoint.hub import USED, check_files, converted, unwrapped
from shardkit.checkpoint.inner import Flat, flattened, has_subclass
from shardkit.checkpoint.moved import Computed, Moved
from shardkit.checkpoint.pieces import Part, inside, part_of, whole
from shardkit.checkpoint.read import Located, locate, read_parts
from shardkit.checkpoint.source import holds_same
from shardkit.checkpoint.transfer import Progress
from shardkit.errors import CheckpointError, listing, message
from shardkit.ranks import groups_of, together
from shardkit.state.names import ModelState
from shardkit.state.place import Room, live_state
from shardkit.state.plan import (
    IncompatibleKeys,
    KeyMap,
    LoadPlan,
    Request,
    Spec,
    check_ties,
    plan_load,
)


def load_pretrained(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    key_map: KeyMap | None = None,
    dtype: torch.dtype | None = None,
    strict: bool = True,
    progress: Progress | None = None,
) -> IncompatibleKeys:
    """Load a model's weights from safetensors files: those of Hugging Face, of ``save_checkpoint``, or any other.

    Each rank reads the byte ranges of its own shards, straight into them, so no rank ever holds the model, nor a whole
    tensor of it. For a model of transformers 5, the conversions of its ``from_pretrained`` apply, such as experts that
    are one by one in the files and fused in the model; what they permute beyond stacking, splitting and transposing
    passes through memory tensor by tensor. They are left out with ``key_map``, and for what ``save_checkpoint`` wrote.

    Parameters stay the same objects. In place; **collective** over the ranks of the model's meshes, which
    exchange one digest; local for a plain model.

    A model on meta, sharded or not, is materialised: parameters and persistent buffers get what the files have, where
    their mesh wants them (the CPU where offloaded). Other meta tensors, such as non-persistent buffers, get what the
    construction computes that ``init_on_meta`` recorded, or the model's own initialisers, as by ``materialize``.

    Args:
        model: plain, or sharded by anyone with ``fully_shard``, on meta or with values.
        path: a safetensors file, an index (``*.safetensors.index.json``), or a directory that has either, such as a
            snapshot of the hub.
        key_map: from names in the files to FQNs of the model: a function (None leaves the tensor out), a map of whole
            names, or pairs of a regular expression and what replaces it, of which the first that is found in the name
            is applied, such as ``[("^transformer\\\\.", "model.")]``.
        dtype: what floating-point parameters and buffers that are loaded become; None: they keep the model's. Values
            are converted on the way, 16 MiB at a time. A new dtype takes new memory, and belongs before the first
            forward and the optimizer.
        strict: every parameter and persistent buffer must be in the files, and everything in the files in the model.
            Of tied ones any name is enough; where the files have several, their values must be equal. False leaves
            names alone that only one side has, and takes the first of different values with a warning.
        progress: called on each rank with its bytes read, and its total, every 64 MiB.

    Returns:
        ``missing_keys`` and ``unexpected_keys``, as ``nn.Module.load_state_dict``; both empty when strict.

    Raises:
        CheckpointError: on every rank, with nothing changed: the files break a rule of their format or are not there;
            names, shapes or dtypes do not fit (all of them are listed); ranks do not see the same. Also when the disk
            fails while values are read: then a model that had values may have some of the new ones.
        ShardkitError: on every rank: meta tensors that neither the files nor the construction would give a value, or
            a model whose ``state_dict()`` has hooks that replace tensors.
    """
    groups = groups_of(model)
    request = Request(os.fspath(path), strict, key_map)
    with together(groups, CheckpointError, call="load_pretrained") as poll:
        state = live_state(model)
        poll.own = has_subclass(state.tensors.values())
    flat = flattened(state.tensors, groups) if poll.any else Flat(state.tensors, [])
    with together(groups, CheckpointError):
        load = _plan(model, state, flat, path, dtype, request)
    agree(load.described(), groups, "load_pretrained")
    with together(groups, CheckpointError):
        _read(load.jobs(), progress)
        load.room.compute()
        flat.write_back()
    in_place = [tensor for tensor in load.tensors.values() if load.room.of(tensor) is tensor]
    torch.autograd.graph.increment_version(in_place)
    load.room.install()
    if load.used is not None:
        setattr(unwrapped(model), USED, load.used)
    return load.plan.keys


@dataclass(frozen=True)
class _Load:
    """What one load will do."""

    found: Mapping[str, Located | Moved]  # what the files have
    plan: LoadPlan  # which of it goes where
    tensors: Mapping[str, Tensor]  # the model's, and those inside of its subclasses, that are read
    room: Room  # the memory that is read into
    used: Any  # transformers' note of what it converted

    def jobs(self) -> Iterable[tuple[Located | Moved, Part]]:
        """What to read into what."""
        for name, tensor in self.tensors.items():
            yield self.found[self.plan.copies[name]], part_of(self.room.of(tensor))

    def described(self) -> dict[str, object]:
        """What must be equal on all ranks."""
        entries = {name: _said(self.found[source]) for name, source in self.plan.copies.items()}
        return {"what is read": entries, "missing and unexpected": self.plan.keys, "the rest": self.room.digest}


def _plan(
    model: nn.Module,
    state: ModelState,
    flat: Flat,
    path: str | os.PathLike[str],
    dtype: torch.dtype | None,
    request: Request,
) -> _Load:
    """What to read into the model's own tensors, which may become another dtype, and into those of subclasses."""
    if dtype is not None and not dtype.is_floating_point:
        raise CheckpointError(message("dtype", f"is {dtype}", "It is one of floating point", "Use torch.bfloat16"))
    if meta := [name for name, each in flat.tensors.items() if each.is_meta and name not in state.tensors]:
        rule = "Memory is made for plain tensors, not for what is inside of a subclass"
        fix = "Call shardkit.materialize(model) before the model is quantised"
        raise CheckpointError(message(listing(meta), "on meta", rule, fix))
    tensors = {name: state.tensors.get(name, tensor) for name, tensor in flat.tensors.items()}
    files = locate(path)
    if request.key_map is None:
        check_files(files, tensors, request.where)
    is_plain = request.key_map is None and state.tensors.keys() == tensors.keys()
    hub = converted(model, tensors, files) if is_plain else None
    found: Mapping[str, Located | Moved] = files if hub is None else hub.tensors
    offered = {name: _spec(each) for name, each in found.items()} | ({} if hub is None else hub.others)
    own = {name: each for name, each in tensors.items() if name in state.tensors}
    dtypes = {name: dtype if dtype and each.is_floating_point() else each.dtype for name, each in own.items()}
    plan = plan_load(tensors, offered, request, dtypes)

    def are_equal(name: str, *names: str) -> bool:
        sources = [found[each] for each in names]
        return holds_same(tensors[name], lambda rooms: _read(zip(sources, map(part_of, rooms), strict=True)))

    check_ties(plan, are_equal, request)
    room = Room(model, tensors, {name: dtypes[name] for name in plan.copies if name in own})
    return _Load(found, plan, {name: tensors[name] for name in plan.copies}, room, hub and hub.used)


# ---- what the files have, and what transformers makes of it ----------------------------------------------------


def _spec(source: Located | Moved) -> Spec:
    return Spec(source.dtype, source.shape) if isinstance(source, Moved) else source.entry


def _said(source: Located | Moved) -> str:
    if isinstance(source, Located):
        return repr(source.entry)
    return repr([(piece.where, piece.box, piece.dims, getattr(piece.source, "entry", None)) for piece in source.pieces])


def _read(jobs: Iterable[tuple[Located | Moved, Part]], progress: Progress | None = None) -> None:
    """Read parts of what the files have, and of what comes of it; of the latter only what they come from. Local."""
    parts = [
        each
        for source, part in jobs
        for each in (source.sources_of(part) if isinstance(source, Moved) else [(source, part)])
    ]
    read_parts([(source, part) for source, part in parts if isinstance(source, Located)], progress)
    for source, (values, box) in parts:
        if isinstance(source, Computed):
            full = source.value(_whole)
            values.copy_(inside(full, whole(full.shape), box))


def _whole(source: Located) -> Tensor:
    full = torch.empty(source.entry.shape, dtype=source.entry.dtype)
    read_parts([(source, (full, whole(full.shape)))])
    return full
