"""From rules and settings to a plan; pure and local."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

from shardkit.errors import PlanError, listing, refuse
from shardkit.plan import MeshSpec, ShardingPlan, ShardUnit
from shardkit.planning.default import default_units
from shardkit.planning.dims import balanced
from shardkit.planning.repair import join_ties, split_dtypes
from shardkit.planning.rules import (
    Overrides,
    Rule,
    Selection,
    check_settings,
    policy_name,
    select,
)
from shardkit.planning.tree import (
    ModelTree,
    ModuleNode,
    assign,
    has_forward,
    tie_problem,
    units_around,
)


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
    """What ``plan_model`` was asked for; each field is an argument of that name."""

    units: Rule | Sequence[Rule] | None = None
    mesh: DeviceMesh | MeshSpec | None = None
    settings: Settings = field(default_factory=Settings)
    ignored_params: Iterable[nn.Parameter | str] | None = None
    prefetch: int = 0
    forward_methods: Iterable[str] = ()
    example_batch: Any = None


@dataclass
class Draft:
    """What a plan is made of: modules and parameters of one model.

    Attributes:
        selections: the units, the root among them.
        settings: for what the selections do not override.
        ignored: FQNs of parameters to leave alone.
        replicated: FQNs of parameters that every rank holds in full; those ignored are left out.
        tiles: in how many tiles of tokens a module computes.
    """

    selections: list[Selection]
    settings: Settings
    ignored: set[str] = field(default_factory=set)
    replicated: set[str] = field(default_factory=set)
    tiles: dict[ModuleNode, int] = field(default_factory=dict)
    prefetch: int = 0
    forward_methods: Iterable[str] = ()
    notes: list[str] = field(default_factory=list)


def build_plan(tree: ModelTree, mesh: MeshSpec, request: Request) -> ShardingPlan:
    """Return the plan as requested on a mesh of that shape.

    Raises PlanError: rules do not fit the model, or the plan is not valid.
    """
    settings = request.settings
    check_settings("", vars(settings))
    chosen = select(tree, request.units)
    ignored = _ignored_fqns(tree, request.ignored_params or ())
    replicated = tree.unshardable()
    for node in chosen.replicated:
        replicated.update(node.params)

    notes: list[str] = []
    if chosen.units is None:
        selections, tie_notes = join_ties(tree, default_units(tree), ignored | replicated)
        selections, odd, dtype_notes = split_dtypes(tree, selections, ignored | replicated)
        replicated |= odd
        notes = [*tie_notes, *dtype_notes]
    else:
        selections = chosen.units
        if not any(tree.root in selection.modules for selection in selections):
            selections = [*selections, Selection((tree.root,), reshard=False)]
    if chosen.replicated:
        selections = _without(selections, {*chosen.replicated} - {tree.root})

    plan = plan_of(
        tree,
        mesh,
        Draft(
            selections,
            settings,
            ignored,
            replicated,
            {node: tiles for node, tiles in chosen.tiles.items() if tiles is True or tiles != 1},
            request.prefetch,
            request.forward_methods,
            notes,
        ),
    )
    for name in ("checkpoint_activations", "compile"):
        if getattr(settings, name) and not any(getattr(unit, name) for unit in plan.units):
            raise PlanError(
                f"{name}={policy_name(getattr(settings, name))!r} reaches no module. It applies to "
                "blocks: units of one module with submodules. Name the modules: "
                f"units=[by_name(..., {name}=True)]."
            )
    return plan


def _ignored_fqns(tree: ModelTree, ignored_params: Iterable[nn.Parameter | str]) -> set[str]:
    ignored = set()
    unknown = []
    for param in ignored_params:
        fqn = tree.fqn_of(param)
        if fqn is None:
            unknown.append(param if isinstance(param, str) else f"a {type(param).__name__}")
        else:
            ignored.add(fqn)
    if unknown:
        raise PlanError(
            f"ignored_params has {listing(unknown)}, not in the model. It takes parameters of the "
            "model, or their FQNs. Take them from model.named_parameters()."
        )
    return ignored


def _without(selections: list[Selection], replicated: set[ModuleNode]) -> list[Selection]:
    """Leave out modules that need no gathering, such as the norm of [norm, head]."""
    kept = []
    for selection in selections:
        modules = tuple(node for node in selection.modules if node not in replicated)
        if modules:
            kept.append(replace(selection, modules=modules))
    return kept


def plan_of(tree: ModelTree, mesh: MeshSpec, draft: Draft) -> ShardingPlan:
    """Return the plan of a draft on a mesh.

    Raises PlanError: the selections split a tie or lie inside each other, or the plan is not valid.
    """
    for selection in draft.selections:
        if selection.overrides.get("mesh") is not None:
            mesh = mesh.sharded_from(selection.overrides["mesh"])
    selections = _children_first(tree, draft.selections)
    replicated = draft.replicated - draft.ignored
    skipped = draft.ignored | replicated
    owned, in_several = assign(tree, [each.modules for each in selections], skipped)
    refuse(tie_problem(tree, fqn) for fqn in in_several)

    settings = draft.settings
    # Only the root returns to the user: blocks that cast their outputs would keep more.
    inner = replace(settings, mp_policy=replace(settings.mp_policy, output_dtype=None))
    units = []
    for selection, params in zip(selections, owned, strict=True):
        is_root = selection.modules == (tree.root,)
        units.append(_unit(tree, selection, params, settings if is_root else inner))

    specs = dict(tree.specs)
    unsplit = set(tree.unsplit)
    for unit in units:
        if unit.mesh and mesh.parts(unit.mesh) > 1:  # experts, which the model has split
            unsplit.update(unit.params)
            for fqn in unit.params:
                specs[fqn] = specs[fqn]._replace(tensor_parallel=True)

    notes = list(draft.notes)
    trained = [fqn for fqn in sorted(draft.ignored) if specs[fqn].trainable]
    if trained:
        names = listing(trained, 6)
        notes.append(f"{names}: ignored but trained, so each rank keeps its own, unreduced gradient")
    plan = ShardingPlan(
        units=tuple(units),
        mesh=mesh,
        params=tuple(specs.values()),
        ignored=tuple(fqn for fqn in tree.params if fqn in draft.ignored),
        replicated=tuple(fqn for fqn in tree.params if fqn in replicated),
        prefetch=draft.prefetch,
        forward_methods=_forward_methods(tree, draft.forward_methods),
        tiles=tuple((node.fqn, draft.tiles[node]) for node in tree.nodes if node in draft.tiles),
        notes=tuple(notes),
    )
    plan = balanced(plan, unsplit)
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
    """Return the plan whose units are these modules, by FQN, each with its settings.

    ``""`` is the root. What torch would refuse is repaired as in the default rule, with a note:
    modules that share a parameter become one unit, and modules of another dtype become units of
    their own. Modules without a forward or without parameters are no units.
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
        notes.append(f"{listing(uncalled, 6)}: has no forward, so the unit around it gathers its parameters")

    left_alone = set(ignored)
    selections, tie_notes = join_ties(tree, selections, left_alone)
    for selection in selections:
        if len(selection.modules) > 1:
            names = listing(node.fqn for node in selection.modules)
            notes.append(f"{names}: share a parameter, so are one unit")
    selections, _, dtype_notes = split_dtypes(tree, selections, left_alone)

    owned, _ = assign(tree, [selection.modules for selection in selections], left_alone)
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
    draft = Draft(kept, Settings(), left_alone, tree.unshardable(), prefetch=prefetch)
    draft.notes = [*notes, *tie_notes, *dtype_notes]
    return plan_of(tree, mesh, draft)


def _children_first(tree: ModelTree, selections: list[Selection]) -> list[Selection]:
    """Sort into the order of the ``fully_shard`` calls: units inside a module before its unit."""

    def place(selection: Selection) -> tuple[bool, list[int]]:
        return selection.modules == (tree.root,), [node.place for node in selection.modules]

    selections = sorted(selections, key=place)
    around = units_around(tree, [selection.modules for selection in selections])
    inner: dict[int, list[int]] = {index: [] for index in range(len(selections))}
    for index, selection in enumerate(selections):
        outer: set[int] = set()
        for node in selection.modules:
            for parent in node.parents:
                outer |= around[parent]
        for each in sorted(outer):
            inner[each].append(index)
    try:
        return [selections[index] for index in TopologicalSorter(inner).static_order()]
    except CycleError as error:
        names = [repr(node.name) for node in selections[error.args[1][0]].modules]
        raise PlanError(
            f"group({', '.join(names)}) has a module that lies inside another one of the same unit, "
            "or of a unit inside it. Leave the inner module out."
        ) from error


def _unit(tree: ModelTree, selection: Selection, params: list[str], settings: Settings) -> ShardUnit:
    chosen = selection.overrides
    # Recomputing a lone embedding, norm or head saves nothing, and neither does the whole model.
    first = selection.modules[0]
    is_block = len(selection.modules) == 1 and bool(first.children) and first is not tree.root
    fqns = tuple(node.fqn for node in selection.modules)
    reshard = chosen.get("reshard_after_forward", settings.reshard_after_forward)
    policy = chosen.get("checkpoint_activations", is_block and settings.checkpoint_activations)
    dim = chosen.get("shard_dim")
    dims = []
    if dim:
        dims = [(fqn, dim) for fqn in params if len(tree.specs[fqn].shape) > dim]
    return ShardUnit(
        modules=fqns,
        params=tuple(params),
        reshard_after_forward=selection.reshard if reshard is None else reshard,
        mp_policy=chosen.get("mp_policy", settings.mp_policy),
        offload_policy=chosen.get("offload_policy", settings.offload_policy),
        checkpoint_activations=policy_name(policy),
        compile=chosen.get("compile", settings.compile and is_block),
        blocks=fqns if is_block else (),
        shard_dims=tuple(dims),
        mesh=chosen.get("mesh"),
        may_skip=bool(chosen.get("may_skip")),
        dim_given=dim is not None,
    )


def _forward_methods(tree: ModelTree, methods: Iterable[str]) -> tuple[str, ...]:
    if isinstance(methods, str):
        raise PlanError(
            f"forward_methods must be a list of names, got the string {methods!r}. Pass forward_methods=[{methods!r}]."
        )
    names = list(methods)
    if callable(getattr(tree.root.module, "generate", None)):
        names.insert(0, "generate")
    return tuple(dict.fromkeys(names))


def method_problems(tree: ModelTree, plan: ShardingPlan) -> Iterator[str]:
    """Yield an error for each method that the plan names and that cannot gather parameters."""
    units = {tree.find(fqn) for unit in plan.units for fqn in unit.modules}
    for name in plan.forward_methods:
        fqn, _, method = name.rpartition(".")
        node = tree.find(fqn)
        found = node is not None and callable(getattr(node.module, method, None))
        if not found or method == "forward":
            yield (
                f"forward_methods has {name!r}, which is not a method besides forward of a module in "
                "the model. Only units and the model can gather. Correct the name."
            )
        elif node not in units:
            yield (
                f"forward_methods has {name!r}, a method of {fqn}, which is not a unit. Only units and "
                f"the model can gather. Make {fqn} a unit with units=, or name a method of a unit or "
                "of the model that calls this one."
            )


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
        raise PlanError(
            f"model {given} cannot be built ({type(error).__name__}: {error}). It must be "
            "package.module:factory, a callable without arguments, or a config.json of transformers. "
            "Check that it can be imported from here."
        ) from error
