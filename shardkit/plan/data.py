"""The data of a plan: every decision about how to shard a model, and what follows from it; pure and
local.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from shardkit.plan.types import MeshSpec, ParamSpec, ShardUnit, ancestors, is_world_size

VERSION = 1  # of the JSON form


@dataclass(frozen=True)
class PlanData:
    """The fields of a ``ShardingPlan``, and what follows from them; what writes plans as text
    imports this.
    """

    units: tuple[ShardUnit, ...]
    mesh: MeshSpec
    params: tuple[ParamSpec, ...] = ()
    ignored: tuple[str, ...] = ()
    replicated: tuple[str, ...] = ()
    prefetch: int = 0
    forward_methods: tuple[str, ...] = ()
    tiles: tuple[tuple[str, int], ...] = ()
    order: tuple[str, ...] = ()
    notes: tuple[str, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "units", tuple(map(self._resolved, self.units)))
        object.__setattr__(self, "tiles", tuple(dict(self.tiles).items()))

    def _resolved(self, unit: ShardUnit) -> ShardUnit:
        """Return the unit with settings as torch understands them, the same in every version."""
        changes: dict[str, Any] = {}
        if unit.mesh is not None and not self.mesh.splits(unit.mesh):  # the only axis that shards
            changes["mesh"] = None
        reshard = unit.reshard_after_forward
        if is_world_size(reshard) and reshard in (1, self.mesh_of(unit).shard_size):
            changes["reshard_after_forward"] = reshard != 1  # 1 first, as torch: nothing is freed
        policy = unit.mp_policy
        if policy.param_dtype is not None and policy.reduce_dtype is None:
            # Since torch 2.15 None is the dtype of the parameters. Before, it was param_dtype.
            specs = self.specs_of(unit)
            trainable = [spec for spec in specs if spec.trainable]  # if none, they may train later
            dtypes = {spec.dtype for spec in trainable or specs}
            if len(dtypes) == 1:
                changes["mp_policy"] = replace(policy, reduce_dtype=dtypes.pop())
        return replace(unit, **changes) if changes else unit

    @cached_property
    def specs(self) -> dict[str, ParamSpec]:
        """The parameters, by FQN."""
        return {spec.fqn: spec for spec in self.params}

    @property
    def not_in_units(self) -> tuple[str, ...]:
        """The parameters that no unit owns: ignored or replicated."""
        return (*self.ignored, *self.replicated)

    def specs_of(self, unit: ShardUnit) -> list[ParamSpec]:
        """The parameters that ``unit`` owns."""
        specs = self.specs
        return [specs[fqn] for fqn in unit.params if fqn in specs]

    def mesh_of(self, unit: ShardUnit) -> MeshSpec:
        """The mesh that ``unit`` is sharded on: one axis, or two that replicate and shard."""
        return self.mesh.on(unit.mesh)

    def split_specs(self, unit: ShardUnit) -> list[ParamSpec]:
        """The parameters of ``unit`` as ``fully_shard`` gets them: a rank's part, where the model
        has split them.
        """
        # experts are split over dim 0; of other dims only the padding would differ
        parts = self.mesh.parts(unit.mesh)
        specs = self.specs_of(unit)
        if parts == 1:
            return [spec.local if spec.part else spec for spec in specs]
        return [
            spec._replace(shape=(-(-spec.shape[0] // parts), *spec.shape[1:])) for spec in specs
        ]

    def held_bytes(self) -> int:
        """The bytes of the parameters that the fullest rank holds, those that every rank holds in
        full included.
        """
        held = sum(self.specs[fqn].local.nbytes for fqn in self.replicated if fqn in self.specs)
        for unit in self.units:
            dims, ranks = dict(unit.shard_dims), self.mesh_of(unit).shard_size
            specs = self.split_specs(unit)
            held += sum(
                spec.nbytes_of(spec.shard_numel(ranks, dims.get(spec.fqn, 0))) for spec in specs
            )
        return held

    def replicated_modules(self) -> dict[str, torch.dtype]:
        """The modules with replicated parameters alone, which have a dim, and the dtype to compute
        in.

        That is the ``param_dtype`` of the unit around.
        """
        computed_in: dict[str, torch.dtype] = {}
        if not self.replicated:
            return computed_in
        dtypes: dict[str, torch.dtype | None] = {}
        for unit in self.units:
            dtypes.update(dict.fromkeys(unit.modules, unit.mp_policy.param_dtype))
        replicated = set(self.replicated)
        with_others: set[str] = set()
        for spec in self.params:
            if spec.fqn not in replicated:
                for name in (spec.fqn, *spec.aliases):
                    with_others.update(ancestors(name))
        for fqn in self.replicated:
            for name in (fqn, *self.specs[fqn].aliases):
                around = ancestors(name)
                dtype = next(dtypes[module] for module in around if module in dtypes)
                for module in around:
                    if self.specs[fqn].shards and dtype and module not in with_others:
                        computed_in[module] = dtype
        return computed_in

    def trains(self, unit: ShardUnit) -> bool:
        """Whether ``unit`` owns a parameter that trains."""
        return any(spec.trainable for spec in self.specs_of(unit))

    def stays(self, unit: ShardUnit, keep_unsharded: bool | str | None) -> bool:
        """Whether ``accumulate`` keeps ``unit`` unsharded through all micro-batches."""
        if isinstance(keep_unsharded, bool):
            return keep_unsharded
        return unit.reshard_after_forward is False or (
            keep_unsharded == "frozen" and not self.trains(unit)
        )

    def execution_order(self) -> list[ShardUnit]:
        """Return the units as a forward runs them: in ``order`` if given, else in the model's own,
        parents first.
        """
        seen = {name: place for place, name in enumerate(self.order)}
        first: dict[str, int] = {}
        for place, spec in enumerate(self.params):
            for fqn in ancestors(spec.fqn):
                first.setdefault(fqn, place)

        def place_of(unit: ShardUnit) -> tuple[int, int, int]:
            depth = unit.modules[0].count(".") if unit.modules[0] else -1
            return seen.get(unit.name, len(seen)), first.get(unit.modules[0], 0), depth

        return sorted(self.units, key=place_of)

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as JSON-ready data: strings, numbers, lists and dicts; keys are the field
        names.
        """
        return {"version": VERSION, **_plain(self)}


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, (str, int, float)):
        return value
    if isinstance(value, torch.dtype):
        return dtype_name(value)
    if isinstance(value, MixedPrecisionPolicy):
        return mp_policy_to_dict(value)
    if isinstance(value, (list, tuple)):
        return [item if type(item) is str else _plain(item) for item in value]  # most are names
    return {attr.name: _plain(getattr(value, attr.name)) for attr in dataclasses.fields(value)}


def dtype_name(dtype: torch.dtype) -> str:
    """Return ``"bfloat16"`` for ``torch.bfloat16``."""
    return str(dtype).removeprefix("torch.")


def mp_policy_to_dict(policy: MixedPrecisionPolicy) -> dict[str, Any]:
    """Return the fields that differ from torch's defaults, dtypes by name."""
    default = vars(MixedPrecisionPolicy())
    return {name: _plain(value) for name, value in vars(policy).items() if value != default[name]}


def skippable(plan: PlanData) -> set[ShardUnit]:
    """Return the units with ``may_skip=True`` and those inside them."""
    fqns = {fqn for unit in plan.units if unit.may_skip for fqn in unit.modules}
    if not fqns:
        return set()
    inside = set()
    for unit in plan.units:
        if not fqns.isdisjoint([unit.modules[0], *ancestors(unit.modules[0])]):
            inside.add(unit)
    return inside


def callers(plan: PlanData) -> dict[ShardUnit, list[ShardUnit]]:
    """Return the units that call those, in the plan's order, each with all units that it calls."""
    inside = skippable(plan)
    if not inside:
        return {}
    unit_of = {fqn: unit for unit in plan.units for fqn in unit.modules}
    calls: dict[ShardUnit, list[ShardUnit]] = {unit: [] for unit in plan.units}
    for unit in plan.execution_order():
        around = [unit_of[fqn] for fqn in ancestors(unit.modules[0]) if fqn in unit_of]
        if around:
            calls[around[0]].append(unit)
    return {unit: called for unit, called in calls.items() if not inside.isdisjoint(called)}
