"""From rules and settings to a plan; pure and local."""

from __future__ import annotations

import pkgutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardkit.errors import PlanError, listing, refuse
from shardkit.plan import MeshSpec, ShardingPlan, ShardUnit
from shardkit.planning.default import default_units
from shardkit.planning.dims import balanced
from shardkit.planning.repair import join_ties, split_dtypes
from shardkit.planning.selection import Overrides, Rule, Selection, check_settings, policy_name
from shardkit.planning.tree import (
    ModelTree,
    ModuleNode,
    assign,
    has_forward,
    in_order,
    tie_problem,
)

FEW = 1024  # elements of a frozen parameter that is worth no sharding where modules share it


def build_plan(
    tree: ModelTree,
    mesh: MeshSpec,
    *,
    units: Rule | Sequence[Rule] | None = None,
    settings: Overrides | None = None,
    ignored_params: Iterable[nn.Parameter | str] | None = None,
    float32: Rule | Sequence[Rule] = (),
    replicate: Rule | Sequence[Rule] = (),
    tiles: Mapping[Any, int] | None = None,
    prefetch: int = 0,
    forward_methods: Iterable[str] = (),
) -> ShardingPlan:
    """Return the plan on a mesh of that shape; arguments are those of ``plan_model``.

    ``settings`` are the whole model's, which a rule may override for its units. Raises PlanError:
    rules do not fit the model, or the plan is not valid.
    """
    settings = settings or Overrides()
    check_settings("", settings)
    ignored = _ignored_fqns(tree, ignored_params or ())
    whole: set[ModuleNode] = set()
    tiled: dict[ModuleNode, int] = {}
    if units is not None or float32 or replicate or tiles:
        # the user's rules, which the default rule does without
        from shardkit.planning.rules import in_float32, replicated_modules, select, tiled_modules

        whole = replicated_modules(tree, replicate)
        tiled = tiled_modules(tree, tiles or {})
    replicated = tree.unshardable()
    for node in whole:
        replicated.update(node.params)

    notes: list[str] = []
    if units is None:
        if tree.shares_modules:
            replicated |= _small_shared(tree)
        selections, tie_notes = join_ties(tree, default_units(tree), ignored | replicated)
        selections, mixed, dtype_notes = split_dtypes(tree, selections, ignored | replicated)
        replicated |= mixed
        notes = [*tie_notes, *dtype_notes]
    else:
        selections = select(tree, units)
        if not any(tree.root in selection.modules for selection in selections):
            selections = [*selections, Selection((tree.root,), reshard=False)]
    if whole:
        selections = _without(selections, whole - {tree.root})
    if float32:  # replicated or not: they cast what they are given
        selections = in_float32(tree, selections, float32, settings)

    plan = plan_of(
        tree,
        mesh,
        selections,
        settings,
        ignored=ignored,
        replicated=replicated,
        tiles=tiled,
        prefetch=prefetch,
        forward_methods=forward_methods,
        notes=notes,
    )
    for name in ("checkpoint_activations", "compile"):
        if settings.get(name) and not any(getattr(unit, name) for unit in plan.units):
            raise PlanError(
                f"{name}={policy_name(settings.get(name))!r} reaches no module. It applies to "
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


def _small_shared(tree: ModelTree) -> set[str]:
    """Return the frozen parameters of few elements in modules that several modules share, as in a
    rotary embedding. These may call a method of it, for which no unit of its own would unshard.
    """
    small: set[str] = set()
    for shared in tree.nodes:
        if len(shared.parents) < 2:
            continue
        for node in tree.subtree(shared):
            for fqn in node.params:
                if not tree.specs[fqn].trainable and tree.specs[fqn].numel <= FEW:
                    small.add(fqn)
    return small


def _without(selections: list[Selection], replicated: set[ModuleNode]) -> list[Selection]:
    """Leave out replicated modules, such as the norm of [norm, head]. The root stays a unit, since
    a plan ends with it, even where a rule names it.
    """
    kept = []
    for selection in selections:
        modules = tuple(node for node in selection.modules if node not in replicated)
        if modules:
            kept.append(replace(selection, modules=modules))
    return kept


def plan_of(
    tree: ModelTree,
    mesh: MeshSpec,
    selections: list[Selection],
    settings: Overrides,
    *,
    ignored: set[str],
    replicated: set[str],
    tiles: Mapping[ModuleNode, int] | None = None,
    prefetch: int = 0,
    forward_methods: Iterable[str] = (),
    notes: Sequence[str] = (),
) -> ShardingPlan:
    """Return the plan of units on a mesh.

    Raises PlanError: the selections split a tie or lie inside each other, or the plan is not valid.

    Args:
        selections: the units, the root among them.
        settings: for what the selections do not override.
        ignored: FQNs of parameters to leave alone.
        replicated: FQNs of parameters that every rank holds in full; those ignored are left out.
        tiles: in how many tiles of tokens a module computes.
    """
    for selection in selections:
        axis = selection.overrides.get("mesh")
        if axis is not None:
            mesh = mesh.sharded_from(axis)
    selections = _children_first(selections)
    replicated = replicated - ignored
    owned, in_several = assign(
        tree, [selection.modules for selection in selections], ignored | replicated
    )
    refuse(tie_problem(tree, fqn) for fqn in in_several)
    units = []
    for selection, params in zip(selections, owned, strict=True):
        units.append(_unit(tree, selection, params, settings))

    specs = dict(tree.specs)
    unsplit = set(tree.unsplit)
    for unit in units:
        if unit.mesh and mesh.parts(unit.mesh) > 1:  # experts, which the model has split on dim 0
            unsplit.difference_update(unit.params)
            for fqn in unit.params:
                specs[fqn] = specs[fqn]._replace(tensor_parallel=True)

    notes = list(notes)
    trained = [fqn for fqn in sorted(ignored) if specs[fqn].trainable]
    if trained:
        names = listing(trained, 6)
        notes.append(
            f"{names}: ignored but trained, so each rank keeps its own, unreduced gradient"
        )
    if units[-1].params and not has_forward(tree.root.module):
        notes.append(
            "The model has no forward, so nothing unshards what the root keeps. Name the modules "
            "that you call as units, or shard each of them by itself"
        )
    tiles = tiles or {}
    plan = ShardingPlan(
        units=tuple(units),
        mesh=mesh,
        params=tuple(specs.values()),
        ignored=tree.ordered(ignored),
        replicated=tree.ordered(replicated),
        prefetch=prefetch,
        forward_methods=_forward_methods(tree, forward_methods),
        tiles=tuple((node.fqn, tiles[node]) for node in in_order(tiles)),
        notes=tuple(notes),
    )
    plan = balanced(plan, unsplit)
    plan.check()
    refuse(method_problems(tree, plan))
    return plan


def _children_first(selections: list[Selection]) -> list[Selection]:
    """Sort into the order of the ``fully_shard`` calls: units inside a module before its unit."""
    # The root, which has no parents, comes last.
    selections = sorted(
        selections, key=lambda unit: (not unit.modules[0].parents, [n.place for n in unit.modules])
    )
    unit_of: dict[ModuleNode, int] = {}
    inner: dict[int, list[int]] = {}
    for index, selection in enumerate(selections):
        unit_of.update(dict.fromkeys(selection.modules, index))
        inner[index] = []
    for index, selection in enumerate(selections):
        outer: set[int] = set()
        waiting = [parent for node in selection.modules for parent in node.parents]
        while waiting:
            node = waiting.pop()
            if node in unit_of:
                outer.add(unit_of[node])
            else:
                waiting += node.parents
        for around in sorted(outer):
            inner[around].append(index)
    try:
        return [selections[index] for index in TopologicalSorter(inner).static_order()]
    except CycleError as error:
        names = [repr(node.name) for node in selections[error.args[1][0]].modules]
        raise PlanError(
            f"group({', '.join(names)}) has a module that lies inside another one of the same "
            "unit, or of a unit inside it. Leave the inner module out."
        ) from error


def _unit(
    tree: ModelTree, selection: Selection, params: list[str], settings: Overrides
) -> ShardUnit:
    first = selection.modules[0]
    # Recomputing a lone embedding, norm or head saves nothing, and neither does the whole model.
    is_alone = len(selection.modules) == 1 and first is not tree.root
    is_block = (
        is_alone and bool(tree.children(first)) and not isinstance(first.module, nn.Embedding)
    )
    if selection.float32 and not selection.reshard:
        is_block = False  # a part of one
    chosen: dict[str, Any] = dict(settings)
    if not is_block:
        chosen.pop("checkpoint_activations", None)
        chosen.pop("compile", None)
    policy = settings.get("mp_policy")
    if policy is not None and policy.output_dtype is not None and first is not tree.root:
        # Only the root returns to the user: blocks that cast their outputs would keep more.
        chosen["mp_policy"] = replace(policy, output_dtype=None)
    chosen.update(selection.overrides)
    if chosen.get("reshard_after_forward") is None:
        chosen["reshard_after_forward"] = selection.reshard
    chosen["checkpoint_activations"] = policy_name(chosen.get("checkpoint_activations"))

    fqns = tuple(node.fqn for node in selection.modules)
    return ShardUnit(
        modules=fqns,
        params=tuple(params),
        blocks=fqns if is_block else (),
        float32=selection.float32,
        **chosen,
    )


def _forward_methods(tree: ModelTree, methods: Iterable[str]) -> tuple[str, ...]:
    names = list(methods)
    if callable(getattr(tree.root.module, "generate", None)):
        names.insert(0, "generate")
    return tuple(dict.fromkeys(names))


def method_problems(tree: ModelTree, plan: ShardingPlan) -> Iterator[str]:
    """Yield an error for each method that the plan names and that cannot unshard parameters."""
    units = {""}
    for unit in plan.units:
        units.update(unit.modules)
    for name in plan.forward_methods:
        fqn, _, method = name.rpartition(".")
        node = tree.find(fqn)
        is_method = node is not None and callable(getattr(node.module, method, None))
        if node is None or node.fqn not in units or not is_method or method == "forward":
            yield (
                f"forward_methods has {name!r}, which is not a method besides forward of the model "
                "or of a unit. Only these can unshard. Correct the name, or make "
                f"{fqn or 'its module'} a unit with units=."
            )


def named_model(given: str) -> nn.Module:
    """Return the model that a command line names, on meta: of a factory, or of a transformers
    config; or PlanError.
    """
    try:
        with torch.device("meta"):
            if Path(given).exists():
                import transformers

                config = transformers.AutoConfig.from_pretrained(given)
                # Files of the hub say bfloat16; what trains is loaded in float32.
                return transformers.AutoModelForCausalLM.from_config(config).float()  # type: ignore[no-any-return, no-untyped-call]
            model: nn.Module = pkgutil.resolve_name(given)()
            return model
    except Exception as error:  # whatever the user's code raises
        raise PlanError(
            f"model {given} cannot be built ({type(error).__name__}: {error}). It must be "
            "package.module:factory, a callable without arguments, or an existing config.json of "
            "transformers. Check the path, or that it can be imported from here."
        ) from error
