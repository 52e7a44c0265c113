"""A plan as text: the table, and the difference of two plans; ``code`` writes it as Python."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence

from shardkit.errors import listing
from shardkit.plan.counting import collectives
from shardkit.plan.data import PlanData, dtype_name, mp_policy_to_dict
from shardkit.plan.types import ShardUnit, count, nbytes

# --- The table ------------------------------------------------------------------------------------


def table(plan: PlanData) -> str:
    """Return the plan as a table: a row for units that differ in numbers only, then a summary."""
    alike: dict[tuple[str, ...], list[ShardUnit]] = defaultdict(list)
    for unit in plan.units:
        pattern = re.sub(r"\d+", "#", unit.name)
        alike[(pattern, *_row(plan, unit).values())].append(unit)
    rows = []
    for units in alike.values():
        row = {"unit": units[0].name, **_row(plan, units[0])}
        if len(units) > 1:
            row["unit"] += f" .. {units[-1].name}"
            row["parameters"] = f"{len(units)} x {row['parameters']}"
            row["bytes"] = f"{len(units)} x {row['bytes']}"
        rows.append(row)
    titles = [title for title in rows[0] if any(row[title] for row in rows)]
    cells = [titles]
    for row in rows:
        cells.append([row[title] for title in titles])
    numel = sum(spec.numel for spec in plan.params)
    size = sum(spec.nbytes for spec in plan.params)
    headline = (
        f"ShardingPlan: {count(numel)} parameters in {len(plan.units)} units on mesh {plan.mesh}, "
        f"{nbytes(plan.held_bytes())} of {nbytes(size)} on each rank"
    )
    left = {0, *range(3, len(titles))}  # all but numbers
    return "\n".join([headline, "", *aligned(cells, left), "", *_footer(plan)])


def aligned(rows: Sequence[Sequence[str]], left: Collection[int] = (0,)) -> list[str]:
    """Format rows of cells with columns of one width, those in ``left`` aligned left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = []
        for column, (cell, width) in enumerate(zip(row, widths, strict=True)):
            cells.append(cell.ljust(width) if column in left else cell.rjust(width))
        lines.append("  ".join(cells).rstrip())
    return lines


def _row(plan: PlanData, unit: ShardUnit) -> dict[str, str]:
    """Return the cells of a unit, by the titles of their columns."""
    specs = plan.specs_of(unit)
    row = {"parameters": "-", "bytes": "-"}
    if specs:
        row["parameters"] = count(sum(spec.numel for spec in specs))
        row["bytes"] = nbytes(sum(spec.nbytes for spec in specs))
    dtypes = {dtype_name(spec.dtype) + " frozen" * (not spec.trainable) for spec in specs}
    row["dtype"] = ", ".join(sorted(dtypes))
    policy = mp_policy_to_dict(unit.mp_policy)
    precision = [str(policy.get("param_dtype", "stored dtype"))] if policy else []
    if "reduce_dtype" in policy:
        precision.append(f"reduces in {policy['reduce_dtype']}")
    row["computes in"] = ", ".join(precision)
    row["reshards"] = f"to {unit.reshard_after_forward} ranks"
    if isinstance(unit.reshard_after_forward, bool):
        row["reshards"] = "after forward" if unit.reshard_after_forward else "after backward"
    row["lives on"] = "CPU" if unit.offloads else ""
    checkpointed = unit.checkpoint_activations
    row["checkpointed"] = "yes" if checkpointed is True else checkpointed or ""
    row["compiled"] = "yes" if unit.compile else ""
    dims = Counter(dim for _, dim in unit.shard_dims)
    row["not on dim 0"] = ", ".join(
        f"{number} on dim {dim}" for dim, number in sorted(dims.items())
    )
    row["mesh"] = str(plan.mesh_of(unit)) if plan.mesh.shard_axes > 1 else ""
    return row


def _footer(plan: PlanData) -> list[str]:
    lines = []
    for spec in plan.params:
        if spec.aliases:
            lines.append(f"tied: {' = '.join((spec.fqn, *spec.aliases))}")
    listed: dict[str, Sequence[str]] = {
        "the root keeps": plan.units[-1].params if plan.units else (),
        "ignored": plan.ignored,
        "replicated, gradients reduced": plan.replicated,
        "prefetch": [f"{plan.prefetch} units ahead"] if plan.prefetch else [],
        "ranks may skip": [unit.name for unit in plan.units if unit.may_skip],
        "in tiles of tokens": [f"{fqn} ({number})" for fqn, number in plan.tiles],
        "methods that unshard": plan.forward_methods,
    }
    for title, items in listed.items():
        if items:
            lines.append(f"{title}: {listing(items, 6)}")
    counts = collectives(plan)
    lines.append(
        f"one forward and backward: {counts.all_gathers} all-gathers, "
        f"{counts.reduce_scatters} reduce-scatters, {counts.all_reduces} all-reduces"
    )
    lines += [f"note: {note}" for note in plan.notes]
    return lines


# --- The difference of two plans ------------------------------------------------------------------


def diff(plan: PlanData, other: PlanData) -> str:
    """Return one line per difference, ``-`` for ``plan`` and ``+`` for ``other``."""
    shared = {unit.name for unit in plan.units} & {unit.name for unit in other.units}
    mine, theirs = _facts(plan, shared), _facts(other, shared)
    lines = []
    for fact in sorted(mine.keys() | theirs.keys()):
        if mine.get(fact) != theirs.get(fact):
            if fact in mine:
                lines.append(f"- {fact}: {mine[fact]}")
            if fact in theirs:
                lines.append(f"+ {fact}: {theirs[fact]}")
    return "\n".join(lines)


def _facts(plan: PlanData, shared: set[str]) -> dict[str, object]:
    """Return each thing that two plans can differ in, by its name."""
    facts = plan.to_dict()
    del facts["notes"]
    facts["mesh"] = plan.mesh
    facts["order of units"] = [unit.name for unit in plan.units]
    for unit, settings in zip(plan.units, facts.pop("units"), strict=True):
        if unit.name not in shared:
            facts[f"unit {unit.name}"] = f"{len(unit.params)} parameters"
            continue
        for name, value in settings.items():
            facts[f"unit {unit.name}: {name}"] = value
    for fqn, *spec in facts.pop("params"):
        facts[f"parameter {fqn}"] = spec
    return facts
