"""A plan as text: the table, and the difference of two plans; ``code`` writes it as Python."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Sequence

from shardkit.errors import listing
from shardkit.plan.data import PlanData, dtype_name, mp_policy_to_dict
from shardkit.plan.types import ShardUnit, count, nbytes

_INDEXED = re.compile(r"(?s)(.*\.|)(0|[1-9][0-9]*)(\..*|)")  # around its last number

# --- The table ------------------------------------------------------------------------------------


def table(plan: PlanData) -> str:
    """Return the plan as a table: a row per unit, equal neighbors folded, then a summary."""

    def looks(unit: ShardUnit) -> tuple[object, ...]:
        specs = [(*spec[1:4], spec.element_bytes) for spec in plan.specs_of(unit)]
        return (*calls(unit), specs)

    rows = [_row(plan, units) for units in fold(plan.units, looks)]
    titles = [title for title in rows[0] if any(row[title] for row in rows)]
    cells = [titles]
    for row in rows:
        cells.append([row[title] for title in titles])
    left = [at for at, title in enumerate(titles) if title not in ("parameters", "bytes")]
    numel = sum(spec.numel for spec in plan.params)
    size = sum(spec.nbytes for spec in plan.params)
    headline = (
        f"ShardingPlan: {count(numel)} parameters in {len(plan.units)} units on mesh {plan.mesh}, "
        f"{nbytes(plan.held_bytes())} of {nbytes(size)} on each rank"
    )
    return "\n".join([headline, "", *aligned(cells, left), "", *_footer(plan)])


def aligned(rows: Sequence[Sequence[str]], left: Collection[int] = (0,)) -> list[str]:
    """Format rows of cells with columns of one width, those in ``left`` aligned left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = []
        for column, cell in enumerate(row):
            width = widths[column]
            cells.append(cell.ljust(width) if column in left else cell.rjust(width))
        lines.append("  ".join(cells).rstrip())
    return lines


def _row(plan: PlanData, units: Sequence[ShardUnit]) -> dict[str, str]:
    """Return the cells of one unit, or of several that are alike, by the titles
    of their columns.
    """
    unit = units[0]
    specs = plan.specs_of(unit)
    row = {"unit": unit.name, "parameters": "-", "bytes": "-"}
    suffix = ""
    if len(units) > 1:
        row["unit"] = f"{unit.name} .. {units[-1].name}"
        suffix = " each"
    if specs:
        row["parameters"] = count(sum(spec.numel for spec in specs)) + suffix
        row["bytes"] = nbytes(sum(spec.nbytes for spec in specs)) + suffix
    dtypes: dict[str, None] = {}  # trained ones first
    for spec in sorted(specs, key=lambda spec: (not spec.trainable, str(spec.dtype))):
        dtypes[dtype_name(spec.dtype) + ("" if spec.trainable else " frozen")] = None
    row["dtype"] = ", ".join(dtypes)
    row["computes in"] = _precision(unit)
    row["reshards"] = f"to {unit.reshard_after_forward} ranks"
    if isinstance(unit.reshard_after_forward, bool):
        row["reshards"] = "after forward" if unit.reshard_after_forward else "after backward"
    row["lives on"] = "CPU" if unit.offloads else ""
    policy = unit.checkpoint_activations
    row["checkpointed"] = "yes" if policy is True else policy or ""
    row["compiled"] = "yes" if unit.compile else ""
    dims = Counter(dim for _, dim in unit.shard_dims)
    row["not on dim 0"] = ", ".join(
        f"{number} on dim {dim}" for dim, number in sorted(dims.items())
    )
    row["mesh"] = ""
    if any(other.mesh for other in plan.units):
        splits = [f"{name}={size}" for name, size in plan.mesh.splits(unit.mesh).items()]
        row["mesh"] = str(plan.mesh_of(unit))
        if splits:
            row["mesh"] += f", split over {' x '.join(splits)}"
    return row


def _precision(unit: ShardUnit) -> str:
    policy = mp_policy_to_dict(unit.mp_policy)
    if not policy:
        return ""
    text = str(policy.get("param_dtype", "stored dtype"))
    if "reduce_dtype" in policy:
        text += f", reduces in {policy['reduce_dtype']}"
    return text


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
    }
    for number in dict.fromkeys(dict(plan.tiles).values()):
        names = [fqn or "(root)" for fqn, tiles in plan.tiles if tiles == number]
        listed[f"in {number} tiles of tokens"] = names
    listed["methods that unshard"] = plan.forward_methods
    for title, items in listed.items():
        if items:
            lines.append(f"{title}: {listing(items, 6)}")
    counts = plan.collectives()
    lines.append(
        f"one forward and backward: {counts.all_gathers} all-gathers, "
        f"{counts.reduce_scatters} reduce-scatters, {counts.all_reduces} all-reduces"
    )
    lines += [f"note: {note}" for note in plan.notes]
    return lines


# --- Runs of units: layers.0, layers.1, ... -------------------------------------------------------


def fold(units: Sequence[ShardUnit], key: Callable[[ShardUnit], object]) -> list[list[ShardUnit]]:
    """Return runs of units that differ only in one counted path component, as ``layers.0``, ..."""
    runs: list[list[ShardUnit]] = []
    open_runs: dict[str, tuple[int, list[ShardUnit]]] = {}
    for unit in units:
        around, index = counted(unit)
        run_key = f"{around} {key(unit)!r}"
        last, run = open_runs.get(run_key, (None, []))
        if index is None or last != index - 1:
            run = []
            runs.append(run)
        run.append(unit)
        if index is not None:
            open_runs[run_key] = (index, run)
    return runs


def counted(unit: ShardUnit) -> tuple[list[tuple[str, str]], int | None]:
    """Return the text around the last number of each FQN, and the number.

    It is None if the modules do not share one.
    """
    around, numbers = [], set()
    for fqn in unit.modules:
        match = _INDEXED.fullmatch(fqn)
        if match is None:
            return [(fqn, "") for fqn in unit.modules], None
        before, number, after = match.groups()
        around.append((before, after))
        numbers.add(int(number))
    if len(numbers) > 1:
        return [(fqn, "") for fqn in unit.modules], None
    return around, numbers.pop()


def calls(unit: ShardUnit) -> tuple[object, ...]:
    """Return what two units must share to be in one loop of the code."""
    return (
        repr(unit.reshard_after_forward),  # True is not 1
        unit.mp_policy,
        repr(unit.offload_policy),
        unit.checkpoint_activations,
        unit.compile,
        unit.mesh,
        sorted(dim for _, dim in unit.shard_dims),
    )


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


def _facts(plan: PlanData, shared: set[str]) -> dict[str, str]:
    """Return one string for each thing that two plans can differ in."""
    data = plan.to_dict()
    facts = {"mesh": str(plan.mesh), "order of units": str([unit.name for unit in plan.units])}
    for name in ("prefetch", "ignored", "replicated", "forward_methods", "order"):
        facts[name.replace("_", " ")] = str(data[name])
    for unit, settings in zip(plan.units, data["units"], strict=True):
        if unit.name not in shared:
            facts[f"unit {unit.name}"] = f"{len(unit.params)} parameters"
            continue
        for key, value in settings.items():
            facts[f"unit {unit.name}: {key}"] = str(value)
    for fqn, number in plan.tiles:
        facts[f"tiles of {fqn}"] = str(number)
    for spec in plan.params:
        facts[f"parameter {spec.fqn}"] = repr(spec[1:])
    return facts
