"""The user's rules for units: which modules share one all-gather, and with which settings."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias, get_type_hints

import torch.nn as nn
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy
from typing_extensions import TypedDict, Unpack

from shardkit.errors import PlanError, listing, message, refuse
from shardkit.planning.tree import ModelTree, has_forward


class Overrides(TypedDict, total=False):
    """The settings that a rule may give its units, each replacing the one given for the whole model."""

    reshard_after_forward: bool | int
    mp_policy: MixedPrecisionPolicy
    offload_policy: OffloadPolicy
    checkpoint_activations: bool
    compile: bool
    shard_dim: int  # of the unit's parameters that have this dim; others, such as biases, stay on dim 0
    mesh: str
    may_skip: bool
    tiles: int  # alone: the modules compute in tiles of tokens, and are units only if another rule says so


_SETTINGS = get_type_hints(Overrides)


@dataclass(frozen=True)
class Selection:
    """Modules that will be one unit."""

    entries: tuple[int, ...]  # their places in the ModelTree; several are torch's list form
    overrides: Overrides = field(default_factory=Overrides)  # settings that a rule asked for
    reshard: bool = True  # what reshard_after_forward=None means for it

    @property
    def tiles(self) -> int | None:
        """In how many tiles its modules compute; None for a unit."""
        return self.overrides.get("tiles")


@dataclass(frozen=True)
class UnitRule:
    """What ``by_class``, ``by_name``, ``by_size`` and ``group`` return; made by them only."""

    text: str  # the call that made it, for messages
    select: Callable[[ModelTree, frozenset[int]], list[Selection]]  # given the entries that earlier rules took
    together: bool = False  # whether all that it matches is one unit


Rule: TypeAlias = UnitRule | type[nn.Module] | str | Callable[[str, nn.Module], "bool | Overrides"]


def by_class(*classes: type[nn.Module] | str, together: int = 1, **overrides: Unpack[Overrides]) -> UnitRule:
    """Make every module of one of ``classes``, or of a subclass, a unit of its own.

    Args:
        classes: classes, or names of classes, where importing them is inconvenient.
        together: fuses this many consecutive modules into one unit, torch's ``fully_shard([a, b])``. For small blocks
            this saves CPU time, with fewer hooks and larger collectives. It costs memory, since they are gathered
            together.
        overrides: settings for these units. ``tiles=4``, alone, makes no units: the modules compute in tiles.

    Example:
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

    return _rule_of_predicate(f"by_class({shown})", matches, overrides, together)


def by_name(*globs: str, together: int = 1, **overrides: Unpack[Overrides]) -> UnitRule:
    """Make every module whose FQN matches one of ``globs`` a unit of its own.

    Args:
        globs: ``*`` and ``?`` stay within one component, ``**`` crosses dots: ``"layers.*"`` is ``layers.0`` but
            not ``layers.0.mlp``. ``""`` is the root.
        together: fuses this many consecutive modules into one unit, as for ``by_class``.
        overrides: settings for these units. ``mesh="efsdp"`` shards them on that axis of the mesh alone: experts that
            the model has split, as DTensors, over the axes after it. ``tiles=4`` as for ``by_class``.
    """
    patterns = [_compile_glob(glob) for glob in globs]

    def matches(fqn: str, _: nn.Module) -> bool:
        return any(pattern.fullmatch(fqn) for pattern in patterns)

    return _rule_of_predicate(f"by_name({', '.join(map(repr, globs))})", matches, overrides, together)


def by_size(min_numel: int, **overrides: Unpack[Overrides]) -> UnitRule:
    """Make units of the innermost modules that hold at least ``min_numel`` elements outside of inner units.

    Containers without forward are looked into; ``nn.MultiheadAttention`` is taken whole, since it uses the
    weight of its ``out_proj`` without calling it.

    Args:
        min_numel: elements.
        overrides: settings for these units.
    """
    if isinstance(min_numel, bool) or not isinstance(min_numel, int) or min_numel < 1:
        problem = f"must be a number of elements, at least 1, got {min_numel!r}"
        raise PlanError(message("min_numel", problem, "", "Use by_size(10**8)"))

    def select(tree: ModelTree, taken: frozenset[int]) -> list[Selection]:
        mha = (entry for entry, module in enumerate(tree.modules) if isinstance(module, nn.MultiheadAttention))
        skipped = {0, *taken, *(below for entry in mha for below in tree.subtree(entry) if below != entry)}
        # The elements below each entry that no unit has, summed up from the innermost modules.
        left = [sum(tree.params[fqn].numel() for fqn in owned) for owned in tree.owned]
        found: list[int] = []
        for entry in tree.post_order:
            if left[entry] >= min_numel and entry not in skipped and has_forward(tree.modules[entry]):
                found.append(entry)
            elif entry not in taken and entry != 0:
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
        found: list[int] = []
        for glob in globs:
            pattern = _compile_glob(glob)
            matched = [entry for entry in tree.first_entries if pattern.fullmatch(tree.fqns[entry])]
            if not matched:
                raise PlanError(_no_match(text, tree, f"{glob!r} matches no module"))
            found += [entry for entry in matched if entry not in found]
        return [Selection(tuple(sorted(found)), overrides)]

    return UnitRule(text, select, together=True)


def select(tree: ModelTree, rules: Iterable[Rule]) -> list[Selection]:
    """Return the selections of all rules; the first match wins, for units and for tiles.

    Raises:
        PlanError: a rule matches nothing or nothing that is left, two rules claim one module for different
            groups, a module has no forward, or an override is unknown.
    """
    selections: list[Selection] = []
    taken: dict[int, str] = {}
    cut: dict[int, str] = {}

    def earlier(new: Selection) -> dict[int, str]:
        return taken if new.tiles is None else cut

    for rule in map(as_rule, rules):
        found = rule.select(tree, frozenset(taken))
        found = [new for new in found if any(not entry or tree.has_params(entry) for entry in new.entries)]
        if not found:
            raise PlanError(_no_match(rule.text, tree, "matches no module that has parameters"))
        fresh = [new for new in found if not any(entry in earlier(new) for entry in new.entries)]
        if not fresh or (rule.together and fresh != found):
            claimed = [(entry, earlier(new)) for new in found for entry in new.entries if entry in earlier(new)]
            claims = [f"{tree.fqns[entry] or '(root)'} (by {by[entry]})" for entry, by in claimed]
            problem = f"matches modules of earlier rules: {listing(claims)}"
            first_wins = "Each module is in one unit, and the first matching rule wins"
            fix = "Remove one of the rules, or put the narrower one first"
            raise PlanError(message(rule.text, problem, first_wins, fix))
        for new in fresh:
            for entry in (entry for entry in new.entries if not has_forward(tree.modules[entry])):
                name, kind = tree.fqns[entry], type(tree.modules[entry]).__name__
                called = "A unit is gathered when its module is called, and a module without forward is never called"
                fix = f'Select its children instead: by_name("{name}.*")'
                problem = f"is a {kind} without forward, and {rule.text} matches it"
                raise PlanError(message(name, problem, called, fix))
            check_settings(rule.text, new.overrides)
            _check_tiles(rule.text, new)
            earlier(new).update(dict.fromkeys(new.entries, rule.text))
        _check_dim(rule, tree, fresh)
        selections += fresh
    return selections


def only_tiles(selections: list[Selection]) -> bool:
    """Return whether rules selected tiles and no units, so that the default rule makes the units."""
    return bool(selections) and all(new.tiles is not None for new in selections)


def _check_tiles(text: str, new: Selection) -> None:
    if new.tiles is not None and (len(new.overrides) > 1 or len(new.entries) > 1):
        others = listing(sorted(new.overrides.keys() - {"tiles"})) or "several modules"
        rule = "A rule with tiles= makes no units: each module computes in tiles, in whichever unit it is"
        fix = "Give tiles= a rule of its own, by_class or by_name"
        raise PlanError(message(text, f"has tiles={new.tiles} with {others}", rule, fix))


def _check_dim(rule: UnitRule, tree: ModelTree, found: list[Selection]) -> None:
    """Raise if no parameter has the dim of a rule; some, such as biases, need not."""
    dim = found[0].overrides.get("shard_dim") or 0
    below = (inner for new in found for entry in new.entries for inner in tree.subtree(entry))
    most = max((tree.params[fqn].dim() for inner in below for fqn in tree.owned[inner]), default=0)
    if dim >= max(most, 1):
        problem = f"has shard_dim={dim}, but no parameter of its modules has more than {most} dims"
        raise PlanError(message(rule.text, problem, "Dims count from 0", ""))


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
    text: str, predicate: Callable[[str, nn.Module], bool | Overrides], overrides: Overrides, together: int = 1
) -> UnitRule:
    if isinstance(together, bool) or not isinstance(together, int) or together < 1:
        problem = f"has together={together!r}, which must be a number of consecutive modules, at least 1"
        raise PlanError(message(text, problem, "", "Use together=2"))

    def select(tree: ModelTree, taken: frozenset[int]) -> list[Selection]:
        found = []
        for entry in tree.first_entries:
            answer = predicate(tree.fqns[entry], tree.modules[entry])
            if answer or isinstance(answer, Mapping):
                own = answer if isinstance(answer, Mapping) else Overrides()
                found.append(Selection((entry,), Overrides(**{**overrides, **own})))
        if together == 1:
            return found
        siblings: dict[int, list[Selection]] = {}  # by parent
        for new in found:
            if new.entries[0] not in taken:
                siblings.setdefault(tree.parents[new.entries[0]], []).append(new)
        starts = ((each, start) for each in siblings.values() for start in range(0, len(each), together))
        fused = (each[start : start + together] for each, start in starts)
        return [Selection(tuple(new.entries[0] for new in each), each[0].overrides) for each in fused]

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
    return message(text, problem, there, "Name one of these, or remove the rule")


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
