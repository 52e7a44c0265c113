"""Which unit owns which parameter: torch's rule, applied to names before torch applies it to tensors."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from shardkit.errors import listing, message
from shardkit.planning.tree import ModelTree


class Ownership(NamedTuple):
    """The parameters of each unit, and the tied parameters that more than one unit would have to own."""

    params: list[list[str]]  # of each unit, FQNs in torch's order: children before parents
    split: list[str]  # FQNs


def assign(tree: ModelTree, units: Sequence[Sequence[int]], ignored: Collection[str] = ()) -> Ownership:
    """Return what a series of ``fully_shard`` calls would own: each parameter belongs to the innermost unit around it.

    ``units`` are the entries of each unit's modules, the root among them. No unit owns ``ignored`` parameters.
    """
    around = unit_of_entries(tree, units)
    ignored = frozenset(ignored)
    owner: dict[str, int] = {}
    split: dict[str, None] = {}
    for entry in tree.post_order:
        unit = around[entry]
        for fqn in tree.owned[entry]:
            if fqn not in ignored and owner.setdefault(fqn, unit) != unit:
                split[fqn] = None
    params: list[list[str]] = [[] for _ in units]
    for fqn, unit in owner.items():
        params[unit].append(fqn)
    return Ownership(params, list(split))


def unit_of_entries(tree: ModelTree, units: Sequence[Sequence[int]]) -> list[int]:
    """Return the innermost unit around each entry of the tree."""
    unit_at = {path: index for index, unit in enumerate(units) for entry in unit for path in tree.paths(entry)}
    around = [-1] * len(tree.modules)
    for entry in sorted(unit_at):  # outer modules first, so that inner ones overwrite
        around[entry : tree.ends[entry]] = [unit_at[entry]] * (tree.ends[entry] - entry)
    return around


def owners(tree: ModelTree, fqn: str) -> list[int]:
    """Return the entries of the modules that register the parameter ``fqn`` under any of its names."""
    return [entry for entry in tree.first_entries if fqn in tree.owned[entry]]


def split_problem(tree: ModelTree, fqn: str) -> str:
    """Return the error for a tied parameter that is in several units."""
    modules = [tree.fqns[entry] or "(root)" for entry in owners(tree, fqn)]
    problem = f"is shared by {listing(modules)}, which are in different units"
    rule = "A tied parameter is gathered and reduced in one unit"
    return message(fqn, problem, rule, f"Put them in one: group({', '.join(map(repr, modules))})")
