"""Find uses of FSDP1 in one program, and optimizers that are built too early."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from typing import TypeAlias

from shardkit.fsdp1.audit.flow import Flow
from shardkit.fsdp1.audit.judge import Judge, Verdict
from shardkit.fsdp1.audit.names import PUBLIC, bound
from shardkit.fsdp1.audit.report import Finding
from shardkit.fsdp1.audit.syntax import arguments_of
from shardkit.fsdp1.audit.uses import Uses
from shardkit.replacements import FSDP

MOST_CODE = 100  # characters of a call that are shown
_NAME = re.compile(r"(?<![\w.\"'])[A-Za-z_]\w*(?!\w|=[^=])")  # not attributes, keywords or strings
_LINE = re.compile(r"[^\r\n]*(?:\r\n|\r|\n|$)")  # as Python counts lines; str.splitlines knows more ends
OPTIMIZER = re.compile(r"(optim|adam|sgd|adafactor|adagrad|rmsprop|lion|shampoo|muon|lamb|lbfgs|sophia)", re.IGNORECASE)

Found: TypeAlias = "tuple[ast.expr | ast.stmt, str, Verdict, bool]"


def findings_of(path: str, text: str) -> tuple[list[Finding], bool]:
    """Return the uses of FSDP1 in a program, in order of place, and whether it names FSDP2 too.

    Args:
        path: for the findings.
        text: the program.

    Raises:
        SyntaxError: it is not Python 3.
        ValueError: it holds a null byte.
        RecursionError: it is nested too deeply.
    """
    tree, lines = ast.parse(text), _LINE.findall(text)
    flow = Flow(tree)
    uses = Uses(tree, flow)
    judge = Judge(flow, lambda node: _written(node, lines))
    wraps = any(use.wraps for use in uses.found)
    found: list[Found] = [(use.node, use.name, judge.verdict(use), use.likely) for use in uses.found]
    used = {name for _, _, verdict, _ in found for name in _NAME.findall(verdict.replacement)}
    ours = {name for each in found for name in _new_names(each, lines)} & PUBLIC
    for node, paths, is_likely in uses.imports:
        found.append((node, "import", judge.of_import(paths, wraps, _kept(node, used), ours), is_likely))
    wrappings = [use.node for use in uses.found if use.name == FSDP and use.kind in ("call", "subclass")]
    for optimizer, wrapping in _built_before(tree, wrappings) if wrappings else ():
        why = f"it would hold the parameters from before line {wrapping.lineno}, and update nothing"
        verdict = Verdict("decision", f"move it below line {wrapping.lineno}", why, "optimizer")
        found.append((optimizer, "optimizer", verdict, False))
    findings = [_finding(path, lines, each) for each in found]
    return sorted(findings, key=lambda each: (each.line, each.column, each.name)), uses.names_fsdp2


def _kept(node: ast.Import | ast.ImportFrom, used: set[str]) -> list[str]:
    names = node.names if isinstance(node, ast.ImportFrom) else ()
    return [ast.unparse(alias) for alias in names if (alias.asname or alias.name) in used]


def _new_names(found: Found, lines: list[str]) -> set[str]:
    """Return the names that a replacement uses and the code it replaces does not."""
    node, _, verdict, _ = found
    return set(_NAME.findall(verdict.replacement)) - set(_NAME.findall(_written(node, lines)))


def _finding(path: str, lines: list[str], found: Found) -> Finding:
    node, name, verdict, is_likely = found
    before = lines[node.lineno - 1].encode()[: node.col_offset]  # ast counts bytes of UTF-8
    code = " ".join(_written(node, lines).split())
    code = code if len(code) <= MOST_CODE else f"{code[: MOST_CODE - 4]} ..."
    return Finding(path, node.lineno, len(before.decode(errors="replace")) + 1, name, code, *verdict, is_likely)


def _written(node: ast.expr | ast.stmt, lines: list[str]) -> str:
    """Return the code of a node on one line."""
    if node.lineno == node.end_lineno and hasattr(node, "end_col_offset"):
        return lines[node.lineno - 1].encode()[node.col_offset : node.end_col_offset].decode(errors="replace")
    return ast.unparse(node)


# --- Optimizers -------------------------------------------------------------------------------------------------------


def _built_before(tree: ast.Module, wrappings: Iterable[ast.expr]) -> Iterator[tuple[ast.Call, ast.Call]]:
    """Yield each optimizer of a model's parameters, with the later call that wraps this model.

    Within one function, or the module's own statements. FSDP2 replaces parameters, so such an optimizer would update
    tensors that the model no longer uses.
    """
    functions = [node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    for function in (tree, *functions):
        derived: dict[str, set[str]] = {}  # names of lists of parameters, and of which models
        built: list[tuple[ast.Call, set[str]]] = []
        for node in sorted(_own_nodes(function), key=lambda node: (node.lineno, node.col_offset)):
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                derived[node.targets[0].id] = _models(node.value, derived)
            elif isinstance(node, ast.Call) and node in wrappings:
                wrapped = ast.unparse(bound(FSDP, node).get("module", ast.Constant(None)))
                yield from ((optimizer, node) for optimizer, models in built if wrapped in models)
                built = [(optimizer, models) for optimizer, models in built if wrapped not in models]
            elif isinstance(node, ast.Call) and OPTIMIZER.search(ast.unparse(node.func).rpartition(".")[2]):
                built.append((node, {model for each in arguments_of(node) for model in _models(each, derived)}))


def _models(node: ast.expr, derived: dict[str, set[str]]) -> set[str]:
    """Return the models whose parameters an expression reads."""
    nodes = list(ast.walk(node))
    names = [each.id for each in nodes if isinstance(each, ast.Name)]
    reads = [
        each for each in nodes if isinstance(each, ast.Attribute) and each.attr in ("parameters", "named_parameters")
    ]
    return {ast.unparse(each.value) for each in reads}.union(*(derived.get(name, set()) for name in names))


def _own_nodes(function: ast.AST) -> Iterator[ast.Assign | ast.Call]:
    """Yield assignments and calls, without those in inner functions and classes."""
    for child in ast.iter_child_nodes(function):
        if isinstance(child, (ast.Assign, ast.Call)):
            yield child
        if not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
            yield from _own_nodes(child)
