"""The values of a unit before it is sharded, as FSDP1 gave them: made from meta, then broadcast from the first rank.

One unit at a time, so that no rank ever holds more than its shards and one whole unit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import torch
import torch.nn as nn
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from shardkit.apply.start import broadcast_from_first
from shardkit.errors import TranslationError, listing, message
from shardkit.fsdp1.translate.types import Translation
from shardkit.meta import is_recorded
from shardkit.plan import ShardUnit
from shardkit.ranks import Groups, gather_by_rank, together


def own_states(module: nn.Module) -> list[Tensor]:
    """The parameters and buffers that the module registers itself."""
    return [*module.parameters(recurse=False), *module.buffers(recurse=False)]


class Sources:
    """Where the values of a model come from on all ranks. Collective: made by every rank of ``groups``.

    Attributes:
        recorded: every rank built the model under ``init_on_meta``, so ``materialize`` gives it its values.
        anywhere_on_meta: some rank has to make values from meta.
    """

    def __init__(self, model: nn.Module, translation: Translation, groups: Groups) -> None:
        ignored = {model.get_submodule(fqn) for fqn in translation.ignored_modules}
        on_meta = any(
            state.is_meta for module in model.modules() if module not in ignored for state in own_states(module)
        )
        recorded = on_meta and translation.param_init_fn is None and is_recorded(model)
        answers = gather_by_rank((on_meta, recorded), groups).values()
        self.recorded = all(recorded for _, recorded in answers)
        self.anywhere_on_meta = any(on_meta for on_meta, _ in answers) and not self.recorded


class UnitStates:
    """Called with each unit right before it is sharded: makes and broadcasts its values. Collective.

    Args:
        model: the model.
        translation: says how.
        mesh: broadcasts run over its axes, from the first rank of each, the replicating axis first.
    """

    def __init__(self, model: nn.Module, translation: Translation, mesh: DeviceMesh) -> None:
        self._model = model
        self._translation = translation
        self._mesh = mesh
        self._ignored = {model.get_submodule(fqn) for fqn in translation.ignored_modules}
        self._synced: dict[int, Tensor] = {}  # kept, so that an id is of one buffer only

    def __call__(self, unit: ShardUnit) -> None:
        with together(self._mesh.get_all_groups(), TranslationError):
            self._materialize(unit)
            states = list(self._unsynced(unit)) if self._translation.sync_module_states else []
            _check_real(states, unit)
        broadcast_from_first(states, self._mesh.get_all_groups(), self._mesh.device_type)

    def _materialize(self, unit: ShardUnit) -> None:
        modules = self._modules(unit)
        if any(state.is_meta for module in modules for state in own_states(module)):
            for module in modules:
                self._initialise(module)
            self._tie(unit)
        _check_made(self._model, self._translation, unit, modules)

    def _initialise(self, module: nn.Module) -> None:
        """FSDP1 calls ``param_init_fn`` with every module of the unit, or empties and resets those with states."""
        if self._translation.param_init_fn is not None:
            self._translation.param_init_fn(module)
        elif any(state.is_meta for state in own_states(module)):
            with torch.no_grad():
                module.to_empty(device=self._translation.device or self._mesh.device_type, recurse=False)
                module.reset_parameters()  # type: ignore[operator]  # checked before

    def _modules(self, unit: ShardUnit) -> list[nn.Module]:
        """The modules of the unit, breadth first as in FSDP1, without inner units and ignored modules."""
        found: dict[nn.Module, None] = {}
        pending = deque(self._model.get_submodule(fqn) for fqn in unit.modules)
        while pending:
            module = pending.popleft()
            if module not in found and module not in self._ignored and not isinstance(module, FSDPModule):
                found[module] = None
                pending.extend(module.children())
        return list(found)

    def _tie(self, unit: ShardUnit) -> None:
        """Making a tied parameter from meta makes one for each of its names; FSDP1 let them part."""
        for spec in self._translation.plan.specs_of(unit):
            for alias in spec.aliases:
                owner, _, name = alias.rpartition(".")
                setattr(self._model.get_submodule(owner), name, self._model.get_parameter(spec.fqn))

    def _unsynced(self, unit: ShardUnit) -> Iterator[Tensor]:
        """The buffers at and below the unit that none before it had, those of ignored modules too, and its params."""
        for fqn in unit.modules:
            for _, buffer in sorted(self._model.get_submodule(fqn).named_buffers()):
                if id(buffer) not in self._synced:
                    self._synced[id(buffer)] = buffer
                    yield buffer
        yield from (self._model.get_parameter(fqn) for fqn in unit.params)


def check_initialisers(model: nn.Module, translation: Translation) -> None:
    """Raises TranslationError where a module on meta has no way to get its values; local and pure."""
    if translation.param_init_fn is not None or is_recorded(model):
        return
    ignored = {model.get_submodule(fqn) for fqn in translation.ignored_modules}
    without = [
        fqn or "(root)"
        for fqn, module in model.named_modules()
        if module not in ignored
        and any(state.is_meta for state in own_states(module))
        and not callable(getattr(module, "reset_parameters", None))
    ]
    if without:
        raise TranslationError(
            message(
                listing(without, 6),
                "on the meta device, and without reset_parameters",
                "FSDP1 gives a meta module its values by param_init_fn, or else by reset_parameters",
                "Pass param_init_fn, or build the model under shardkit.init_on_meta()",
            )
        )


def cast_buffers(model: nn.Module, translation: Translation) -> None:
    """Casts the buffers to their ``buffer_dtype``, in place; local."""
    for fqn, dtype in translation.buffer_dtypes.items():
        buffer = model.get_buffer(fqn)
        buffer.data = buffer.to(dtype)


def _check_made(model: nn.Module, translation: Translation, unit: ShardUnit, modules: list[nn.Module]) -> None:
    specs = translation.plan.specs_of(unit)
    params = [(spec, model.get_parameter(spec.fqn)) for spec in specs]
    wrong = [
        spec.fqn
        for spec, param in params
        if param.is_meta
        or (tuple(param.shape), param.dtype, param.requires_grad) != (spec.shape, spec.dtype, spec.trainable)
    ]
    if wrong or any(buffer.is_meta for module in modules for buffer in module.buffers(recurse=False)):
        raise TranslationError(
            message(
                "param_init_fn",
                f"left {listing(wrong, 6) or 'buffers'} of {unit.name} on meta, or with another shape or dtype",
                "It gives each module that it is called with its values, as module.to_empty(...) does",
                "Make it write all of a module's own parameters and buffers",
            )
        )


def _check_real(states: list[Tensor], unit: ShardUnit) -> None:
    if any(state.is_meta for state in states):
        raise TranslationError(
            message(
                "sync_module_states",
                f"buffers of an ignored module in {unit.name} are on meta",
                "What is broadcast is real on every rank, and FSDP1 makes no ignored module",
                "Materialize the ignored modules first",
            )
        )
