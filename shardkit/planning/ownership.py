"""Which unit owns which parameter: torch's rule, applied to names before torch applies it to tensors."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from shardkit.errors import listing, message
from shardkit.planning.tree import ModelTree


@dataclass(frozen=True)
class Ownership:
    """The parameters of each unit, and those that more than one unit would have to own."""

    params: list[list[str]]  # for each unit the FQNs it owns, in torch's order: children before parents
    split: dict[str, list[int]]  # for each tied parameter that is in several units, the entries that register it


def assign(tree: ModelTree, units: Sequence[Sequence[int]], ignored: Collection[str] = ()) -> Ownership:
    """What a series of ``fully_shard`` calls would own: each parameter belongs to the innermost unit around it.

    ``units`` are the entries of each unit's modules, the root among them; no unit owns what is ``ignored``.
    """
    around = unit_of_entries(tree, units)
    left_alone = frozenset(ignored)
    owner: dict[str, int] = {}
    params: list[list[str]] = [[] for _ in units]
    split: dict[str, list[int]] = {}
    for entry in tree.post_order:
        for param in tree.owned[entry]:
            unit, fqn = around[entry], tree.names[id(param)]
            if fqn in left_alone:
                continue
            if fqn not in tree.ties or fqn not in owner:
                owner[fqn] = unit
                params[unit].append(fqn)
            elif owner[fqn] != unit:
                split[fqn] = owners(tree, fqn)
    return Ownership(params, split)


def unit_of_entries(tree: ModelTree, units: Sequence[Sequence[int]]) -> list[int]:
    """For each entry of the tree the unit that is innermost around it."""
    by_module = {id(tree.modules[entry]): index for index, unit in enumerate(units) for entry in unit}
    around: list[int] = []
    for entry, module in enumerate(tree.modules):
        outer = around[tree.parents[entry]] if entry else -1
        around.append(by_module.get(id(module), outer))
    return around


def owners(tree: ModelTree, fqn: str) -> list[int]:
    """The entries whose modules register the parameter ``fqn``, under any of its names; each module once."""
    param = tree.params[fqn]
    found: dict[int, int] = {}
    for entry, owned in enumerate(tree.owned):
        if any(own is param for own in owned):
            found.setdefault(id(tree.modules[entry]), entry)
    return list(found.values())


def split_problem(tree: ModelTree, fqn: str) -> str:
    """The error for a tied parameter that is in several units."""
    modules = [tree.fqns[entry] or "(root)" for entry in owners(tree, fqn)]
    problem = f"is shared by {listing(modules)}, which are in different units"
    rule = "A tied parameter is gathered and reduced in one unit"
    return message(fqn, problem, rule, f"Put them in one: group({', '.join(map(repr, modules))})")
