"""Choose the dim on which each parameter is sharded: dim 0, unless that leaves some ranks with too much."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import replace

from shardkit.errors import listing
from shardkit.plan import MeshSpec, ShardingPlan, ShardUnit, is_world_size
from shardkit.plan.types import nbytes

_EFFECT = "the fullest rank holds"  # in each note of this file
SLACK = 0.01  # how much more than with the best dims the fullest rank may hold, so that small parameters keep dim 0
# The same on more than MANY ranks. There torch copies a parameter on another dim from and to as many views as there are
# ranks, in every collective (16,384: 0.1 s), and a rank's part of it is thousands of short runs in a file.
MANY, SLACK_OF_MANY = 1024, 0.5


def balanced(plan: ShardingPlan, keep: Collection[str] = ()) -> ShardingPlan:
    """Return the plan with the dims that make its fullest rank hold at most ``SLACK`` more than it must; pure.

    FSDP2 gives whole rows of dim 0 to each rank: 8 experts on 64 ranks leave 56 without any. It shards other dims in
    equal parts only, and copies them once more in each collective. So the shapes that waste most are taken first, and
    no more than needed, each on the first dim that divides, whose shards are the longest runs in memory. Notes say why.
    Parameters in ``keep``, and those of units whose rule gave a dim, stay as they are.
    """
    keep = {*keep, *(fqn for unit in plan.units if unit.dim_given for fqn in unit.params)}
    by_shape: dict[object, list[tuple[str, int, int]]] = defaultdict(list)
    for unit in plan.units:
        ranks = plan.mesh_of(unit).shard_size
        for spec in plan.split_specs(unit):
            # torch takes no other dim where it reshards to fewer ranks.
            stays = spec.fqn in keep or is_world_size(unit.reshard_after_forward)
            if stays or not spec.shape or spec.shape[0] % ranks == 0:
                continue
            if dim := next((dim for dim, size in enumerate(spec.shape) if size % ranks == 0), 0):
                waste = spec.nbytes_of(spec.shard_numel(ranks)) - spec.nbytes // ranks
                by_shape[spec.shape, spec.dtype].append((spec.fqn, dim, waste))
    if not by_shape:
        return plan
    held = plan.held_bytes()
    saving = {shape: sum(waste for *_, waste in found) for shape, found in by_shape.items()}
    least = held - sum(saving.values())
    dims: dict[str, int] = {}
    slack = SLACK if plan.mesh.shard_size <= MANY else SLACK_OF_MANY
    for shape in sorted(saving, key=lambda shape: -saving[shape]):
        if held > (1 + slack) * least:
            dims |= {fqn: dim for fqn, dim, _ in by_shape[shape]}
            held -= saving[shape]
    pairs = ((unit, tuple((fqn, dims[fqn]) for fqn in unit.params if fqn in dims)) for unit in plan.units)
    units = tuple(replace(unit, shard_dims=unit.shard_dims + chosen) if chosen else unit for unit, chosen in pairs)
    return replace(plan, units=units, notes=(*plan.notes, *_notes(plan, dims, held)))


def on_mesh(plan: ShardingPlan, mesh: MeshSpec) -> ShardingPlan:
    """Return the plan on another mesh, with the dims chosen for that mesh; pure. On its own mesh it is unchanged.

    Dims that a rule gave stay; a note names those that the other mesh does not divide, which go back to dim 0. Raises
    PlanError where a unit is sharded on an axis that is not one of the first two of ``mesh``.
    """
    for axis in dict.fromkeys(unit.mesh for unit in plan.units if unit.mesh is not None):
        mesh = mesh.sharded_from(axis)
    if mesh == plan.mesh:
        return plan
    notes = tuple(note for note in plan.notes if _EFFECT not in note)
    moved = replace(plan, mesh=mesh, notes=notes)
    units: list[ShardUnit] = []
    for unit in moved.units:
        given, ranks = dict(unit.shard_dims) if unit.dim_given else {}, moved.mesh_of(unit).shard_size
        sizes = {spec.fqn: spec.shape[given[spec.fqn]] for spec in moved.split_specs(unit) if spec.fqn in given}
        undone = [fqn for fqn, size in sizes.items() if size % ranks]
        units.append(replace(unit, shard_dims=tuple((fqn, given[fqn]) for fqn in given if fqn not in undone)))
        if undone:
            notes += (f"{listing(undone, 2)}: on dim 0, because {mesh} does not divide the dim that a rule gave",)
    keep = {spec.fqn for spec in plan.params if spec.tensor_parallel}
    return balanced(replace(moved, units=tuple(units), notes=notes), keep)


def _notes(plan: ShardingPlan, dims: dict[str, int], held: int) -> Iterator[str]:
    for dim in sorted(set(dims.values())):
        names = listing((fqn for fqn in dims if dims[fqn] == dim), 2)
        rows = sorted({plan.specs[fqn].shape[0] for fqn in dims if dims[fqn] == dim})
        yield (
            f"{names}: sharded on dim {dim}, because the {listing(map(str, rows), 3)} rows of dim 0 do not spread over "
            f"{plan.mesh.shard_size} ranks; {_EFFECT} {nbytes(held)}, not {nbytes(plan.held_bytes())}"
        )
