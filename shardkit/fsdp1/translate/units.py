"""From the modules that FSDP1 would wrap to a plan."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from shardkit.errors import listing
from shardkit.plan import MeshSpec, ShardingPlan
from shardkit.planning.build import plan_of
from shardkit.planning.repair import join_ties, split_dtypes
from shardkit.planning.selection import Overrides, Selection
from shardkit.planning.tree import ModelTree, assign, has_forward


def plan_from_units(
    tree: ModelTree,
    units: Mapping[str, Overrides],
    mesh: MeshSpec,
    *,
    ignored: Collection[str] = (),
    prefetch: int = 0,
) -> ShardingPlan:
    """Return the plan whose units are these modules, by FQN, each with its settings.

    ``""`` is the root. What torch would refuse is repaired as in the default rule, with a note:
    modules that share a parameter become one unit, and modules of another dtype become units of
    their own. Modules without a forward or without parameters are not units.
    """
    notes = []
    selections, uncalled = [], []
    for fqn, settings in units.items():
        node = tree.node(fqn)
        if node is tree.root or has_forward(node.module):
            selections.append(Selection((node,), settings, reshard=node is not tree.root))
        else:
            uncalled.append(fqn)
    if uncalled:
        notes.append(
            f"{listing(uncalled, 6)}: has no forward, so the unit around it owns its parameters"
        )

    ignored = set(ignored)
    replicated = tree.unshardable()
    selections, tie_notes = join_ties(tree, selections, ignored | replicated)
    for selection in selections:
        if len(selection.modules) > 1:
            names = listing(node.fqn for node in selection.modules)
            notes.append(f"{names}: share a parameter, so are one unit")
    selections, mixed, dtype_notes = split_dtypes(tree, selections, ignored | replicated)
    replicated |= mixed

    modules = [selection.modules for selection in selections]
    owned, _ = assign(tree, modules, ignored | replicated)
    kept, empty = [], []
    for selection, params in zip(selections, owned, strict=True):
        policy = selection.overrides.get("mp_policy")
        casts = policy is not None and policy.output_dtype is not None
        if params or casts or tree.root in selection.modules:
            kept.append(selection)
        else:
            empty += [node.fqn for node in selection.modules]
    if empty:
        notes.append(f"{listing(empty, 4)}: without parameters of its own, so not a unit")
    return plan_of(
        tree,
        mesh,
        kept,
        Overrides(),
        ignored=ignored,
        replicated=replicated,
        prefetch=prefetch,
        notes=[*notes, *tie_notes, *dtype_notes],
    )
