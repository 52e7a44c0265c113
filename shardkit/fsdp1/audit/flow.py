"""Data flow analysis: which expressions of a program may be wrapped models or other values of FSDP1.

The program is read from top to bottom, and the body of a function after the scope around it. This repeats until no
reading adds values, because a parameter gets the arguments of calls further down. Where branches join, a name may have
its value from the end of any of them. A last reading finds the names that may also be something else.
"""

from __future__ import annotations

import ast
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

from shardkit.fsdp1.audit.names import PARTIAL, STATICS, bound, imported, public_name, wraps_otherwise
from shardkit.fsdp1.audit.syntax import Function, is_decorated, leaves, parameters_of, parsed, place, read_by_getattr
from shardkit.fsdp1.audit.values import FOREIGN, NONE, WRAPPED, WRAPPER, Maybe, Narrowed, Scope, Value, Values, union
from shardkit.replacements import FSDP

SAME_MODEL = {"to", "cuda", "cpu", "train", "eval", "half", "bfloat16", "float", "double", "requires_grad_", "compile"}
SAME_ITEMS = {"list", "tuple", "reversed", "sorted"}
HOLDERS = {"list", "List", "tuple", "Tuple", "dict", "Dict", "Sequence", "Iterable", "Iterator", "Mapping", "set"}
MOST_READINGS = 16  # and one for each function: a reading passes a value through at least one more call


class Flow(Values, ast.NodeVisitor):
    """The possible values of each expression in a program."""

    def __init__(self, tree: ast.Module) -> None:
        super().__init__(tree)
        self.annotations: dict[ast.AST, ast.expr] = {}  # annotations written as strings, parsed
        self._bodies: deque[tuple[Function, Scope]] = deque()
        for self._is_settled in (False, True):
            for _ in range(MOST_READINGS + sum(isinstance(node, ast.FunctionDef) for node in ast.walk(tree))):
                self._has_changed = False
                self._scope = Scope(tree)
                self.generic_visit(tree)
                while self._bodies:
                    self._read_body(*self._bodies.popleft())
                if not self._has_changed:
                    break

    # --- Names --------------------------------------------------------------------------------------------------------

    def _bind(self, target: ast.expr, values: Maybe) -> None:
        if isinstance(target, (ast.Tuple, ast.List)):
            for index, each in enumerate(target.elts):
                self._bind(each, self._item(values, index))
        elif isinstance(target, ast.Name):
            self._scope.names[target.id] = tuple(
                value._replace(kept=value.kept or value.kind == "path") for value in values
            )
            if target.id in self._scope.shared:
                self._store(self._tree, target.id, values)
            if isinstance(self._scope.node, ast.ClassDef):
                self._store(self._scope.node, target.id, values)
        elif isinstance(target, (ast.Attribute, ast.Subscript)):
            self.generic_visit(target)
            for owner in self.values(target.value):
                if isinstance(target, ast.Attribute) and owner.kind in ("class", "instance"):
                    self._store(owner.of, target.attr, values)
                elif isinstance(target, ast.Subscript) and owner.kind == "group":
                    owner.of.is_complete = False
                    self._store(owner.of, "", values)
            self._scope.names[place(target)] = values

    def _narrowed(self, test: ast.expr) -> dict[str, Maybe]:
        """Return the names where the condition holds: ``isinstance`` narrows a name to a wrapped model."""
        names = dict(self._scope.names)
        for each in test.values if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And) else [test]:
            if not isinstance(each, ast.Compare) or isinstance(each.ops[0], (ast.Is, ast.Eq)):
                checked, excluded = self.checked(each), self.excluded(each)
                for text in map(place, checked or excluded):
                    narrowed = Narrowed([WRAPPED if checked else FOREIGN])
                    narrowed.before, names[text] = names.get(text), narrowed
        return names

    # --- Statements ---------------------------------------------------------------------------------------------------

    def visit(self, node: ast.AST) -> Maybe:
        """Read a statement or an expression; return and record the possible values of an expression."""
        values: Maybe = super().visit(node) or ()
        self._of_node[node] = values
        return values

    def _branch(self, nodes: Sequence[ast.AST], names: dict[str, Maybe]) -> dict[str, Maybe]:
        """Read statements, starting from ``names``, and return the names after them."""
        self._scope.names = dict(names)
        for node in nodes:
            self.visit(node)
        return self._scope.names

    def visit_Import(self, node: ast.Import | ast.ImportFrom) -> None:
        for name, path, is_likely in imported(node):
            self._scope.names[name] = (Value("path", path, is_likely),)

    visit_ImportFrom = visit_Import

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        for each in (node.args, *node.decorator_list):
            self.visit(each)
        for parameter in parameters_of(node):
            self._add(node, parameter.arg, self._annotated(parameter.annotation))
        self._add(node, "", self._annotated(node.returns))
        self._scope.names[node.name] = (Value("function", node),)
        if isinstance(self._scope.node, ast.ClassDef):
            self._add(self._scope.node, node.name, self._scope.names[node.name])
        self._bodies.append((node, self._scope))

    visit_AsyncFunctionDef = visit_FunctionDef

    def _read_body(self, node: Function, scope: Scope) -> None:
        """Read the body of a function, after the scope around it."""
        names = {each.arg: self._cell(node, each.arg) for each in parameters_of(node)}
        if isinstance(scope.node, ast.ClassDef) and names and not is_decorated(node, "staticmethod"):
            names[next(iter(names))] = self._cell(scope.node, "")
        self._scope = Scope(node, scope)
        self._branch([node.body] if isinstance(node, ast.Lambda) else node.body, names)
        if isinstance(node, ast.Lambda):
            self._store(node, "", self.values(node.body))

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for each in (*node.decorator_list, *node.bases, *node.keywords):
            self.visit(each)
        scope = self._scope
        scope.names[node.name] = (Value("class", node),)
        self._add(node, "", [Value("instance", node)])
        self._scope = Scope(node, scope)
        self._branch(node.body, {})
        self._scope = scope

    def visit_Return(self, node: ast.Return) -> None:
        if node.value is not None:
            self._store(self._scope.node, "", self.visit(node.value))

    def visit_Assign(self, node: ast.Assign) -> None:
        values = self.visit(node.value)
        for target in node.targets:
            self._bind(target, values)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        annotated = self._annotated(node.annotation)
        values = self.visit(node.value) if node.value is not None else ()
        self._bind(node.target, annotated or values)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self.visit(node.value)
        self._bind(node.target, ())

    def visit_For(self, node: ast.For | ast.AsyncFor | ast.While) -> None:
        """Read a loop: at its start, a name has its value from before the loop or from the end of the body."""
        element = () if isinstance(node, ast.While) else self._item(self.visit(node.iter))
        before, assigned = self._scope.names, self._assigned(node)
        again = {name: self._cell(node, name) for name in assigned}
        again |= {name: self._joined(before[name], again[name]) for name in assigned & before.keys()}
        self._scope.names = before | again
        if isinstance(node, ast.While):
            self.visit(node.test)
        else:
            self._bind(node.target, element)
        names = self._branch(node.body, self._scope.names)
        for name in assigned:
            self._add(node, name, names.get(name, ()))
            if name in before:
                names[name] = self._joined(before[name], names.get(name, ()))
        self._branch(node.orelse, names)

    visit_AsyncFor = visit_While = visit_For

    def _assigned(self, loop: ast.AST) -> set[str]:
        """Return the names that a loop assigns, and those that it passes to FSDP1's static methods."""
        nodes = list(ast.walk(loop))
        calls = [node for node in nodes if isinstance(node, ast.Call) and getattr(node.func, "attr", "") in STATICS]
        stored = [node for node in nodes if isinstance(getattr(node, "ctx", None), ast.Store)]
        places = map(place, (*stored, *(each for call in calls for each in call.args)))
        return {node.id for node in stored if isinstance(node, ast.Name)} | {*self._scope.names}.intersection(places)

    def visit_If(self, node: ast.If) -> None:
        self.visit(node.test)
        opposite = self._scope.names
        if isinstance(node.test, ast.UnaryOp) and isinstance(node.test.op, ast.Not):
            opposite = self._narrowed(node.test.operand)
        taken = self._branch(node.body, self._narrowed(node.test))
        other = self._branch(node.orelse, opposite)
        if leaves(node.orelse):
            self._scope.names = taken
        elif not leaves(node.body):
            self._scope.names = self._merged(taken, other)

    def visit_Try(self, node: ast.Try) -> None:
        before = dict(self._scope.names)
        branches = [self._branch([*node.body, *node.orelse], before)]
        for handler in node.handlers:
            names = self._branch([handler], before)
            branches += [] if leaves(handler.body) else [names]
        self._branch(node.finalbody, self._merged(*branches))

    visit_TryStar: Any = visit_Try

    def visit_Match(self, node: ast.Match) -> None:
        self.visit(node.subject)
        before = self._scope.names
        self._scope.names = self._merged(before, *(self._branch([case], before) for case in node.cases))

    def visit_withitem(self, node: ast.withitem) -> None:
        self.visit(node.context_expr)
        if node.optional_vars is not None:
            self._bind(node.optional_vars, ())

    def visit_Global(self, node: ast.Global) -> None:
        self._scope.shared.update(node.names)

    def visit_Assert(self, node: ast.Assert) -> None:
        self.generic_visit(node)
        self._scope.names = self._narrowed(node.test)

    # --- Annotations --------------------------------------------------------------------------------------------------

    def _annotated(self, node: ast.expr | None) -> Maybe:
        """Return the values that an annotation allows, as ``FSDP``, ``Optional[FSDP]``, ``list[FSDP]`` or a string."""
        if node is None:
            return ()
        texts = {each: self.annotations.get(each) or parsed(each) for each in ast.walk(node)}
        self.annotations |= {each: inner for each, inner in texts.items() if inner is not None}
        parts = [node, *(inner for inner in texts.values() if inner is not None)]
        for part in parts:
            self.visit(part)
        nodes = [each for part in parts for each in ast.walk(part)]
        values = [value for each in nodes for value in self.values(each)]
        classes = [self._cell(value.of, "") for value in values if value.kind == "class"]
        made = union(*classes, [WRAPPED] * any(map(self.is_constructor, values)))
        holders = {ast.unparse(each.value).rpartition(".")[2] for each in nodes if isinstance(each, ast.Subscript)}
        if not made or holders & {"type", "Type", "Callable"}:
            return ()
        return self._holding(node, made) if holders & HOLDERS else made

    def _holding(self, node: ast.AST, element: Maybe) -> Maybe:
        """Return a group whose keys are unknown, with the possible values of its elements."""
        group = self._group(node)
        group.is_complete = False
        self._add(group, "", element)
        return (Value("group", group),)

    # --- Expressions --------------------------------------------------------------------------------------------------

    def visit_Constant(self, node: ast.Constant) -> Maybe:
        return (NONE,) if node.value is None else ()

    def visit_Name(self, node: ast.Name) -> Maybe:
        return self._lookup(node.id)

    def visit_NamedExpr(self, node: ast.NamedExpr) -> Maybe:
        values = self.visit(node.value)
        self._bind(node.target, values)
        return values

    def visit_Await(self, node: ast.Await) -> Maybe:
        return self.visit(node.value)

    def visit_IfExp(self, node: ast.IfExp) -> Maybe:
        self.visit(node.test)
        before = self._scope.names
        body = self._branch([node.body], self._narrowed(node.test))
        self._scope.names = self._merged(before, body)
        return self._joined(self.values(node.body), self.visit(node.orelse))

    def visit_BoolOp(self, node: ast.BoolOp) -> Maybe:
        before = self._scope.names
        for value in node.values:
            self.visit(value)
            if isinstance(node.op, ast.And):
                self._scope.names = self._narrowed(value)
        self._scope.names = self._merged(before, self._scope.names)
        return self._joined(*map(self.values, node.values))

    def visit_Tuple(self, node: ast.Tuple | ast.List | ast.Set) -> Maybe:
        self.generic_visit(node)
        group = self._group(node)
        group.parts |= enumerate(node.elts)
        return (Value("group", group),)

    visit_List = visit_Set = visit_Tuple

    def visit_Dict(self, node: ast.Dict) -> Maybe:
        self.generic_visit(node)
        return self._dict(node, zip(node.keys, node.values, strict=True))

    def _dict(self, node: ast.expr, items: Iterable[tuple[ast.expr | None, ast.expr]]) -> Maybe:
        group = self._group(node)
        for key, value in items:
            if isinstance(key, ast.Constant):
                group.parts[key.value] = value
            else:
                entries = self.entries(value) if key is None else None
                group.is_complete &= entries is not None
                group.parts |= entries or {}
                self._add(group, "", self.values(value))
        return (Value("group", group),)

    def visit_ListComp(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp) -> Maybe:
        outer = self._scope
        self._scope = Scope(node, outer)
        for generator in node.generators:
            self._bind(generator.target, self._item(self.visit(generator.iter)))
            for condition in generator.ifs:
                self.visit(condition)
                self._scope.names = self._narrowed(condition)
        parts = [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
        element = [self.visit(part) for part in parts][-1]
        self._scope = outer
        return self._holding(node, element)

    visit_SetComp = visit_GeneratorExp = visit_DictComp = visit_ListComp

    def visit_Lambda(self, node: ast.Lambda) -> Maybe:
        self.visit(node.args)
        self._bodies.append((node, self._scope))
        return (Value("function", node),)

    def visit_Attribute(self, node: ast.Attribute) -> Maybe:
        base = self.visit(node.value)
        is_owner = any(value.kind in ("path", "class", "instance") for value in base)
        return (() if is_owner else self._at_place(node)) or self._attribute(base, node.attr)

    def visit_Subscript(self, node: ast.Subscript) -> Maybe:
        self.generic_visit(node)
        key = node.slice.value if isinstance(node.slice, ast.Constant) else None
        return self._at_place(node) or self._item(self.values(node.value), key)

    # --- Calls --------------------------------------------------------------------------------------------------------

    def visit_Call(self, node: ast.Call) -> Maybe:
        self.generic_visit(node)
        function = self.values(node.func)
        made = union(*(self._call(value, node) for value in function))
        if isinstance(node.func, ast.Attribute):
            return union(made, self._call_method(node, node.func))
        return made if function or not isinstance(node.func, ast.Name) else self._call_builtin(node, node.func.id)

    def _call(self, function: Value, node: ast.Call) -> Maybe:
        if function.kind == "path":
            return self._call_imported(function.of, node)
        if function.kind not in ("class", "function", "method"):
            return (WRAPPED,) if function == WRAPPER else ()
        called = self._cell(function.of, "__init__") if function.kind == "class" else (function,)
        for each in called:
            if each.kind in ("function", "method"):
                self._give(each.of, node, is_bound=function.kind != "function")
        return self._cell(function.of, "")

    def _give(self, function: Function, node: ast.Call, is_bound: bool) -> None:
        """Add the arguments of a call to the values of the function's parameters."""
        names = [each.arg for each in parameters_of(function)][is_bound:]
        given = [*zip(names, node.args, strict=False), *((each.arg or "", each.value) for each in node.keywords)]
        for name, argument in given:
            if name in names:
                self._store(function, name, self.values(argument))

    def _call_imported(self, path: str, node: ast.Call) -> Maybe:
        name = public_name(path)
        if name in ((FSDP, ""), ("wrap", "")):
            return (WRAPPED,)
        if name == (FSDP, "fsdp_modules"):
            return self._holding(node, (WRAPPED,))
        if name is not None:
            return (Value("setting", node),)
        if path in PARTIAL and node.args and self.is_class(node.args[0]):
            return (WRAPPER,)
        if path == "torch.compile":
            return union(*map(self.values, node.args[:1]))
        if path == "typing.cast":
            given = [*node.args[:1], *(each.value for each in node.keywords if each.arg == "typ")]
            return union(*map(self._annotated, given))
        return (FOREIGN,) if wraps_otherwise(path) else ()

    def _call_builtin(self, node: ast.Call, name: str) -> Maybe:
        if name == "dict" and not node.args:
            items = ((ast.Constant(each.arg) if each.arg else None, each.value) for each in node.keywords)
            return self._dict(node, items)
        read = read_by_getattr(node)
        if read is not None:
            return self.visit_Attribute(read)
        return self.values(node.args[0]) if name in SAME_ITEMS and len(node.args) == 1 else ()

    def _call_method(self, node: ast.Call, function: ast.Attribute) -> Maybe:
        owners = self.values(function.value)
        if function.attr in ("update", "setdefault", "pop"):
            for value in owners:
                if value.kind == "group":
                    value.of.is_complete = False
        paths = [public_name(value.of) for value in self.values(function) if value.kind == "path"]
        if function.attr in STATICS and (not paths or (FSDP, function.attr) in paths):
            given = bound(f"{FSDP}.{function.attr}", node)
            model = given.get("model", given.get("module"))
            if model is not None and place(model) and WRAPPED not in self.values(model):
                self._bind(model, (WRAPPED,))  # the program treats it as a wrapped model
        is_same = function.attr in SAME_MODEL
        return tuple(value for value in owners if is_same and value.kind in ("wrapped", "ddp", "other"))
