"""A translation, and sharding a model by it: the only part of ``translate`` that changes a model."""

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

from shardkit._fsdp.fsdp1 import reduce_unused_beside_used
from shardkit._torch import real_tensors
from shardkit.apply.init_sync import broadcast_from_first, check_same_start, facts_of
from shardkit.apply.mesh import build_mesh, check_mesh, ensure_process_group, mesh_of_groups
from shardkit.apply.shard import carry_out, facts_of_plan, given_plan
from shardkit.apply.validate import check_fit
from shardkit.errors import PlanError, TranslationError, listing, message
from shardkit.fsdp1.translate.arguments import Note
from shardkit.fsdp1.translate.strategy import groups_to_agree
from shardkit.meta import is_recorded, materialize
from shardkit.plan import ShardingPlan, ShardUnit
from shardkit.ranks import Groups, accelerator, device_type, gather_by_rank, together

_ANY = torch.float32  # for dtypes that ranks compare only after param_init_fn
ParamInitFn: TypeAlias = Callable[[nn.Module], object]


@dataclass(frozen=True)
class Translation:
    """A plan, a note for every argument that is not at its default, and what a plan does not hold.

    Plain data, made without changing the model; ``print(translation)`` shows the plan's table and the notes.

    Attributes:
        plan: the ``fully_shard`` calls.
        notes: how each argument is translated, in the order of FSDP1's signature.
        device_mesh: FSDP1's ``device_mesh``, if FSDP2 can use it; None builds one of ``plan.mesh``.
        process_groups: FSDP1's groups, one for each axis of ``plan.mesh``, the replicate group first; empty for all
            ranks.
        device: FSDP1's ``device_id``; None is the accelerator.
        param_init_fn: initializes a meta module before it is sharded, as in FSDP1.
        sync_module_states: whether parameters and buffers are broadcast from the first rank before sharding.
        buffer_dtypes: the dtypes to which FSDP1 casts floating-point buffers at the first forward, by FQN.
        ignored_modules: FQNs of the modules that FSDP1 ignores.
        wrapped: FQNs of the modules that FSDP1 would have wrapped below the root, each with the arguments that a
            CustomPolicy gave for it.
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
        """Return the notes on what FSDP2 cannot do, of a configuration file; refused arguments raise instead."""
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

    def ignored_in(self, model: nn.Module) -> set[nn.Module]:
        """Return the modules of ``ignored_modules``."""
        return {model.get_submodule(fqn) for fqn in self.ignored_modules}

    def __str__(self) -> str:
        return "\n".join([str(self.plan), "", *(f"{note}" for note in self.notes)])


def shard_translated(
    model: nn.Module,
    decide: Callable[[], Translation],
    groups: Groups,
    mesh_of: Callable[[Translation], DeviceMesh] | None = None,
    any_start: bool = False,
    after: Callable[[ShardUnit, dict[str, nn.Parameter]], object] | None = None,
) -> tuple[Translation, DeviceMesh]:
    """Shard ``model`` in place as ``decide`` says, without casting buffers, and return what was decided and the mesh.

    Collective over ``groups``. An error of ``decide`` on one rank is raised on all. With ``any_start`` ranks may start
    from different values, as in FSDP1.
    """
    ensure_process_group()
    with real_tensors():  # as in apply_decided
        with together(groups, PlanError) as poll:
            translation = decide()
            _check(model, translation)
            plan, sync, dtypes = translation.plan, translation.sync_module_states, dict(translation.buffer_dtypes)
            # A rank may begin on meta in another dtype than the first, which has the values, and cast in param_init_fn.
            like = replace(plan, params=tuple(each._replace(dtype=_ANY) for each in plan.params)) if sync else plan
            facts = {"sync_module_states": str(sync)} if any_start and not sync else facts_of(model, sync)
            poll.same = {**facts, "buffer_dtype": str(dtypes), **facts_of_plan(like)}
        if not (any_start or sync):
            check_same_start(model, plan.ignored, groups, sync_module_states=False)
        on_meta = any(True for _ in _on_meta(model, translation))
        by_recording = on_meta and translation.param_init_fn is None and is_recorded(model)
        answers = gather_by_rank((on_meta, by_recording), groups).values()
        recorded, anywhere_on_meta = all(each[1] for each in answers), any(each[0] for each in answers)
        mesh = (mesh_of or mesh_for)(translation)
    needed = (sync or anywhere_on_meta) and not recorded
    carry_out(model, plan, mesh, _UnitStates(model, translation, mesh) if needed else None, after)
    if recorded:
        materialize(model)
    reduce_unused_beside_used(model)
    return translation, mesh


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
    plan, tree = given_plan(model, translation.plan, mesh, translation.apart)
    check_fit(tree, plan)
    if translation.param_init_fn is not None or is_recorded(model):
        return
    on_meta = _on_meta(model, translation)
    without = [fqn or "(root)" for fqn, each in on_meta if not callable(getattr(each, "reset_parameters", None))]
    if without:
        problem = "is on the meta device and has no reset_parameters"
        rule = "FSDP1 initializes a meta module by param_init_fn, or else by reset_parameters"
        fix = "Pass param_init_fn, or build the model under shardkit.init_on_meta()"
        raise TranslationError(message(listing(without, 6), problem, rule, fix))


def _own_states(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(recurse=False), *module.buffers(recurse=False)]


def _on_meta(model: nn.Module, translation: Translation) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules with own tensors on meta, without ignored modules."""
    ignored = translation.ignored_in(model)
    for fqn, module in model.named_modules():
        if module not in ignored and any(state.is_meta for state in _own_states(module)):
            yield fqn, module


class _UnitStates:
    """Called with each unit right before it is sharded: initializes and broadcasts its values, as FSDP1. Collective.

    One unit at a time, so that no rank holds more than its shards and one full unit. Broadcasts run over the axes of
    ``mesh``, from the first rank of each, the replicating axis first.
    """

    def __init__(self, model: nn.Module, translation: Translation, mesh: DeviceMesh) -> None:
        self._model = model
        self._translation = translation
        self._mesh = mesh
        self._ignored = translation.ignored_in(model)
        self._synced: dict[int, Tensor] = {}  # keeps the buffers alive, so that ids stay unique

    def __call__(self, unit: ShardUnit) -> None:
        with together(self._mesh.get_all_groups(), TranslationError, call="FullyShardedDataParallel") as poll:
            self._materialize(unit)
            poll.same = {f"dtype of {fqn}": str(self._model.get_parameter(fqn).dtype) for fqn in unit.params}
            states = list(self._unsynced(unit)) if self._translation.sync_module_states else []
            if any(state.is_meta for state in states):
                problem = f"cannot broadcast buffers of an ignored module in {unit.name}, which are on meta"
                raise TranslationError(message("sync_module_states", problem, "", "Initialize ignored modules first"))
        broadcast_from_first(states, self._mesh.get_all_groups(), self._mesh.device_type)

    def _materialize(self, unit: ShardUnit) -> None:
        modules = self._modules(unit)
        if any(state.is_meta for module in modules for state in _own_states(module)):
            for module in modules:  # FSDP1 calls param_init_fn with every module, reset_parameters with those on meta
                if self._translation.param_init_fn is not None:
                    self._translation.param_init_fn(module)
                elif any(state.is_meta for state in _own_states(module)):
                    with torch.no_grad():
                        module.to_empty(device=self._translation.device or self._mesh.device_type, recurse=False)
                        module.reset_parameters()  # type: ignore[operator]  # checked before
            # Each name of a tied parameter now has a parameter of its own; FSDP1 left them untied.
            for spec in self._translation.plan.specs_of(unit):
                for alias in spec.aliases:
                    owner, _, name = alias.rpartition(".")
                    setattr(self._model.get_submodule(owner), name, self._model.get_parameter(spec.fqn))
        self._check_made(unit, modules)

    def _modules(self, unit: ShardUnit) -> list[nn.Module]:
        """Return the modules of the unit, breadth first as in FSDP1, without inner units and ignored modules."""
        found: dict[nn.Module, None] = {}
        pending = deque(self._model.get_submodule(fqn) for fqn in unit.modules)
        while pending:
            module = pending.popleft()
            if module not in found and module not in self._ignored and not isinstance(module, FSDPModule):
                found[module] = None
                pending.extend(module.children())
        return list(found)

    def _unsynced(self, unit: ShardUnit) -> Iterator[Tensor]:
        """Yield the buffers at and below the unit that no unit before it had, ignored ones too, and its parameters."""
        for fqn in unit.modules:
            for _, buffer in sorted(self._model.get_submodule(fqn).named_buffers()):
                if id(buffer) not in self._synced:
                    self._synced[id(buffer)] = buffer
                    yield buffer
        yield from (self._model.get_parameter(fqn) for fqn in unit.params)

    def _check_made(self, unit: ShardUnit, modules: list[nn.Module]) -> None:
        pairs = [(spec, self._model.get_parameter(spec.fqn)) for spec in self._translation.plan.specs_of(unit)]
        casts = self._translation.sync_module_states  # then all ranks compare dtypes
        wrong = [
            spec.fqn
            for spec, param in pairs
            if (tuple(param.shape), param.requires_grad, param.is_meta) != (spec.shape, spec.trainable, False)
            or not (casts or param.dtype == spec.dtype)
        ]
        if wrong or any(buffer.is_meta for module in modules for buffer in module.buffers(recurse=False)):
            problem = f"left {listing(wrong, 6) or 'buffers'} of {unit.name} on meta, or with another shape or dtype"
            fix = "Call module.to_empty(device=..., recurse=False) in it, then initialize"
            raise TranslationError(message("param_init_fn", problem, "", fix))
