"""Helpers for ``ast`` nodes."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import TypeAlias

Function: TypeAlias = "ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda"


def place(node: ast.AST) -> str:
    """Return the text of ``a``, ``a.b`` or ``a["b"]``, the key of its values in a scope; empty for other nodes."""
    if isinstance(node, ast.Name):
        return node.id
    base = place(node.value) if isinstance(node, (ast.Attribute, ast.Subscript)) else ""
    if base and isinstance(node, ast.Attribute):
        return f"{base}.{node.attr}"
    if base and isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        return f"{base}[{node.slice.value!r}]"
    return ""


def arguments_of(call: ast.Call) -> list[ast.expr]:
    """Return all arguments of a call, without their names."""
    return [*call.args, *(keyword.value for keyword in call.keywords)]


def classes_of(check: ast.Call) -> Sequence[ast.expr]:
    """Return the classes that an ``isinstance`` call checks for."""
    return check.args[1].elts if isinstance(check.args[1], ast.Tuple) else [check.args[1]]


def read_by_getattr(call: ast.Call) -> ast.Attribute | None:
    """Return ``x.name`` for ``getattr(x, "name")``; None for other calls."""
    if isinstance(call.func, ast.Name) and call.func.id == "getattr" and len(call.args) > 1:
        name = call.args[1].value if isinstance(call.args[1], ast.Constant) else None
        return ast.copy_location(ast.Attribute(call.args[0], name, ast.Load()), call) if isinstance(name, str) else None
    return None


def parsed(node: ast.AST) -> ast.expr | None:
    """Parse an annotation written as a string; its nodes get the string's position in the file."""
    if not isinstance(node, ast.Constant) or not isinstance(node.value, str):
        return None
    try:
        inner = ast.parse(node.value.strip(), mode="eval").body
    except (SyntaxError, ValueError):
        return None
    for each in ast.walk(inner):
        ast.copy_location(each, node)
    return inner


def parameters_of(node: Function) -> list[ast.arg]:
    """Return all parameters of a function."""
    rest = [each for each in (node.args.vararg, node.args.kwarg) if each is not None]
    return [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs, *rest]


def is_decorated(node: Function, name: str) -> bool:
    """Return whether one of its decorators contains ``name``."""
    return not isinstance(node, ast.Lambda) and any(name in ast.unparse(each) for each in node.decorator_list)


def leaves(block: Sequence[ast.stmt]) -> bool:
    """Return whether the block ends in a return, raise, continue or break."""
    return bool(block) and isinstance(block[-1], (ast.Return, ast.Raise, ast.Continue, ast.Break))
