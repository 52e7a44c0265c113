"""A translation, and sharding a model by it."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from shardkit._fsdp.collectives import reduce_unused
from shardkit._torch import real_tensors
from shardkit.apply.broadcast import broadcast_from_first, check_can_broadcast
from shardkit.apply.init_sync import check_same_start, state_facts, states_of
from shardkit.apply.mesh import build_mesh, check_mesh, ensure_process_group
from shardkit.apply.shard import plan_facts, shard_for_training, shard_units
from shardkit.apply.validate import check_plan
from shardkit.errors import PlanError, TranslationError, listing
from shardkit.fsdp1.translate.notes import Note
from shardkit.fsdp1.translate.strategy import groups_to_agree
from shardkit.meta import is_recorded, materialize
from shardkit.plan import MeshSpec, ShardingPlan, ShardUnit
from shardkit.ranks import (
    Groups,
    all_gather_bytes,
    check_equal,
    device_type,
    max_over_ranks,
    raise_on_all_ranks,
)

ParamInitFn: TypeAlias = Callable[[nn.Module], object]

_BROADCAST = """
for tensor in (*model.parameters(), *model.buffers()):
    value = tensor.detach().to(device_type)
    torch.distributed.broadcast(value, 0)
    tensor.data.copy_(value)
"""
_CAST = """
for name, dtype in {}.items():
    model.get_buffer(name).data = model.get_buffer(name).to(dtype)
"""


@dataclass(frozen=True)
class Translation:
    """A plan, a note for every argument that is not at its default, and what a plan does not hold.

    Plain data, made without changing the model; ``print(translation)`` shows the plan and the
    notes.

    Attributes:
        plan: the ``fully_shard`` calls.
        notes: how each argument is translated, in the order of FSDP1's signature.
        device_mesh: FSDP1's ``device_mesh``, if FSDP2 takes it; None builds one of ``plan.mesh``.
        process_groups: FSDP1's groups, one for each axis of ``plan.mesh``; empty for all ranks.
        device: FSDP1's ``device_id``; None is the accelerator.
        param_init_fn: initializes a meta module before it is sharded, as in FSDP1.
        sync_module_states: whether the first rank's parameters and buffers are broadcast.
        buffer_dtypes: the dtypes to which FSDP1 casts buffers at the first forward, by FQN.
        ignored_modules: FQNs of the modules that FSDP1 ignores.
        wrapped: FQNs of the modules that FSDP1 would have wrapped below the root, each with the
            arguments that a CustomPolicy gave for it.
        wrapped_before: FQNs of modules that earlier calls of the drop-in wrapped, whose parameters
            the plan ignores.
    """

    plan: ShardingPlan
    notes: tuple[Note, ...] = ()
    device_mesh: DeviceMesh | None = None
    process_groups: tuple[dist.ProcessGroup, ...] = ()
    device: torch.device | None = None
    param_init_fn: ParamInitFn | None = None
    sync_module_states: bool = False
    buffer_dtypes: Mapping[str, torch.dtype] = field(default_factory=dict)
    ignored_modules: tuple[str, ...] = ()
    wrapped: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    wrapped_before: tuple[str, ...] = ()

    @property
    def refused(self) -> tuple[Note, ...]:
        """Return the notes on keys of a configuration that are refused; refused arguments raise."""
        return tuple(note for note in self.notes if note.support == "refused")

    def apply(self, model: nn.Module) -> nn.Module:
        """Shard ``model`` in place and return it, as ``shard_like_fsdp1`` does. Collective.

        Raises:
            TranslationError, PlanError: as ``shard_like_fsdp1``.
        """
        groups = groups_to_agree(self.process_groups or None, self.device_mesh)
        shard_translated(model, lambda: self, groups)
        cast_buffers(model, self)
        return model

    def to_python(self) -> str:
        """Return plain torch code that does the same to a ``model`` in scope: the plan's, with the
        broadcast of the first rank's values before it and the casts of buffers after it.
        """
        plan = replace(self.plan, notes=())
        code = plan.to_python(before=_BROADCAST if self.sync_module_states else "")
        return code + (_CAST.format(dict(self.buffer_dtypes)) if self.buffer_dtypes else "")

    def ignored_in(self, model: nn.Module) -> set[nn.Module]:
        """Return the modules of ``ignored_modules``."""
        return {model.get_submodule(fqn) for fqn in self.ignored_modules}

    def __str__(self) -> str:
        return "\n".join([str(self.plan), "", *map(str, self.notes)])


def shard_translated(
    model: nn.Module,
    make_translation: Callable[[], Translation],
    groups: Groups,
    make_mesh: Callable[[Translation], DeviceMesh] | None = None,
    any_start: bool = False,
    after: Callable[[ShardUnit, dict[str, nn.Parameter]], object] | None = None,
) -> tuple[Translation, DeviceMesh]:
    """Shard ``model`` in place by a translation; return that and the mesh. Buffers are not cast.

    Collective over ``groups``. An error of ``make_translation`` on one rank is raised on all. With
    ``any_start`` ranks may start from different values, as in FSDP1. The drop-in passes ``after``,
    which is called with each unit when it is sharded, and installs its own hooks.
    """
    ensure_process_group()
    with real_tensors():
        # Every rank makes its own translation, and checks it. It must be the same on all ranks.
        with raise_on_all_ranks(groups, PlanError):
            translation = make_translation()
            _check(model, translation)
            can_replay = translation.param_init_fn is None and is_recorded(model)
            facts = _facts(model, translation, any_start)
        check_equal(facts, groups, PlanError)
        (some_cannot,) = max_over_ranks([int(not can_replay)], groups)
        if not any_start and not translation.sync_module_states:
            check_same_start(model, translation.plan, groups)
        mesh = (make_mesh or mesh_for)(translation)

    # Where every rank recorded the model under init_on_meta, it gets its values after sharding, by
    # replay. Else no rank replays, and each unit gets its values right before it is sharded: with
    # sync_module_states the first rank may have built the model outside of init_on_meta.
    all_replay = not some_cannot
    initialize_unit = None if all_replay else _UnitInitializer(model, translation, mesh)
    if after is None:
        shard_for_training(model, translation.plan, mesh, before=initialize_unit)
    else:
        shard_units(model, translation.plan, mesh, before=initialize_unit, after=after)
    if all_replay:
        materialize(model)
    reduce_unused(model.modules(), beside_used=True)
    return translation, mesh


def _facts(model: nn.Module, translation: Translation, any_start: bool) -> dict[str, Any]:
    """Return what must be equal on all ranks."""
    plan, syncs = translation.plan, translation.sync_module_states
    facts = {"sync_module_states": str(syncs), "buffer_dtype": str(dict(translation.buffer_dtypes))}
    if syncs or not any_start:
        facts |= state_facts(dict(sorted(model.named_buffers())), compare_meta=False)
    if syncs:
        check_can_broadcast(states_of(model))
        # A meta rank may begin in another dtype than the first, and cast in param_init_fn.
        params = [spec._replace(dtype=torch.float32) for spec in plan.params]
        plan = replace(plan, params=tuple(params))
    return {**facts, **plan_facts(plan)}


def cast_buffers(model: nn.Module, translation: Translation) -> None:
    """Cast the buffers to their ``buffer_dtypes``, in place; local."""
    for fqn, dtype in translation.buffer_dtypes.items():
        buffer = model.get_buffer(fqn)
        buffer.data = buffer.to(dtype)


def mesh_of_groups(
    spec: MeshSpec, groups: Sequence[dist.ProcessGroup], device: str | None = None
) -> DeviceMesh:
    """Build the DeviceMesh of ``spec`` on process groups that exist. Collective over the groups.

    Args:
        spec: the mesh's shape, in ranks, and axis names.
        groups: this rank's group of each axis; for two axes the second may be left out if it has
            one rank.
        device: the mesh's device type; None is the accelerator, or the CPU if only gloo could serve
            it.
    """
    device = device or device_type()
    if len(spec.shape) == 1:
        return DeviceMesh.from_group(groups[0], device, mesh_dim_names=spec.axis_names)
    if len(groups) == 1:  # the shard axis is this rank alone, so only this rank makes its group
        groups = [groups[0], dist.new_group([dist.get_rank()], use_local_synchronization=True)]
    replicate, shard = groups
    mine = dist.get_process_group_ranks(shard)
    rows = [json.loads(row) for row in all_gather_bytes(json.dumps(mine).encode(), replicate)]
    return DeviceMesh.from_group(
        [replicate, shard], device, torch.tensor(rows), mesh_dim_names=spec.axis_names
    )


def mesh_for(translation: Translation) -> DeviceMesh:
    """Return the mesh of a translation, built if needed, and select its device. Collective."""
    device = translation.device
    if device is not None and device.type != "cpu" and device.index is not None:
        torch.accelerator.set_device_index(device.index)  # FSDP2 shards on the current device
    if translation.device_mesh is not None:
        return translation.device_mesh
    kind = device.type if device is not None else device_type()
    spec, groups = translation.plan.mesh, translation.process_groups
    return mesh_of_groups(spec, groups, kind) if groups else build_mesh(spec, kind)


def _check(model: nn.Module, translation: Translation) -> None:
    """Raise what can be refused before the model changes."""
    mesh = translation.device_mesh
    if not translation.process_groups:
        check_mesh(mesh, translation.plan.mesh)
    check_plan(model, translation.plan, mesh, translation.wrapped_before)
    if translation.param_init_fn is not None or is_recorded(model):
        return
    ignored = translation.ignored_in(model)
    cannot_reset = []
    for fqn, module in model.named_modules():
        if module not in ignored and _on_meta(module) and not hasattr(module, "reset_parameters"):
            cannot_reset.append(fqn or "(root)")
    if cannot_reset:
        raise TranslationError(
            f"{listing(cannot_reset, 6)} is on the meta device and has no reset_parameters, by "
            "which FSDP1 initializes a module without param_init_fn. Pass param_init_fn, or build "
            "the model under shardkit.init_on_meta()."
        )


def _on_meta(module: nn.Module) -> bool:
    own = (*module.parameters(recurse=False), *module.buffers(recurse=False))
    return any(state.is_meta for state in own)


class _UnitInitializer:
    """Called with each unit right before it is sharded: initializes and broadcasts its values.

    As in FSDP1, one unit at a time, so that no rank holds more than its shards and one full unit.
    """

    def __init__(self, model: nn.Module, translation: Translation, mesh: DeviceMesh) -> None:
        self._model = model
        self._translation = translation
        self._mesh = mesh
        self._ignored = translation.ignored_in(model)
        # buffers and replicated parameters, which units inside of others share
        self._broadcast: set[Tensor] = set()

    def __call__(self, unit: ShardUnit) -> None:
        """Collective with ``sync_module_states``, else local."""
        groups = self._mesh.get_all_groups()
        syncs = self._translation.sync_module_states
        with raise_on_all_ranks(groups, TranslationError, call="FullyShardedDataParallel"):
            modules = self._modules_of(unit)
            if any(map(_on_meta, modules)):
                self._initialize(modules)
                self._tie(unit)
            states: dict[str, Tensor] = self._unsharded_of(unit) if syncs else {}
            for fqn in unit.params:
                states[fqn] = self._model.get_parameter(fqn)
            dtypes = {f"dtype of {name}": str(state.dtype) for name, state in states.items()}
            on_meta = [name for name, state in states.items() if state.is_meta]
            if on_meta:
                raise TranslationError(
                    f"{listing(on_meta, 6)} is on the meta device after param_init_fn was called, "
                    "which ignored modules are not passed to. Call module.to_empty(device=..., "
                    "recurse=False) in it, then initialize, and build ignored modules elsewhere."
                )
        check_equal(dtypes, groups, TranslationError)
        if syncs:
            broadcast_from_first(states.values(), groups, self._mesh.device_type)

    def _modules_of(self, unit: ShardUnit) -> list[nn.Module]:
        """Return the modules of the unit, breadth first as in FSDP1, without inner units."""
        modules = []
        seen = set(self._ignored)
        pending = deque(self._model.get_submodule(fqn) for fqn in unit.modules)
        while pending:
            module = pending.popleft()
            if module not in seen and not isinstance(module, FSDPModule):
                seen.add(module)
                modules.append(module)
                pending.extend(module.children())
        return modules

    def _initialize(self, modules: list[nn.Module]) -> None:
        """As in FSDP1: ``param_init_fn`` gets every module, else those on meta are reset."""
        device = self._translation.device or self._mesh.device_type
        for module in modules:
            if self._translation.param_init_fn is not None:
                self._translation.param_init_fn(module)
            elif _on_meta(module):
                with torch.no_grad():
                    module.to_empty(device=device, recurse=False)
                    module.reset_parameters()  # type: ignore[operator]  # checked before

    def _tie(self, unit: ShardUnit) -> None:
        """Tie parameters again: ``to_empty`` gave each of their names a parameter of its own."""
        for spec in self._translation.plan.specs_of(unit):
            for alias in spec.aliases:
                owner, _, name = alias.rpartition(".")
                param = self._model.get_parameter(spec.fqn)
                setattr(self._model.get_submodule(owner), name, param)

    def _unsharded_of(self, unit: ShardUnit) -> dict[str, Tensor]:
        """Return the buffers at and below the unit, also ignored ones, and the replicated
        parameters, that no unit before had.
        """
        states: dict[str, Tensor] = {}
        for fqn in unit.modules:
            module = self._model.get_submodule(fqn)
            named = sorted(module.named_buffers(prefix=fqn))
            for name, param in module.named_parameters(prefix=fqn):
                if name in self._translation.plan.replicated:
                    named.append((name, param))
            for name, state in named:
                if state not in self._broadcast:
                    self._broadcast.add(state)
                    states[name] = state
        return states
