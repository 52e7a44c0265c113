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

_DISTRIBUTED = "distributed", "dist"  # what torch.distributed is called wherever it comes from
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
    """Return what a rewritten program sees in front of ``.fsdp``: ``value``, unless that is ``torch.distributed``."""
    return SimpleNamespace(fsdp=importlib.import_module(OURS)) if value is torch.distributed else value


class _Turn(ast.NodeTransformer):
    def __init__(self, tree: ast.Module) -> None:
        self.count = 0
        # Names that are imported, or assigned from something called distributed.
        self.names = {*_DISTRIBUTED}
        for node in ast.walk(tree):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                self.names.update(alias.asname or alias.name for alias in node.names)
            elif isinstance(node, ast.Assign) and getattr(node.value, "attr", None) in _DISTRIBUTED:
                self.names.update(target.id for target in node.targets if isinstance(target, ast.Name))

    def visit_Import(self, node: ast.Import) -> ast.AST:
        for alias in node.names:
            turned = self._turned(alias.name)
            if alias.asname is not None:  # else it binds torch, whose dotted use is turned
                alias.name = turned
        return node

    def visit_ImportFrom(self, node: ast.ImportFrom) -> Any:
        if node.level:
            return node
        node.module = self._turned(node.module)
        packages = [alias for alias in node.names if alias.name == "fsdp"]
        if node.module != "torch.distributed" or not packages:
            return node
        self.count += len(packages)
        node.names = [alias for alias in node.names if alias.name != "fsdp"]
        turned = [ast.copy_location(ast.alias("fsdp1", alias.asname or "fsdp"), alias) for alias in packages]
        ours = ast.copy_location(ast.ImportFrom("shardkit", turned, 0), node)
        return [node, ours] if node.names else ours

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        self.generic_visit(node)
        if node.attr == "fsdp" and isinstance(node.ctx, ast.Load):
            node.value = self._seen(node.value)
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """Turn ``import_module("torch.distributed.fsdp")`` and ``getattr(torch.distributed, "fsdp")``."""
        self.generic_visit(node)
        function = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", None)
        names = [each.value if isinstance(each, ast.Constant) else None for each in node.args]
        if function == "import_module" and any(names[:1]):
            node.args[0] = ast.copy_location(ast.Constant(self._turned(names[0])), node.args[0])
        elif function == "getattr" and names[1:2] == ["fsdp"]:
            node.args[0] = self._seen(node.args[0])
        return node

    def _turned(self, module: Any) -> Any:
        """Return the module of shardkit in the place of one of torch; any other one as it is."""
        package, _, name = module.rpartition(".") if isinstance(module, str) else ("", "", "")
        if module != TORCH and not (package == TORCH and name in SUBMODULES):
            return module
        self.count += 1
        return OURS if module == TORCH else f"{OURS}.{name}"

    def _seen(self, value: ast.expr) -> ast.expr:
        """Return the expression ``seen(value)`` where the value's name says that it may be ``torch.distributed``.

        ``seen`` knows when the program runs, but it would slow down code that is compiled for nothing.
        """
        named = isinstance(value, ast.Name) and value.id in self.names
        if not (named or (isinstance(value, ast.Attribute) and value.attr in _DISTRIBUTED)):
            return value
        call = ast.Call(ast.parse(_SEEN, mode="eval").body, [], [])
        for node in ast.walk(call):
            ast.copy_location(node, value)
        call.args = [value]
        return call
