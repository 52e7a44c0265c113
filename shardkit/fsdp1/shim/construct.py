"""What the drop-in's constructor does: translate the arguments, shard, and put wrappers where FSDP1 had them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardkit.errors import TranslationError, message
from shardkit.fsdp1.arguments import Arguments
from shardkit.fsdp1.place import groups_to_agree
from shardkit.fsdp1.shard import mesh_for, shard_translated
from shardkit.fsdp1.shim.names import outermost
from shardkit.fsdp1.shim.record import Record
from shardkit.fsdp1.strategy import HYBRID, parse_strategy
from shardkit.fsdp1.translate import translate
from shardkit.fsdp1.types import Translation
from shardkit.mesh import ensure_process_group


@dataclass(frozen=True, eq=False)
class Constructed:
    """What a constructor call made.

    Attributes:
        record: of the module itself.
        below: of each module below it that the policy chose, by FQN.
        parameters: the module's parameters before, by all of their FQNs.
    """

    record: Record
    below: Mapping[str, Record]
    parameters: Mapping[str, nn.Parameter]


def construct(module: nn.Module, given: Arguments, kind: type[nn.Module]) -> Constructed:
    """Shards ``module`` in place, but for what is wrapped below it already. Collective.

    Args:
        module: what the constructor was called with.
        given: its arguments.
        kind: the wrapper's class.

    Raises:
        TranslationError, PlanError: on every rank, with the module unchanged; each is a ValueError too.
    """
    ensure_process_group()
    _check_by_hand(given)
    apart = dict(outermost(module, kind))
    _check_nesting(given, apart)
    given = _with_node(given)
    before = dict(module.named_parameters(remove_duplicate=False))
    groups = groups_to_agree(given.process_group, given.device_mesh)
    translation, mesh = shard_translated(module, lambda: translate(module, given, apart), groups, _shared_mesh)
    below = {
        fqn: Record(replace(given, auto_wrap_policy=None, **own), translation, mesh, top=False)
        for fqn, own in translation.wrapped.items()
    }
    return Constructed(Record(given, translation, mesh, top=True), below, before)


def put_in_place(
    module: nn.Module, below: Mapping[str, Record], wrapper_of: Callable[[nn.Module, Record], nn.Module]
) -> None:
    """Replaces each module of ``below`` by its wrapper wherever it is registered; in place."""
    chosen = {module.get_submodule(fqn): record for fqn, record in below.items()}
    places = [
        (parent, name, child)
        for parent in list(module.modules())
        for name, child in parent._modules.items()
        if child in chosen
    ]
    wrappers = {inner: wrapper_of(inner, record) for inner, record in chosen.items()}
    for parent, name, child in places:
        assert child is not None, "it is a key of chosen"
        parent._modules[name] = wrappers[child]


def _check_by_hand(given: Arguments) -> None:
    hybrid = parse_strategy(given.sharding_strategy).name in HYBRID
    if hybrid and given.process_group is None and given.device_mesh is None and given.auto_wrap_policy is None:
        problem = f"{parse_strategy(given.sharding_strategy).name} without process_group, device_mesh or policy"
        rule = "Wrapping by hand, nothing would say that all wrapped modules share their groups"
        raise TranslationError(
            message("sharding_strategy", problem, rule, "Pass (shard_group, replicate_group) or a 2-d device_mesh")
        )


def _check_nesting(given: Arguments, apart: Mapping[str, nn.Module]) -> None:
    if given.auto_wrap_policy is not None and apart:
        problem = f"given, and FSDP wraps {next(iter(apart))} already"
        rule = "Nested modules are wrapped by a policy or by hand"
        raise TranslationError(
            message("auto_wrap_policy", problem, rule, "Leave out the policy or the inner FSDP(...)")
        )


def _with_node(given: Arguments) -> Arguments:
    """FSDP1 took a node to be the devices that a process sees; where torchrun counts ranks, that is the same."""
    if given.process_group is not None or given.device_mesh is not None or "LOCAL_WORLD_SIZE" in os.environ:
        return given
    if parse_strategy(given.sharding_strategy).name not in HYBRID:
        return given
    devices = torch.accelerator.device_count() if torch.accelerator.is_available() else 1
    return replace(given, ranks_per_node=devices)


_meshes: dict[tuple[Any, ...], DeviceMesh] = {}


def _shared_mesh(translation: Translation) -> DeviceMesh:
    """One mesh for all wrappers on the same ranks: each would make process groups, which are a hundred at most."""
    if translation.device_mesh is not None:
        return mesh_for(translation)
    world = dist.group.WORLD
    key = (world, translation.plan.mesh, translation.process_groups, translation.device)
    for stale in [each for each in _meshes if each[0] is not world]:
        del _meshes[stale]
    if key not in _meshes:
        _meshes[key] = mesh_for(translation)
    return _meshes[key]
