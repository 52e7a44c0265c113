"""Repairs of units where torch would refuse them: split ties, and mixed dtypes that train.

For the default rule's units, and for those that an FSDP1 policy chooses. A user's own rules are never repaired;
there the same finding is an error.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable

import torch

from shardkit.errors import listing
from shardkit.planning.called import is_called
from shardkit.planning.ownership import assign, owners, unit_of_entries
from shardkit.planning.rules import Selection, first_entries
from shardkit.planning.tree import ModelTree


def join_ties(
    tree: ModelTree, selections: list[Selection], ignored: frozenset[str]
) -> tuple[list[Selection], list[str]]:
    """Units in which every tied parameter is in one unit: the modules that share it, gathered together.

    Where one of them is around another, or is the root, the outer one owns the parameter.
    """
    notes: list[str] = []
    if not tree.ties:
        return selections, notes
    for _ in range(len(tree.ties) + len(selections) + 1):  # each round joins a tie or dissolves a unit
        split = assign(tree, [selection.entries for selection in selections], ignored).split
        if not split:
            return selections, notes
        selections, new_notes = _join(tree, selections, _components(split.values())[0])  # which may fix others
        notes += new_notes
    raise AssertionError(f"ties {split} are still split")  # our own invariant: the root takes all in the end


def split_dtypes(
    tree: ModelTree, selections: list[Selection], ignored: frozenset[str]
) -> tuple[list[Selection], list[str]]:
    """Units whose parameters that train have one dtype: modules of another dtype become units of their own.

    A module that itself registers parameters of two dtypes cannot be split, nor one whose weights are read without
    calling it, as a router's: see :func:`inseparable_dtypes`.
    """
    taken_out: list[int] = []
    if len({param.dtype for param in tree.params.values()}) < 2:
        return selections, []
    while True:
        params = assign(tree, [selection.entries for selection in selections], ignored).params
        new = [
            Selection(tuple(entries), selection.overrides, selection.reshard)
            for selection, owned in zip(selections, params, strict=True)
            for entries in _minorities(tree, selection, owned).values()
        ]
        if not new:
            break
        selections = [*selections, *new]  # one of these may itself be around a third dtype
        taken_out += [entry for selection in new for entry in selection.entries]
    names = listing((tree.fqns[entry] for entry in sorted(taken_out)), 4)
    note = f"{names}: train in another dtype than what is around them, so are units of their own"
    return selections, [note] * bool(taken_out)


def inseparable_dtypes(tree: ModelTree, selections: list[Selection], ignored: frozenset[str]) -> list[str]:
    """FQNs of what trains in another dtype than most of its unit and cannot be a unit of its own.

    Its module is not called, as a router's, or registers parameters of the other dtype too, as Mamba's ``A_log``.
    """
    found: list[str] = []
    for owned in assign(tree, [selection.entries for selection in selections], ignored).params:
        elements = _elements([tree.params[fqn] for fqn in owned])
        kept = max(elements, key=lambda dtype: elements[dtype], default=None)
        others = [fqn for fqn in owned if tree.params[fqn].requires_grad and tree.params[fqn].dtype != kept]
        found += [fqn for fqn in others if not _is_separable(tree, tree.places[fqn.rpartition(".")[0]])]
    return found


def _is_separable(tree: ModelTree, entry: int) -> bool:
    return is_called(tree, entry) and len({param.dtype for param in tree.owned[entry] if param.requires_grad}) == 1


def _elements(params: Iterable[torch.Tensor]) -> Counter[torch.dtype]:
    """How many of each dtype train."""
    elements: Counter[torch.dtype] = Counter()
    for param in (param for param in params if param.requires_grad):
        elements[param.dtype] += param.numel()
    return elements


def _minorities(tree: ModelTree, selection: Selection, owned: list[str]) -> dict[torch.dtype, list[int]]:
    """The modules below a unit to take out of it, by the dtype of the parameters that they register."""
    trained = [fqn for fqn in owned if tree.params[fqn].requires_grad]
    if len({tree.params[fqn].dtype for fqn in trained}) < 2:
        return {}
    elements = _elements([tree.params[fqn] for fqn in trained])
    own = {param.dtype for entry in selection.entries for param in tree.owned[entry] if param.requires_grad}
    kept = own.pop() if len(own) == 1 else max(elements, key=lambda dtype: elements[dtype])
    wanted = {id(tree.params[fqn]) for fqn in trained}
    first = set(first_entries(tree)) - set(selection.entries)
    apart: dict[int, torch.dtype] = {}
    for entry in sorted(below for top in selection.entries for below in tree.subtree(top)):
        dtypes = {param.dtype for param in tree.owned[entry] if id(param) in wanted}
        if len(dtypes) == 1 and kept not in dtypes and entry in first and is_called(tree, entry):
            apart[entry] = dtypes.pop()
    found: dict[torch.dtype, list[int]] = defaultdict(list)
    for entry, dtype in apart.items():
        # A tied parameter stays with those of its modules that stay.
        names = [tree.names[id(param)] for param in tree.owned[entry] if id(param) in wanted]
        if all(owner in apart for fqn in names if fqn in tree.ties for owner in owners(tree, fqn)):
            found[dtype].append(entry)
    return {dtype: _outermost(tree, entries) for dtype, entries in found.items()}


def _components(groups: Iterable[list[int]]) -> list[set[int]]:
    """The groups, those that share an entry merged."""
    merged: list[set[int]] = []
    for group in groups:
        touching = [other for other in merged if other & set(group)]
        merged = [other for other in merged if other not in touching]
        merged.append(set(group).union(*touching))
    return merged


def _join(tree: ModelTree, selections: list[Selection], sharing: set[int]) -> tuple[list[Selection], list[str]]:
    """The selections with one that holds all of the ``sharing`` entries, and a note where a unit is given up."""
    sharing = {path for entry in sharing for path in tree.paths(entry)}
    modules = _outermost(tree, set().union(*(_called_around(tree, entry) for entry in sharing)))
    around = unit_of_entries(tree, [selection.entries for selection in selections])
    owning = [selections[index] for index in sorted({around[entry] for entry in sharing})]
    if 0 in modules:
        gone = [each for each in owning if 0 not in each.entries]
        names = listing(tree.fqns[entry] for each in gone for entry in each.entries)
        note = f"{names}: shares a parameter with the root, so the root gathers it"
        return [each for each in selections if each not in gone], [note]
    gone = [each for each in owning if any(_inside(tree, modules, entry) for entry in each.entries)]
    entries = _outermost(tree, {*modules, *(entry for each in gone for entry in each.entries)})
    settings = (gone or [each for each in owning if 0 not in each.entries] or owning)[0].overrides
    joined = Selection(tuple(entries), settings, reshard=all(each.reshard for each in gone))
    kept = [each for each in selections if each not in gone]
    return [joined, *kept], []


def _inside(tree: ModelTree, modules: Iterable[int], entry: int) -> bool:
    return any(tree.contains(module, entry) for module in modules)


def _outermost(tree: ModelTree, entries: Iterable[int]) -> list[int]:
    """The entries without those that are inside another, in order; pre-order puts the outer one first."""
    found: list[int] = []
    for entry in sorted(entries):
        if not _inside(tree, found, entry):
            found.append(entry)
    return found


def _called_around(tree: ModelTree, entry: int) -> set[int]:
    """The module at ``entry``, by its first path, if it is called on all of them; else what is called around each."""
    paths = tree.paths(entry)
    if not entry or all(is_called(tree, path) for path in paths):
        return {paths[0]}
    return {outer for path in paths for outer in _called_around(tree, tree.parents[path])}
