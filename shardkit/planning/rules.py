"""The user's rules for units: which modules share one all-gather, and with which settings."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from typing_extensions import Unpack

from shardkit.errors import PlanError, listing
from shardkit.planning.selection import (
    Overrides,
    Rule,
    Selection,
    UnitRule,
    check_settings,
    large_modules,
)
from shardkit.planning.tree import (
    ModelTree,
    ModuleNode,
    has_forward,
    in_order,
    outermost,
    units_around,
)


def by_class(*classes: type[nn.Module] | str, **overrides: Unpack[Overrides]) -> UnitRule:
    """Make every module of one of ``classes``, or of a subclass, a unit of its own.

    Args:
        classes: classes, or names of classes, where importing them is inconvenient.
        overrides: settings for these units.

    Examples:
        >>> by_class(nn.TransformerEncoderLayer, "MyBlock", reshard_after_forward=False).text
        "by_class(TransformerEncoderLayer, 'MyBlock')"
    """
    names, types = set(), []
    for cls in classes:
        if isinstance(cls, str):
            names.add(cls)
        elif isinstance(cls, type) and issubclass(cls, nn.Module):
            types.append(cls)
        else:
            raise PlanError(f"by_class takes nn.Module classes or their names, got {cls!r}.")
    shown = [cls.__name__ if isinstance(cls, type) else repr(cls) for cls in classes]

    def matches(_: str, module: nn.Module) -> bool:
        bases = {base.__name__ for base in type(module).__mro__}
        return isinstance(module, tuple(types)) or not names.isdisjoint(bases)

    return _rule_for(f"by_class({', '.join(shown)})", matches, overrides)


def by_name(*globs: str, **overrides: Unpack[Overrides]) -> UnitRule:
    """Make every module whose FQN matches one of ``globs`` a unit of its own.

    Args:
        globs: ``*`` and ``?`` stay within one component, ``**`` crosses dots: ``"layers.*"`` is
            ``layers.0`` but not ``layers.0.mlp``. ``""`` is the root.
        overrides: settings for these units. ``mesh="efsdp"`` shards them on that axis of the mesh
            alone: experts that the model has split, as DTensors, over the axes after it.
    """
    patterns = [_compile_glob(glob) for glob in globs]

    def matches(fqn: str, _: nn.Module) -> bool:
        return any(pattern.fullmatch(fqn) for pattern in patterns)

    return _rule_for(f"by_name({', '.join(map(repr, globs))})", matches, overrides)


def by_size(min_numel: int, **overrides: Unpack[Overrides]) -> UnitRule:
    """Make units of the innermost modules with at least ``min_numel`` elements outside inner units.

    Modules that are not called, such as the ``out_proj`` of ``nn.MultiheadAttention``, count for
    the one around them.

    Args:
        min_numel: elements.
        overrides: settings for these units.
    """

    def select(tree: ModelTree, taken: Set[ModuleNode]) -> list[Selection]:
        return [Selection((node,), overrides) for node in large_modules(tree, min_numel, taken)]

    return UnitRule(f"by_size({min_numel})", select)


def group(*globs: str, **overrides: Unpack[Overrides]) -> UnitRule:
    """Make one unit of all modules whose FQN matches a glob, torch's ``fully_shard([a, b])``.

    They are unsharded when the first of them runs and resharded when all have run. Tied modules must
    be grouped.

    Args:
        globs: as for ``by_name``; each must match.
        overrides: settings for this unit.
    """
    text = f"group({', '.join(map(repr, globs))})"

    def select(tree: ModelTree, _: Set[ModuleNode]) -> list[Selection]:
        modules: set[ModuleNode] = set()
        for glob in globs:
            pattern = _compile_glob(glob)
            matched = [node for node in tree.nodes if pattern.fullmatch(node.fqn)]
            if not matched:
                raise _no_match(f"{text} {glob!r} matches no module", tree)
            modules.update(matched)
        return [Selection(tuple(in_order(modules)), overrides)]

    return UnitRule(text, select)


def select(tree: ModelTree, rules: Rule | Sequence[Rule]) -> list[Selection]:
    """Return the units that rules make; of those that match a module the first wins.

    Raises PlanError: a rule matches nothing that is left, or a module without forward; a setting is
    unknown.
    """
    units: list[Selection] = []
    taken: set[ModuleNode] = set()
    for rule in _as_rules(rules):
        selections = _not_taken(tree, rule, taken)
        for selection in selections:
            taken.update(selection.modules)
            check_settings(rule.text, selection.overrides)
            _check_callable(rule, selection)
        units += selections
    return units


def replicated_modules(tree: ModelTree, rules: Rule | Sequence[Rule]) -> set[ModuleNode]:
    """Return the modules that rules match, with all below them."""
    modules: set[ModuleNode] = set()
    for rule in _as_rules(rules):
        for selection in _without_settings(tree, rule, "replicate"):
            for node in selection.modules:
                modules.update(tree.subtree(node))
    split = {fqn for node in modules for fqn in node.params if tree.specs[fqn].tensor_parallel}
    if split:
        raise PlanError(
            f"replicate has {listing(sorted(split), 6)}, a DTensor. Only parameters that every "
            "rank holds in full can be replicated. Leave its module out."
        )
    return modules


def in_float32(
    tree: ModelTree,
    selections: list[Selection],
    rules: Rule | Sequence[Rule],
    settings: Overrides,
) -> list[Selection]:
    """Return the units without the modules that rules match, and those of these, which compute in
    float32. Those inside of one unit are one together, which stays unsharded until backward.
    """
    matched: set[ModuleNode] = set()
    for rule in _as_rules(rules):
        for selection in _without_settings(tree, rule, "float32"):
            _check_callable(rule, selection)
            matched.update(selection.modules)
    named = outermost(matched - {tree.root})
    inside: set[ModuleNode] = set()
    for node in named:
        inside.update(tree.subtree(node))

    around = units_around(tree, [selection.modules for selection in selections])
    of_model = replace(settings.get("mp_policy") or MixedPrecisionPolicy(), output_dtype=None)
    units = []
    for index, selection in enumerate(selections):
        policy = selection.overrides.get("mp_policy") or of_model
        policy = replace(policy, param_dtype=torch.float32, cast_forward_inputs=False)
        own = tuple(node for node in selection.modules if node in inside)
        others = tuple(node for node in selection.modules if node not in inside)
        parts = [node for node in named if min(around[node]) == index and node not in own]
        if others:
            units.append(replace(selection, modules=others))
        if own:
            overrides = Overrides(**{**selection.overrides, "mp_policy": policy})
            units.append(replace(selection, modules=own, overrides=overrides, float32=True))
        if parts:
            policy = replace(policy, output_dtype=None)
            overrides = Overrides(**{**selection.overrides, "mp_policy": policy})
            units.append(Selection(tuple(parts), overrides, reshard=False, float32=True))
    return units


def tiled_modules(tree: ModelTree, tiles: Mapping[Any, int]) -> dict[ModuleNode, int]:
    """Return in how many tiles modules compute, as the first rule for a module says."""
    numbers: dict[ModuleNode, int] = {}
    for given, number in tiles.items():
        rule = as_rule(given)
        for selection in _without_settings(tree, rule, "tiles"):
            _check_callable(rule, selection)
            for node in selection.modules:
                numbers.setdefault(node, number)
    return numbers


def _without_settings(tree: ModelTree, rule: UnitRule, argument: str) -> list[Selection]:
    """Return what a rule matches that only names modules."""
    selections = _not_taken(tree, rule, set())
    for selection in selections:
        if selection.overrides:
            raise PlanError(
                f"{rule.text} has {listing(selection.overrides)}, and is given to {argument}=, "
                "which makes no units. Leave its settings out, or give them to a rule of units=."
            )
    return selections


def _not_taken(tree: ModelTree, rule: UnitRule, taken: set[ModuleNode]) -> list[Selection]:
    """Return what a rule matches and no earlier rule has; PlanError if that is nothing."""
    selections = []
    for selection in rule.select(tree, taken):
        has_params = False  # perhaps empty ones
        for node in selection.modules:
            has_params |= node is tree.root or any(below.params for below in tree.subtree(node))
        if has_params and taken.isdisjoint(selection.modules):
            selections.append(selection)
    if not selections:
        problem = "matches no module that has parameters and that no earlier rule matches"
        raise _no_match(f"{rule.text} {problem}", tree)
    return selections


def _check_callable(rule: UnitRule, selection: Selection) -> None:
    for node in selection.modules:
        if not has_forward(node.module):
            raise PlanError(
                f"{node.fqn} is a {type(node.module).__name__} without forward, and {rule.text} "
                "matches it. A unit is unsharded when its module is called, and a module without "
                f'forward is never called. Select its children instead: by_name("{node.fqn}.*").'
            )


def _as_rules(rules: Rule | Sequence[Rule]) -> list[UnitRule]:
    listed: Any = rules if isinstance(rules, (list, tuple)) else [rules]
    return [as_rule(rule) for rule in listed]


def as_rule(rule: Rule) -> UnitRule:
    """Return the rule object for a class, an FQN glob, a callable or a rule."""
    if isinstance(rule, UnitRule):
        return rule
    if isinstance(rule, str):
        return by_name(rule)
    if isinstance(rule, type) and issubclass(rule, nn.Module):
        return by_class(rule)
    if callable(rule) and not isinstance(rule, (type, nn.Module)):
        return _rule_for(getattr(rule, "__name__", repr(rule)), rule, Overrides())
    raise PlanError(
        "units must be by_class, by_name, by_size, group, a module class, an FQN glob or a "
        f"callable (fqn, module), or a list of these, got {rule!r}."
    )


def _rule_for(
    text: str, matches: Callable[[str, nn.Module], bool | Overrides], overrides: Overrides
) -> UnitRule:
    def select(tree: ModelTree, _: Set[ModuleNode]) -> list[Selection]:
        selections = []
        for node in tree.nodes:
            answer = matches(node.fqn, node.module)
            if isinstance(answer, Mapping):  # settings for this module, perhaps none
                selections.append(Selection((node,), Overrides(**{**overrides, **answer})))
            elif answer:
                selections.append(Selection((node,), overrides))
        return selections

    return UnitRule(text, select)


def _compile_glob(glob: str) -> re.Pattern[str]:
    pattern = ""
    for token in re.split(r"(\*\*|\*|\?|\[[^\]]*\])", glob):
        if token == "**":
            pattern += ".*"
        elif token == "*":
            pattern += "[^.]*"
        elif token == "?":
            pattern += "[^.]"
        elif token.startswith("["):
            pattern += token.replace("[!", "[^")
        else:
            pattern += re.escape(token)
    return re.compile(pattern)


def _no_match(problem: str, tree: ModelTree) -> PlanError:
    classes = dict.fromkeys(type(node.module).__name__ for node in tree.nodes)
    modules = [node.fqn for node in tree.nodes if node.fqn and node.fqn.count(".") < 2]
    return PlanError(
        f"{problem}. The model's classes are: {listing(classes)}. Its modules are: "
        f"{listing(modules)}. Use by_class for a class, by_name for a module, remove the rule, or put "
        "the narrower rule first."
    )
