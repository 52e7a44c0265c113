"""A call of the drop-in's class: shard the module in place by FSDP1's arguments."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecision

from shardkit._fsdp.fsdp1 import full_precision_classes, set_cast_forward_inputs
from shardkit.apply.mesh import build_mesh, ensure_process_group
from shardkit.fsdp1.dropin import optimizers
from shardkit.fsdp1.dropin.record import Record, is_wrapped, record_of
from shardkit.fsdp1.translate import casts_inputs, translate
from shardkit.fsdp1.translate.arguments import Arguments
from shardkit.fsdp1.translate.shard import Translation, cast_buffers, mesh_for, shard_translated
from shardkit.fsdp1.translate.strategy import HYBRID, RESHARDING, groups_to_agree, parse_strategy
from shardkit.plan import MeshSpec
from shardkit.ranks import warn_once
from shardkit.runtime.hooks import install_hooks

QUIET = "SHARDKIT_FSDP1_QUIET"

_meshes: dict[tuple[Any, ...], DeviceMesh] = {}


def construct(module: nn.Module, given: Arguments) -> dict[nn.Module, Record]:
    """Shard ``module`` in place, but for what is wrapped below it already. Collective.

    Returns:
        the record of each module that FSDP1 would have wrapped, ``module`` last.
    """
    ensure_process_group()
    given = _with_node(given)
    inner = _outermost_wrapped(module)
    if next(module.parameters(), None) is None:  # FSDP1 allows it
        mesh = build_mesh(MeshSpec.sharded(dist.get_world_size()))
        return {module: Record(given, mesh, True, given.mixed_precision or MixedPrecision())}

    before = dict(module.named_parameters(remove_duplicate=False))
    groups = groups_to_agree(given.process_group, given.device_mesh)
    translation, mesh = shard_translated(
        module, lambda: translate(module, given, list(inner)), groups, _shared_mesh, any_start=True
    )
    optimizers.remember(before, module)
    records = _records(module, given, translation, mesh)
    for wrapped in inner.values():
        _no_longer_root(wrapped)
    _cast_buffers(module, translation, records[module], inner)
    if isinstance(module, FSDPModule):
        install_hooks(module)
    _say_what_differs(given, translation)
    return records


def _outermost_wrapped(module: nn.Module) -> dict[str, nn.Module]:
    found: dict[str, nn.Module] = {}
    for fqn, child in module.named_modules():
        if is_wrapped(child) and record_of(child).is_root:
            found[fqn] = child
    return found


def _records(
    module: nn.Module, given: Arguments, translation: Translation, mesh: DeviceMesh
) -> dict[nn.Module, Record]:
    apart = full_precision_classes(given.mixed_precision)
    records = {}
    for fqn, own in translation.wrapped.items():
        inside = module.get_submodule(fqn)
        arguments = replace(given, auto_wrap_policy=None, **own)
        precision = arguments.mixed_precision
        if precision is None or isinstance(inside, apart):
            precision = MixedPrecision()
        records[inside] = Record(arguments, mesh, False, precision)
    records[module] = Record(given, mesh, True, given.mixed_precision or MixedPrecision())
    return records


def _no_longer_root(wrapped: nn.Module) -> None:
    """FSDP1's root stays gathered after forward and has its own setting for casting inputs."""
    record = record_of(wrapped)
    record.is_root = False
    if isinstance(wrapped, FSDPModule):
        reshards = parse_strategy(record.given.sharding_strategy).name in RESHARDING
        wrapped.set_reshard_after_forward(reshards, recurse=False)
        set_cast_forward_inputs(wrapped, casts_inputs(record.precision, is_root=False))


def _cast_buffers(module: nn.Module, translation: Translation, record: Record, inner: dict[str, nn.Module]) -> None:
    """Cast the buffers that no inner call has cast, and remember their dtypes for state dicts."""
    dtypes = {
        name: dtype
        for name, dtype in translation.buffer_dtypes.items()
        if not name.startswith(tuple(f"{fqn}." for fqn in inner))
    }
    record.buffer_dtypes = {name: module.get_buffer(name).dtype for name in dtypes}
    cast_buffers(module, replace(translation, buffer_dtypes=dtypes))


def _say_what_differs(given: Arguments, translation: Translation) -> None:
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
    """Return one mesh for all calls on the same ranks: NCCL has about 100 process groups."""
    if translation.device_mesh is not None:
        return mesh_for(translation)
    world = dist.group.WORLD
    key = (world, translation.plan.mesh, translation.process_groups, translation.device)
    if _meshes and next(iter(_meshes))[0] is not world:
        _meshes.clear()  # of a process group that was destroyed
    if key not in _meshes:
        _meshes[key] = mesh_for(translation)
    return _meshes[key]
