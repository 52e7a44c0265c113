"""Repairs of units that torch would refuse, of the default rule and of FSDP1's policies.

Ties between units, and several dtypes that train in one. In a user's own rules both are errors.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Set

import torch

from shardkit.errors import listing
from shardkit.planning.selection import Selection
from shardkit.planning.tree import (
    ModelTree,
    ModuleNode,
    assign,
    called_around,
    is_called,
    outermost,
    units_around,
)


def join_ties(
    tree: ModelTree, selections: list[Selection], skipped: Set[str]
) -> tuple[list[Selection], list[str]]:
    """Return units in which each tied parameter has one owner, and a note for what the root takes.

    The modules that share the parameter become one unit. Where one of them is around another, or is
    the root, the outer one owns the parameter.
    """
    notes: list[str] = []
    if not (tree.shares_params or tree.shares_modules):
        return selections, notes
    while True:  # each round joins a tie or dissolves a unit; in the end the root owns everything
        _, in_several = assign(tree, [selection.modules for selection in selections], skipped)
        if not in_several:
            return selections, notes
        owners = tree.owners(in_several[0])
        around = units_around(tree, [selection.modules for selection in selections])
        indices: set[int] = set()
        for owner in owners:
            indices |= around[owner]
        owning = [selections[index] for index in sorted(indices)]
        sharing: list[ModuleNode] = []
        for owner in owners:
            sharing += called_around(owner)
        sharing = outermost(sharing)
        if tree.root in sharing:
            dissolved = [unit for unit in owning if tree.root not in unit.modules]
            names = []
            for unit in dissolved:
                names += [node.fqn for node in unit.modules]
            notes.append(f"{listing(names)}: shares a parameter with the root, so the root owns it")
            selections = [unit for unit in selections if unit not in dissolved]
        else:
            selections = _join(tree, selections, owning, sharing)


def _join(
    tree: ModelTree, selections: list[Selection], owning: list[Selection], sharing: list[ModuleNode]
) -> list[Selection]:
    """Make one unit of these modules and of the owning units with modules at or below them."""
    inside: set[ModuleNode] = set()
    for node in sharing:
        inside.update(tree.subtree(node))
    joined = [unit for unit in owning if not inside.isdisjoint(unit.modules)]
    modules = list(sharing)
    for selection in joined:
        modules += selection.modules
    overrides = (joined or owning)[0].overrides
    reshard = all(unit.reshard for unit in joined)
    together = Selection(tuple(outermost(modules)), overrides, reshard)
    return [together] + [unit for unit in selections if unit not in joined]


def split_dtypes(
    tree: ModelTree, selections: list[Selection], skipped: Set[str]
) -> tuple[list[Selection], set[str], list[str]]:
    """Return units that train one dtype each, what else to replicate, and notes.

    torch reduces the gradients of a unit together, in one dtype. Modules of another dtype than the
    rest of their unit become units of their own. Where that cannot be, their parameters are left
    over, to be replicated: their module is not called, such as a router, or has both dtypes, such
    as Mamba's mixer with its ``A_log``.
    """
    if len({spec.dtype for spec in tree.specs.values() if spec.trainable}) < 2:
        return selections, set(), []
    new: list[Selection] = []
    separate: list[ModuleNode] = []
    mixed: set[str] = set()
    owned, _ = assign(tree, [selection.modules for selection in selections], skipped)
    for selection, params in zip(selections, owned, strict=True):
        numel: dict[torch.dtype, int] = defaultdict(int)
        trained = [fqn for fqn in params if tree.specs[fqn].trainable]
        for fqn in trained:
            numel[tree.specs[fqn].dtype] += tree.specs[fqn].numel
        if len(numel) < 2:
            continue
        # what the unit's modules have themselves cannot be taken out
        own = []
        for node in selection.modules:
            own += [tree.specs[fqn].dtype for fqn in node.params]
        fixed = [dtype for dtype in numel if dtype in own]
        kept = max(fixed or numel, key=lambda dtype: numel[dtype])
        by_dtype: dict[torch.dtype, list[ModuleNode]] = defaultdict(list)
        for fqn in sorted(trained):
            dtype = tree.specs[fqn].dtype
            if dtype == kept:
                continue
            if all(_trains_only(tree, node, dtype, selection) for node in tree.owners(fqn)):
                by_dtype[dtype] += tree.owners(fqn)
            else:
                mixed.add(fqn)
        for nodes in by_dtype.values():
            modules = tuple(outermost(nodes))
            new.append(Selection(modules, selection.overrides, selection.reshard))
            separate += modules
    notes = []
    if new:
        names = listing([node.fqn for node in outermost(separate)], 4)
        notes.append(
            f"{names}: train in another dtype than the modules around them, so they are separate "
            "units"
        )
    if mixed:
        notes.append(
            f"{listing(tree.ordered(mixed), 4)}: train in another dtype "
            "than the rest of their unit and cannot be a unit of their own, so are replicated"
        )
    return [*selections, *new], mixed, notes


def _trains_only(
    tree: ModelTree, node: ModuleNode, dtype: torch.dtype, selection: Selection
) -> bool:
    """Whether a module of a unit can be taken out of it to train this dtype."""
    if node in selection.modules or not is_called(node):
        return False
    for below in tree.subtree(node):
        for fqn in below.params:
            if tree.specs[fqn].trainable and tree.specs[fqn].dtype != dtype:
                return False
    return True
