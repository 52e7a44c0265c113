"""Choose the dim on which each parameter is sharded: dim 0, unless some ranks then
hold too much.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from dataclasses import replace
from typing import Any

from shardkit.errors import listing
from shardkit.plan import MeshSpec, ParamSpec, ShardingPlan, is_world_size
from shardkit.plan.types import nbytes

_EFFECT = "the fullest rank holds"  # in each note of this file
SLACK = 0.01  # how much more a shape on dim 0 may cost, of what the fullest rank must hold
# The same on more than MANY ranks. There torch copies a parameter on another dim from and to as
# many views as there are ranks, in every collective (16,384: 0.1 s), and a rank's part of it is
# thousands of short runs in a file.
MANY, SLACK_OF_MANY = 1024, 0.5


def balanced(plan: ShardingPlan, keep: Collection[str] = ()) -> ShardingPlan:
    """Return the plan with other dims where dim 0 would cost the fullest rank over ``SLACK``; pure.

    FSDP2 gives whole rows of dim 0 to each rank: 8 experts on 64 ranks leave 56 without any. It
    shards other dims in equal parts only, and copies them once more in each collective. So only
    shapes that waste much are taken, each on the first dim that divides, whose shards are the
    longest runs in memory. Notes say why. Parameters in ``keep`` stay as they are.
    """
    # What could be on another dim, by shape and dtype: the dims, and the bytes that this saves.
    possible: dict[Any, dict[str, int]] = defaultdict(dict)
    saving: dict[Any, int] = defaultdict(int)
    for unit in plan.units:
        if is_world_size(unit.reshard_after_forward):  # torch reshards to fewer ranks on dim 0 only
            continue
        ranks = plan.mesh_of(unit).shard_size
        for spec in plan.split_specs(unit):
            if not spec.shape or spec.shape[0] % ranks == 0 or spec.fqn in keep:
                continue
            dim = _first_that_divides(spec, ranks)
            if dim is not None:
                kind = (spec.shape, spec.dtype)
                possible[kind][spec.fqn] = dim
                saving[kind] += spec.nbytes_of(spec.shard_numel(ranks)) - spec.nbytes // ranks
    if not possible:
        return plan

    on_dim_0 = plan.held_bytes()
    least = on_dim_0 - sum(saving.values())
    slack = SLACK if plan.mesh.shard_size <= MANY else SLACK_OF_MANY
    held = on_dim_0
    dims: dict[str, int] = {}
    for kind, bytes_saved in saving.items():
        if bytes_saved > slack * least:
            dims.update(possible[kind])
            held -= bytes_saved

    units = []
    for unit in plan.units:
        moved = tuple((fqn, dims[fqn]) for fqn in unit.params if fqn in dims)
        units.append(replace(unit, shard_dims=unit.shard_dims + moved) if moved else unit)
    notes = list(plan.notes)
    for dim in sorted(set(dims.values())):
        names = [fqn for fqn in dims if dims[fqn] == dim]
        rows = sorted({plan.specs[fqn].shape[0] for fqn in names})
        notes.append(
            f"{listing(names, 2)}: sharded on dim {dim}, because the {listing(map(str, rows), 3)} "
            f"rows of dim 0 do not spread over {plan.mesh.shard_size} ranks; {_EFFECT} "
            f"{nbytes(held)}, not {nbytes(on_dim_0)}"
        )
    return replace(plan, units=tuple(units), notes=tuple(notes))


def _first_that_divides(spec: ParamSpec, ranks: int) -> int | None:
    for dim, size in enumerate(spec.shape):
        if size % ranks == 0:
            return dim
    return None


def on_mesh(plan: ShardingPlan, mesh: MeshSpec) -> ShardingPlan:
    """Return the plan on another mesh, with the dims chosen for that mesh; pure.

    On its own mesh the plan is unchanged. Raises PlanError where a unit is sharded on an axis that
    is not one of the first two of ``mesh``.
    """
    for unit in plan.units:
        if unit.mesh is not None:
            mesh = mesh.sharded_from(unit.mesh)
    if mesh == plan.mesh:
        return plan
    units = tuple(replace(unit, shard_dims=()) for unit in plan.units)
    notes = tuple(note for note in plan.notes if _EFFECT not in note)
    keep = {spec.fqn for spec in plan.params if spec.tensor_parallel}
    return balanced(replace(plan, mesh=mesh, units=units, notes=notes), keep)
