"""A few questions of syntax."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import TypeAlias

Function: TypeAlias = "ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda"


def place(node: ast.AST) -> str:
    """The text of ``a``, ``a.b``, ``a["b"]`` and the like, under which a scope keeps what it is; empty for others."""
    if isinstance(node, ast.Name):
        return node.id
    base = place(node.value) if isinstance(node, (ast.Attribute, ast.Subscript)) else ""
    if base and isinstance(node, ast.Attribute):
        return f"{base}.{node.attr}"
    if base and isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        return f"{base}[{node.slice.value!r}]"
    return ""


def arguments_of(call: ast.Call) -> list[ast.expr]:
    """All arguments of a call, without their names."""
    return [*call.args, *(keyword.value for keyword in call.keywords)]


def classes_of(check: ast.Call) -> Sequence[ast.expr]:
    """The classes that an ``isinstance`` asks for."""
    return check.args[1].elts if isinstance(check.args[1], ast.Tuple) else [check.args[1]]


def read_by_getattr(call: ast.Call) -> ast.Attribute | None:
    """The ``x.name`` that ``getattr(x, "name")`` reads."""
    if isinstance(call.func, ast.Name) and call.func.id == "getattr" and len(call.args) > 1:
        name = call.args[1].value if isinstance(call.args[1], ast.Constant) else None
        return ast.copy_location(ast.Attribute(call.args[0], name, ast.Load()), call) if isinstance(name, str) else None
    return None


def parsed(node: ast.AST) -> ast.expr | None:
    """The annotation in a string, with the string's place in the file."""
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
    """All parameters of a function."""
    rest = [each for each in (node.args.vararg, node.args.kwarg) if each is not None]
    return [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs, *rest]


def is_decorated(node: Function, name: str) -> bool:
    """Whether one of its decorators says so."""
    return not isinstance(node, ast.Lambda) and any(name in ast.unparse(each) for each in node.decorator_list)


def leaves(block: Sequence[ast.stmt]) -> bool:
    """Whether what follows the block is not run after it."""
    return bool(block) and isinstance(block[-1], (ast.Return, ast.Raise, ast.Continue, ast.Break))
