"""The user's rules for units: which modules share one all-gather, and with which settings."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, get_type_hints

import torch.nn as nn
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy
from typing_extensions import TypedDict, Unpack

from shardkit.errors import PlanError, listing, message, refuse
from shardkit.planning.tree import ModelTree, has_forward, is_called


class Overrides(TypedDict, total=False):
    """The settings that a rule may give its units, each replacing the one given for the whole model."""

    reshard_after_forward: bool | int
    mp_policy: MixedPrecisionPolicy
    offload_policy: OffloadPolicy
    checkpoint_activations: bool | str | Callable[..., Any]
    compile: bool
    shard_dim: int  # of the unit's parameters that have this dim; others, such as biases, stay on dim 0
    mesh: str
    may_skip: bool
    tiles: int  # alone: the modules compute in tiles of tokens, and are units only if another rule says so
    replicate: bool  # alone: the modules are not units, and every rank holds their parameters in full


_SETTINGS = get_type_hints(Overrides) | {"checkpoint_activations": object}  # named_policy checks it


@dataclass(frozen=True)
class Selection:
    """Modules that will be one unit."""

    entries: tuple[int, ...]  # their places in the ModelTree; several are torch's list form
    overrides: Overrides = field(default_factory=Overrides)  # settings that a rule asked for
    reshard: bool = True  # what reshard_after_forward=None means for it


@dataclass
class Chosen:
    """What rules selected."""

    units: list[Selection] = field(default_factory=list)
    tiles: dict[int, int] = field(default_factory=dict)  # in how many tiles each entry computes
    replicated: set[int] = field(default_factory=set)  # entries whose parameters every rank holds in full
    by_default: bool = True  # no rule makes units, so the default rule does


@dataclass(frozen=True)
class UnitRule:
    """What ``by_class``, ``by_name``, ``by_size`` and ``group`` return; made by them only."""

    text: str  # the call that made it, for messages
    select: Callable[[ModelTree, frozenset[int]], list[Selection]]  # given the entries that earlier rules took


Rule: TypeAlias = UnitRule | type[nn.Module] | str | Callable[[str, nn.Module], "bool | Overrides"]


def by_class(*classes: type[nn.Module] | str, **overrides: Unpack[Overrides]) -> UnitRule:
    """Make every module of one of ``classes``, or of a subclass, a unit of its own.

    Args:
        classes: classes, or names of classes, where importing them is inconvenient.
        overrides: settings for these units. Two of them make no units and stand alone: with ``tiles=4`` the modules
            compute in tiles; with ``replicate=True`` every rank holds their parameters in full, and one all-reduce at
            the end of backward reduces the gradients of all. If no rule makes units, the default rule does.

    Examples:
        >>> by_class(nn.TransformerEncoderLayer, "MyBlock", reshard_after_forward=False).text
        "by_class(TransformerEncoderLayer, 'MyBlock')"
    """
    shown = ", ".join(repr(cls) if isinstance(cls, str) else getattr(cls, "__name__", repr(cls)) for cls in classes)
    types = tuple(cls for cls in classes if not isinstance(cls, str))
    names = {cls for cls in classes if isinstance(cls, str)}
    for cls in types:
        if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
            raise PlanError(message("by_class", f"takes nn.Module classes or their names, got {cls!r}", "", ""))

    def matches(_: str, module: nn.Module) -> bool:
        return isinstance(module, types) or not names.isdisjoint(base.__name__ for base in type(module).__mro__)

    return _rule_of_predicate(f"by_class({shown})", matches, overrides)


def by_name(*globs: str, **overrides: Unpack[Overrides]) -> UnitRule:
    """Make every module whose FQN matches one of ``globs`` a unit of its own.

    Args:
        globs: ``*`` and ``?`` stay within one component, ``**`` crosses dots: ``"layers.*"`` is ``layers.0`` but
            not ``layers.0.mlp``. ``""`` is the root.
        overrides: settings for these units. ``mesh="efsdp"`` shards them on that axis of the mesh alone: experts that
            the model has split, as DTensors, over the axes after it. ``tiles=4`` and ``replicate=True`` as for
            ``by_class``.
    """
    patterns = [_compile_glob(glob) for glob in globs]

    def matches(fqn: str, _: nn.Module) -> bool:
        return any(pattern.fullmatch(fqn) for pattern in patterns)

    return _rule_of_predicate(f"by_name({', '.join(map(repr, globs))})", matches, overrides)


def by_size(min_numel: int, **overrides: Unpack[Overrides]) -> UnitRule:
    """Make units of the innermost modules that hold at least ``min_numel`` elements outside of inner units.

    Modules that are not called, such as the ``out_proj`` of ``nn.MultiheadAttention``, count for the one around them.

    Args:
        min_numel: elements.
        overrides: settings for these units.
    """

    def select(tree: ModelTree, taken: frozenset[int]) -> list[Selection]:
        # The elements below each entry that no unit has, summed up from the innermost modules.
        left = [sum(tree.specs[fqn].numel for fqn in owned) for owned in tree.owned]
        found = set[int]()
        for entry in tree.post_order:
            if not entry or entry in taken or tree.firsts[entry] in found:
                continue  # the last is a module that was found by another name
            if left[entry] >= min_numel and is_called(tree, entry):
                found.add(entry)
            else:
                left[tree.parents[entry]] += left[entry]
        return [Selection((entry,), overrides) for entry in sorted(found)]

    return UnitRule(f"by_size({min_numel})", select)


def group(*globs: str, **overrides: Unpack[Overrides]) -> UnitRule:
    """Make one unit of all modules whose FQN matches one of ``globs``, torch's ``fully_shard([a, b])``.

    They are gathered when the first of them runs and resharded when all have run. Tied modules must be grouped.

    Args:
        globs: as for ``by_name``; each must match.
        overrides: settings for this unit.
    """
    text = f"group({', '.join(map(repr, globs))})"

    def select(tree: ModelTree, _: frozenset[int]) -> list[Selection]:
        found: set[int] = set()
        for glob in globs:
            pattern = _compile_glob(glob)
            matched = {entry for entry in tree.first_entries if pattern.fullmatch(tree.fqns[entry])}
            if not matched:
                raise PlanError(_no_match(text, tree, f"{glob!r} matches no module"))
            found |= matched
        return [Selection(tuple(sorted(found)), overrides)]

    return UnitRule(text, select)


def select(tree: ModelTree, rules: Rule | Sequence[Rule] | None) -> Chosen:
    """Return what a rule, or all of a list, select; the first match wins, for units and for tiles.

    Raises PlanError: a rule matches nothing that is left, or a module without forward; a setting is unknown.
    """
    chosen = Chosen()
    units: dict[int, str] = {}  # the text of the rule that took each entry
    tiles: dict[int, str] = {}
    listed: Any = [] if rules is None else rules if isinstance(rules, (list, tuple)) else [rules]
    for rule in map(as_rule, listed):
        found = rule.select(tree, frozenset(units))
        found = [new for new in found if any(not e or any(tree.owned[e : tree.ends[e]]) for e in new.entries)]
        if not found:
            raise PlanError(_no_match(rule.text, tree, "matches no module that has parameters"))
        taken = units if found[0].overrides.get("tiles") is None else tiles
        fresh = [new for new in found if taken.keys().isdisjoint(new.entries)]
        if not fresh:
            claims = [f"{tree.fqns[e] or '(root)'} (by {taken[e]})" for new in found for e in new.entries if e in taken]
            fix = "Remove one of the rules, or put the narrower one first"
            first_wins = "Each module is in one unit, and the first matching rule wins"
            raise PlanError(message(rule.text, f"matches modules of earlier rules: {listing(claims)}", first_wins, fix))
        for new in fresh:
            check_settings(rule.text, new.overrides)
            taken.update(dict.fromkeys(new.entries, rule.text))
            _choose(tree, rule.text, new, chosen)
        _check_dim(tree, rule.text, fresh)
    chosen.by_default = rules is None or (not chosen.units and bool(chosen.tiles or chosen.replicated))
    return chosen


def _choose(tree: ModelTree, text: str, new: Selection, chosen: Chosen) -> None:
    """Add a selection of the rule ``text`` to what is chosen; PlanError if its modules cannot be that."""
    tiles, replicate = new.overrides.get("tiles"), new.overrides.get("replicate")
    if (tiles is not None or replicate) and len(new.overrides) > 1:
        alone, value = ("replicate", True) if replicate else ("tiles", tiles)
        problem = f"has {alone}={value} with {listing(sorted(new.overrides.keys() - {alone}))}"
        rule = f"A rule with {alone}= makes no units: its modules stay in whichever unit they are"
        raise PlanError(message(text, problem, rule, f"Give {alone}= a rule of its own"))
    if replicate:
        inside = [below for entry in new.entries for below in tree.subtree(entry)]
        if split := sorted({fqn for each in inside for fqn in tree.owned[each] if tree.specs[fqn].tensor_parallel}):
            rule = "Only parameters that every rank holds in full can be replicated"
            fix = "Leave its module out of the rule with replicate=True"
            raise PlanError(message(listing(split, 6), f"is a DTensor, and {text} matches it", rule, fix))
        chosen.replicated.update(inside)
        return
    for entry in (entry for entry in new.entries if not has_forward(tree.modules[entry])):
        name, problem = tree.fqns[entry], f"is a {type(tree.modules[entry]).__name__} without forward"
        rule = "A unit is gathered when its module is called, and a module without forward is never called"
        fix = f'Select its children instead: by_name("{name}.*")'
        raise PlanError(message(name, f"{problem}, and {text} matches it", rule, fix))
    if tiles is not None:
        chosen.tiles.update(dict.fromkeys(new.entries, tiles))
    else:
        chosen.units.append(new)


def _check_dim(tree: ModelTree, text: str, found: list[Selection]) -> None:
    """Raise if no parameter has the dim of a rule; some, such as biases, need not."""
    if dim := found[0].overrides.get("shard_dim"):
        inside = [below for new in found for entry in new.entries for below in tree.subtree(entry)]
        most = max(len(tree.specs[fqn].shape) for each in inside for fqn in tree.owned[each])
        if dim >= most:
            problem = f"has shard_dim={dim}, but no parameter of its modules has more than {most} dims"
            raise PlanError(message(text, problem, "Dims count from 0", ""))


def as_rule(rule: Rule) -> UnitRule:
    """Return the rule object for a class, an FQN glob, a callable or a rule."""
    if isinstance(rule, UnitRule):
        return rule
    if isinstance(rule, str):
        return by_name(rule)
    if isinstance(rule, type) and issubclass(rule, nn.Module):
        return by_class(rule)
    if callable(rule) and not isinstance(rule, (type, nn.Module)):
        return _rule_of_predicate(getattr(rule, "__name__", repr(rule)), rule, Overrides())
    kinds = "by_class, by_name, by_size, group, a module class, an FQN glob or a callable (fqn, module)"
    raise PlanError(message("units", f"must be {kinds}, or a list of these, got {rule!r}", "", ""))


def _rule_of_predicate(
    text: str, predicate: Callable[[str, nn.Module], bool | Overrides], overrides: Overrides
) -> UnitRule:
    def select(tree: ModelTree, _: frozenset[int]) -> list[Selection]:
        found = []
        for entry in tree.first_entries:
            answer = predicate(tree.fqns[entry], tree.modules[entry])
            if isinstance(answer, Mapping):  # also an empty one
                found.append(Selection((entry,), Overrides(**{**overrides, **answer})))
            elif answer:
                found.append(Selection((entry,), overrides))
        return found

    return UnitRule(text, select)


def _compile_glob(glob: str) -> re.Pattern[str]:
    tokens = re.split(r"(\*\*|\*|\?|\[[^\]]*\])", glob)
    meaning = {"**": ".*", "*": "[^.]*", "?": "[^.]"}
    sets = {token: token.replace("[!", "[^") for token in tokens if token.startswith("[")}
    return re.compile("".join((meaning | sets).get(token, re.escape(token)) for token in tokens))


def _no_match(text: str, tree: ModelTree, problem: str) -> str:
    classes = dict.fromkeys(type(module).__name__ for module in tree.modules)
    modules = [fqn for fqn in tree.fqns if fqn and fqn.count(".") < 2]
    there = f"The model's classes are: {listing(classes)}. Its modules are: {listing(modules)}"
    return message(text, problem, there, "Use by_class for a class, by_name for a module, or remove the rule")


def check_settings(subject: str, settings: Mapping[str, Any]) -> None:
    """Raise PlanError for unknown settings and for values of another type than torch's; None means the default."""
    if unknown := sorted(settings.keys() - _SETTINGS.keys()):
        known = f"A unit's settings are {listing(_SETTINGS)}"
        raise PlanError(message(subject, f"has an unknown setting, {listing(unknown)}", known, ""))
    wrong = []
    for name, kind in _SETTINGS.items():
        if name in settings and not isinstance(settings[name], (kind, type(None))):
            wanted = "True, False or a number of ranks" if name == "reshard_after_forward" else f"a {kind.__name__}"
            of = f" of {subject}" if subject else ""
            wrong.append(message(f"{name}{of}", f"must be {wanted}, got {settings[name]!r}", "", ""))
    refuse(wrong)
    named_policy(settings.get("checkpoint_activations"))


def named_policy(value: object) -> bool | str:
    """Return ``checkpoint_activations`` as a plan has it: a policy by its name, which JSON stores and ranks compare."""
    if callable(value):
        value = f"{getattr(value, '__module__', '')}:{getattr(value, '__qualname__', '<locals>')}"
    if isinstance(value, str) and (value == "selective" or (":" in value and "<" not in value)):
        return value
    if value not in (None, False, True):
        problem = f'must be True, False, "selective" or a policy, got {value!r}'
        rule = "A plan stores the name of a policy, and each rank imports it"
        raise PlanError(message("checkpoint_activations", problem, rule, "Define the policy at the top of a module"))
    return bool(value)
