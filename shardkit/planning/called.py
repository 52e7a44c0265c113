"""Whether a module is called, as far as the code around it tells: FSDP2 gathers a unit only when it is called.

Read from the bytecode of ``forward`` and of the methods that it uses, so that source files are not needed and nothing
runs. It sees ``self.norm.weight`` and ``layer.forward(x)``; what goes through other ways is left to a dry run.
"""

from __future__ import annotations

import dis
import functools
import inspect
from collections.abc import Iterator
from types import CodeType
from typing import Any

from torch import nn

from shardkit.planning.rules import has_forward
from shardkit.planning.tree import ModelTree

_LOCAL = "local "  # before the name of a variable, to tell it from an attribute


def is_called(tree: ModelTree, entry: int) -> bool:
    """False for a module without forward, or whose parameters or ``forward`` a module around takes by name.

    And for what a dry run saw used without being called.
    """
    if entry in tree.uncalled or not has_forward(tree.modules[entry]):
        return False
    name = tree.fqns[entry].rpartition(".")[2]
    looked_for = {(name, attribute) for attribute in (*tree.modules[entry]._parameters, "forward")}
    outer, from_list = tree.parents[entry], False
    while outer >= 0:
        loads = _loads(type(tree.modules[outer]))  # type: ignore[arg-type]  # a class is hashable
        if looked_for & loads:
            return False
        if from_list and any(first.startswith(_LOCAL) and second == "forward" for first, second in loads):
            return False  # for layer in self.layers: layer.forward(x)
        from_list = outer == tree.parents[entry] and isinstance(tree.modules[outer], nn.ModuleList)
        outer = tree.parents[outer]
    return True


@functools.cache
def _loads(cls: type[nn.Module]) -> frozenset[tuple[str, str]]:
    """Names that stand as ``first.second`` in a class's forward and in its methods that this uses."""
    found: set[tuple[str, str]] = set()
    todo, seen = ["forward"], set(dir(nn.Module)) - {"forward"}
    while todo:
        method = todo.pop()
        if method not in seen:
            seen.add(method)
            pairs = set(_pairs(_code(cls, method)))
            found |= pairs
            todo += [second for first, second in pairs if first == _LOCAL + "self"]
    return frozenset(found)


def _code(cls: type, method: str) -> Any:
    function = inspect.unwrap(getattr(cls, method, None))  # type: ignore[arg-type]
    return getattr(function, "__code__", None)


def _pairs(code: CodeType | None) -> Iterator[tuple[str, str]]:
    if code is None:
        return
    last = None
    for instruction in dis.get_instructions(code):
        kind, value = instruction.opname, instruction.argval
        if kind in ("LOAD_ATTR", "LOAD_METHOD"):
            if last is not None:
                yield last, value
            last = value
        elif kind.startswith(("LOAD_FAST", "LOAD_DEREF")):
            last = _LOCAL + (value[-1] if isinstance(value, tuple) else value)
        elif kind not in ("EXTENDED_ARG", "CACHE", "NOP"):
            last = None
    for constant in code.co_consts:  # comprehensions and functions inside
        if isinstance(constant, CodeType):
            yield from _pairs(constant)
