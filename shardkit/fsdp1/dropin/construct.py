"""The drop-in's constructor: translate the arguments, shard, put wrappers where FSDP1 had them; and deep copies."""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.tensor import DTensor

from shardkit._fsdp.fsdp1 import full_precision_classes, reduce_unused_beside_used
from shardkit._fsdp.undone import as_it_was
from shardkit.apply.mesh import ensure_process_group
from shardkit.apply.shard import carry_out
from shardkit.errors import TranslationError, message
from shardkit.fsdp1.dropin import optimizers, roots, state_load
from shardkit.fsdp1.dropin.record import (
    Record,
    inner_of,
    is_wrapper,
    record_of,
    sharded_of,
    without_wrappers,
    wrappers_of,
)
from shardkit.fsdp1.translate.arguments import Arguments
from shardkit.fsdp1.translate.notes import REDUCES_UNUSED
from shardkit.fsdp1.translate.shard import Translation, mesh_for, shard_translated
from shardkit.fsdp1.translate.strategy import HYBRID, groups_to_agree, parse_strategy
from shardkit.fsdp1.translate.translate import translate
from shardkit.meta.shards import install
from shardkit.state.place import new_memory
from shardkit.state.routes import local_of

Wrap: TypeAlias = Callable[[nn.Module, Record], nn.Module]  # makes a wrapper around a module that is sharded

# Sharded modules, so that a second wrapper may be put around one: programs wrap again to evaluate.
_made: WeakKeyDictionary[nn.Module, Record] = WeakKeyDictionary()
_SAME = ("sharding_strategy", "mixed_precision", "cpu_offload", "process_group", "device_mesh")
_meshes: dict[tuple[Any, ...], DeviceMesh] = {}


def construct(module: nn.Module, given: Arguments, wrap: Wrap) -> Record:
    """Shard ``module`` in place, but for what is wrapped below it already, and wrap what a policy chooses. Collective.

    Returns:
        The record for the wrapper of ``module`` itself.

    Raises:
        TranslationError, PlanError: on every rank, with the module unchanged; each is a ValueError too.
    """
    ensure_process_group()
    wrapped = [fqn for fqn, child in module.named_modules() if is_wrapper(child) and child is not module]
    _check(module, given, wrapped)
    given = _with_node(given)
    before = dict(module.named_parameters(remove_duplicate=False))
    below: Mapping[str, Mapping[str, Any]] = {}
    if is_wrapper(module) or (not wrapped and _all_ignored(module, given)):
        record = _without_parameters(module, given)
    elif module in _made and all(getattr(given, name) == getattr(_made[module].given, name) for name in _SAME):
        return replace(_made[module], root=None, shown=[])
    else:
        apart = [fqn for fqn in dict.fromkeys(wrapped) if not any(fqn.startswith(f"{outer}.") for outer in wrapped)]
        groups = groups_to_agree(given.process_group, given.device_mesh)
        translation, mesh = shard_translated(
            module, lambda: translate(module, given, apart), groups, _shared_mesh, any_start=True
        )
        _warn_as_fsdp1(module, given, translation, mesh)
        _made[module] = record = Record(given, translation, mesh, top=True)
        below = translation.wrapped
    state_load.prepare(module)
    optimizers.remember(before, module)
    chosen = {module.get_submodule(fqn): replace(given, auto_wrap_policy=None, **own) for fqn, own in below.items()}
    records = {inner: Record(own, record.translation, record.mesh, top=False) for inner, own in chosen.items()}
    put_in_place(module, records, wrap)
    roots.attend_to(module, record.strategy)
    return record


def put_in_place(module: nn.Module, below: Mapping[nn.Module, Record], wrap: Wrap) -> None:
    """Replace each module of ``below`` by its wrapper wherever it is registered; in place."""
    places = [(parent, name, child) for parent in module.modules() for name, child in parent._modules.items()]
    wrappers = {inner: wrap(inner, record) for inner, record in below.items()}
    for parent, name, child in places:
        if child is not None and child in wrappers:
            parent._modules[name] = wrappers[child]


def _check(module: nn.Module, given: Arguments, wrapped: list[str]) -> None:
    """Raise TranslationError for what FSDP1 refused too, in the words that programs may look for."""
    strategy = parse_strategy(given.sharding_strategy)
    places = (given.process_group, given.device_mesh, given.auto_wrap_policy)
    if strategy.name in HYBRID and all(each is None for each in places):
        problem = f"{strategy.name} without process_group, device_mesh or policy"
        rule = f"Manual wrapping with {strategy} requires explicit specification of process group or device_mesh"
        fix = "Pass (shard_group, replicate_group) or a 2-d device_mesh"
        raise TranslationError(message("sharding_strategy", problem, rule, fix))
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)) and type(module).forward is nn.Module.forward:
        rule = "It has no forward, so nothing would gather its parameters; FSDP1 did not gather them either"
        fix = "Wrap each of its modules, or the module that contains it"
        raise TranslationError(message("module", f"is a {type(module).__name__}", rule, fix))
    ignored = [*_each(given.ignored_modules), *_each(given.ignored_states)]
    if any(map(is_wrapper, ignored)):
        rule = "`ignored_modules` should not include FSDP modules"
        fix = "Leave them out: modules that are wrapped already are left as they are"
        raise TranslationError(message("ignored_modules", "contains modules that FSDP wraps already", rule, fix))
    if any(each is module for each in ignored):
        text = "Trying to ignore the top-level module passed into the FSDP constructor itself will result in all "
        text += f"parameters being ignored and is not well-supported: {type(module).__name__}"
        warnings.warn(text, stacklevel=4)
    if given.auto_wrap_policy is not None and (is_wrapper(module) or wrapped):
        found = "(root)" if is_wrapper(module) else wrapped[0]
        problem = f"is given, and FSDP wraps {found} already"
        rule = f"FSDP auto wrapping requires modules to not already have FSDP applied but found {found} in the model"
        raise TranslationError(
            message("auto_wrap_policy", problem, rule, "Leave out the policy or the inner FSDP(...)")
        )


def _warn_as_fsdp1(module: nn.Module, given: Arguments, translation: Translation, mesh: DeviceMesh) -> None:
    strategy = parse_strategy(given.sharding_strategy)
    if mesh.size() == 1 and strategy is not ShardingStrategy.NO_SHARD:
        text = f"FSDP is switching to use `NO_SHARD` instead of {strategy} since the world size is 1."
        warnings.warn(text, stacklevel=4)
    classes = full_precision_classes(given.mixed_precision) if given.mixed_precision is not None else ()
    chosen = map(module.get_submodule, translation.wrapped)
    if found := sorted({type(each).__name__ for each in chosen if isinstance(each, classes)}):
        text = "Both mixed precision and an auto_wrap_policy were specified to FSDP, where the wrapped module has "
        text += f"submodules of type: {found}. These modules will be wrapped as separate FSDP instances with mixed "
        warnings.warn(text + "precision disabled.", stacklevel=4)


def _all_ignored(module: nn.Module, given: Arguments) -> bool:
    """Return whether no parameter is left to shard; False for invalid arguments, which the translation refuses."""
    states = [*_each(given.ignored_modules), *_each(given.ignored_states)]
    both = given.ignored_modules is not None and given.ignored_states is not None
    if both or len({isinstance(state, nn.Module) for state in states}) > 1:
        return False
    ignored = {param for state in states if isinstance(state, nn.Module) for param in state.parameters()}
    return {*ignored, *states}.issuperset(module.parameters())


def _each(states: Any) -> list[Any]:
    return list(states) if isinstance(states, Iterable) and not isinstance(states, nn.Module) else []


def _without_parameters(module: nn.Module, given: Arguments) -> Record:
    """Return the record of a wrapper that shards nothing, which FSDP1 allows; its mesh is that of any module."""
    plain = replace(given, auto_wrap_policy=None, ignored_modules=None, ignored_states=None, param_init_fn=None)
    translation = translate(nn.Linear(1, 1), replace(plain, sync_module_states=False))
    translation = replace(translation, plan=replace(translation.plan, units=(), params=()))
    ignored = {inner for each in _each(given.ignored_modules) for inner in each.modules()}
    fqns = tuple(fqn for fqn, child in module.named_modules() if child in ignored)
    return Record(given, replace(translation, ignored_modules=fqns), _shared_mesh(translation), top=True)


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


# Deep copies


def copied(wrapper: nn.Module, memo: dict[int, Any], wrap: Wrap) -> nn.Module:
    """Return a deep copy of a wrapper and all below it, sharded alike, with memory of its own. Local.

    ``fully_shard`` refuses deep copies, which averages of weights start from. The plain modules are copied with
    parameters on meta, sharded as the originals were, and given the values of this rank's shards, so no parameter is
    ever full. Gradients are not copied, as ``copy.deepcopy`` copies none. ``wrapper`` was constructed by itself, not by
    a policy.
    """
    roots.reshard(wrapper)
    inner = _plain(inner_of(wrapper), memo, wrap)
    record = record_of(wrapper)
    if sharded_of(wrapper) is not None:
        carry_out(inner, record.translation.plan, record.mesh, groups=())
        if REDUCES_UNUSED:
            reduce_unused_beside_used(inner)
        _fill(inner, inner_of(wrapper))
        roots.attend_to(inner, record.strategy)
    below = [each for each in wrappers_of(wrapper) if record_of(each).translation is record.translation]
    put_in_place(inner, {memo[id(each)]: _fresh(record_of(each), memo) for each in below if each is not wrapper}, wrap)
    new = memo[id(wrapper)] = wrap(inner, _fresh(record, memo))
    return new


def _plain(module: nn.Module, memo: dict[int, Any], wrap: Wrap) -> nn.Module:
    """Return the copy of a module without what FSDP did to it; wrappers inside that were constructed by hand stay."""
    if id(module) in memo:
        return memo[id(module)]  # type: ignore[no-any-return]
    if is_wrapper(module):
        if record_of(module).top:
            return copied(module, memo, wrap)
        memo[id(module)] = new = _plain(inner_of(module), memo, wrap)
        return new
    kind, attributes = as_it_was(module)
    new = kind.__new__(kind)
    memo[id(module)] = new
    for param in module.parameters(recurse=False):
        if isinstance(param, DTensor) and id(param) not in memo:
            meta = torch.empty(param.shape, dtype=param.dtype, device="meta")
            memo[id(param)] = nn.Parameter(meta, param.requires_grad)
            vars(memo[id(param)]).update(vars(param))
    for child in module.children():
        _plain(child, memo, wrap)
    vars(new).update(copy.deepcopy(attributes, memo))
    return new


@torch.no_grad()
def _fill(inner: nn.Module, original: nn.Module) -> None:
    """Give parameters that are sharded on meta the values of the original's shards."""
    originals = {without_wrappers(name): param for name, param in original.named_parameters()}
    pairs = [(param, originals[without_wrappers(name)]) for name, param in inner.named_parameters() if param.is_meta]
    values = {id(param): own for param, own in pairs}
    targets = new_memory(inner, {id(param): param.dtype for param, _ in pairs})
    for target in targets:
        assert target.value is not None, "made by new_memory"
        local_of(target.value).copy_(local_of(values[id(target.tensor)]))
    install(inner, targets)


def _fresh(record: Record, memo: dict[int, Any]) -> Record:
    """Return the record for a copy: not a root yet, nor summoned; with the original dtypes of buffers cast already."""
    buffers = {(memo.get(id(module), module), name): dtype for (module, name), dtype in record.buffer_dtypes.items()}
    return replace(record, root=None, summoned=False, shown=[], buffer_dtypes=buffers)
