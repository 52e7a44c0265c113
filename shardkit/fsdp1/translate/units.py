"""From the modules that FSDP1 would wrap to units that FSDP2 can gather, with a note for each difference."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from shardkit.errors import listing
from shardkit.fsdp1.translate.policy import Wrapped
from shardkit.planning.ownership import assign
from shardkit.planning.repair import join_ties, split_dtypes
from shardkit.planning.rules import Overrides, Selection, has_forward
from shardkit.planning.tree import ModelTree


def select_wrapped(
    tree: ModelTree, wrapped: list[Wrapped], settings: Callable[[Wrapped | None], Overrides], ignored: frozenset[str]
) -> tuple[list[Selection], list[str]]:
    """The selections for FSDP1's choice, the root's among them, and a note for each that FSDP2 cannot have.

    Args:
        tree: the model.
        wrapped: FSDP1's choice below the root.
        settings: the settings of a unit; of the root for None.
        ignored: FQNs of parameters that no unit owns.
    """
    called, notes = _without_containers(tree, wrapped)
    selections = [Selection((each.entry,), settings(each)) for each in called]
    selections.append(Selection((0,), settings(None), reshard=False))
    selections, tie_notes = join_ties(tree, selections, ignored)
    notes += _joined(tree, selections) + tie_notes
    selections, dtype_notes = split_dtypes(tree, selections, ignored)
    selections, empty_notes = _without_params(tree, selections, ignored)
    return selections, notes + dtype_notes + empty_notes


def _without_containers(tree: ModelTree, wrapped: list[Wrapped]) -> tuple[list[Wrapped], list[str]]:
    """FSDP1 wraps a ModuleList with a warning and never gathers it, since it is never called."""
    called = [each for each in wrapped if has_forward(tree.modules[each.entry])]
    holding = [
        tree.fqns[each.entry] for each in wrapped if each not in called and _holds_more(tree, each.entry, wrapped)
    ]
    note = f"{listing(holding, 6)}: never called, since it has no forward, so the unit around it gathers what it holds"
    return called, [note] if holding else []


def _holds_more(tree: ModelTree, entry: int, wrapped: list[Wrapped]) -> bool:
    """Whether a parameter at or below ``entry`` is in none of the units below it."""
    inner = {each.entry for each in wrapped if each.entry != entry}
    pending = [entry]
    while pending:
        place = pending.pop()
        if tree.owned[place]:
            return True
        pending += [child for child in tree.children(place) if child not in inner]
    return False


def _joined(tree: ModelTree, selections: Iterable[Selection]) -> list[str]:
    return [
        f"{listing(tree.fqns[entry] for entry in each.entries)}: share a parameter, so are one unit; FSDP1 "
        "gathered it for the first of them only"
        for each in selections
        if len(each.entries) > 1
    ]


def _without_params(
    tree: ModelTree, selections: list[Selection], ignored: frozenset[str]
) -> tuple[list[Selection], list[str]]:
    """Without the units that own nothing: FSDP1's have no effect. One that casts what runs through it is kept."""
    params = assign(tree, [selection.entries for selection in selections], ignored).params
    empty = [
        selection
        for selection, owned in zip(selections, params, strict=True)
        if not owned and selection.entries != (0,) and selection.overrides["mp_policy"].output_dtype is None
    ]
    names = listing((tree.fqns[entry] for each in empty for entry in each.entries), 4)
    kept = [selection for selection in selections if selection not in empty]
    return kept, [f"{names}: wrapped by FSDP1 and without parameters of its own, so no unit"] if empty else []
