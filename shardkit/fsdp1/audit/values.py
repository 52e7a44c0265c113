"""What an expression of a program may be, as far as FSDP1 is concerned, and how it becomes known."""

from __future__ import annotations

import ast
import builtins
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias

from shardkit.fsdp1.audit.names import public_name
from shardkit.fsdp1.audit.syntax import classes_of, is_decorated, place
from shardkit.fsdp1.instead import FSDP

Kind: TypeAlias = Literal[
    "path", "class", "instance", "function", "method", "group", "setting", "wrapped", "wrapper", "other"
]


MOST_PATHS = 64  # of one variable, which a loop may walk along a tree
LONGEST_PATH = 12  # names; a loop may ask for an attribute of an attribute without end


class Value(NamedTuple):
    """One thing that an expression may be.

    Attributes:
        kind: something imported; a class, an instance, a function or a bound method of the file; a tuple, list or dict;
            an object of one of FSDP1's other classes; a model that it wrapped; a partial of its class; or, on another
            path through the program, something else.
        of: the dotted path, the node of the class or function, the ``Group``, or the call that made the object.
        likely: only the name of what is imported says that it is FSDP1's.
        kept: it went through a variable, so it was reported where it was assigned.
    """

    kind: Kind
    of: Any = None
    likely: bool = False
    kept: bool = False


WRAPPED, WRAPPER, OTHER = Value("wrapped"), Value("wrapper"), Value("other")


class Var:
    """All that something may be, and who waits for more of it: nobody where all is known."""

    __slots__ = ("before", "readers", "values")

    def __init__(self, *values: Value, is_open: bool = False) -> None:
        self.values = dict.fromkeys(values)  # a set in order
        self.readers: list[tuple[Any, ...]] | None = [] if is_open else None
        self.before: tuple[Var | None] | None = None  # what it was, in a tuple, where a condition told what it is


NOTHING, NONE = Var(), Var()  # of no concern; the constant None


@dataclass(eq=False)
class Group:
    """The expressions in a tuple, list or dict, by index or key; what else is in it; whether its keys are all known."""

    parts: dict[object, ast.expr]
    rest: Var
    is_complete: bool = True


@dataclass
class Scope:
    """A module, a function, a class body or a comprehension: its names, and places such as ``self.model`` by text."""

    node: ast.AST
    parent: Scope | None = None
    names: dict[str, Var] = field(default_factory=dict)
    shared: set[str] = field(default_factory=set)  # names that a ``global`` statement made the module's


class Values:
    """What the expressions of a program may be, and its cells: what is assigned in one place and read in another."""

    def __init__(self, tree: ast.Module) -> None:
        self._tree, self._scope = tree, Scope(tree)
        self._opened: list[Var] = []
        self._vars: dict[ast.AST, Var] = {}
        self._cells: dict[tuple[ast.AST, str], Var] = {}
        self._attributes: dict[tuple[Var, str], Var] = {}
        self._joins: list[tuple[Var, Sequence[Var]]] = []
        self._waiting: deque[tuple[Value, Any]] = deque()

    def values(self, node: ast.AST) -> Iterable[Value]:
        """What an expression may be; empty where it is of no concern."""
        return self._var(node).values

    def is_constructor(self, value: Value) -> bool:
        """Whether calling it wraps a model."""
        if value.kind == "path":
            return public_name(value.of) == (FSDP, "")
        return value == WRAPPER or (value.kind == "class" and WRAPPED in self._cell(value.of, "").values)

    def is_class(self, node: ast.expr) -> bool:
        """Whether it may be FSDP1's class, or one of the file that derives from it."""
        return any(map(self.is_constructor, self.values(node)))

    def defines(self, value: Value, name: str) -> bool:
        """Whether it is a class of the file, or an instance, that has such a method, or wrapped models there."""
        own = self._cell(value.of, name).values if value.kind in ("class", "instance") else ()
        return any(each.kind in ("function", "group") or WRAPPED in own for each in own)

    def entries(self, node: ast.expr) -> dict[object, ast.expr] | None:
        """The keys and expressions of a dict; None where they are not known."""
        groups = [value.of for value in self.values(node) if value.kind == "group" and not value.kept]
        if not groups or len(groups) < len(self._var(node).values) or not all(group.is_complete for group in groups):
            return None
        return {key: part for group in groups for key, part in group.parts.items()}

    def checked(self, node: ast.expr) -> list[ast.expr]:
        """The ``x`` of ``isinstance(x, FSDP)``, and of ``type(x) is FSDP`` and the like."""
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and len(node.args) == 2:
            is_check = node.func.id in ("isinstance", "issubclass") and any(map(self.is_class, classes_of(node)))
            return node.args[:1] if is_check else []
        if isinstance(node, ast.Compare) and len(node.ops) == 1 and self.is_class(node.comparators[0]):
            left = node.left
            if isinstance(left, ast.Call) and isinstance(left.func, ast.Name) and left.func.id == "type":
                return left.args[:1]
            return [left.value] if isinstance(left, ast.Attribute) and left.attr == "__class__" else []
        return []

    # --- Vars ---------------------------------------------------------------------------------------------------------

    def _var(self, node: ast.AST) -> Var:
        return self._vars.get(node, NOTHING)

    def _open(self) -> Var:
        self._opened.append(Var(is_open=True))
        return self._opened[-1]

    def _add(self, var: Var, value: Value) -> None:
        is_one_more = value.kind == "path" and len(var.values) >= MOST_PATHS
        if value not in var.values and not is_one_more:
            var.values[value] = None
            self._waiting.extend((value, reader) for reader in var.readers or ())

    def _pass_on(self) -> None:
        while self._waiting:
            value, (reader, *arguments) = self._waiting.popleft()
            reader(value, *arguments)

    def _each(self, var: Var, reader: Callable[..., None], *arguments: object) -> None:
        """Call ``reader`` with all that the var is, and with what it turns out to be later."""
        for value in list(var.values):
            reader(value, *arguments)
        if var.readers is not None:
            var.readers.append((reader, *arguments))

    def _link(self, source: Var, target: Var, kinds: tuple[Kind, ...] | None = None) -> None:
        """Pass on what ``source`` is, if it is of these kinds."""
        self._each(source, self._pass, target, kinds)

    def _pass(self, value: Value, target: Var, kinds: tuple[Kind, ...] | None) -> None:
        if kinds is None or value.kind in kinds:
            self._add(target, value)

    def _keep(self, value: Value, target: Var, is_local: bool = False) -> None:
        """Pass on what goes through a variable; where that is of another scope, what matters there."""
        if value.kind != "path" or is_local or self.is_constructor(value):
            is_kept = value.kept or value.kind == "path" or (value.kind == "group" and not is_local)
            self._add(target, value._replace(kept=is_kept))

    def _union(self, parts: Iterable[Var]) -> Var:
        var = self._open()
        for part in parts:
            self._link(part, var)
        return var

    def _joined(self, parts: Sequence[Var]) -> Var:
        self._joins.append((self._union(parts), parts))
        return self._joins[-1][0]

    def _cell(self, owner: ast.AST, name: str) -> Var:
        """An attribute of a class, a parameter of a function, a global of the module; ``""`` is what a call gives."""
        if (owner, name) not in self._cells:
            var = self._cells[owner, name] = self._open()
            if isinstance(owner, ast.ClassDef):
                methods = [each for each in owner.body if isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef))]
                var.values |= dict.fromkeys(Value("function", each) for each in methods if each.name == name)
                for value in (value for base in owner.bases for value in self.values(base)):
                    if value.kind == "class":
                        self._link(self._cell(value.of, name), var, None if name else ("wrapped",))
                    elif not name and self.is_constructor(value):
                        self._add(var, WRAPPED)
        return self._cells[owner, name]

    def _lookup(self, name: str) -> Var:
        scope: Scope | None = self._scope
        while scope is not None:
            var = scope.names.get(name) if scope is self._scope or not isinstance(scope.node, ast.ClassDef) else None
            if var is not None and (scope.parent is not None or var not in (NOTHING, NONE)):
                return var
            scope = scope.parent
        return NOTHING if hasattr(builtins, name) else self._cell(self._tree, name)

    def _at_place(self, node: ast.expr) -> Var:
        text, scope = place(node), self._scope
        while text not in scope.names and scope.parent is not None:
            scope = scope.parent
        return scope.names.get(text, NOTHING) if text else NOTHING

    def _merged(self, *branches: dict[str, Var]) -> dict[str, Var]:
        """The names after branches of which one was run. What a condition told of one ends, unless it was assigned."""
        merged = {}
        for name in dict.fromkeys(name for branch in branches for name in branch):
            parts = [branch[name] for branch in branches if name in branch]
            before = dict.fromkeys(part.before[0] if part.before else part for part in parts)
            if len(parts) == len(branches) and all(part is parts[0] for part in parts):
                merged[name] = parts[0]
            elif len(before) > 1:
                merged[name] = self._joined(parts)
            elif (var := next(iter(before))) is not None:
                merged[name] = var
        return merged

    # --- Attributes and items -----------------------------------------------------------------------------------------

    def _attribute(self, base: Var, name: str) -> Var:
        if base in (NOTHING, NONE):
            return NOTHING
        if (base, name) not in self._attributes:
            var = self._attributes[base, name] = self._open()
            self._each(base, self._get, name, var)
        return self._attributes[base, name]

    def _get(self, owner: Value, name: str, var: Var) -> None:
        if owner.kind == "path" and owner.of.count(".") < LONGEST_PATH:
            self._add(var, Value("path", f"{owner.of}.{name}", owner.likely))
        elif owner.kind == "class":
            self._link(self._cell(owner.of, name), var)
        elif owner.kind == "instance":
            self._each(self._cell(owner.of, name), self._get_bound, var)

    def _get_bound(self, value: Value, var: Var) -> None:
        if value.kind == "function" and is_decorated(value.of, "property"):
            self._link(self._cell(value.of, ""), var)
        else:
            is_method = value.kind == "function" and not is_decorated(value.of, "staticmethod")
            self._add(var, value._replace(kind="method") if is_method else value)

    def _item(self, base: Var, key: object = None) -> Var:
        """What stands at a key; by default, what may stand at any."""
        if not base.values and base.readers is None:
            return NOTHING
        var = self._open()
        self._each(base, self._take, key, var)
        return var

    def _take(self, value: Value, key: object, var: Var) -> None:
        if value.kind == "group":
            parts = value.of.parts
            for node in [parts[key]] if key in parts else parts.values():
                self._link(self._var(node), var)
            self._link(value.of.rest, var)
