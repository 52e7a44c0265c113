"""The constructor of the drop-in: translate the arguments, shard, and put wrappers where FSDP1 had
them.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecision

from shardkit._fsdp.fsdp1 import full_precision_classes, set_cast_forward_inputs
from shardkit._fsdp.plain import as_dtensors, show_plain, to_plain
from shardkit.apply.mesh import build_mesh, ensure_process_group
from shardkit.fsdp1.dropin.record import Record, inner_of, is_wrapper, record_of
from shardkit.fsdp1.translate import casts_inputs, make_translation
from shardkit.fsdp1.translate.arguments import Arguments
from shardkit.fsdp1.translate.shard import Translation, cast_buffers, mesh_for, shard_translated
from shardkit.fsdp1.translate.strategy import (
    HYBRID,
    RESHARDING,
    groups_to_agree,
    parse_strategy,
)
from shardkit.plan import MeshSpec, ShardUnit
from shardkit.ranks import warn_once
from shardkit.runtime.hooks import install_hooks

QUIET = "SHARDKIT_FSDP1_QUIET"

_meshes: dict[tuple[Any, ...], DeviceMesh] = {}


def shard_and_wrap(
    module: nn.Module, given: Arguments, wrap: Callable[[nn.Module, Record], nn.Module]
) -> Record:
    """Shard ``module`` in place, but for what is wrapped below it, and wrap what a policy chooses.
    Collective.

    Args:
        wrap: makes a wrapper around a module that is sharded.

    Returns:
        The record for the wrapper of ``module`` itself.
    """
    ensure_process_group()
    given = _with_node(given)
    precision = _precision(given)
    # Programs wrap from the inside out: in FSDP(Sequential(FSDP(a), b)) the call for a has sharded
    # it, as a root. This call shards the rest, b, and makes the wrapper of a an inner one.
    roots_below = {}
    for fqn, child in module.named_modules():
        if is_wrapper(child) and record_of(child).is_root:
            roots_below[fqn] = child

    # FSDP1 allows two wrappers around one module, and modules without parameters. There is nothing
    # to shard then: the wrapper only becomes the root of what is wrapped below it.
    if is_wrapper(module) or next(module.parameters(), None) is None:
        mesh = build_mesh(MeshSpec.sharded(dist.get_world_size()))
        for wrapper in roots_below.values():
            _make_inner(wrapper, casts=precision.cast_root_forward_inputs)
        return Record(given, mesh, is_root=True, precision=precision)

    def make_plain(unit: ShardUnit, originals: dict[str, nn.Parameter]) -> None:
        by_slot = {}
        for fqn, original in originals.items():
            owner, _, name = fqn.rpartition(".")
            by_slot[id(module.get_submodule(owner)), name] = original
        sharded: Any = module.get_submodule(unit.modules[0])
        to_plain(sharded, by_slot)

    # What is wrapped below shows DTensors here: plain parameters differ in shape between ranks.
    with as_dtensors(module):
        translation, mesh = shard_translated(
            module,
            lambda: make_translation(module, given, list(roots_below)),
            groups_to_agree(given.process_group, given.device_mesh),
            _shared_mesh,
            any_start=True,
            after=make_plain,
        )
    show_plain(module)
    for wrapper in roots_below.values():
        _make_inner(wrapper)
    record = Record(given, mesh, is_root=True, precision=precision)

    # Cast the buffers that no call before has cast, and remember their dtypes for state dicts.
    below = tuple(f"{fqn}." for fqn in roots_below)
    dtypes = {}
    for name, dtype in translation.buffer_dtypes.items():
        if not name.startswith(below):
            dtypes[name] = dtype
            record.buffer_dtypes[name] = module.get_buffer(name).dtype
    cast_buffers(module, replace(translation, buffer_dtypes=dtypes))

    _put_wrappers(module, given, translation, mesh, wrap)
    if isinstance(module, FSDPModule):
        install_hooks(module)
    _log_what_differs(given, translation)
    return record


def _make_inner(wrapper: nn.Module, casts: bool = False) -> None:
    """Undo for a root what FSDP1 has for roots only: it stays unsharded after forward, and casts
    inputs by a setting of its own.
    """
    record, sharded = record_of(wrapper), inner_of(wrapper)
    record.is_root = False
    if isinstance(sharded, FSDPModule):
        reshards = parse_strategy(record.given.sharding_strategy).name in RESHARDING
        sharded.set_reshard_after_forward(reshards, recurse=False)
        set_cast_forward_inputs(sharded, casts or casts_inputs(record.precision, False))


def _put_wrappers(
    module: nn.Module,
    given: Arguments,
    translation: Translation,
    mesh: DeviceMesh,
    wrap: Callable[[nn.Module, Record], nn.Module],
) -> None:
    """Replace each module that the policy chose by its wrapper, wherever it is registered."""
    batch_norms = full_precision_classes(given.mixed_precision)
    wrappers: dict[nn.Module, nn.Module] = {}
    for fqn, own_arguments in translation.wrapped.items():
        inner = module.get_submodule(fqn)
        arguments = replace(given, auto_wrap_policy=None, **own_arguments)
        precision = MixedPrecision() if isinstance(inner, batch_norms) else _precision(arguments)
        wrappers[inner] = wrap(inner, Record(arguments, mesh, is_root=False, precision=precision))
    for parent in list(module.modules()):
        if is_wrapper(parent):
            continue
        for name, child in parent._modules.items():
            if child in wrappers:
                parent._modules[name] = wrappers[child]


def _precision(given: Arguments) -> MixedPrecision:
    return given.mixed_precision or MixedPrecision()


def _log_what_differs(given: Arguments, translation: Translation) -> None:
    """Log each note on an argument that FSDP2 treats otherwise, once, on rank 0."""
    if os.environ.get(QUIET, "0") not in ("", "0"):
        return
    for note in translation.notes:
        if note.support == "noted" and note.argument.partition(".")[0] in given.changed():
            warn_once(f"FullyShardedDataParallel runs on fully_shard. {note}")


def _with_node(given: Arguments) -> Arguments:
    """FSDP1 took a node to be the devices of a process; where torchrun counts ranks, the same."""
    placed = given.process_group is not None or given.device_mesh is not None
    if placed or "LOCAL_WORLD_SIZE" in os.environ:
        return given
    if parse_strategy(given.sharding_strategy).name not in HYBRID:
        return given
    devices = torch.accelerator.device_count() if torch.accelerator.is_available() else 1
    return replace(given, ranks_per_node=devices)


def _shared_mesh(translation: Translation) -> DeviceMesh:
    """Return one mesh for all wrappers on the same ranks: NCCL has about 100 process groups."""
    if translation.device_mesh is not None:
        return mesh_for(translation)
    world = dist.group.WORLD
    key = (world, translation.plan.mesh, translation.process_groups, translation.device)
    if _meshes and next(iter(_meshes))[0] is not world:
        _meshes.clear()  # of a process group that was destroyed
    if key not in _meshes:
        _meshes[key] = mesh_for(translation)
    return _meshes[key]
