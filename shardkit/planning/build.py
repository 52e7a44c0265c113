"""From rules and settings to a plan; pure and local."""

from __future__ import annotations

import pkgutil
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

from shardkit.errors import PlanError, listing, message, refuse
from shardkit.plan import MeshSpec, ShardingPlan, ShardUnit
from shardkit.planning.default import default_units
from shardkit.planning.dims import balanced
from shardkit.planning.repair import join_ties, split_dtypes
from shardkit.planning.rules import Overrides, Rule, Selection, check_settings, named_policy, select
from shardkit.planning.tree import ModelTree, assign, has_forward, split_problem, unit_of_entries


@dataclass(frozen=True)
class Settings:
    """The settings of the whole model, which a rule may override for its units."""

    reshard_after_forward: bool | int | None = None
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy()  # noqa: RUF009  frozen
    offload_policy: OffloadPolicy = field(default_factory=OffloadPolicy)
    checkpoint_activations: bool | str | Callable[..., Any] = False
    compile: bool = False


@dataclass(frozen=True, eq=False)
class Request:
    """What ``plan_model`` was asked for; each field is an argument of that name, the settings together."""

    units: Rule | Sequence[Rule] | None = None
    mesh: DeviceMesh | MeshSpec | None = None
    settings: Settings = field(default_factory=Settings)
    ignored_params: Iterable[nn.Parameter | str] | None = None
    prefetch: int = 0
    forward_methods: Iterable[str] = ()
    example_batch: Any = None

    def check_not_given(self, memory_budget: object) -> None:
        """Raise PlanError if anything but a mesh was given, as beside a finished plan."""
        values = {**vars(self.settings), **vars(self), "memory_budget": memory_budget}
        defaults = {**vars(Settings()), **vars(Request()), "memory_budget": None}
        asked = defaults.keys() - {"mesh", "settings"}
        if given := [name for name in values if name in asked and values[name] is not defaults[name] != values[name]]:
            problem = f"was given together with {listing(given)}, and contains all settings"
            raise PlanError(message("plan", problem, "", "Pass plan=plan_model(...) alone, with a mesh if you like"))


def build_plan(tree: ModelTree, mesh: MeshSpec, request: Request) -> ShardingPlan:
    """Return the plan as requested on a mesh of that shape; PlanError if rules do not fit, or the plan is not valid."""
    settings = request.settings
    check_settings("", vars(settings))
    left_alone = _ignored_fqns(tree, request.ignored_params or ())
    chosen = select(tree, request.units)
    apart = chosen.replicated
    replicated = tree.unshardable.union(*(tree.owned[entry] for entry in apart))
    blocks, notes = None, list[str]()
    if not chosen.by_default:
        selections = chosen.units
        if not any(0 in selection.entries for selection in selections):
            selections.append(Selection((0,), reshard=False))
    else:
        selections, blocks, odd, notes = default_units(tree, left_alone | replicated)
        replicated |= set(odd)
    if apart:  # modules that need no gathering, such as the norm of [norm, head]
        kept = [tuple(entry for entry in new.entries if not entry or entry not in apart) for new in selections]
        selections = [replace(new, entries=entries) for new, entries in zip(selections, kept, strict=True) if entries]
    prefetch, methods = request.prefetch, request.forward_methods
    tiles = [(entry, number) for entry, number in chosen.tiles.items() if number is True or number != 1]  # 1 is whole
    plan = plan_of(tree, mesh, selections, settings, left_alone, replicated, blocks, prefetch, methods, notes, tiles)
    for name in ("checkpoint_activations", "compile"):
        if getattr(settings, name) and not any(getattr(unit, name) for unit in plan.units):
            problem, rule = "reaches no module", "It applies to blocks: modules that repeat, or units with submodules"
            fix = f"Name the modules: units=[by_name(..., {name}=True)]"
            raise PlanError(message(f"{name}={named_policy(getattr(settings, name))!r}", problem, rule, fix))
    return plan


def plan_of(
    tree: ModelTree,
    mesh: MeshSpec,
    selections: list[Selection],
    settings: Settings,
    left_alone: frozenset[str],
    replicated: frozenset[str],
    blocks: list[int] | None = None,
    prefetch: int = 0,
    methods: Iterable[str] = (),
    notes: Iterable[str] = (),
    tiles: Iterable[tuple[int, int]] = (),
) -> ShardingPlan:
    """Return the plan whose units are ``selections``, the root among them.

    ``blocks`` are the entries to checkpoint and compile; None is each unit of one module with submodules. Raises
    PlanError if the selections split a tie or lie inside each other, or the plan is not valid.
    """
    for axis in dict.fromkeys(each.overrides.get("mesh") for each in selections):
        mesh = mesh if axis is None else mesh.sharded_from(axis)
    selections = _children_first(tree, selections)
    entries = [selection.entries for selection in selections]
    if blocks is None:
        # Recomputing a lone embedding, norm or head saves nothing, and neither does recomputing the root.
        blocks = [first for first, *others in entries if first and not others and tree.ends[first] > first + 1]
    around, inside = unit_of_entries(tree, entries), defaultdict[int, list[str]](list)
    for block in blocks:
        inside[around[block]].append(tree.fqns[block])
    replicated -= left_alone
    owned, torn = assign(tree, entries, left_alone | replicated)
    refuse(split_problem(tree, fqn) for fqn in torn)
    # Below the root without output_dtype: only the root returns to the user, and blocks that cast would keep more.
    inner = replace(settings, mp_policy=replace(settings.mp_policy, output_dtype=None))
    units = tuple(
        _unit(tree, selection, tuple(params), tuple(inside[index]), settings if selection.entries == (0,) else inner)
        for index, (selection, params) in enumerate(zip(selections, owned, strict=True))
    )
    if isinstance(methods, str):
        problem, fix = f"must be a list of names, got the string {methods!r}", f"Pass forward_methods=[{methods!r}]"
        raise PlanError(message("forward_methods", problem, "", fix))
    generate = ["generate"] * callable(getattr(tree.modules[0], "generate", None))
    trained = sorted(fqn for fqn in left_alone if tree.specs[fqn].trainable)
    note = f"{listing(trained, 6)}: ignored but trained, so each rank keeps its own, unreduced gradient"
    split = {fqn for unit in units if unit.mesh and mesh.parts(unit.mesh) > 1 for fqn in unit.params}
    specs = tree.specs | {fqn: tree.specs[fqn]._replace(tensor_parallel=True) for fqn in split}
    plan = ShardingPlan(
        units=units,
        mesh=mesh,
        params=tuple(specs.values()),
        ignored=tuple(fqn for fqn in tree.params if fqn in left_alone),
        replicated=tuple(fqn for fqn in tree.params if fqn in replicated),
        prefetch=prefetch,
        forward_methods=tuple(dict.fromkeys([*generate, *methods])),
        tiles=tuple((tree.fqns[entry], number) for entry, number in sorted(tiles)),
        notes=(*notes, *[note] * bool(trained)),
    )
    plan = balanced(plan, split | tree.unsplit)
    plan.check()
    refuse(method_problems(tree, plan))
    return plan


def plan_from_units(
    tree: ModelTree,
    units: Mapping[str, Overrides],
    mesh: MeshSpec,
    *,
    ignored: Collection[str] = (),
    prefetch: int = 0,
) -> ShardingPlan:
    """Return the plan whose units are these modules, by FQN, each with its settings; ``""`` is the root.

    What torch would refuse is repaired as in the default rule, with a note: modules that share a
    parameter become one unit, and modules of another dtype become units of their own. Modules without
    a forward or without parameters are no units.
    """
    left_alone = frozenset(ignored)
    places = {fqn: tree.places[fqn] for fqn in units}
    uncalled = [fqn for fqn, entry in places.items() if fqn and not has_forward(tree.modules[entry])]
    notes = []
    if uncalled:
        notes.append(f"{listing(uncalled, 6)}: has no forward, so the unit around it gathers its parameters")
    selections = [
        Selection((entry,), units[fqn], reshard=fqn != "")
        for fqn, entry in places.items()
        if fqn not in uncalled
    ]
    selections, tie_notes = join_ties(tree, selections, left_alone)
    for selection in selections:
        if len(selection.entries) > 1:
            names = listing(tree.fqns[entry] for entry in selection.entries)
            notes.append(f"{names}: share a parameter, so are one unit")
    selections, _, dtype_notes = split_dtypes(tree, selections, left_alone)
    owned, _ = assign(tree, [selection.entries for selection in selections], left_alone)
    kept, empty = [], []
    for selection, params in zip(selections, owned, strict=True):
        policy = selection.overrides.get("mp_policy")
        casts = policy is not None and policy.output_dtype is not None
        is_unit = params or casts or selection.entries == (0,)
        (kept if is_unit else empty).append(selection)
    if empty:
        names = listing((tree.fqns[entry] for each in empty for entry in each.entries), 4)
        notes.append(f"{names}: without parameters of its own, so not a unit")
    notes += [*tie_notes, *dtype_notes]
    replicated = tree.unshardable
    return plan_of(
        tree, mesh, kept, Settings(), left_alone, replicated, prefetch=prefetch, notes=notes
    )


def _ignored_fqns(tree: ModelTree, ignored_params: Iterable[nn.Parameter | str]) -> frozenset[str]:
    if not ignored_params:
        return frozenset()
    aliases = {fqn: fqn for fqn in tree.params} | {alias: fqn for fqn, ties in tree.ties.items() for alias in ties}
    found = {each: aliases.get(each) if isinstance(each, str) else tree.names.get(id(each)) for each in ignored_params}
    unknown = [each if isinstance(each, str) else f"a {type(each).__name__}" for each in found if found[each] is None]
    if unknown:
        rule, fix = "It takes parameters of the model, or their FQNs", "Take them from model.named_parameters()"
        raise PlanError(message("ignored_params", f"has {listing(unknown)}, not in the model", rule, fix))
    return frozenset(fqn for fqn in found.values() if fqn is not None)


def _children_first(tree: ModelTree, selections: list[Selection]) -> list[Selection]:
    """Sort into the order of the ``fully_shard`` calls: units inside a module before the unit of that module."""
    selections = sorted(selections, key=lambda each: (each.entries == (0,), each.entries))
    around = unit_of_entries(tree, [selection.entries for selection in selections])
    inner: dict[int, list[int]] = {index: [] for index in range(len(selections))}
    for index, selection in enumerate(selections):
        for outer in sorted({around[tree.parents[entry]] for entry in selection.entries if entry}):
            inner[outer].append(index)
    try:
        return [selections[index] for index in TopologicalSorter(inner).static_order()]
    except CycleError as error:
        entries = selections[error.args[1][0]].entries
        name = f"group({', '.join(repr(tree.fqns[entry] or '(root)') for entry in entries)})"
        problem = "has a module that lies inside another one of the same unit, or of a unit inside it"
        raise PlanError(message(name, problem, "", "Leave the inner module out")) from error


def _unit(
    tree: ModelTree, selection: Selection, params: tuple[str, ...], blocks: tuple[str, ...], settings: Settings
) -> ShardUnit:
    chosen = selection.overrides
    policy = chosen.get("checkpoint_activations", bool(blocks) and settings.checkpoint_activations)
    reshard, dim = chosen.get("reshard_after_forward", settings.reshard_after_forward), chosen.get("shard_dim")
    return ShardUnit(
        modules=tuple(tree.fqns[entry] for entry in selection.entries),
        params=params,
        reshard_after_forward=selection.reshard if reshard is None else reshard,
        mp_policy=chosen.get("mp_policy", settings.mp_policy),
        offload_policy=chosen.get("offload_policy", settings.offload_policy),
        checkpoint_activations=named_policy(policy),
        compile=chosen.get("compile", settings.compile and bool(blocks)),
        blocks=blocks,
        shard_dims=tuple((fqn, dim) for fqn in params if len(tree.specs[fqn].shape) > dim) if dim else (),
        mesh=chosen.get("mesh"),
        may_skip=bool(chosen.get("may_skip")),
        dim_given=dim is not None,
    )


def method_problems(tree: ModelTree, plan: ShardingPlan) -> Iterator[str]:
    """Yield an error for each method that the plan names and that cannot gather parameters."""
    units = {fqn for unit in plan.units for fqn in unit.modules}
    for name in plan.forward_methods:
        fqn, _, method = name.rpartition(".")
        entry = tree.places.get(fqn, -1) if fqn else 0
        module = tree.modules[entry] if entry >= 0 else None
        if not callable(getattr(module, method, None)) or method == "forward":
            problem, fix = "which is not a method besides forward of a module in the model", "Correct the name"
        elif units.isdisjoint(tree.fqns[path] for path in tree.paths(entry)):
            problem = f"a method of {fqn}, which is not a unit"
            fix = f"Make {fqn} a unit with units=, or name a method of a unit or of the model that calls this one"
        else:
            continue
        yield message("forward_methods", f"has {name!r}, {problem}", "Only units and the model can gather", fix)


def named_model(given: str) -> nn.Module:
    """Return the model that a command line names, on meta: of a factory, or of a transformers config; or PlanError."""
    try:
        if given.endswith(".json") and not Path(given).exists():
            raise FileNotFoundError(f"no such file in {Path.cwd()}")
        with torch.device("meta"):
            if Path(given).exists():
                import transformers

                config = transformers.AutoConfig.from_pretrained(given)
                return transformers.AutoModelForCausalLM.from_config(config)  # type: ignore[no-any-return, no-untyped-call]
            model: nn.Module = pkgutil.resolve_name(given)()
            return model
    except Exception as error:  # whatever the user's code raises
        problem = f"{given} cannot be built ({type(error).__name__}: {error})"
        rule = "It must be package.module:factory, a callable without arguments, or a config.json of transformers"
        raise PlanError(message("model", problem, rule, "Check that it can be imported from here")) from error
