"""A program's source with its imports of ``torch.distributed.fsdp`` turned to ``shardkit.fsdp1``. Pure.

Only imports and what stands for one are touched, and positions stay, so tracebacks show the program as it is written.
"""

from __future__ import annotations

import ast
import importlib
import pkgutil
from types import SimpleNamespace
from typing import Any

import torch.distributed.fsdp

TORCH = "torch.distributed.fsdp"
OURS = "shardkit.fsdp1"
# wrap, api, fully_sharded_data_parallel, sharded_grad_scaler, and FSDP1's private ones; FSDP2 is in a package.
SUBMODULES = tuple(found.name for found in pkgutil.iter_modules(torch.distributed.fsdp.__path__) if not found.ispkg)

_USED = "distributed", "dist"  # what torch.distributed is called wherever it comes from
_SEEN = '__import__("shardkit.fsdp1.dropin.rewrite", fromlist=["seen"]).seen'  # needs no name in the program


def mentions(source: bytes) -> bool:
    """Return whether a source may have anything to turn: every form has this word in it."""
    return b"fsdp" in source


def rewrite(source: bytes, path: str) -> tuple[ast.Module, int]:
    """Return the source as a tree with its imports turned, and how many were.

    Raises:
        SyntaxError: as Python itself raises it for the file.
    """
    tree = ast.parse(source, filename=path)
    turn = _Turn(tree)
    return turn.visit(tree), turn.count


def seen(value: Any) -> Any:
    """What a rewritten program sees in front of ``.fsdp``: its own value, unless that is ``torch.distributed``."""
    if value is not torch.distributed:
        return value
    return SimpleNamespace(fsdp=importlib.import_module(OURS))


def ours(module: str | None) -> str | None:
    """Return the module of shardkit in the place of one of torch; None for one that stays."""
    if module == TORCH:
        return OURS
    package, _, name = (module or "").rpartition(".")
    return f"{OURS}.{name}" if package == TORCH and name in SUBMODULES else None


class _Turn(ast.NodeTransformer):
    def __init__(self, tree: ast.Module) -> None:
        self.count = 0
        self.names = {*_USED, *_bound(tree)}

    def visit_Import(self, node: ast.Import) -> ast.AST:
        """``import torch.distributed.fsdp`` without ``as`` binds ``torch``: its dotted use is turned instead."""
        for alias in node.names:
            if alias.asname is None:
                self.count += ours(alias.name) is not None
            else:
                alias.name = self._turned(alias.name)
        return node

    def visit_ImportFrom(self, node: ast.ImportFrom) -> Any:
        if node.level:
            return node
        node.module = self._turned(node.module)
        if node.module != "torch.distributed":
            return node
        packages = [alias for alias in node.names if alias.name == "fsdp"]
        node.names = [alias for alias in node.names if alias.name != "fsdp"]
        self.count += len(packages)
        turned = [ast.copy_location(ast.alias("fsdp1", alias.asname or "fsdp"), alias) for alias in packages]
        imports = [ast.copy_location(ast.ImportFrom("shardkit", [alias], 0), node) for alias in turned]
        return [*([node] if node.names else []), *imports]

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        self.generic_visit(node)
        if node.attr == "fsdp" and isinstance(node.ctx, ast.Load) and self._may_be_distributed(node.value):
            node.value = _seen(node.value)
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """``import_module("torch.distributed.fsdp")`` and ``getattr(torch.distributed, "fsdp")``."""
        self.generic_visit(node)
        function = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", None)
        if function == "import_module" and node.args and isinstance(node.args[0], ast.Constant):
            node.args[0].value = self._turned(node.args[0].value)
        elif function == "getattr" and len(node.args) > 1 and self._is_package_of(node.args[0], node.args[1]):
            node.args[0] = _seen(node.args[0])
        return node

    def _turned(self, module: Any) -> Any:
        found = ours(module) if isinstance(module, str) else None
        self.count += found is not None
        return found or module

    def _is_package_of(self, value: ast.expr, name: ast.expr) -> bool:
        return isinstance(name, ast.Constant) and name.value == "fsdp" and self._may_be_distributed(value)

    def _may_be_distributed(self, value: ast.expr) -> bool:
        """By its name. :func:`seen` knows when the program runs, but it would stand in compiled code for nothing."""
        if isinstance(value, ast.Attribute):
            return value.attr in _USED
        return isinstance(value, ast.Name) and value.id in self.names


def _bound(tree: ast.Module) -> set[str]:
    """Names that are imported, or assigned from something called distributed."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names.update(alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Attribute) and node.value.attr in _USED:
            names.update(target.id for target in node.targets if isinstance(target, ast.Name))
    return names


def _seen(value: ast.expr) -> ast.expr:
    """Return the expression ``seen(value)``, at the place of ``value``."""
    call = ast.Call(ast.parse(_SEEN, mode="eval").body, [], [])
    for node in ast.walk(call):
        ast.copy_location(node, value)
    call.args = [value]
    return call
