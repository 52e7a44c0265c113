"""The drop-in's constructor: translate the arguments, shard, and put wrappers where FSDP1 had them."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from shardkit.apply.mesh import ensure_process_group
from shardkit.fsdp1.dropin import optimizers
from shardkit.fsdp1.dropin.record import Record, is_wrapper
from shardkit.fsdp1.translate import translate
from shardkit.fsdp1.translate.arguments import Arguments
from shardkit.fsdp1.translate.shard import Translation, mesh_for, shard_translated
from shardkit.fsdp1.translate.strategy import HYBRID, groups_to_agree, parse_strategy
from shardkit.runtime.hooks import install_hooks

Wrap: TypeAlias = Callable[[nn.Module, Record], nn.Module]  # makes a wrapper around a module that is sharded

_meshes: dict[tuple[Any, ...], DeviceMesh] = {}


def construct(module: nn.Module, given: Arguments, wrap: Wrap) -> Record:
    """Shard ``module`` in place, but for what is wrapped below it already, and wrap what a policy chooses. Collective.

    Returns:
        The record for the wrapper of ``module`` itself.
    """
    ensure_process_group()
    wrapped = [fqn for fqn, child in module.named_modules() if is_wrapper(child) and child is not module]
    given = _with_node(given)
    if is_wrapper(module) or next(module.parameters(), None) is None:
        return _without_parameters(given)
    before = dict(module.named_parameters(remove_duplicate=False))
    apart = [fqn for fqn in dict.fromkeys(wrapped) if not any(fqn.startswith(f"{outer}.") for outer in wrapped)]
    groups = groups_to_agree(given.process_group, given.device_mesh)
    translation, mesh = shard_translated(
        module, lambda: translate(module, given, apart), groups, _shared_mesh, any_start=True
    )
    optimizers.remember(before, module)
    _put_in_place(module, given, translation, mesh, wrap)
    if isinstance(module, FSDPModule):
        install_hooks(module)
    return Record(given, translation, mesh, top=True)


def _put_in_place(module: nn.Module, given: Arguments, translation: Translation, mesh: DeviceMesh, wrap: Wrap) -> None:
    """Replace each module that the policy chose by its wrapper wherever it is registered; in place."""
    wrappers: dict[nn.Module, nn.Module] = {}
    for fqn, own in translation.wrapped.items():
        inner = module.get_submodule(fqn)
        arguments = replace(given, auto_wrap_policy=None, **own)
        wrappers[inner] = wrap(inner, Record(arguments, translation, mesh, top=False))
    for parent in [each for each in module.modules() if not is_wrapper(each)]:
        for name, child in parent._modules.items():
            if child is not None and child in wrappers:
                parent._modules[name] = wrappers[child]


def _without_parameters(given: Arguments) -> Record:
    """Return the record of a wrapper that shards nothing, which FSDP1 allows; its mesh is that of any module."""
    plain = replace(given, auto_wrap_policy=None, ignored_modules=None, ignored_states=None, param_init_fn=None)
    translation = translate(nn.Linear(1, 1), replace(plain, sync_module_states=False))
    translation = replace(translation, plan=replace(translation.plan, units=(), params=()))
    return Record(given, translation, _shared_mesh(translation), top=True)


def _with_node(given: Arguments) -> Arguments:
    """FSDP1 took a node to be the devices that a process sees; where torchrun counts ranks, that is the same."""
    placed = given.process_group is not None or given.device_mesh is not None or "LOCAL_WORLD_SIZE" in os.environ
    if placed or parse_strategy(given.sharding_strategy).name not in HYBRID:
        return given
    devices = torch.accelerator.device_count() if torch.accelerator.is_available() else 1
    return replace(given, ranks_per_node=devices)


def _shared_mesh(translation: Translation) -> DeviceMesh:
    """Return one mesh for all wrappers on the same ranks: each makes process groups, of which NCCL has about 100."""
    if translation.device_mesh is not None:
        return mesh_for(translation)
    world = dist.group.WORLD
    key = (world, translation.plan.mesh, translation.process_groups, translation.device)
    for stale in [each for each in _meshes if each[0] is not world]:
        del _meshes[stale]
    if key not in _meshes:
        _meshes[key] = mesh_for(translation)
    return _meshes[key]
