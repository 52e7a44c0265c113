"""A translation, and sharding a model by it: the only part of ``translate`` that
changes a model.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
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
from shardkit.apply.init_sync import (
    broadcast_from_first,
    check_can_broadcast,
    check_same_start,
    state_facts,
    states_of,
)
from shardkit.apply.mesh import build_mesh, check_mesh, ensure_process_group, mesh_of_groups
from shardkit.apply.shard import plan_facts, shard_units
from shardkit.apply.validate import check_plan
from shardkit.errors import PlanError, TranslationError, listing, message
from shardkit.fsdp1.translate.notes import Note
from shardkit.fsdp1.translate.strategy import groups_to_agree
from shardkit.meta import is_recorded, materialize
from shardkit.plan import ShardingPlan, ShardUnit
from shardkit.ranks import (
    Groups,
    accelerator,
    check_equal,
    device_type,
    max_over_ranks,
    raise_on_all_ranks,
)

ParamInitFn: TypeAlias = Callable[[nn.Module], object]

_BROADCAST = """
for tensor in (*model.parameters(), *model.buffers()):
    value = tensor.detach().to(device_type)
    dist.broadcast(value, 0)
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
        apart: FQNs of modules that are wrapped already; the plan ignores their parameters.
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
    apart: tuple[str, ...] = ()

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
    decide: Callable[[], Translation],
    groups: Groups,
    mesh_of: Callable[[Translation], DeviceMesh] | None = None,
    any_start: bool = False,
    after: Callable[[ShardUnit, dict[str, nn.Parameter]], object] | None = None,
) -> tuple[Translation, DeviceMesh]:
    """Shard ``model`` in place as ``decide`` says; return what was decided, and the mesh.

    Collective over ``groups``. An error of ``decide`` on one rank is raised on all. Buffers are not
    cast. With ``any_start`` ranks may start from different values, as in FSDP1.
    """
    ensure_process_group()
    with real_tensors():
        with raise_on_all_ranks(groups, PlanError):
            translation = decide()
            _check(model, translation)
            recorded = translation.param_init_fn is None and is_recorded(model)
            facts = _facts(model, translation, any_start)
        check_equal(facts, groups, PlanError)
        # on all ranks: with sync_module_states the first may be real
        (some_real,) = max_over_ranks([int(not recorded)], groups)
        if not any_start and not translation.sync_module_states:
            check_same_start(model, translation.plan, groups)
        mesh = (mesh_of or mesh_for)(translation)
    prepare = _UnitStates(model, translation, mesh) if some_real else None
    shard_units(model, translation.plan, mesh, before=prepare, after=after)
    if not some_real:
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
        params = (spec._replace(dtype=torch.float32) for spec in plan.params)
        plan = replace(plan, params=tuple(params))
    return {**facts, **plan_facts(plan)}


def cast_buffers(model: nn.Module, translation: Translation) -> None:
    """Cast the buffers to their ``buffer_dtypes``, in place; local."""
    for fqn, dtype in translation.buffer_dtypes.items():
        buffer = model.get_buffer(fqn)
        buffer.data = buffer.to(dtype)


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
    device, mesh = translation.device, translation.device_mesh
    allowed = ("cpu", accelerator()) if mesh is None else (mesh.device_type,)
    if device is not None and device.type not in allowed:
        problem = f"must be on {' or '.join(dict.fromkeys(allowed))}, got {device}"
        raise TranslationError(message("device_id", problem, "", "Remove device_id"))
    if not translation.process_groups:
        check_mesh(mesh, translation.plan.mesh)
    check_plan(model, translation.plan, mesh, translation.apart)
    if translation.param_init_fn is not None or is_recorded(model):
        return
    ignored = translation.ignored_in(model)
    without = [
        fqn or "(root)"
        for fqn, module in model.named_modules()
        if module not in ignored and _on_meta(module) and not hasattr(module, "reset_parameters")
    ]
    if without:
        problem = "is on the meta device and has no reset_parameters"
        rule = "FSDP1 initializes a meta module by param_init_fn, or else by reset_parameters"
        fix = "Pass param_init_fn, or build the model under shardkit.init_on_meta()"
        raise TranslationError(message(listing(without, 6), problem, rule, fix))


def _on_meta(module: nn.Module) -> bool:
    own = (*module.parameters(recurse=False), *module.buffers(recurse=False))
    return any(state.is_meta for state in own)


class _UnitStates:
    """Called with each unit right before it is sharded: initializes and broadcasts its values.

    As in FSDP1, one unit at a time, so that no rank holds more than its shards and one full unit.
    """

    def __init__(self, model: nn.Module, translation: Translation, mesh: DeviceMesh) -> None:
        self._model = model
        self._translation = translation
        self._mesh = mesh
        self._ignored = translation.ignored_in(model)
        self._synced: dict[int, Tensor] = {}  # by id; keeps the buffers alive

    def __call__(self, unit: ShardUnit) -> None:
        """Collective with ``sync_module_states``, else local."""
        groups = self._mesh.get_all_groups()
        states: list[Tensor] = []
        params = {fqn: self._model.get_parameter(fqn) for fqn in unit.params}
        with raise_on_all_ranks(groups, TranslationError, call="FullyShardedDataParallel"):
            modules = list(self._modules(unit))
            if any(map(_on_meta, modules)):
                self._initialize(modules)
                self._tie(unit)
                params = {fqn: self._model.get_parameter(fqn) for fqn in unit.params}
            self._check_made(unit, modules, params)
            if self._translation.sync_module_states:
                states = [*self._buffers(unit), *params.values()]
            if any(state.is_meta for state in states):
                raise TranslationError(
                    f"sync_module_states cannot broadcast buffers of ignored modules in {unit.name}, "
                    "which are on the meta device. Initialize ignored modules before sharding."
                )
        dtypes = {f"dtype of {fqn}": str(param.dtype) for fqn, param in params.items()}
        check_equal(dtypes, groups, TranslationError)
        broadcast_from_first(states, groups, self._mesh.device_type)

    def _modules(self, unit: ShardUnit) -> Iterator[nn.Module]:
        """Yield the modules of the unit, breadth first as in FSDP1, without inner units."""
        pending = deque(self._model.get_submodule(fqn) for fqn in unit.modules)
        seen = set(self._ignored)
        while pending:
            module = pending.popleft()
            if module not in seen and not isinstance(module, FSDPModule):
                seen.add(module)
                yield module
                pending.extend(module.children())

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
        """Tie parameters again: each of their names has got a parameter of its own."""
        for spec in self._translation.plan.specs_of(unit):
            for alias in spec.aliases:
                owner, _, name = alias.rpartition(".")
                param = self._model.get_parameter(spec.fqn)
                setattr(self._model.get_submodule(owner), name, param)

    def _check_made(
        self, unit: ShardUnit, modules: list[nn.Module], params: Mapping[str, nn.Parameter]
    ) -> None:
        wrong = [
            spec.fqn
            for spec in self._translation.plan.specs_of(unit)
            if params[spec.fqn].is_meta or params[spec.fqn].shape != spec.shape
        ]
        if wrong or any(map(_on_meta, modules)):
            problem = f"left {listing(wrong, 6) or 'buffers'} of {unit.name} on meta, or reshaped"
            fix = "Call module.to_empty(device=..., recurse=False) in it, then initialize"
            raise TranslationError(message("param_init_fn", problem, "", fix))

    def _buffers(self, unit: ShardUnit) -> Iterator[Tensor]:
        """Yield the buffers at and below the unit, ignored ones too, that no unit before it had."""
        for fqn in unit.modules:
            for _, buffer in sorted(self._model.get_submodule(fqn).named_buffers()):
                if id(buffer) not in self._synced:
                    self._synced[id(buffer)] = buffer
                    yield buffer
