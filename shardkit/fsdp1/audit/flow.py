"""What each expression of a program may be, as far as FSDP1 is concerned, from one reading forward.

A ``Var`` holds what something may be and passes on what it gets later: a parameter gets the arguments of calls further
down. So nothing is read twice. Where branches join, a name may be what it was at the end of any of them.
"""

from __future__ import annotations

import ast
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

from shardkit.fsdp1.audit.names import PARTIAL, STATICS, bound, imported, public_name
from shardkit.fsdp1.audit.syntax import Function, is_decorated, leaves, parameters_of, parsed, place, read_by_getattr
from shardkit.fsdp1.audit.values import NONE, NOTHING, OTHER, WRAPPED, WRAPPER, Group, Scope, Value, Values, Var
from shardkit.fsdp1.instead import FSDP

SAME_MODEL = {"to", "cuda", "cpu", "train", "eval", "half", "bfloat16", "float", "double", "requires_grad_", "compile"}
SAME_ITEMS = {"list", "tuple", "reversed", "sorted"}
HOLDERS = {"list", "List", "tuple", "Tuple", "dict", "Dict", "Sequence", "Iterable", "Iterator", "Mapping", "set"}


class Flow(Values, ast.NodeVisitor):
    """A program's expressions, and what each may be."""

    def __init__(self, tree: ast.Module) -> None:
        super().__init__(tree)
        self.annotations: dict[ast.AST, ast.expr] = {}  # those that are written as strings
        self._bodies: deque[tuple[Function, Scope]] = deque()
        self.generic_visit(tree)
        while self._bodies:
            self._read_body(*self._bodies.popleft())
        for var, parts in self._joins:
            if any(not part.values and part is not NONE for part in parts):
                self._add(var, OTHER)
        self._pass_on()
        for var in self._opened:
            var.readers = None  # all is known, and no circle of references keeps the tree

    # --- Names --------------------------------------------------------------------------------------------------------

    def _bind(self, target: ast.expr, var: Var) -> None:
        if isinstance(target, (ast.Tuple, ast.List)):
            for index, each in enumerate(target.elts):
                self._bind(each, self._item(var, index))
        elif isinstance(target, ast.Name):
            self._bind_name(target.id, var)
        elif isinstance(target, (ast.Attribute, ast.Subscript)):
            self.generic_visit(target)
            self._each(self._var(target.value), self._put, target, var)
            self._scope.names[place(target)] = var

    def _bind_name(self, name: str, var: Var) -> None:
        if any(value.kind == "path" for value in var.values):
            source, var = var, self._open()
            self._each(source, self._keep, var, True)
        self._scope.names[name] = var
        if name in self._scope.shared:
            self._each(var, self._keep, self._cell(self._tree, name))
        if isinstance(self._scope.node, ast.ClassDef):
            self._each(var, self._keep, self._cell(self._scope.node, name))

    def _put(self, owner: Value, target: ast.Attribute | ast.Subscript, var: Var) -> None:
        if isinstance(target, ast.Attribute) and owner.kind in ("class", "instance"):
            self._each(var, self._keep, self._cell(owner.of, target.attr))
        elif isinstance(target, ast.Subscript) and owner.kind == "group":
            owner.of.is_complete = False
            self._each(var, self._keep, owner.of.rest)

    def _narrowed(self, test: ast.expr) -> dict[str, Var]:
        """The names where the condition holds: ``isinstance`` tells what is a wrapped model."""
        names = dict(self._scope.names)
        for each in test.values if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And) else [test]:
            if not isinstance(each, ast.Compare) or isinstance(each.ops[0], (ast.Is, ast.Eq)):
                for text in map(place, self.checked(each)):
                    var = Var(WRAPPED)
                    var.before, names[text] = (names.get(text),), var
        return names

    # --- Statements ---------------------------------------------------------------------------------------------------

    def visit(self, node: ast.AST) -> Var:
        """Read a statement, or an expression and what it may be."""
        var: Var = super().visit(node) or NOTHING
        if isinstance(node, ast.stmt):
            self._pass_on()
        elif var is not NOTHING:
            self._vars[node] = var
        return var

    def _branch(self, nodes: Sequence[ast.AST], names: dict[str, Var]) -> dict[str, Var]:
        """The names after statements before which they were ``names``."""
        self._scope.names = dict(names)
        for node in nodes:
            self.visit(node)
        return self._scope.names

    def visit_Import(self, node: ast.Import | ast.ImportFrom) -> None:
        for name, path, is_likely in imported(node):
            self._scope.names[name] = Var(Value("path", path, is_likely))

    visit_ImportFrom = visit_Import

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        for each in (node.args, *node.decorator_list):
            self.visit(each)
        for parameter in parameters_of(node):
            self._link(self._annotated(parameter.annotation), self._cell(node, parameter.arg))
        self._link(self._annotated(node.returns), self._cell(node, ""))
        self._scope.names[node.name] = Var(Value("function", node))
        self._bodies.append((node, self._scope))

    visit_AsyncFunctionDef = visit_FunctionDef

    def _read_body(self, node: Function, scope: Scope) -> None:
        """Read the body of a function, when the scope around it is complete."""
        names = {each.arg: self._cell(node, each.arg) for each in parameters_of(node)}
        if isinstance(scope.node, ast.ClassDef) and names and not is_decorated(node, "staticmethod"):
            names[next(iter(names))] = self._cell(scope.node, "")
        self._scope = Scope(node, scope)
        body = [node.body] if isinstance(node, ast.Lambda) else node.body
        self._branch(body, names)
        if isinstance(node, ast.Lambda):
            self._each(self._var(node.body), self._keep, self._cell(node, ""))
        self._pass_on()

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for each in (*node.decorator_list, *node.bases, *node.keywords):
            self.visit(each)
        scope = self._scope
        scope.names[node.name] = Var(Value("class", node))
        self._add(self._cell(node, ""), Value("instance", node))
        self._scope = Scope(node, scope)
        self._branch(node.body, {})
        self._scope = scope

    def visit_Return(self, node: ast.Return) -> None:
        if node.value is not None:
            self._each(self.visit(node.value), self._keep, self._cell(self._scope.node, ""))

    def visit_Assign(self, node: ast.Assign) -> None:
        var = self.visit(node.value)
        for target in node.targets:
            self._bind(target, var)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        annotated = self._annotated(node.annotation)
        var = self.visit(node.value) if node.value is not None else NOTHING
        self._bind(node.target, annotated if annotated.values else var)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self.visit(node.value)
        self._bind(node.target, NOTHING)

    def visit_For(self, node: ast.For | ast.AsyncFor | ast.While) -> None:
        """Where a loop begins, a name that its body assigns is what it was before, or what it is at the body's end."""
        element = NOTHING if isinstance(node, ast.While) else self._item(self.visit(node.iter))
        before = self._scope.names
        again = {name: self._union([before[name]] if name in before else []) for name in self._assigned(node)}
        self._scope.names = before | again
        if isinstance(node, ast.While):
            self.visit(node.test)
        else:
            self._bind(node.target, element)
        names = self._branch(node.body, self._scope.names)
        for name, var in again.items():
            end = names.get(name, NOTHING)
            self._link(end, var)
            if name in before:
                self._joins.append((var, (before[name], end)))
                names[name] = var
        self._branch(node.orelse, names)

    visit_AsyncFor = visit_While = visit_For

    def _assigned(self, loop: ast.AST) -> set[str]:
        """The names that a loop assigns, and those it hands to FSDP1's statics."""
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
            self._bind(node.optional_vars, NOTHING)

    def visit_Global(self, node: ast.Global) -> None:
        self._scope.shared.update(node.names)

    def visit_Assert(self, node: ast.Assert) -> None:
        self.generic_visit(node)
        self._scope.names = self._narrowed(node.test)

    # --- Annotations --------------------------------------------------------------------------------------------------

    def _annotated(self, node: ast.expr | None) -> Var:
        """What a parameter of this annotation is: ``FSDP``, ``Optional[FSDP]``, ``list[FSDP]``, or one as text."""
        if node is None:
            return NOTHING
        texts = {each: inner for each in ast.walk(node) if (inner := parsed(each)) is not None}
        self.annotations |= texts
        for part in (node, *texts.values()):
            self.visit(part)
        nodes = [each for part in (node, *texts.values()) for each in ast.walk(part)]
        values = [value for each in nodes for value in self.values(each)]
        classes = [self._cell(value.of, "") for value in values if value.kind == "class"]
        var = self._union([*classes, *(Var(WRAPPED) for value in values if self.is_constructor(value))])
        holders = {ast.unparse(each.value).rpartition(".")[2] for each in nodes if isinstance(each, ast.Subscript)}
        if not var.values or holders & {"type", "Type", "Callable"}:
            return NOTHING
        return Var(Value("group", Group({}, var, is_complete=False))) if holders & HOLDERS else var

    # --- Expressions --------------------------------------------------------------------------------------------------

    def visit_Constant(self, node: ast.Constant) -> Var:
        return NONE if node.value is None else NOTHING

    def visit_Name(self, node: ast.Name) -> Var:
        return self._lookup(node.id)

    def visit_NamedExpr(self, node: ast.NamedExpr) -> Var:
        var = self.visit(node.value)
        self._bind(node.target, var)
        return var

    def visit_Await(self, node: ast.Await) -> Var:
        return self.visit(node.value)

    def visit_IfExp(self, node: ast.IfExp) -> Var:
        self.visit(node.test)
        before = self._scope.names
        body = self._branch([node.body], self._narrowed(node.test))
        self._scope.names = self._merged(before, body)
        return self._joined([self._var(node.body), self.visit(node.orelse)])

    def visit_BoolOp(self, node: ast.BoolOp) -> Var:
        before = self._scope.names
        for value in node.values:
            self.visit(value)
            if isinstance(node.op, ast.And):
                self._scope.names = self._narrowed(value)
        self._scope.names = self._merged(before, self._scope.names)
        return self._joined([self._var(value) for value in node.values])

    def visit_Tuple(self, node: ast.Tuple | ast.List | ast.Set) -> Var:
        self.generic_visit(node)
        return Var(Value("group", Group(dict(enumerate(node.elts)), self._open())))

    visit_List = visit_Set = visit_Tuple

    def visit_Dict(self, node: ast.Dict) -> Var:
        self.generic_visit(node)
        return self._dict(zip(node.keys, node.values, strict=True))

    def _dict(self, items: Iterable[tuple[ast.expr | None, ast.expr]]) -> Var:
        group = Group({}, self._open())
        for key, value in items:
            if isinstance(key, ast.Constant):
                group.parts[key.value] = value
            else:
                entries = self.entries(value) if key is None else None
                group.is_complete &= entries is not None
                group.parts |= entries or {}
                self._link(self._var(value), group.rest)
        return Var(Value("group", group))

    def visit_ListComp(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp) -> Var:
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
        return Var(Value("group", Group({}, element, is_complete=False)))

    visit_SetComp = visit_GeneratorExp = visit_DictComp = visit_ListComp

    def visit_Lambda(self, node: ast.Lambda) -> Var:
        self.visit(node.args)
        self._bodies.append((node, self._scope))
        return Var(Value("function", node))

    def visit_Attribute(self, node: ast.Attribute) -> Var:
        base = self.visit(node.value)
        is_owner = any(value.kind in ("path", "class", "instance") for value in base.values)
        found = NOTHING if is_owner else self._at_place(node)
        return self._attribute(base, node.attr) if found is NOTHING else found

    def visit_Subscript(self, node: ast.Subscript) -> Var:
        self.generic_visit(node)
        key = node.slice.value if isinstance(node.slice, ast.Constant) else None
        found = self._at_place(node)
        return self._item(self._var(node.value), key) if found is NOTHING else found

    # --- Calls --------------------------------------------------------------------------------------------------------

    def visit_Call(self, node: ast.Call) -> Var:
        self.generic_visit(node)
        var, function = self._open(), self._var(node.func)
        self._each(function, self._call, node, var)
        if isinstance(node.func, ast.Attribute):
            self._call_method(node, node.func, var)
        elif isinstance(node.func, ast.Name) and function is NOTHING:
            return self._call_builtin(node, node.func.id)
        return var

    def _call(self, function: Value, node: ast.Call, var: Var) -> None:
        if function.kind == "path":
            self._call_imported(function.of, node, var)
        elif function == WRAPPER:
            self._add(var, WRAPPED)
        elif function.kind in ("class", "function", "method"):
            self._link(self._cell(function.of, ""), var)
            called = self._cell(function.of, "__init__") if function.kind == "class" else Var(function)
            self._each(called, self._give, node, function.kind != "function")

    def _give(self, value: Value, node: ast.Call, is_bound: bool) -> None:
        """Hand the arguments of a call to the function's parameters."""
        function = value.of
        names = [each.arg for each in parameters_of(function)][is_bound:]
        given = [*zip(names, node.args, strict=False), *((each.arg or "", each.value) for each in node.keywords)]
        for name, argument in given:
            if name in names:
                self._each(self._var(argument), self._keep, self._cell(function, name))

    def _call_imported(self, path: str, node: ast.Call, var: Var) -> None:
        name = public_name(path)
        if name in ((FSDP, ""), ("wrap", "")):
            self._add(var, WRAPPED)
        elif name == (FSDP, "fsdp_modules"):
            self._add(var, Value("group", Group({}, Var(WRAPPED))))
        elif name is not None:
            self._add(var, Value("setting", node))
        elif path in PARTIAL and node.args and self.is_class(node.args[0]):
            self._add(var, WRAPPER)
        elif path == "torch.compile":
            self._link(self._union(map(self._var, node.args[:1])), var)
        elif path == "typing.cast":
            given = [*node.args[:1], *(each.value for each in node.keywords if each.arg == "typ")]
            self._link(self._union(map(self._annotated, given)), var)

    def _call_builtin(self, node: ast.Call, name: str) -> Var:
        if name == "dict" and not node.args:
            return self._dict((ast.Constant(each.arg) if each.arg else None, each.value) for each in node.keywords)
        read = read_by_getattr(node)
        if read is not None:
            return self.visit_Attribute(read)
        return self._var(node.args[0]) if name in SAME_ITEMS and len(node.args) == 1 else NOTHING

    def _call_method(self, node: ast.Call, function: ast.Attribute, var: Var) -> None:
        if function.attr in SAME_MODEL:
            self._link(self._var(function.value), var, ("wrapped", "other"))
        elif function.attr in ("update", "setdefault", "pop"):
            for value in self.values(function.value):
                if value.kind == "group":
                    value.of.is_complete = False
        paths = [public_name(value.of) for value in self.values(function) if value.kind == "path"]
        if function.attr in STATICS and (not paths or (FSDP, function.attr) in paths):
            given = bound(f"{FSDP}.{function.attr}", node)
            model = given.get("model", given.get("module"))
            if model is not None and place(model) and WRAPPED not in self.values(model):
                self._bind(model, Var(WRAPPED))  # whatever it is, the program takes it for a wrapped one
