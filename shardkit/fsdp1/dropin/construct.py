"""What the drop-in's constructor does: translate the arguments, shard, and put wrappers where FSDP1 had them."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import ShardingStrategy

from shardkit._fsdp.fsdp1 import full_precision_classes
from shardkit.apply.mesh import ensure_process_group
from shardkit.errors import TranslationError, message
from shardkit.fsdp1.dropin.record import Record, is_wrapper, outermost
from shardkit.fsdp1.translate.arguments import Arguments
from shardkit.fsdp1.translate.shard import Translation, mesh_for, shard_translated
from shardkit.fsdp1.translate.strategy import HYBRID, groups_to_agree, parse_strategy
from shardkit.fsdp1.translate.translate import translate


class Constructed(NamedTuple):
    """What a constructor call made."""

    record: Record  # of the module itself
    below: Mapping[nn.Module, Record]  # of each module below it that the policy chose
    parameters: Mapping[str, nn.Parameter]  # the module's before, by all of their FQNs
    again: bool = False  # whether an earlier call with the same module did all that


def construct(module: nn.Module, given: Arguments) -> Constructed:
    """Shards ``module`` in place, but for what is wrapped below it already. Collective.

    Raises:
        TranslationError, PlanError: on every rank, with the module unchanged; each is a ValueError too.
    """
    ensure_process_group()
    _check_by_hand(given)
    _check_container(module)
    _check_ignored(module, given)
    apart = dict(outermost(module))
    _check_nesting(module, given)
    given = _with_node(given)
    before = dict(module.named_parameters(remove_duplicate=False))
    if not apart and _all_ignored(module, given):
        return Constructed(_without_parameters(module, given), {}, before)
    if module in _made and all(getattr(given, name) == getattr(_made[module].given, name) for name in _SAME):
        return Constructed(replace(_made[module], root=None), {}, before, again=True)
    groups = groups_to_agree(given.process_group, given.device_mesh)
    translation, mesh = shard_translated(
        module, lambda: translate(module, given, apart), groups, _shared_mesh, any_start=True
    )
    _say_alone(given, mesh)
    _say_full_precision(module, given, translation)
    below = {
        module.get_submodule(fqn): Record(replace(given, auto_wrap_policy=None, **own), translation, mesh, top=False)
        for fqn, own in translation.wrapped.items()
    }
    _made[module] = record = Record(given, translation, mesh, top=True)
    return Constructed(record, below, before)


# What was sharded, to put a second wrapper around the same module, as programs do that wrap again to evaluate.
_made: WeakKeyDictionary[nn.Module, Record] = WeakKeyDictionary()
_SAME = ("sharding_strategy", "mixed_precision", "cpu_offload", "process_group", "device_mesh")


def put_in_place(
    module: nn.Module, below: Mapping[nn.Module, Record], wrapper_of: Callable[[nn.Module, Record], nn.Module]
) -> None:
    """Replaces each module of ``below`` by its wrapper wherever it is registered; in place."""
    places = [(parent, name, child) for parent in module.modules() for name, child in parent._modules.items()]
    wrappers = {inner: wrapper_of(inner, record) for inner, record in below.items()}
    for parent, name, child in places:
        if child is not None and child in wrappers:
            parent._modules[name] = wrappers[child]


def _check_by_hand(given: Arguments) -> None:
    strategy = parse_strategy(given.sharding_strategy)
    hybrid = strategy.name in HYBRID
    if hybrid and given.process_group is None and given.device_mesh is None and given.auto_wrap_policy is None:
        problem = f"{strategy.name} without process_group, device_mesh or policy"
        rule = f"Manual wrapping with {strategy} requires explicit specification of process group or device_mesh"
        fix = "Pass (shard_group, replicate_group) or a 2-d device_mesh"
        raise TranslationError(message("sharding_strategy", problem, rule, fix))


def _check_container(module: nn.Module) -> None:
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)) and type(module).forward is nn.Module.forward:
        rule = "It has no forward, so nothing would gather its parameters, under FSDP1 neither"
        fix = "Wrap each of its modules, or the module that it is in"
        raise TranslationError(message("module", f"a {type(module).__name__}", rule, fix))


def _check_nesting(module: nn.Module, given: Arguments) -> None:
    wrapped = [fqn for fqn, child in module.named_modules() if is_wrapper(child)]
    if given.auto_wrap_policy is not None and wrapped:
        problem = f"given, and FSDP wraps {wrapped[0]} already"
        rule = "FSDP auto wrapping requires modules to not already have FSDP applied but found "
        fix = "Leave out the policy or the inner FSDP(...)"
        raise TranslationError(message("auto_wrap_policy", problem, f"{rule}{wrapped[0]} in the model", fix))


def _check_ignored(module: nn.Module, given: Arguments) -> None:
    """By FSDP1's rules; its words, which programs may look for."""
    states = [*_each(given.ignored_modules), *_each(given.ignored_states)]
    ignored = [each for each in states if isinstance(each, nn.Module)]
    if any(is_wrapper(each) for each in ignored):
        rule = "`ignored_modules` should not include FSDP modules"
        fix = "Leave them out: what is wrapped already is left alone as it is"
        raise TranslationError(message("ignored_modules", "modules that FSDP wraps already", rule, fix))
    if any(each is module for each in ignored):
        warnings.warn(
            "Trying to ignore the top-level module passed into the FSDP constructor itself will result in all "
            f"parameters being ignored and is not well-supported: {type(module).__name__}",
            stacklevel=4,
        )


def _say_alone(given: Arguments, mesh: DeviceMesh) -> None:
    """As FSDP1, in its words."""
    strategy = parse_strategy(given.sharding_strategy)
    if mesh.size() == 1 and strategy is not ShardingStrategy.NO_SHARD:
        text = f"FSDP is switching to use `NO_SHARD` instead of {strategy} since the world size is 1."
        warnings.warn(text, stacklevel=4)


def _say_full_precision(module: nn.Module, given: Arguments, translation: Translation) -> None:
    """As FSDP1, in its words."""
    classes = full_precision_classes(given.mixed_precision) if given.mixed_precision is not None else ()
    chosen = map(module.get_submodule, translation.wrapped)
    found = sorted({type(each).__name__ for each in chosen if isinstance(each, classes)})
    if found:
        text = "Both mixed precision and an auto_wrap_policy were specified to FSDP, where the wrapped module has "
        text += f"submodules of type: {found}. These modules will be wrapped as separate FSDP instances with mixed "
        warnings.warn(text + "precision disabled.", stacklevel=4)


def _all_ignored(module: nn.Module, given: Arguments) -> bool:
    """Return whether no parameter is left; False where what to ignore is given wrongly, which the translation says."""
    states = [*_each(given.ignored_modules), *_each(given.ignored_states)]
    both = given.ignored_modules is not None and given.ignored_states is not None
    if both or len({isinstance(state, nn.Module) for state in states}) > 1:
        return False
    ignored = {param for state in states if isinstance(state, nn.Module) for param in state.parameters()}
    return {*ignored, *states}.issuperset(module.parameters())


def _each(states: Any) -> list[Any]:
    return list(states) if isinstance(states, Iterable) and not isinstance(states, nn.Module) else []


def _without_parameters(module: nn.Module, given: Arguments) -> Record:
    """Return the record of a wrapper that shards nothing, which FSDP1 allows: its mesh is that of any module."""
    plain = replace(given, auto_wrap_policy=None, ignored_modules=None, ignored_states=None, param_init_fn=None)
    translation = translate(nn.Linear(1, 1), replace(plain, sync_module_states=False))
    ignored = {inner for each in _each(given.ignored_modules) for inner in each.modules()}
    fqns = tuple(fqn for fqn, child in module.named_modules() if child in ignored)
    return Record(given, replace(translation, ignored_modules=fqns), _shared_mesh(translation), top=True)


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
