"""Repairs of the default rule's units that torch would refuse: split ties, and several dtypes that train in one.

FSDP1's policies are repaired too. In a user's own rules the same finding is an error.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch

from shardkit.errors import listing
from shardkit.planning.rules import Selection
from shardkit.planning.tree import ModelTree, assign, is_called, owners, unit_of_entries, user_of


def join_ties(
    tree: ModelTree, selections: list[Selection], ignored: frozenset[str]
) -> tuple[list[Selection], list[str]]:
    """Return units in which each tied parameter has one owner, and a note for each unit that is dissolved.

    The modules that share the parameter become one unit. Where one of them is around another, or is the root, the
    outer one owns the parameter.
    """
    notes: list[str] = []
    while tree.ties:  # each round joins a tie or dissolves a unit; in the end the root owns everything
        split = assign(tree, [selection.entries for selection in selections], ignored)[1]
        if not split:
            break
        selections, new_notes = _join(tree, selections, owners(tree, split[0]))
        notes += new_notes
    return selections, notes


def _join(tree: ModelTree, selections: list[Selection], sharing: Iterable[int]) -> tuple[list[Selection], list[str]]:
    """Join the units of the entries that share a parameter, or leave it to the root, with a note."""
    sharing = {path for entry in sharing for path in tree.paths(entry)}
    modules = tree.outermost(set().union(*(_called_around(tree, entry) for entry in sharing)))
    around = unit_of_entries(tree, [selection.entries for selection in selections])
    owning = [selections[index] for index in sorted({around[entry] for entry in sharing})]
    if 0 in modules:
        gone = [each for each in owning if 0 not in each.entries]
        names = listing(tree.fqns[entry] for each in gone for entry in each.entries)
        note = f"{names}: shares a parameter with the root, so the root gathers it"
        return [each for each in selections if each not in gone], [note]
    inside = {below for module in modules for below in tree.subtree(module)}
    gone = [each for each in owning if not inside.isdisjoint(each.entries)]
    entries = tree.outermost({*modules, *(entry for each in gone for entry in each.entries)})
    settings = (gone or [each for each in owning if 0 not in each.entries] or owning)[0].overrides
    joined = Selection(tuple(entries), settings, reshard=all(each.reshard for each in gone))
    return [joined, *(each for each in selections if each not in gone)], []


def _called_around(tree: ModelTree, entry: int) -> set[int]:
    """Return the module at ``entry`` if all its paths are called, else the called modules around what uses each."""
    paths = tree.paths(entry)
    users = [user_of(tree, path) if path else path for path in paths]
    if not entry or users == paths:
        return {paths[0]}
    # A path may be called where another is not: it is then gathered with what is around it.
    around = {tree.parents[path] if user == path else user for path, user in zip(paths, users, strict=True)}
    return set().union(*(_called_around(tree, outer) for outer in around))


def split_dtypes(
    tree: ModelTree, selections: list[Selection], ignored: frozenset[str]
) -> tuple[list[Selection], list[str], list[str]]:
    """Return units that train one dtype each, the FQNs that still train in another than most of their unit, and notes.

    Modules of another dtype become units of their own, with a note. That cannot be where their module is not called,
    such as a router, or trains both dtypes, such as Mamba's mixer with its ``A_log``.
    """
    taken_out: list[int] = []
    left: list[str] = []
    while len({spec.dtype for spec in tree.specs.values() if spec.trainable}) > 1:
        params, _ = assign(tree, [selection.entries for selection in selections], ignored)
        trained = [_by_dtype(tree, owned) for owned in params]
        left = [fqn for by_dtype in trained for fqns in [*by_dtype.values()][1:] for fqn in fqns]
        new = [
            Selection(tuple(entries), selection.overrides, selection.reshard)
            for selection, by_dtype in zip(selections, trained, strict=True)
            for entries in _minorities(tree, selection, by_dtype)
        ]
        if not new:
            break
        selections = [*selections, *new]  # one of these may itself be around a third dtype
        taken_out += [entry for selection in new for entry in selection.entries]
    names = listing((tree.fqns[entry] for entry in sorted(taken_out)), 4)
    note = f"{names}: train in another dtype than the modules around them, so they are separate units"
    return selections, left, [note] * bool(taken_out)


def _minorities(tree: ModelTree, selection: Selection, trained: dict[torch.dtype, list[str]]) -> Iterable[list[int]]:
    """Return the modules to take out of a unit that trains these parameters, one list for each dtype."""
    if len(trained) < 2:
        return []
    own = tree.trained_dtypes(*selection.entries)
    kept = own.pop() if len(own) == 1 else next(iter(trained))
    candidates, wanted = set(tree.first_entries) - set(selection.entries), set().union(*trained.values())
    apart: dict[int, torch.dtype] = {}
    for entry in sorted(below for top in selection.entries for below in tree.subtree(top)):
        dtypes = {tree.specs[fqn].dtype for fqn in tree.owned[entry] if fqn in wanted}
        if len(dtypes) == 1 and kept not in dtypes and entry in candidates and is_called(tree, entry):
            apart[entry] = dtypes.pop()
    found: dict[torch.dtype, list[int]] = defaultdict(list)
    for entry, dtype in apart.items():
        # A tied parameter stays if one of its modules stays.
        tied = wanted.intersection(tree.owned[entry], tree.ties)
        if all(owner in apart for fqn in tied for owner in owners(tree, fqn)):
            found[dtype].append(entry)
    return [tree.outermost(entries) for entries in found.values()]


def _by_dtype(tree: ModelTree, fqns: Iterable[str]) -> dict[torch.dtype, list[str]]:
    """Return those that train by their dtype, that of most elements first."""
    found: dict[torch.dtype, list[str]] = defaultdict(list)
    for fqn in fqns:
        if tree.specs[fqn].trainable:
            found[tree.specs[fqn].dtype].append(fqn)
    return dict(sorted(found.items(), key=lambda each: -sum(tree.specs[fqn].numel for fqn in each[1])))
