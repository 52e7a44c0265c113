"""One walk over a model, from which planning takes every module and parameter under each of its names."""

from __future__ import annotations

import dis
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence, Set
from functools import cache, cached_property
from inspect import unwrap
from itertools import chain, zip_longest
from types import CodeType
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from shardkit._torch import has_own_dispatch
from shardkit.errors import PlanError, listing, message
from shardkit.plan import ParamSpec


class ModelTree:
    """The modules of a model in pre-order, one entry per path, and its parameters with all their names.

    Attributes:
        fqns: the path of each entry, ``""`` for the root.
        modules: the module of each entry; a module reachable under two paths has two entries.
        parents: the entry of each one's parent module, -1 for the root.
        ends: one past the last entry below each one, so that ``range(i, ends[i])`` is its subtree.
        post_order: the entries, children before parents.
        firsts: the first entry of each one's module, itself for almost all.
        by_class: the entries of each class of modules.
        owned: the first FQNs of the parameters that each entry's module registers itself.
        numel: elements at or below each entry; a tied parameter counts at each of its places.
        params: each parameter once, by its first FQN, in pre-order.
        specs: what a plan records of each of them.
        unsplit: the parameters of tensor classes with operators of their own, such as quantized ones and DTensors.
        names: the first FQN of each parameter, by its ``id``.
        ties: the further FQNs of each tied parameter, by its first FQN.
        uncalled: the entries that a dry run saw used without being called; empty without one.
        reads: how often a dry run saw operators read each parameter, those read last at the end; empty without one.
    """

    def __init__(self, model: nn.Module) -> None:
        if not isinstance(model, nn.Module):
            problem = f"must be a torch.nn.Module, got {type(model).__name__}"
            raise PlanError(message("model", problem, "", "Pass the model itself"))
        self.fqns: list[str] = []
        self.modules: list[nn.Module] = []
        self.parents: list[int] = []
        self.ends: list[int] = []
        self.post_order: list[int] = []
        self.firsts: list[int] = []
        self.by_class: dict[type[nn.Module], list[int]] = defaultdict(list)
        self.owned: list[Sequence[str]] = []
        self.numel: list[int] = []
        self.params: dict[str, nn.Parameter] = {}
        self.specs: dict[str, ParamSpec] = {}
        self.unsplit: set[str] = set()
        self.names: dict[int, str] = {}
        self.ties: dict[str, list[str]] = {}
        self.uncalled: set[int] = set()
        self.reads: dict[str, int] = {}
        self._walk("", model, -1, {})
        for fqn, aliases in self.ties.items():
            self.specs[fqn] = self.specs[fqn]._replace(aliases=tuple(aliases))

    def _walk(self, fqn: str, module: nn.Module, parent: int, seen: dict[int, int]) -> None:
        entry = len(self.fqns)
        first = seen.setdefault(id(module), entry)
        if first != entry and module in self._around(parent):
            return  # a module that is its own descendant: torch's named_modules() stops here too
        prefix, owned, numel = fqn + "." if fqn else "", [], 0
        for name, param in module._parameters.items():
            if param is not None:
                owned.append(self._register(prefix + name, param))
                numel += param.numel()
        self.fqns.append(fqn)
        self.modules.append(module)
        self.parents.append(parent)
        self.firsts.append(first)
        self.by_class[type(module)].append(entry)
        self.owned.append(owned)
        self.numel.append(numel)
        self.ends.append(entry + 1)
        if children := module._modules:
            for name, child in children.items():
                if child is not None:
                    self._walk(prefix + name, child, entry, seen)
            self.ends[entry] = len(self.fqns)
        self.post_order.append(entry)
        if entry:
            self.numel[parent] += self.numel[entry]

    def _around(self, entry: int) -> Iterator[nn.Module]:
        while entry >= 0:
            yield self.modules[entry]
            entry = self.parents[entry]

    def _register(self, alias: str, param: nn.Parameter) -> str:
        """Return the first FQN of a parameter."""
        first = self.names.setdefault(id(param), alias)
        if first == alias:
            self.params[first], self.specs[first] = param, self._spec(first, param)
        else:
            self.ties.setdefault(first, []).append(alias)
        return first

    def _spec(self, fqn: str, param: nn.Parameter) -> ParamSpec:
        if is_lazy(param):
            rule, fix = "A lazy module has no shapes before its first forward", "Call the model once before sharding"
            raise PlanError(message(fqn, "is not initialized", rule, fix))
        spec = ParamSpec(fqn, tuple(param.shape), param.dtype, param.requires_grad)
        if type(param) is nn.Parameter or not has_own_dispatch(type(param)):
            return spec
        self.unsplit.add(fqn)
        if isinstance(param, DTensor):
            return spec._replace(tensor_parallel=True)
        return spec if spec.trainable else spec._replace(element_bytes=_element_bytes(param))

    @cached_property
    def places(self) -> dict[str, int]:
        """The entry of each FQN."""
        return {fqn: entry for entry, fqn in enumerate(self.fqns)}

    def instances(self, *classes: type) -> list[int]:
        """The entries of modules of these classes, in order."""
        of_class = (entries for cls, entries in self.by_class.items() if issubclass(cls, classes))
        return sorted(chain.from_iterable(of_class))

    @cached_property
    def shared(self) -> list[int]:
        """The entries of modules that have more than one, in order."""
        repeated = {first for entry, first in enumerate(self.firsts) if first != entry}
        return [entry for entry, first in enumerate(self.firsts) if first in repeated] if repeated else []

    def paths(self, entry: int) -> list[int]:
        """All entries of the module at ``entry``."""
        return [each for each in self.shared if self.firsts[each] == self.firsts[entry]] or [entry]

    @cached_property
    def first_entries(self) -> list[int]:
        """The first entry of each module, in pre-order."""
        return [entry for entry, first in enumerate(self.firsts) if first == entry]

    @cached_property
    def unshardable(self) -> frozenset[str]:
        """The parameters that FSDP2 cannot cut along a dim: scalars and empty ones."""
        return frozenset(fqn for fqn, spec in self.specs.items() if not spec.shards)

    def children(self, entry: int) -> Iterator[int]:
        """The entries directly below ``entry``, in order."""
        child = entry + 1
        while child < self.ends[entry]:
            yield child
            child = self.ends[child]

    def subtree(self, entry: int) -> range:
        """The entry itself and all below it."""
        return range(entry, self.ends[entry])

    def outermost(self, entries: Iterable[int]) -> list[int]:
        """The entries that are not inside of another one, in order."""
        found: list[int] = []
        for entry in sorted(entries):
            if not found or entry >= self.ends[found[-1]]:
                found.append(entry)
        return found

    def trained_dtypes(self, *entries: int) -> set[torch.dtype]:
        """The dtypes of the parameters that require grad and that these modules register themselves."""
        specs = (self.specs[fqn] for entry in entries for fqn in self.owned[entry])
        return {spec.dtype for spec in specs if spec.trainable}


def _element_bytes(param: torch.Tensor) -> float:
    """Return the bytes per element of a parameter that consists of other tensors, such as NF4; 0.0 of any other."""
    inner: list[str] = param.__tensor_flatten__()[0] if hasattr(param, "__tensor_flatten__") else []
    return float(sum(getattr(param, name).nbytes for name in inner)) / max(1, param.numel())


def assign(
    tree: ModelTree, units: Sequence[Sequence[int]], ignored: Set[str] = frozenset()
) -> tuple[list[list[str]], list[str]]:
    """Return what a series of ``fully_shard`` calls would own, and the tied parameters that several of them would.

    Each parameter belongs to the innermost unit around it, in torch's order, children before parents: torch's rule, on
    names. ``units`` are the entries of each unit's modules, the root among them.
    """
    around = unit_of_entries(tree, units)
    params: list[list[str]] = [[] for _ in units]
    owner: dict[str, int] = dict.fromkeys(ignored, -1)
    split: dict[str, None] = {}
    for entry in tree.post_order:
        for fqn in tree.owned[entry]:
            if fqn not in owner:
                owner[fqn] = around[entry]
                params[around[entry]].append(fqn)
            elif owner[fqn] not in (-1, around[entry]):
                split[fqn] = None
    return params, list(split)


def unit_of_entries(tree: ModelTree, units: Sequence[Sequence[int]]) -> list[int]:
    """Return the innermost unit around each entry of the tree."""
    unit_at = {path: index for index, unit in enumerate(units) for entry in unit for path in tree.paths(entry)}
    around = [-1] * len(tree.modules)
    for entry in sorted(unit_at):  # outer modules first, so that inner ones overwrite
        around[entry : tree.ends[entry]] = [unit_at[entry]] * (tree.ends[entry] - entry)
    return around


def owners(tree: ModelTree, fqn: str) -> list[int]:
    """Return the entries of the modules that register the parameter ``fqn`` under any of its names."""
    return [entry for entry in tree.first_entries if fqn in tree.owned[entry]]


def split_problem(tree: ModelTree, fqn: str) -> str:
    """Return the error for a tied parameter that is in several units."""
    modules = [tree.fqns[entry] or "(root)" for entry in owners(tree, fqn)]
    problem, rule = f"is shared by {listing(modules)}, which are in different units", "One unit owns a tied parameter"
    return message(fqn, problem, rule, f"Put them in one: group({', '.join(map(repr, modules))})")


# Whether a module is called, since FSDP2 gathers a unit only then. The bytecode of forward, and of the methods that it
# uses, shows ``self.norm.weight`` and ``layer.forward(x)``; nothing runs. A dry run finds the rest.

_SELF, _LOCAL = "variable self", "another variable"  # no attribute is called like these
_LOADS = ("LOAD_ATTR", "LOAD_METHOD")
_NO_VALUE = frozenset({"device", "dtype", "ndim", "requires_grad", "shape"})  # right on shards too: DTensor answers


def has_forward(module: nn.Module) -> bool:
    """Return whether the module can be called; the hooks of ``fully_shard`` run only around a call."""
    return type(module).forward is not nn.Module.forward or "forward" in vars(module)


def is_called(tree: ModelTree, entry: int) -> bool:
    """Return False without forward, or where an outer module uses its parameters or ``forward`` without calling it."""
    return user_of(tree, entry) == entry


def user_of(tree: ModelTree, entry: int) -> int:
    """Return ``entry`` if it is called, else the outermost module that reads its parameters, and must be gathered."""
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


@cache
def _loads(cls: type[nn.Module]) -> set[tuple[str, str]]:
    """Return the names that stand as ``first.second`` in a class's forward and in its methods that forward uses."""
    found: set[tuple[str, str]] = set()
    pending, seen = ["forward"], set(dir(nn.Module)) - {"forward"}
    while pending:
        method = pending.pop()
        if method not in seen:
            seen.add(method)
            function: Any = unwrap(getattr(cls, method, None))  # type: ignore[arg-type]
            pairs = set(_pairs(function.__code__)) if hasattr(function, "__code__") else set()
            found |= pairs
            pending += [second for first, second in pairs if first == _SELF]
    return found


def _pairs(code: CodeType) -> Iterator[tuple[str, str]]:
    last = None
    steps = [each for each in dis.get_instructions(code) if each.opname not in ("EXTENDED_ARG", "CACHE", "NOP")]
    for step, following in zip_longest(steps, steps[1:]):
        if step.opname in _LOADS:
            if last is not None and not (following and following.opname in _LOADS and following.argval in _NO_VALUE):
                yield last, step.argval
            last = step.argval
        elif step.opname.startswith(("LOAD_FAST", "LOAD_DEREF")):
            variable = step.argval[-1] if isinstance(step.argval, tuple) else step.argval
            last = _SELF if variable == "self" else _LOCAL
        else:
            last = None
    for inner in code.co_consts:  # comprehensions and functions
        yield from _pairs(inner) if isinstance(inner, CodeType) else ()
