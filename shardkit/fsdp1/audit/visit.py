"""Find the uses of FSDP1 in one program: one walk over its syntax, by import aliases and names of methods."""

from __future__ import annotations

import ast
import inspect
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch.distributed.fsdp import FullyShardedDataParallel, fully_sharded_data_parallel

from shardkit.replacements import ARGUMENTS, ATTRIBUTES, FSDP, MEMBERS, NAMES, NO_FLAT, Row, private

SUPPORT = {"mapped": "exact", "noted": "with a note", "decision": "check by hand", "refused": "not possible"}
PACKAGE = "torch.distributed.fsdp"
MODULES = ("wrap", "api", "fully_sharded_data_parallel", "sharded_grad_scaler")
STATICS = {name for name in MEMBERS if isinstance(vars(FullyShardedDataParallel).get(name), staticmethod)}
UNIQUE = {"_all_handles", "_flat_param", "flat_param", "_fsdp_wrapped_module"}  # attributes that only FSDP1 has
OPTIMIZER = re.compile(r"optim|adam|sgd|adafactor|adagrad|rmsprop|lion|shampoo|muon|lamb|lbfgs", re.IGNORECASE)
_CONFIGURED = Row("noted", "a configuration: translate it", "python -m shardkit translate FILE")
_OFF = ("''", "None", "False", "[]")  # of fsdp=
OTHERS = {  # by the first and the last name of the path
    "accelerate FullyShardedDataParallelPlugin": _CONFIGURED,
    "lightning FSDPStrategy": Row("decision", "use ModelParallelStrategy, and call shard_model in configure_model"),
    "torch load_sharded_optimizer_state_dict": Row("decision", "use the function of shardkit.state of the same name"),
}
_READ = MEMBERS | ATTRIBUTES
_UNSEEN = Row("decision", "its arguments are not in this call")


@dataclass(frozen=True)
class Finding:
    """One use of FSDP1.

    Attributes:
        path, line, column: of the use; lines and columns (in characters) count from 1.
        name: in torch, ``FullyShardedDataParallel.no_sync`` for a method.
        code: as written, on one line, shortened.
        support: mapped, noted, decision (check by hand) or refused.
        replacement: one line of shardkit or FSDP2 code; empty if the code is removed or you must decide.
        why: what to know about it.
        likely: only the name of the method or variable suggests FSDP1.
    """

    path: str
    line: int
    column: int
    name: str
    code: str
    support: str
    replacement: str
    why: str
    likely: bool = False

    def __str__(self) -> str:
        support = f"{SUPPORT[self.support]}{', likely' * self.likely}"
        lines = [f"{self.path}:{self.line}:{self.column}  {support}  {self.code}"]
        lines += [f"    -> {self.replacement}"] if self.replacement else []
        return "\n".join([*lines, f"       {self.why}"] if self.why else lines)


def findings_of(path: str, text: str) -> list[Finding]:
    """Return the uses of FSDP1 in a program, in order of place; ``path`` is for the findings."""
    visitor = _Visitor(path, text)
    visitor.visit(visitor.tree)
    visitor.optimizers()
    return sorted(visitor.found, key=lambda each: (each.line, each.column, each.name))


def row_of(dotted: str) -> tuple[str, Row] | None:
    """Return the name and the row of FSDP1's or another package's name by its dotted path; None for any other path."""
    if not dotted.startswith(f"{PACKAGE}."):
        key = f"{dotted.partition('.')[0]} {dotted.rpartition('.')[2]}"
        return (dotted, OTHERS[key]) if key in OTHERS else None
    first, *rest = [*dotted[len(PACKAGE) + 1 :].split("."), ""]
    if first in MODULES:
        first, *rest = [*rest, ""]
    if first == FSDP and rest[0]:
        return f"{FSDP}.{rest[0]}", _READ.get(rest[0], Row("decision", "not a public name of FSDP1"))
    if first in NAMES:
        return first, NAMES[first]
    is_private = first.startswith("_") and not first.startswith("__") and first != "_fully_shard"
    return (dotted, private(dotted)) if is_private else None


def _bound(name: str, call: ast.Call) -> dict[str, ast.expr]:
    """Return the arguments of a call of FSDP1's class, or of a method or setting, by their names in torch."""
    first, _, method = name.partition(".")
    found = getattr(getattr(fully_sharded_data_parallel, first), method or "__init__")
    names = [each for each in inspect.signature(found).parameters if each != "self"]
    return dict(zip(names, call.args, strict=False)) | {each.arg: each.value for each in call.keywords if each.arg}


def _is_spread(call: ast.Call) -> bool:
    return any(isinstance(each, ast.Starred) for each in call.args) or any(not each.arg for each in call.keywords)


class _Visitor(ast.NodeVisitor):
    def __init__(self, path: str, text: str) -> None:
        self.path, self.tree = path, ast.parse(text)
        self.found: list[Finding] = []
        self.lines = [line.encode() for line in text.split("\n")]  # columns are of UTF-8
        nodes: list[Any] = list(ast.walk(self.tree))
        self.parents = {child: node for node in nodes for child in ast.iter_child_nodes(node)}
        imported = [alias for node in nodes for alias in _imported(node)]
        self.aliases = dict(sorted(imported, key=lambda alias: alias[1].startswith(PACKAGE)))  # torch's name wins
        self.wrapped: dict[str, list[tuple[ast.AST, int]]] = {}  # functions, and first lines, where a name is a model
        for node in nodes:
            for model in self._wrapped_at(node):
                line = (node.end_lineno or 0) + 1 if isinstance(node, ast.Assign) else node.lineno
                self.wrapped.setdefault(ast.unparse(model), []).append((self._function(node), line))

    def _around(self, node: ast.AST) -> Iterator[ast.AST]:
        while node in self.parents:
            node = self.parents[node]
            yield node

    def _dotted(self, node: ast.AST) -> str:
        """Return the dotted path that an expression reads, by the imports; empty for all else."""
        if isinstance(node, ast.Attribute):
            return f"{owner}.{node.attr}" if (owner := self._dotted(node.value)) else ""
        return self.aliases.get(node.id, "") if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) else ""

    def _name(self, node: ast.AST) -> str:
        return (row_of(self._dotted(node)) or ("",))[0]

    def _text(self, node: ast.expr | ast.stmt) -> str:
        """Return the code of a node on one line."""
        line = self.lines[node.lineno - 1]
        is_one = node.lineno == node.end_lineno
        return line[node.col_offset : node.end_col_offset].decode() if is_one else ast.unparse(node)

    def _wraps(self, node: ast.AST) -> bool:
        """Return whether it is ``FSDP(...)``, or a method of that such as ``to``."""
        while isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and not self._name(node.func):
            node = node.func.value
        return isinstance(node, ast.Call) and self._name(node.func) == FSDP

    def _wrapped_at(self, node: ast.AST) -> list[ast.expr]:
        """Return the names that a node makes wrapped models, or shows to be: by annotation, isinstance or a static."""
        if isinstance(node, ast.Assign):
            return node.targets if self._wraps(node.value) else []
        if isinstance(node, (ast.arg, ast.AnnAssign)) and node.annotation:
            shown = any(self._name(each) == FSDP for each in ast.walk(node.annotation))
            return [ast.Name(node.arg) if isinstance(node, ast.arg) else node.target] if shown else []
        if not isinstance(node, ast.Call):
            return []
        checks = ast.unparse(node.func) == "isinstance" and any(self._name(each) == FSDP for each in ast.walk(node))
        return node.args[:1] if checks or self._name(node.func) in {f"{FSDP}.{name}" for name in STATICS} else []

    def _function(self, node: ast.AST) -> ast.AST:
        functions = (ast.FunctionDef, ast.AsyncFunctionDef)
        return next((each for each in self._around(node) if isinstance(each, functions)), self.tree)

    def _is_wrapped(self, node: ast.expr) -> bool:
        """Return whether a name is that of a wrapped model: after it is wrapped, or in another function."""
        marks = self.wrapped.get(ast.unparse(node), [])
        own = [line for function, line in marks if function is self._function(node)]
        return node.lineno >= min(own) if own else bool(marks)

    def _add(self, node: ast.expr | ast.stmt, name: str, row: Row, likely: bool = False) -> None:
        column = len(self.lines[node.lineno - 1][: node.col_offset].decode()) + 1
        code = " ".join(self._text(node).split())
        code = code if len(code) <= 100 else f"{code[:96]} ..."
        use = row.use.replace("(, ", "(").replace(", )", ")")
        self.found.append(Finding(self.path, node.lineno, column, name, code, row.support, use, row.sentence, likely))

    def visit_Import(self, node: ast.Import | ast.ImportFrom) -> None:
        rows = dict(found for _, path in _imported(node) if (found := row_of(path)) and found[1] is not _CONFIGURED)
        worst = _worst([row for name, row in rows.items() if name not in NAMES])
        if FSDP in rows:
            worst = worst._replace(use=f"from shardkit import shard_like_fsdp1; from {PACKAGE} import FSDPModule")
        if rows:
            self._add(node, "import", worst)

    visit_ImportFrom = visit_Import

    def visit_Call(self, node: ast.Call) -> None:
        name, row = row_of(self._dotted(node.func)) or ("", None)
        children: list[ast.AST] = [*node.args, *node.keywords]
        if row is not None:
            self._add(node, name, self._wrapping(node) if name == FSDP else self._filled(node, name, row))
            children = [each for each in children if not self._is_setting(each)]
        elif isinstance(node.func, ast.Attribute) and self._is_method(node, node.func):
            name = f"{FSDP}.{node.func.attr}"
            self._add(node, name, self._filled(node, name, MEMBERS[node.func.attr]), likely=True)
            children.append(node.func.value)
        elif any(each.arg == "fsdp" and ast.unparse(each.value) not in _OFF for each in node.keywords):
            self._add(node, "configuration", _CONFIGURED)
        else:
            children.append(node.func)
        for child in children:
            self.visit(child)

    def visit_Attribute(self, node: Any) -> None:
        dotted = self._dotted(node)
        if found := row_of(dotted):
            name, row = found
            row = self._mention(node) if name == FSDP else row._replace(use=row.line(member=dotted.rpartition(".")[2]))
            self._add(node, name, Row("refused", NO_FLAT) if dotted.endswith("LOCAL_STATE_DICT") else row)
            return
        is_read = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and node.attr in _READ
        if is_read and (node.attr in UNIQUE or self._is_wrapped(node.value)):
            use = _READ[node.attr].line(receiver=self._text(node.value)).partition("(...")[0]
            self._add(node, f"{FSDP}.{node.attr}", _READ[node.attr]._replace(use=use), likely=True)
        self.generic_visit(node)

    visit_Name = visit_Attribute

    def visit_Constant(self, node: ast.Constant) -> None:
        parent = self.parents.get(node)
        if isinstance(node.value, str) and "_fsdp_wrapped_module" in node.value and not isinstance(parent, ast.Expr):
            replaces = isinstance(parent, ast.Call) and ast.unparse(parent.func).endswith(("replace", "getattr"))
            why = "FSDP2 adds no prefix to names, so a condition on it is the same for all"
            self._add(node, f"{FSDP}._fsdp_wrapped_module", Row("noted" if replaces else "decision", why))

    def _is_setting(self, node: ast.AST) -> bool:
        """Return whether an argument of a use is a setting or a policy, which goes where the use goes."""
        value = node.value if isinstance(node, ast.keyword) else node
        name = self._name(value.func if isinstance(value, ast.Call) else value)
        return name in NAMES and name != FSDP and not name.endswith("Config") and "LOCAL" not in ast.unparse(value)

    def _is_method(self, node: ast.Call, function: ast.Attribute) -> bool:
        """Return whether a call is of FSDP1's method, by the name of the model or because only FSDP1 has it."""
        method, keywords = function.attr, {each.arg for each in node.keywords}
        clips = method == "clip_grad_norm_" and len(node.args) == 1 and keywords <= {"norm_type"}
        is_known = clips or method in STATICS | {"check_is_root"} or self._is_wrapped(function.value)
        return is_known and method in MEMBERS and method != "module" and not self._dotted(function.value)

    def _mention(self, node: ast.AST) -> Row:
        """Return the row for FSDP1's class where it is not called."""
        within = (ast.Tuple, ast.Subscript, ast.BinOp)
        parent = next(each for each in self._around(node) if not isinstance(each, within))
        if isinstance(parent, ast.ClassDef):
            return Row("decision", "FSDP2 has no class to derive from: turn overridden methods into functions")
        if isinstance(parent, ast.Compare):
            return Row("decision", "a sharded model has a class of its own: use isinstance(model, FSDPModule)")
        checks = isinstance(parent, ast.Call) and ast.unparse(parent.func) in ("isinstance", "issubclass")
        makes = isinstance(parent, (ast.Call, ast.keyword, ast.Assign)) and not checks
        return Row("mapped", "", "shard_like_fsdp1" if makes else "FSDPModule")

    def _wrapping(self, node: ast.Call) -> Row:
        given = _bound(FSDP, node)
        rows = [_UNSEEN] if _is_spread(node) else []
        for name, value in given.items():
            row, text = ARGUMENTS.get(name, Row("decision", "not an argument of torch's FSDP1")), self._text(value)
            if row.support == "implied":  # it matters where FSDP1 was told something else
                row = row._replace(support="noted" if text.endswith(("False", "None", "BACKWARD_POST")) else "mapped")
            rows += [row._replace(sentence=f"{name}: {row.sentence}")] if row.support != "mapped" else []
        hybrid = "HYBRID" in ast.unparse(given.get("sharding_strategy", ast.Constant("")))
        if hybrid and not {"process_group", "device_mesh"} & {*given}:
            rows.append(Row("noted", "ranks_per_node is torchrun's LOCAL_WORLD_SIZE; FSDP1 counted devices"))
        bases = [base for each in self._around(node) if isinstance(each, ast.ClassDef) for base in each.bases]
        if any(ast.unparse(base).endswith("Module") for base in bases):
            rows.append(Row("decision", "a part of a model: name it in units of a call on the model instead"))
        shown = [self._text(v) if name == "module" else f"{name}={self._text(v)}" for name, v in given.items()]
        shown += [f"**{self._text(each.value)}" for each in node.keywords if not each.arg]
        return _worst(rows)._replace(use=f"shard_like_fsdp1({', '.join(shown)})")

    def _filled(self, node: ast.Call, name: str, row: Row) -> Row:
        """Return the row of a call with its template filled in."""
        method, args = name.removeprefix(f"{FSDP}."), [self._text(each) for each in node.args]
        args += [(f"{each.arg}=" if each.arg else "**") + self._text(each.value) for each in node.keywords]
        fields = {"args": ", ".join(args), "optim": "...", "model": args[0] if args else "model"}
        fields["receiver"] = self._text(node.func.value) if isinstance(node.func, ast.Attribute) else ""
        if self._dotted(node.func) and method not in STATICS and name != method:  # a method called on the class
            fields |= {"receiver": args[0] if args else "model", "args": ", ".join(args[1:])}
        if method in STATICS:
            if _is_spread(node):
                return _UNSEEN
            given = {each: self._text(value) for each, value in _bound(name, node).items()}
            fields |= given | {"model": given.get("module", given.get("model", "model"))}
            if method == "summon_full_params":  # whose default of writeback is True
                kept = {"writeback": "True"} | {each: given[each] for each in given if each != "module"}
                shown = [f"{each}={text}" for each, text in kept.items() if text != str(each == "recurse")]
                row = row._replace(use=f"full_params({', '.join([fields['model'], *shown])})")
        values = (*node.args, *(each.value for each in node.keywords))
        if name.endswith("StateDictConfig") and not all(isinstance(each, ast.Constant) for each in values):
            row = row._replace(support="decision", sentence=f"rank0_only is not known here; {row.sentence}")
        return row._replace(use=row.line(**fields))

    def optimizers(self) -> None:
        """Find optimizers of a model's parameters that are built before the model is wrapped, in one function."""
        calls = [each for each in self.parents if isinstance(each, ast.Call)]
        wrappings = [each for each in calls if self._name(each.func) == FSDP]
        built = [each for each in calls if OPTIMIZER.search(ast.unparse(each.func).rpartition(".")[2])]
        for node, optimizer in itertools.product(wrappings, built):
            model = re.escape(ast.unparse(_bound(FSDP, node).get("module", node)))
            reads = re.search(rf"(?<![\w.]){model}\.(named_)?parameters\(", ast.unparse(optimizer))
            if reads and optimizer.lineno < node.lineno and self._function(optimizer) is self._function(node):
                why = f"it would hold the parameters from before line {node.lineno}, and update nothing"
                self._add(optimizer, "optimizer", Row("decision", why, f"move it below line {node.lineno}"))


def _worst(rows: list[Row]) -> Row:
    """Return the worst support of some rows, with all their sentences."""
    support = max(["mapped", *(row.support for row in rows)], key=list(SUPPORT).index)
    return Row(support, "; ".join(dict.fromkeys(row.sentence for row in rows)))


def _imported(node: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield the names that an import binds, each with its dotted path."""
    if isinstance(node, ast.Import):
        yield from ((a.asname, a.name) if a.asname else (a.name.partition(".")[0],) * 2 for a in node.names)
    elif isinstance(node, ast.ImportFrom) and not node.level:
        yield from ((a.asname or a.name, f"{node.module}.{a.name}") for a in node.names if a.name != "*")
        if node.names[0].name == "*" and f"{node.module}".startswith(PACKAGE):
            yield from ((name, f"{PACKAGE}.{name}") for name in NAMES)
