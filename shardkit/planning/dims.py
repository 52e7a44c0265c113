"""Choose the dim on which each parameter is sharded: dim 0, unless some ranks then
hold too much.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from dataclasses import replace
from functools import cache
from typing import TypeAlias

import torch

from shardkit.errors import listing
from shardkit.plan import MeshSpec, ShardingPlan, is_world_size
from shardkit.plan.types import nbytes

_Kind: TypeAlias = tuple[tuple[int, ...], torch.dtype, int]
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
    # Parameters that could be on another dim, by what they have in common: the shape that
    # fully_shard gets, the dtype and the ranks; and the bytes that each kind would save.
    alike: dict[_Kind, list[str]] = defaultdict(list)
    saving: dict[_Kind, int] = defaultdict(int)
    for unit in plan.units:
        if is_world_size(unit.reshard_after_forward):  # torch reshards to fewer ranks on dim 0 only
            continue
        ranks = plan.mesh_of(unit).shard_size
        for spec in plan.split_specs(unit):
            if _best_dim(spec.shape, ranks) > 0 and spec.fqn not in keep:
                kind = (spec.shape, spec.dtype, ranks)
                alike[kind].append(spec.fqn)
                saving[kind] += spec.nbytes_of(spec.shard_numel(ranks)) - spec.nbytes // ranks
    if not alike:
        return plan

    on_dim_0 = plan.held_bytes()
    if_all_moved = on_dim_0 - sum(saving.values())
    slack = SLACK if plan.mesh.shard_size <= MANY else SLACK_OF_MANY
    held = on_dim_0
    moved: dict[tuple[int, int], list[_Kind]] = defaultdict(list)  # by dim and ranks
    for kind, bytes_saved in saving.items():
        if bytes_saved > slack * if_all_moved:
            shape, _, ranks = kind
            moved[_best_dim(shape, ranks), ranks].append(kind)
            held -= bytes_saved

    dims: dict[str, int] = {}
    notes = list(plan.notes)
    for (dim, ranks), kinds in sorted(moved.items(), key=lambda item: item[0]):
        names = []
        for kind in kinds:
            names += alike[kind]
        dims.update(dict.fromkeys(names, dim))
        rows = sorted({shape[0] for shape, _, _ in kinds})
        notes.append(
            f"{listing(names, 2)}: sharded on dim {dim}, because the {listing(map(str, rows), 3)} "
            f"rows of dim 0 do not spread over {ranks} ranks; {_EFFECT} {nbytes(held)}, not "
            f"{nbytes(on_dim_0)}"
        )
    units = []
    for unit in plan.units:
        pairs = tuple((fqn, dims[fqn]) for fqn in unit.params if fqn in dims)
        units.append(replace(unit, shard_dims=unit.shard_dims + pairs) if pairs else unit)
    return replace(plan, units=tuple(units), notes=tuple(notes))


@cache
def _best_dim(shape: tuple[int, ...], ranks: int) -> int:
    """Return the first dim whose size the ranks divide; 0 without one."""
    for dim, size in enumerate(shape):
        if size % ranks == 0:
            return dim
    return 0


def on_mesh(plan: ShardingPlan, mesh: MeshSpec) -> ShardingPlan:
    """Return the plan on another mesh, with the dims chosen for that mesh; pure.

    On its own mesh the plan is unchanged. Raises PlanError where a unit is sharded on an axis that
    is not one of the first two of ``mesh``.
    """
    # as build_plan: no tensor classes with operators of their own, but for experts
    keep = {spec.fqn for spec in plan.params if spec.tensor_parallel or spec.element_bytes}
    for unit in plan.units:
        if unit.mesh is not None:
            mesh = mesh.sharded_from(unit.mesh)
            keep.difference_update(unit.params)
    if mesh == plan.mesh:
        return plan
    units = tuple(replace(unit, shard_dims=()) for unit in plan.units)
    notes = tuple(note for note in plan.notes if _EFFECT not in note)
    return balanced(replace(plan, mesh=mesh, units=units, notes=notes), keep)
