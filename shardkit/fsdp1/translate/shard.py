"""shard_like_fsdp1: translate and shard. Collective, and the only part of ``fsdp1`` that changes a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh

from shardkit._fsdp.fsdp1 import reduce_unused_beside_used
from shardkit._torch import real_tensors
from shardkit.apply.agree import agree_on_plan
from shardkit.apply.mesh import build_mesh, check_mesh, ensure_process_group, mesh_of_groups
from shardkit.apply.shard import carry_out, check_applicable
from shardkit.apply.start import check_same_start, facts_of
from shardkit.errors import TranslationError, message
from shardkit.fsdp1.translate.notes import REDUCES_UNUSED
from shardkit.fsdp1.translate.place import groups_to_agree
from shardkit.fsdp1.translate.states import Sources, UnitStates, cast_buffers, check_initialisers
from shardkit.fsdp1.translate.translate import translate_fsdp1
from shardkit.fsdp1.translate.types import Translation
from shardkit.meta import materialize
from shardkit.plan import ShardingPlan
from shardkit.ranks import Groups, accelerator, device_type


def shard_like_fsdp1(model: nn.Module, **arguments: Any) -> nn.Module:
    """Shards ``model`` in place with FSDP2 as ``FullyShardedDataParallel(model, **arguments)`` would, and returns it.

    ``translate_fsdp1(model, **arguments).apply(model)``, where an error of one rank is raised by all.
    Collective: every rank must call, with the same arguments. Build the optimizer afterwards, since sharding replaces
    the model's parameters. A model on the meta device gets its values as FSDP1 gave them: each unit is made whole by
    ``param_init_fn``, or by ``reset_parameters``, right before it is sharded; one that every rank built under
    ``init_on_meta`` is materialized from its recording instead.

    Args:
        model: the whole model, not wrapped.
        arguments: those of ``translate_fsdp1``: FSDP1's own, ``ranks_per_node`` and ``world_size``.

    Raises:
        TranslationError: on every rank, with the model unchanged: an argument is none that FSDP1 takes, or FSDP2
            cannot do what it says. Also when ``param_init_fn`` fails, which leaves the model half made.
        PlanError: on every rank, with the model unchanged: ranks disagree, or the plan fits not all of them.
    """
    groups = groups_to_agree(arguments.get("process_group"), arguments.get("device_mesh"))
    translation, _ = shard_translated(model, lambda: translate_fsdp1(model, **arguments), groups)
    cast_buffers(model, translation)
    return model


def apply_translation(model: nn.Module, translation: Translation) -> nn.Module:
    """``Translation.apply``."""
    groups = groups_to_agree(translation.process_groups or None, translation.device_mesh)
    shard_translated(model, lambda: translation, groups)
    cast_buffers(model, translation)
    return model


def materialize_translated(
    model: nn.Module, translation: Translation, device: torch.device | str | None = None, seed: int | None = None
) -> nn.Module:
    """``Translation.materialize``."""
    materialize(model, device, seed, init=translation.param_init_fn)
    cast_buffers(model, translation)
    return model


def shard_translated(
    model: nn.Module,
    decide: Callable[[], Translation],
    groups: Groups,
    mesh_of: Callable[[Translation], DeviceMesh] | None = None,
    any_start: bool = False,
) -> tuple[Translation, DeviceMesh]:
    """Shards ``model`` in place as ``decide`` says, but for ``buffer_dtypes``. Collective over ``groups``.

    Args:
        model: the model.
        decide: local; what it raises on one rank is raised by all.
        groups: which together reach all ranks that shard; None is the world.
        mesh_of: what to build the mesh with, ``mesh_for`` by default.
        any_start: whether ranks may start from different values, as FSDP1 lets them.

    Returns:
        What was decided, and the mesh.
    """
    ensure_process_group()
    decided: list[Translation] = []

    def decide_and_check() -> ShardingPlan:
        translation = decide()
        _check(model, translation)
        decided.append(translation)
        return translation.plan

    def facts() -> dict[str, str]:
        sync, dtypes = decided[-1].sync_module_states, decided[-1].buffer_dtypes
        alike = {"sync_module_states": str(sync)} if any_start and not sync else facts_of(model, sync)
        return alike | {"buffer_dtype": str(dict(dtypes))}

    with real_tensors():  # as in apply_decided
        plan = agree_on_plan(decide_and_check, groups, facts)
        if not (any_start or decided[0].sync_module_states):
            check_same_start(model, plan.ignored, groups, sync_module_states=False)
        sources = Sources(model, decided[0], groups)
        mesh = (mesh_of or mesh_for)(decided[0])
    needed = decided[0].sync_module_states or sources.anywhere_on_meta
    carry_out(model, plan, mesh, UnitStates(model, decided[0], mesh) if needed and not sources.recorded else None)
    if sources.recorded:
        materialize(model)
    if REDUCES_UNUSED:
        reduce_unused_beside_used(model)
    return decided[0], mesh


def _check(model: nn.Module, translation: Translation) -> None:
    """What can be refused while the model is untouched."""
    device = translation.device
    if device is not None and device.type not in ("cpu", accelerator()):
        raise TranslationError(
            message(
                "device_id", str(device), f"This process has {accelerator()!r}", "Leave it out, or use another device"
            )
        )
    mesh = translation.device_mesh
    if mesh is not None and device is not None and mesh.device_type != device.type:
        raise TranslationError(
            message(
                "device_id",
                f"{device} with a device_mesh on {mesh.device_type!r}",
                "A model is sharded on the mesh's device",
                "Leave device_id out",
            )
        )
    if not translation.process_groups:
        check_mesh(mesh, translation.plan.mesh)
    check_applicable(model, translation.plan, mesh, _device_type(translation), translation.apart)
    check_initialisers(model, translation)


def _device_type(translation: Translation) -> str:
    if translation.device_mesh is not None:
        return str(translation.device_mesh.device_type)
    return translation.device.type if translation.device is not None else device_type()


def mesh_for(translation: Translation) -> DeviceMesh:
    """The mesh of a translation, built if need be, with its device selected. Collective."""
    device = translation.device
    if device is not None and device.type != "cpu" and device.index is not None:
        torch.accelerator.set_device_index(device.index)  # FSDP2 shards on the current device
    if translation.device_mesh is not None:
        return translation.device_mesh
    kind, spec = _device_type(translation), translation.plan.mesh
    return (
        mesh_of_groups(spec, translation.process_groups, kind) if translation.process_groups else build_mesh(spec, kind)
    )
