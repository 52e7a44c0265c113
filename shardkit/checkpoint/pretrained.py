"""load_pretrained: load weights from safetensors files into a model; each rank reads only its own bytes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from shardkit.checkpoint.chunks import refuse_subclasses
from shardkit.checkpoint.hub import USED, HubFiles, check_files, converted, unwrapped
from shardkit.checkpoint.native import Safetensors
from shardkit.checkpoint.read import locate
from shardkit.checkpoint.source import check_stored_ties
from shardkit.errors import CheckpointError, message
from shardkit.ranks import agree, groups_of, together
from shardkit.state.place import Room, live_state
from shardkit.state.plan import IncompatibleKeys, KeyMap, LoadPlan, Request, plan_load


def load_pretrained(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    key_map: KeyMap | None = None,
    dtype: torch.dtype | None = None,
    strict: bool = True,
) -> IncompatibleKeys:
    """Load a model's weights from safetensors files: those of Hugging Face, of ``save_checkpoint``, or any other.

    Each rank reads the bytes of its own shards, straight into them, so no rank ever holds the model or a full tensor.
    For a model of transformers 5, the conversions of its ``from_pretrained`` apply, such as fusing experts that are
    separate in the files; what they do besides stacking, splitting and transposing is computed in memory, one tensor
    at a time. No conversions apply with ``key_map``, nor to files of ``save_checkpoint``.

    Parameters stay the same objects. In place; **collective** over the ranks of the model's meshes, which exchange
    one digest; local for a plain model.

    A model on meta, sharded or not, is materialized: parameters and persistent buffers get the values in the files, on
    the device of their mesh (the CPU if offloaded). Other meta tensors, such as non-persistent buffers, get the values
    that the construction computes, recorded by ``init_on_meta``, or else by the model's own initializers, as with
    ``materialize``.

    Args:
        model: plain, or sharded by any ``fully_shard`` calls, on meta or with values.
        path: a safetensors file, an index (``*.safetensors.index.json``), or a directory that has either, such as a
            snapshot of the hub.
        key_map: from names in the files to FQNs of the model: a function (None leaves the tensor out), a dict of whole
            names, or pairs of a regular expression and its replacement, of which the first match is applied, such as
            ``[("^transformer\\\\.", "model.")]``.
        dtype: the new dtype of floating-point parameters and buffers that are loaded; None keeps the model's. Values
            are converted while they are read, 16 MiB at a time. A new dtype takes new memory, so pass it before the
            first forward, and before the optimizer is built.
        strict: every parameter and persistent buffer must be in the files, and every tensor in the files in the model.
            One name of a tied tensor is enough; if the files have several, their values must be equal. False leaves
            names alone that only one side has, and takes the first of different values with a warning.

    Returns:
        ``missing_keys`` and ``unexpected_keys``, as ``nn.Module.load_state_dict``; both empty when strict.

    Raises:
        CheckpointError: on every rank, with nothing changed: files are missing or break a rule of their format; names,
            shapes or dtypes do not fit (all are listed); or ranks see different files. Also if the disk fails while
            values are read: then a model that had values may have some of the new ones.
        ShardkitError: on every rank: neither the files nor the construction have a value for some meta tensors, or
            hooks on the model's ``state_dict()`` replace tensors.
    """
    groups = groups_of(model)
    request = Request(os.fspath(path), strict, key_map)
    with together(groups, CheckpointError, call="load_pretrained"):
        load = _plan(model, path, dtype, request)
    source, plan, room = load.source, load.plan, load.room
    keys = {name: source.contents.model[file_name].key for name, file_name in plan.copies.items()}
    read = {name: source.describe(key) for name, key in keys.items()}
    compared = {"what is read": read, "missing and unexpected": plan.keys, "the rest": room.digest}
    agree(compared, groups, "load_pretrained", CheckpointError)
    with together(groups, CheckpointError):
        source.read([(key, room.of(load.tensors[name])) for name, key in keys.items()])
        room.compute()
    room.install()
    if isinstance(source, HubFiles):
        setattr(unwrapped(model), USED, source.used)
    return plan.keys


class _Load(NamedTuple):
    source: Safetensors | HubFiles
    plan: LoadPlan
    tensors: Mapping[str, Tensor]  # the model's
    room: Room  # the memory to read into


def _plan(model: nn.Module, path: str | os.PathLike[str], dtype: torch.dtype | None, request: Request) -> _Load:
    """Plan what to read into the model's own tensors, which may change their dtype. Local."""
    if dtype is not None and not dtype.is_floating_point:
        problem = f"must be a floating-point dtype, got {dtype}"
        raise CheckpointError(message("dtype", problem, "", "Use torch.bfloat16, for example"))
    tensors = live_state(model).tensors
    files = locate(path)
    if request.key_map is None:
        check_files(files, tensors, request.where)
    hub = converted(model, tensors, files) if request.key_map is None else None
    source: Safetensors | HubFiles = Safetensors({"model": files}) if hub is None else hub
    offered = source.contents.model | ({} if hub is None else hub.others)
    dtypes = {name: dtype if dtype and each.is_floating_point() else each.dtype for name, each in tensors.items()}
    plan = plan_load(tensors, offered, request, dtypes)
    refuse_subclasses({name: tensors[name] for name in plan.copies})
    check_stored_ties(source, plan, tensors, request)
    return _Load(source, plan, tensors, Room(model, tensors, {name: dtypes[name] for name in plan.copies}))
