"""From rules and settings to a plan; pure and local."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from graphlib import CycleError, TopologicalSorter

from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

from shardkit.errors import PlanError, listing, message, refuse
from shardkit.plan import MeshSpec, ShardingPlan, ShardUnit
from shardkit.plan.table import nbytes
from shardkit.planning.default import default_units
from shardkit.planning.dims import balanced
from shardkit.planning.ownership import assign, split_problem, unit_of_entries
from shardkit.planning.repair import inseparable_dtypes
from shardkit.planning.rules import Rule, Selection, check_settings, only_tiles, select
from shardkit.planning.tree import ModelTree


@dataclass(frozen=True)
class Settings:
    """The settings for the whole model, which a rule may override for its units."""

    reshard_after_forward: bool | int | None
    mp_policy: MixedPrecisionPolicy
    offload_policy: OffloadPolicy
    checkpoint_activations: bool
    compile: bool


def build_plan(
    tree: ModelTree,
    mesh: MeshSpec,
    rules: Sequence[Rule] | None,
    settings: Settings,
    ignored: Collection[str] = (),
    prefetch: int = 0,
    methods: Iterable[str] = (),
) -> ShardingPlan:
    """Return the plan for the model of ``tree``; ``rules`` are the user's, or None for the default rule.

    Raises:
        PlanError: the rules do not fit the model or each other, or the plan is not valid.
    """
    check_settings("", vars(settings))
    left_alone = frozenset(ignored)
    replicated = tree.unshardable - left_alone
    chosen = [] if rules is None else select(tree, rules)
    if rules is not None and not only_tiles(chosen):
        selections, notes = [new for new in chosen if new.tiles is None], list[str]()
        if not any(0 in selection.entries for selection in selections):
            selections.append(Selection((0,), reshard=False))
    else:
        selections, notes = default_units(tree, left_alone | replicated)
        others = inseparable_dtypes(tree, selections, left_alone | replicated)
        replicated = replicated.union(others)
        reason = "train in another dtype than the rest of their unit and cannot be a unit of their own"
        size = nbytes(sum(tree.params[fqn].nbytes for fqn in others))
        notes += [f"{listing(others, 4)}: {reason}, so are replicated, {size} on every rank"] * bool(others)
    plan = plan_of(tree, mesh, selections, settings, left_alone, prefetch, notes, methods, replicated)
    if tiles := sorted((new.entries[0], new.tiles) for new in chosen if repr(new.tiles) not in ("None", "1")):
        plan = replace(plan, tiles=tuple((tree.fqns[entry], number or 0) for entry, number in tiles))
        plan.check()
    return plan


def plan_of(
    tree: ModelTree,
    mesh: MeshSpec,
    selections: list[Selection],
    settings: Settings,
    left_alone: frozenset[str] = frozenset(),
    prefetch: int = 0,
    notes: Iterable[str] = (),
    methods: Iterable[str] = (),
    replicated: frozenset[str] | None = None,
) -> ShardingPlan:
    """Return the plan whose units are ``selections``, the root among them; None replicates what FSDP2 cannot shard.

    Raises:
        PlanError: the selections split a tie or lie inside each other, or the plan is not valid.
    """
    selections = _children_first(tree, selections)
    for axis in dict.fromkeys(each.overrides.get("mesh") for each in selections):
        mesh = mesh if axis is None else mesh.sharded_from(axis)
    if replicated is None:
        replicated = tree.unshardable - left_alone
    ownership = assign(tree, [selection.entries for selection in selections], left_alone | replicated)
    refuse(split_problem(tree, fqn) for fqn in ownership.split)
    trained = sorted(fqn for fqn in left_alone if tree.params[fqn].requires_grad)
    note = f"{listing(trained, 6)}: ignored but trained, so each rank keeps its own, unreduced gradient"
    # Below the root without output_dtype: only the root returns to the user, and blocks that cast would keep more.
    inner = replace(settings, mp_policy=replace(settings.mp_policy, output_dtype=None))
    units = tuple(
        _unit(tree, selection, params, settings if selection.entries == (0,) else inner)
        for selection, params in zip(selections, ownership.params, strict=True)
    )
    split = {fqn for unit in units if mesh.parts(unit.mesh) > 1 for fqn in unit.params}
    plan = ShardingPlan(
        units=units,
        mesh=mesh,
        params=tuple(spec._replace(tensor_parallel=True) if spec.fqn in split else spec for spec in tree.specs()),
        ignored=tuple(fqn for fqn in tree.params if fqn in left_alone),
        replicated=tuple(fqn for fqn in tree.params if fqn in replicated),
        prefetch=prefetch,
        forward_methods=_forward_methods(tree, methods),
        notes=(*notes, *[note] * bool(trained)),
    )
    plan = balanced(plan, split | tree.unsplit)
    plan.check()
    refuse(method_problems(tree, plan))
    return plan


def _children_first(tree: ModelTree, selections: list[Selection]) -> list[Selection]:
    """Sort into the order of the ``fully_shard`` calls: units inside a module before the unit of that module."""
    selections = sorted(selections, key=lambda each: (each.entries == (0,), each.entries))
    around = unit_of_entries(tree, [selection.entries for selection in selections])
    inner: dict[int, set[int]] = {index: set() for index in range(len(selections))}
    for index, selection in enumerate(selections):
        for entry in selection.entries:
            if entry:
                inner[around[tree.parents[entry]]].add(index)
    try:
        return [selections[index] for index in TopologicalSorter(inner).static_order()]
    except CycleError as error:
        entries = selections[error.args[1][0]].entries
        name = f"group({', '.join(repr(tree.fqns[entry] or '(root)') for entry in entries)})"
        problem = "has a module that lies inside another one of the same unit, or of a unit inside it"
        raise PlanError(message(name, problem, "", "Leave the inner module out")) from error


def _unit(tree: ModelTree, selection: Selection, params: list[str], settings: Settings) -> ShardUnit:
    chosen = selection.overrides
    first = selection.entries[0]
    # Blocks are units of one module that has submodules: recomputing a lone embedding, norm or head saves nothing,
    # and neither does recomputing the root.
    is_block = len(selection.entries) == 1 and first != 0 and tree.ends[first] > first + 1
    reshard = chosen.get("reshard_after_forward", settings.reshard_after_forward)
    dim = chosen.get("shard_dim")
    return ShardUnit(
        modules=tuple(tree.fqns[entry] for entry in selection.entries),
        params=tuple(params),
        reshard_after_forward=selection.reshard if reshard is None else reshard,
        mp_policy=chosen.get("mp_policy", settings.mp_policy),
        offload_policy=chosen.get("offload_policy", settings.offload_policy),
        checkpoint_activations=chosen.get("checkpoint_activations", settings.checkpoint_activations and is_block),
        compile=chosen.get("compile", settings.compile and is_block),
        shard_dims=tuple((fqn, dim) for fqn in params if dim and tree.params[fqn].dim() > dim),
        mesh=chosen.get("mesh"),
        may_skip=bool(chosen.get("may_skip")),
        dim_given=dim is not None,
    )


def _forward_methods(tree: ModelTree, given: Iterable[str]) -> tuple[str, ...]:
    """Return ``generate`` where the model has it, then the methods that the user named."""
    if isinstance(given, str):
        problem, fix = f"must be a list of names, got the string {given!r}", f"Pass forward_methods=[{given!r}]"
        raise PlanError(message("forward_methods", problem, "", fix))
    own = ["generate"] if callable(getattr(tree.modules[0], "generate", None)) else []
    return tuple(dict.fromkeys([*own, *given]))


def method_problems(tree: ModelTree, plan: ShardingPlan) -> Iterator[str]:
    """Yield an error for each method that the plan names and that cannot gather parameters."""
    units = {id(tree.modules[tree.places[fqn]]) for unit in plan.units for fqn in unit.modules if fqn in tree.places}
    for name in plan.forward_methods:
        fqn, _, method = name.rpartition(".") if isinstance(name, str) else ("", "", name)
        module = tree.modules[tree.places[fqn]] if fqn in tree.places else None
        if not isinstance(method, str) or not callable(getattr(module, method, None)):
            problem, fix = "which is not a method of the model or of a module in it", "Correct the name"
        elif method == "forward":
            problem, fix = "which gathers by itself", "Leave it out"
        elif id(module) not in units:
            problem = f"a method of {fqn}, which is not a unit"
            fix = f"Make {fqn} a unit with units=, or name a method of a unit or of the model that calls this one"
        else:
            continue
        yield message("forward_methods", f"has {name!r}, {problem}", "Only units and the model can gather", fix)
