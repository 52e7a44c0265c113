"""Whether a module is called, as far as bytecode tells: FSDP2 gathers a unit only when its module is called.

The bytecode is that of ``forward`` and of the methods that it uses, so no source file is needed and nothing runs. It
shows ``self.norm.weight`` and ``layer.forward(x)``. A dry run finds the rest.
"""

from __future__ import annotations

import dis
import functools
import inspect
import itertools
from collections.abc import Iterator
from types import CodeType

from torch import nn

from shardkit.planning.rules import has_forward
from shardkit.planning.tree import ModelTree

_SELF, _LOCAL = "variable self", "another variable"  # no attribute is called like these
_LOADS = ("LOAD_ATTR", "LOAD_METHOD")
_NO_VALUE = frozenset({"device", "dtype", "ndim", "requires_grad", "shape"})  # right on shards too: DTensor answers


def is_called(tree: ModelTree, entry: int) -> bool:
    """Return False for a module without forward, or whose parameters or ``forward`` an outer module reads by name.

    Also for a module that a dry run saw used without being called.
    """
    return user_of(tree, entry) == entry


def user_of(tree: ModelTree, entry: int) -> int:
    """Return the outermost module that reads the parameters at ``entry``: it must be gathered; ``entry`` if called."""
    name = tree.fqns[entry].rpartition(".")[2]
    looked_for = {(name, attribute) for attribute in (*tree.modules[entry]._parameters, "forward")}
    outer, from_list = tree.parents[entry], False
    user = outer if entry in tree.uncalled or not has_forward(tree.modules[entry]) else entry
    while outer >= 0:
        loads = _loads(type(tree.modules[outer]))  # type: ignore[arg-type]  # a class is hashable
        if not looked_for.isdisjoint(loads) or (from_list and (_LOCAL, "forward") in loads):
            user = outer  # the latter: for layer in self.layers: layer.forward(x)
        from_list = outer == tree.parents[entry] and isinstance(tree.modules[outer], nn.ModuleList)
        outer = tree.parents[outer]
    return user


@functools.cache
def _loads(cls: type[nn.Module]) -> frozenset[tuple[str, str]]:
    """Return the names that stand as ``first.second`` in a class's forward and in its methods that forward uses."""
    found: set[tuple[str, str]] = set()
    pending, seen = ["forward"], set(dir(nn.Module)) - {"forward"}
    while pending:
        method = pending.pop()
        if method not in seen:
            seen.add(method)
            function = inspect.unwrap(getattr(cls, method, None))  # type: ignore[arg-type]
            pairs = set(_pairs(getattr(function, "__code__", None)))
            found |= pairs
            pending += [second for first, second in pairs if first == _SELF]
    return frozenset(found)


def _pairs(code: CodeType | None) -> Iterator[tuple[str, str]]:
    if code is None:
        return
    last = None
    steps = [each for each in dis.get_instructions(code) if each.opname not in ("EXTENDED_ARG", "CACHE", "NOP")]
    for step, following in itertools.zip_longest(steps, steps[1:]):
        if step.opname in _LOADS:
            if last is not None and not (following and following.opname in _LOADS and following.argval in _NO_VALUE):
                yield last, step.argval
            last = step.argval
        elif step.opname.startswith(("LOAD_FAST", "LOAD_DEREF")):
            variable = step.argval[-1] if isinstance(step.argval, tuple) else step.argval
            last = _SELF if variable == "self" else _LOCAL
        else:
            last = None
    for constant in code.co_consts:  # comprehensions and functions inside
        if isinstance(constant, CodeType):
            yield from _pairs(constant)
