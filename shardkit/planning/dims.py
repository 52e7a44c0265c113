"""Choose the dim on which each parameter is sharded: dim 0, unless some ranks then
hold too much.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass, field, replace

from shardkit.errors import listing
from shardkit.plan import MeshSpec, ParamSpec, ShardingPlan, ShardUnit, is_world_size
from shardkit.plan.types import nbytes

_EFFECT = "the fullest rank holds"  # in each note of this file
SLACK = 0.01  # how much more than with the best dims the fullest rank may hold
# The same on more than MANY ranks. There torch copies a parameter on another dim from and to as
# many views as there are ranks, in every collective (16,384: 0.1 s), and a rank's part of it is
# thousands of short runs in a file.
MANY, SLACK_OF_MANY = 1024, 0.5


@dataclass
class _Alike:
    """Parameters of one shape and dtype that could leave dim 0."""

    dims: dict[str, int] = field(default_factory=dict)  # the dim that each would be on, by FQN
    saving: int = 0  # bytes on the fullest rank


def balanced(plan: ShardingPlan, keep: Collection[str] = ()) -> ShardingPlan:
    """Return the plan in which the fullest rank holds at most ``SLACK`` more than it must; pure.

    FSDP2 gives whole rows of dim 0 to each rank: 8 experts on 64 ranks leave 56 without any. It
    shards other dims in equal parts only, and copies them once more in each collective. So the
    shapes that waste most are taken first, and no more than needed, each on the first dim that
    divides, whose shards are the longest runs in memory. Notes say why. Parameters in ``keep``, and
    those of units whose rule gave a dim, stay as they are.
    """
    found: dict[object, _Alike] = defaultdict(_Alike)
    for unit in plan.units:
        if unit.dim_given or is_world_size(unit.reshard_after_forward):  # torch: on dim 0 only
            continue
        ranks = plan.mesh_of(unit).shard_size
        for spec in plan.split_specs(unit):
            if not spec.shape or spec.shape[0] % ranks == 0:
                continue
            dim = _better_dim(spec, ranks)
            if dim and spec.fqn not in keep:
                alike = found[spec.shape, spec.dtype]
                alike.dims[spec.fqn] = dim
                alike.saving += spec.nbytes_of(spec.shard_numel(ranks)) - spec.nbytes // ranks
    if not found:
        return plan
    before = held = plan.held_bytes()
    least = held - sum(alike.saving for alike in found.values())
    slack = SLACK if plan.mesh.shard_size <= MANY else SLACK_OF_MANY
    dims: dict[str, int] = {}
    for alike in sorted(found.values(), key=lambda alike: -alike.saving):
        if held > (1 + slack) * least:
            dims.update(alike.dims)
            held -= alike.saving
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
            f"{nbytes(held)}, not {nbytes(before)}"
        )
    return replace(plan, units=tuple(units), notes=tuple(notes))


def _better_dim(spec: ParamSpec, ranks: int) -> int:
    """Return the first dim that the ranks divide; 0 without one."""
    for dim, size in enumerate(spec.shape):
        if size % ranks == 0:
            return dim
    return 0


def on_mesh(plan: ShardingPlan, mesh: MeshSpec) -> ShardingPlan:
    """Return the plan on another mesh, with the dims chosen for that mesh; pure.

    Dims that a rule gave stay; a note names those that the other mesh does not divide, which go
    back to dim 0. On its own mesh the plan is unchanged. Raises PlanError where a unit is sharded
    on an axis that is not one of the first two of ``mesh``.
    """
    for unit in plan.units:
        if unit.mesh is not None:
            mesh = mesh.sharded_from(unit.mesh)
    if mesh == plan.mesh:
        return plan
    notes = [note for note in plan.notes if _EFFECT not in note]
    moved = replace(plan, mesh=mesh)
    units: list[ShardUnit] = []
    for unit in moved.units:
        ranks = moved.mesh_of(unit).shard_size
        shapes = {spec.fqn: spec.shape for spec in moved.split_specs(unit)}
        kept, undone = [], []
        for fqn, dim in unit.shard_dims if unit.dim_given else ():
            if shapes[fqn][dim] % ranks:
                undone.append(fqn)
            else:
                kept.append((fqn, dim))
        units.append(replace(unit, shard_dims=tuple(kept)))
        if undone:
            notes.append(
                f"{listing(undone, 2)}: on dim 0, because {mesh} does not divide the dim that a "
                "rule gave"
            )
    keep = {spec.fqn for spec in plan.params if spec.tensor_parallel}
    return balanced(replace(moved, units=tuple(units), notes=tuple(notes)), keep)
