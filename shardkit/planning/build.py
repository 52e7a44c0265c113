"""From rules and settings to a plan: one pass, pure and local."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

from shardkit.errors import PlanError, listing, message
from shardkit.plan import MeshSpec, ShardingPlan, ShardUnit
from shardkit.planning.default import default_units
from shardkit.planning.methods import forward_methods, method_problems
from shardkit.planning.ownership import assign, split_problem, unit_of_entries
from shardkit.planning.repair import inseparable_dtypes
from shardkit.planning.rules import Rule, Selection, check_settings, select
from shardkit.planning.tree import ModelTree


@dataclass(frozen=True)
class Settings:
    """The settings for the whole model, which a rule may override for its units."""

    reshard_after_forward: bool | int | None
    mp_policy: MixedPrecisionPolicy
    offload_policy: OffloadPolicy
    checkpoint_activations: bool
    compile: bool

    @cached_property
    def inner_mp_policy(self) -> MixedPrecisionPolicy:
        """For all but the root: only it returns to the user, and blocks that return output_dtype keep more."""
        return replace(self.mp_policy, output_dtype=None)


def build_plan(
    tree: ModelTree,
    mesh: MeshSpec,
    rules: Sequence[Rule] | None,
    settings: Settings,
    ignored: Collection[str] = (),
    prefetch: int = 0,
    methods: Iterable[str] = (),
) -> ShardingPlan:
    """The plan for a model.

    Args:
        tree: the model.
        mesh: shape and axis names, in ranks.
        rules: the user's, or None for the default rule.
        settings: what holds where no rule says otherwise.
        ignored: FQNs of parameters to leave alone.
        prefetch: units to gather ahead.
        methods: those that gather besides forward.

    Raises:
        PlanError: the rules do not fit the model or each other, or the plan does not hold.
    """
    check_settings("", vars(settings))
    left_alone = frozenset(ignored)
    whole = tree.unshardable - left_alone
    if rules is not None:
        selections, notes = _with_root(select(tree, rules)), list[str]()
    else:
        selections, notes = default_units(tree, left_alone | whole)
        others = inseparable_dtypes(tree, selections, left_alone | whole)
        whole = whole.union(others)
        reason = "train in another dtype than the rest of their unit and cannot be a unit of their own"
        notes += [f"{listing(others, 4)}: {reason}, so are replicated"] * bool(others)
    return plan_of(tree, mesh, selections, settings, left_alone, prefetch, notes, methods, whole)


def plan_of(
    tree: ModelTree,
    mesh: MeshSpec,
    selections: list[Selection],
    settings: Settings,
    left_alone: frozenset[str] = frozenset(),
    prefetch: int = 0,
    notes: Sequence[str] = (),
    methods: Iterable[str] = (),
    whole: frozenset[str] | None = None,
) -> ShardingPlan:
    """The plan whose units are ``selections``, the root's among them; ``notes`` say how they came about.

    ``whole`` are the parameters to replicate, None for those that FSDP2 cannot shard.

    Raises:
        PlanError: the selections split a tie or lie inside each other, or the plan does not hold.
    """
    selections = _children_first(tree, selections)
    whole = tree.unshardable - left_alone if whole is None else whole
    ownership = assign(tree, [selection.entries for selection in selections], left_alone | whole)
    if ownership.split:
        raise PlanError("\n".join(split_problem(tree, fqn) for fqn in ownership.split))
    units = [
        _unit(tree, selection, params, settings) for selection, params in zip(selections, ownership.params, strict=True)
    ]
    plan = ShardingPlan(
        units=tuple(units),
        mesh=mesh,
        params=tree.specs(),
        ignored=tuple(fqn for fqn in tree.params if fqn in left_alone),
        replicated=tuple(fqn for fqn in tree.params if fqn in whole),
        prefetch=prefetch,
        forward_methods=forward_methods(tree, methods),
        notes=(*notes, *_ignored_notes(tree, left_alone)),
    )
    plan.check()
    problems = [*method_problems(tree, plan)]
    if problems:
        raise PlanError("\n".join(problems))
    return plan


def _with_root(selections: list[Selection]) -> list[Selection]:
    """The selections with the root among them; its own rule may have selected it already."""
    rooted = any(0 in selection.entries for selection in selections)
    return selections if rooted else [*selections, Selection((0,), reshard=False)]


def _children_first(tree: ModelTree, selections: list[Selection]) -> list[Selection]:
    """The order of the ``fully_shard`` calls: units inside a module before the unit of that module."""
    around = unit_of_entries(tree, [selection.entries for selection in selections])
    inner: list[set[int]] = [set() for _ in selections]
    for index, selection in enumerate(selections):
        for entry in selection.entries:
            if entry:
                inner[around[tree.parents[entry]]].add(index)
    order: dict[int, None] = {}  # a dict is an ordered set
    root = next(index for index, selection in enumerate(selections) if 0 in selection.entries)

    def visit(unit: int, path: frozenset[int]) -> None:
        if unit in path:
            raise PlanError(_interlocked(tree, selections[unit]))
        if inner[unit]:
            for below in sorted(inner[unit] - order.keys(), key=lambda index: selections[index].entries):
                visit(below, path | {unit})
        order[unit] = None

    visit(root, frozenset())
    return [selections[index] for index in order]


def _interlocked(tree: ModelTree, selection: Selection) -> str:
    names = [tree.fqns[entry] or "(root)" for entry in selection.entries]
    return message(
        f"group({', '.join(map(repr, names))})",
        "has a module that lies inside another one of the same unit, or of a unit inside it",
        "The modules of one unit lie beside each other",
        "Leave the inner module out",
    )


def _unit(tree: ModelTree, selection: Selection, params: list[str], settings: Settings) -> ShardUnit:
    chosen = selection.overrides
    is_block = _is_block(tree, selection)
    mp_policy = settings.mp_policy if selection.entries == (0,) else settings.inner_mp_policy
    reshard = chosen.get("reshard_after_forward", settings.reshard_after_forward)
    return ShardUnit(
        modules=tuple(tree.fqns[entry] for entry in selection.entries),
        params=tuple(params),
        reshard_after_forward=selection.reshard if reshard is None else reshard,
        mp_policy=chosen.get("mp_policy", mp_policy),
        offload_policy=chosen.get("offload_policy", settings.offload_policy),
        checkpoint_activations=chosen.get("checkpoint_activations", settings.checkpoint_activations and is_block),
        compile=chosen.get("compile", settings.compile and is_block),
    )


def _is_block(tree: ModelTree, selection: Selection) -> bool:
    """Whether settings that are for blocks reach it: one module, with submodules, other than the root.

    Recomputing a lone embedding, norm or head saves nothing, and recomputing the root saves nothing either.
    """
    entry = selection.entries[0]
    return len(selection.entries) == 1 and entry != 0 and tree.ends[entry] > entry + 1


def _ignored_notes(tree: ModelTree, ignored: frozenset[str]) -> Iterable[str]:
    trained = [fqn for fqn in ignored if tree.params[fqn].requires_grad]
    if trained:
        yield f"{listing(sorted(trained), 6)}: ignored but trained, so each rank keeps its own, unreduced gradient"
