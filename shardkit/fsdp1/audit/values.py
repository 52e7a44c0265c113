"""What an expression of a program may be, as far as FSDP1 is concerned, and where such values are kept."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias

from shardkit.fsdp1.audit.names import public_name, wraps_otherwise
from shardkit.fsdp1.audit.syntax import classes_of, is_decorated, place
from shardkit.replacements import FSDP

Kind: TypeAlias = Literal[
    "path", "class", "instance", "function", "method", "group", "setting", "wrapped", "wrapper", "ddp", "none", "other"
]


MOST_PATHS = 64  # of one expression, which a loop may walk along a tree
LONGEST_PATH = 12  # names; a loop may ask for an attribute of an attribute without end


class Value(NamedTuple):
    """One thing that an expression may be.

    Attributes:
        kind: something imported; a class, an instance, a function or a bound method of the file; a tuple, list or dict;
            an object of one of FSDP1's other classes; a model that it wrapped; a partial of its class; a model that DDP
            or another package wrapped; None; or, on another path through the program, something else.
        of: the dotted path, the node of the class or function, the ``Group``, or the call that made the object.
        likely: only the name of what is imported says that it is FSDP1's.
        kept: it went through a variable, so it was reported where it was assigned.
    """

    kind: Kind
    of: Any = None
    likely: bool = False
    kept: bool = False


WRAPPED, WRAPPER, FOREIGN = Value("wrapped"), Value("wrapper"), Value("ddp")
NONE, OTHER = Value("none"), Value("other")
Maybe: TypeAlias = tuple[Value, ...]  # all that something may be, each once; empty where it is of no concern


class Narrowed(tuple[Value, ...]):
    """What a condition told that a name is; ``before`` is what it was, None where it was unknown."""

    before: Maybe | None = None


@dataclass(eq=False)
class Group:
    """The expressions in a tuple, list or dict, by index or key, and whether its keys are all known."""

    parts: dict[object, ast.expr] = field(default_factory=dict)
    is_complete: bool = True


@dataclass
class Scope:
    """A module, a function, a class body or a comprehension: its names, and places such as ``self.model`` by text."""

    node: ast.AST
    parent: Scope | None = None
    names: dict[str, Maybe] = field(default_factory=dict)
    shared: set[str] = field(default_factory=set)  # names that a ``global`` statement made the module's


def union(*parts: Iterable[Value]) -> Maybe:
    """Return all values of the parts, each once, with at most ``MOST_PATHS`` paths."""
    values = tuple(dict.fromkeys(value for part in parts for value in part))
    if len(values) <= MOST_PATHS:
        return values
    paths = [value for value in values if value.kind == "path"][:MOST_PATHS]
    return (*paths, *(value for value in values if value.kind != "path"))


class Values:
    """What the expressions of a program may be, and its cells: what is assigned in one place and read in another."""

    def __init__(self, tree: ast.Module) -> None:
        self._tree, self._scope = tree, Scope(tree)
        self._of_node: dict[ast.AST, Maybe] = {}
        # By owner and name: an attribute of a class, a parameter of a function, a global of the module, a name at the
        # end of a loop. ``""`` is what a call of the owner gives, and what else is in a group.
        self._cells: dict[tuple[object, str], Maybe] = {}
        self._groups: dict[ast.AST, Group] = {}
        self._has_changed = False  # whether a cell has got more in this reading
        self._is_settled = False  # whether the cells hold all, so that what is unknown is something else

    def values(self, node: ast.AST) -> Maybe:
        """Return what an expression may be; empty where it is of no concern."""
        return self._of_node.get(node, ())

    def is_constructor(self, value: Value) -> bool:
        """Return whether calling it wraps a model."""
        if value.kind == "path":
            return public_name(value.of) == (FSDP, "")
        if value.kind != "class":
            return value == WRAPPER
        bases = [base for each in self._ancestors(value.of) for node in each.bases for base in self.values(node)]
        return any(base.kind == "path" and self.is_constructor(base) for base in bases) or WRAPPER in bases

    def is_class(self, node: ast.expr) -> bool:
        """Return whether it may be FSDP1's class, or one of the file that derives from it."""
        return any(map(self.is_constructor, self.values(node)))

    def defines(self, value: Value, name: str) -> bool:
        """Return whether it is a class of the file, or an instance, that has such a method, or wrapped models there."""
        own = self._cell(value.of, name) if value.kind in ("class", "instance") else ()
        return any(each.kind in ("function", "group") or each == WRAPPED for each in own)

    def entries(self, node: ast.expr) -> dict[object, ast.expr] | None:
        """Return the keys and expressions of a dict; None where they are not known."""
        groups = [value.of for value in self.values(node) if value.kind == "group" and not value.kept]
        if not groups or len(groups) < len(self.values(node)) or not all(group.is_complete for group in groups):
            return None
        return {key: part for group in groups for key, part in group.parts.items()}

    def checked(self, node: ast.expr) -> list[ast.expr]:
        """Return the ``x`` of ``isinstance(x, FSDP)``, and of ``type(x) is FSDP`` and the like."""
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and len(node.args) == 2:
            is_check = node.func.id in ("isinstance", "issubclass") and any(map(self.is_class, classes_of(node)))
            return node.args[:1] if is_check else []
        if isinstance(node, ast.Compare) and len(node.ops) == 1 and self.is_class(node.comparators[0]):
            left = node.left
            if isinstance(left, ast.Call) and isinstance(left.func, ast.Name) and left.func.id == "type":
                return left.args[:1]
            return [left.value] if isinstance(left, ast.Attribute) and left.attr == "__class__" else []
        return []

    def excluded(self, node: ast.expr) -> list[ast.expr]:
        """Return the ``x`` of ``isinstance(x, DistributedDataParallel)`` and the like, of other wrappers only."""
        if not isinstance(node, ast.Call) or ast.unparse(node.func) != "isinstance" or len(node.args) != 2:
            return []
        classes = [[value for value in self.values(each) if value.kind == "path"] for each in classes_of(node)]
        return node.args[:1] * all(any(wraps_otherwise(value.of) for value in each) for each in classes)

    # --- Cells --------------------------------------------------------------------------------------------------------

    def _ancestors(self, node: ast.ClassDef) -> list[ast.ClassDef]:
        """Return the class and the classes of the file that it derives from."""
        found = [node]
        for each in found:
            bases = (value for base in each.bases for value in self.values(base))
            found += dict.fromkeys(base.of for base in bases if base.kind == "class" and base.of not in found)
        return found

    def _cell(self, owner: object, name: str) -> Maybe:
        if not isinstance(owner, ast.ClassDef):
            return self._cells.get((owner, name), ())
        if not name:
            return (*self._cells.get((owner, ""), ()), *[WRAPPED] * self.is_constructor(Value("class", owner)))
        return union(*(self._cells.get((each, name), ()) for each in self._ancestors(owner)))

    def _add(self, owner: object, name: str, values: Iterable[Value]) -> None:
        """Add to a cell."""
        old = self._cells.get((owner, name), ())
        self._cells[owner, name] = union(old, values)
        self._has_changed |= len(self._cells[owner, name]) > len(old)

    def _store(self, owner: object, name: str, values: Iterable[Value]) -> None:
        """Add to a cell of another scope what matters there."""
        kept = (value for value in values if value.kind not in ("path", "none") or self.is_constructor(value))
        self._add(owner, name, (value._replace(kept=value.kept or value.kind in ("path", "group")) for value in kept))

    def _group(self, node: ast.AST) -> Group:
        group = self._groups.setdefault(node, Group())
        group.parts, group.is_complete = {}, True
        return group

    # --- Names --------------------------------------------------------------------------------------------------------

    def _lookup(self, name: str) -> Maybe:
        scope: Scope | None = self._scope
        while scope is not None:
            is_seen = scope is self._scope or not isinstance(scope.node, ast.ClassDef)
            found = scope.names.get(name) if is_seen else None
            if found is not None and (scope.parent is not None or found not in ((), (NONE,))):
                return found
            scope = scope.parent
        return () if hasattr(builtins, name) else self._cell(self._tree, name)

    def _at_place(self, node: ast.expr) -> Maybe:
        text, scope = place(node), self._scope
        while text not in scope.names and scope.parent is not None:
            scope = scope.parent
        return scope.names.get(text, ()) if text else ()

    def _joined(self, *parts: Maybe) -> Maybe:
        """Return what something may be that is any of the parts."""
        values = union(*parts)
        is_unknown = self._is_settled and any(part == () for part in parts)
        return union((value for value in values if value != NONE or len(values) == 1), [OTHER] * is_unknown)

    def _merged(self, *branches: dict[str, Maybe]) -> dict[str, Maybe]:
        """Return the names after branches of which one ran. What a condition told ends, unless it was assigned."""
        merged = {}
        for name in dict.fromkeys(name for branch in branches for name in branch):
            parts = [branch[name] for branch in branches if name in branch]
            before = dict.fromkeys(part.before if isinstance(part, Narrowed) else part for part in parts)
            if len(parts) == len(branches) and all(part is parts[0] for part in parts):
                merged[name] = parts[0]
            elif len(before) > 1:
                merged[name] = self._joined(*parts)
            elif (values := next(iter(before))) is not None:
                merged[name] = values
        return merged

    # --- Attributes and items -----------------------------------------------------------------------------------------

    def _attribute(self, owners: Maybe, name: str) -> Maybe:
        found: list[Value] = []
        for owner in owners:
            if owner.kind == "path" and owner.of.count(".") < LONGEST_PATH:
                found.append(Value("path", f"{owner.of}.{name}", owner.likely))
            elif owner.kind == "class":
                found += self._cell(owner.of, name)
            elif owner.kind == "instance":
                found += (each for value in self._cell(owner.of, name) for each in self._bound(value))
        return union(found)

    def _bound(self, value: Value) -> Maybe:
        """Return what an attribute of a class is on an instance."""
        if value.kind != "function" or is_decorated(value.of, "staticmethod"):
            return (value,)
        return self._cell(value.of, "") if is_decorated(value.of, "property") else (value._replace(kind="method"),)

    def _item(self, values: Maybe, key: object = None) -> Maybe:
        """Return what stands at a key; by default, what may stand at any."""
        groups = [value.of for value in values if value.kind == "group"]
        nodes = ([group.parts[key]] if key in group.parts else group.parts.values() for group in groups)
        parts = [self.values(node) for each in nodes for node in each]
        return union(*parts, *(self._cell(group, "") for group in groups))
