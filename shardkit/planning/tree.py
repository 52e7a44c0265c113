"""The modules and parameters of a model as planning sees them, from one walk over the model."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parameter import is_lazy

from shardkit._torch import has_own_dispatch
from shardkit.errors import PlanError, listing
from shardkit.plan import ParamSpec


@dataclass(eq=False, slots=True)
class ModuleNode:
    """One module of the model. A module that is registered in several places
    has several parents.
    """

    fqn: str  # where the model registers it first; "" is the root
    module: nn.Module
    place: int  # in the order of named_modules()
    # The tree has the children: a cycle of references would keep all nodes until the garbage
    # collector finds them, which is slow for large models.
    parents: tuple[ModuleNode, ...]
    params: tuple[str, ...]  # that it registers itself, by their first FQNs
    numel: int  # elements at or below; a tied parameter counts at each of its places
    below: int = 0  # the number of modules, where none is shared
    is_no_unit: bool = False  # a dry run saw that FSDP2 would train it wrongly as one

    @property
    def name(self) -> str:
        """The FQN, for messages."""
        return self.fqn or "(root)"

    def ancestors(self) -> list[ModuleNode]:
        """The modules around it, each once, inner ones first."""
        around = list(self.parents)
        seen = set(around)
        for node in around:  # which grows
            for parent in node.parents:
                if parent not in seen:
                    seen.add(parent)
                    around.append(parent)
        return around


class ModelTree:
    """The modules of a model in the order of ``named_modules()``, and its parameters.

    Attributes:
        root: the model itself.
        nodes: all modules, each once.
        post_order: the same, children before parents, as torch visits them.
        params: each parameter once, by its first FQN.
        specs: what a plan records of each of them.
        shares_modules: whether a module is registered in several places.
        shares_params: whether a parameter is.
        called_last: the layer that a dry run called last.
        unsplit: the parameters of tensor classes with operators of their own, such as DTensors.
    """

    def __init__(self, model: nn.Module) -> None:
        if not isinstance(model, nn.Module):
            kind = type(model).__name__
            raise PlanError(f"model must be a torch.nn.Module, got {kind}. Pass the model itself.")
        self.nodes: list[ModuleNode] = []
        self.post_order: list[ModuleNode] = []
        self.params: dict[str, nn.Parameter] = {}
        self.specs: dict[str, ParamSpec] = {}
        self.shares_modules = False
        self.shares_params = False
        self.called_last: ModuleNode | None = None
        self.unsplit: set[str] = set()
        self._children: dict[ModuleNode, list[ModuleNode]] = {}
        self._by_module: dict[nn.Module, ModuleNode] = {}
        self._by_param: dict[int, str] = {}
        self._aliases: dict[str, str] = {}
        self.root = self._walk("", model, ())

    def _walk(self, fqn: str, module: nn.Module, parents: tuple[ModuleNode, ...]) -> ModuleNode:
        prefix = f"{fqn}." if fqn else ""
        params = []
        numel = 0
        for name, param in module._parameters.items():
            if param is not None:
                params.append(self._register(prefix + name, param))
                numel += param.numel()
        node = ModuleNode(fqn, module, len(self.nodes), parents, tuple(params), numel)
        self.nodes.append(node)
        self._by_module[module] = node
        if module._modules:
            around = (node,)  # one tuple for all children
            children: list[ModuleNode] = []
            for name, child in module._modules.items():
                if child is None:
                    continue
                seen = self._by_module.get(child)
                if seen is None:
                    seen = self._walk(prefix + name, child, around)
                elif node in seen.parents or seen is node or seen in node.ancestors():
                    continue  # its own descendant, where named_modules() stops too
                else:
                    seen.parents += around
                    self.shares_modules = True
                children.append(seen)
                node.numel += seen.numel
            self._children[node] = children
            node.below = len(self.nodes) - node.place - 1
        self.post_order.append(node)
        return node

    def _register(self, fqn: str, param: nn.Parameter) -> str:
        first = self._by_param.setdefault(id(param), fqn)
        if first == fqn:
            self.params[fqn] = param
            self.specs[fqn] = self._spec(fqn, param)
        else:
            spec = self.specs[first]
            self.specs[first] = spec._replace(aliases=(*spec.aliases, fqn))
            self._aliases[fqn] = first
            self.shares_params = True
        return first

    def _spec(self, fqn: str, param: nn.Parameter) -> ParamSpec:
        if type(param) is nn.Parameter:
            return ParamSpec(fqn, tuple(param.shape), param.dtype, param.requires_grad)
        if is_lazy(param):
            raise PlanError(
                f"{fqn} is not initialized. A lazy module has no shapes before its first forward. "
                "Call the model once before sharding."
            )
        spec = ParamSpec(fqn, tuple(param.shape), param.dtype, param.requires_grad)
        if not has_own_dispatch(type(param)):
            return spec
        self.unsplit.add(fqn)
        if isinstance(param, DTensor):
            return spec._replace(tensor_parallel=True, part=_largest_part(param))
        return spec if spec.trainable else spec._replace(element_bytes=_element_bytes(param))

    def children(self, node: ModuleNode) -> list[ModuleNode]:
        """The modules that a module registers, each once."""
        return self._children.get(node, [])

    def subtree(self, node: ModuleNode) -> list[ModuleNode]:
        """The module and all below it, each once, outer ones first."""
        if not self.shares_modules:
            return self.nodes[node.place : node.place + 1 + node.below]
        inside = [node]
        seen = {node}
        for outer in inside:  # which grows
            for child in self.children(outer):
                if child not in seen:
                    seen.add(child)
                    inside.append(child)
        return inside

    def node(self, fqn: str) -> ModuleNode:
        """The module of a path, also of a further path of a shared module."""
        return self._by_module[self.root.module.get_submodule(fqn)]

    def find(self, fqn: str) -> ModuleNode | None:
        """The module of a path, None without one."""
        try:
            return self.node(fqn)
        except AttributeError:
            return None

    def owners(self, fqn: str) -> list[ModuleNode]:
        """The modules that register a parameter: several where it is tied."""
        paths = (fqn, *self.specs[fqn].aliases)
        return [self.node(path.rpartition(".")[0]) for path in paths]

    def ordered(self, fqns: Set[str]) -> tuple[str, ...]:
        """These parameters in the model's order."""
        return tuple(fqn for fqn in self.params if fqn in fqns) if fqns else ()

    def fqn_of(self, param: torch.Tensor | str) -> str | None:
        """The first FQN of a parameter, given itself or any of its FQNs; None if it is not here."""
        if isinstance(param, str):
            return param if param in self.params else self._aliases.get(param)
        return self._by_param.get(id(param))

    def unshardable(self) -> set[str]:
        """The parameters that FSDP2 cannot cut along a dim: scalars and empty ones."""
        return {fqn for fqn, spec in self.specs.items() if not spec.shards}


def _element_bytes(param: torch.Tensor) -> float:
    """Bytes per element of a parameter that consists of other tensors, such as NF4;
    0.0 of others.
    """
    names = param.__tensor_flatten__()[0] if hasattr(param, "__tensor_flatten__") else []
    return float(sum(getattr(param, name).nbytes for name in names)) / max(1, param.numel())


def _largest_part(param: DTensor) -> tuple[int, ...]:
    """The shape of a DTensor on the rank that has most of it, the same on every rank."""
    shape = list(param.shape)
    for ranks, placement in zip(param.device_mesh.shape, param.placements, strict=True):
        if isinstance(placement, Shard):
            shape[placement.dim] = -(-shape[placement.dim] // ranks)
    return tuple(shape)


def in_order(nodes: Iterable[ModuleNode]) -> list[ModuleNode]:
    """The modules in the model's order."""
    return sorted(nodes, key=lambda node: node.place)


def outermost(nodes: Iterable[ModuleNode]) -> list[ModuleNode]:
    """The modules that are not inside of another one of them, in the model's order."""
    given = set(nodes)
    return in_order(node for node in given if given.isdisjoint(node.ancestors()))


# --- Which unit owns a parameter ----------------------------------------------------------------


def units_around(
    tree: ModelTree, units: Sequence[Sequence[ModuleNode]]
) -> dict[ModuleNode, frozenset[int]]:
    """The unit that is unsharded while a module runs: the innermost around it.

    Several, by index, where a module is registered in several units.
    """
    around: dict[ModuleNode, frozenset[int]] = {}
    unit_of = {node: frozenset([index]) for index, nodes in enumerate(units) for node in nodes}
    if not tree.shares_modules:
        for node in in_order(unit_of):  # outer ones first
            around.update(dict.fromkeys(tree.subtree(node), unit_of[node]))
        return around
    around.update(unit_of)
    for node in reversed(tree.post_order):  # all its parents come before a module
        if node in around:
            continue
        if len(node.parents) == 1:
            around[node] = around[node.parents[0]]
        else:
            around[node] = frozenset().union(*[around[parent] for parent in node.parents])
    return around


def assign(
    tree: ModelTree, units: Sequence[Sequence[ModuleNode]], skipped: Set[str] = frozenset()
) -> tuple[list[list[str]], list[str]]:
    """Return the parameters that each ``fully_shard`` call would own, and those of several.

    A unit owns what is in its modules and in no unit inside, in torch's order: children before
    parents. A tied parameter, or one of a shared module, may so be in several units, which torch
    would give to the first: the others would run without it. Callers join these units or refuse.
    """
    around = units_around(tree, units)
    owned: list[list[str]] = [[] for _ in units]
    in_several: list[str] = []
    tied: set[str] = set()
    for node in tree.post_order:
        if not node.params:
            continue
        own = owned[min(around[node])]
        for fqn in node.params:
            if fqn in skipped or fqn in tied:
                continue
            places = around[node]
            if tree.shares_params and tree.specs[fqn].aliases:
                tied.add(fqn)
                places = places.union(*[around[owner] for owner in tree.owners(fqn)])
            if len(places) > 1:
                in_several.append(fqn)
            own.append(fqn)
    return owned, in_several


def tie_problem(tree: ModelTree, fqn: str) -> str:
    """Return the error for a tied parameter that is in several units."""
    names = [node.name for node in tree.owners(fqn)]
    group = f"group({', '.join(map(repr, names))})"
    return (
        f"{fqn} is shared by {listing(names)}, which are in different units. "
        f"One unit owns a tied parameter. Put them in one: {group}."
    )


# --- Whether a module is called, since FSDP2 unshards a unit only around a call of it ----


def has_forward(module: nn.Module) -> bool:
    """Whether the module can be called."""
    return type(module).forward is not nn.Module.forward or "forward" in vars(module)


def is_called(node: ModuleNode) -> bool:
    """False without forward, or where an outer module uses its parameters without calling it."""
    if node.is_no_unit or not has_forward(node.module):
        return False
    if not node.fqn.rpartition(".")[2].isidentifier():
        return True  # an item of a list; no source can name its parameters
    return not any(reads(outer, node) for outer in node.ancestors())


def called_around(node: ModuleNode) -> list[ModuleNode]:
    """The module itself if it is called, else the modules around it that use its parameters."""
    if not node.parents or is_called(node):
        return [node]
    readers = [outer for outer in node.ancestors() if reads(outer, node)]
    called: list[ModuleNode] = []
    for outer in readers or node.parents:
        called += called_around(outer)
    return outermost(called)


# Such an attribute of a parameter is right on shards too: DTensor answers.
_WITHOUT_VALUE = r"(?!\.(device|dtype|ndim|requires_grad|shape)\b)"


def reads(outer: ModuleNode, node: ModuleNode) -> bool:
    """Whether the source of ``outer``'s forward has ``<name>.weight``, or ``<name>.forward``.

    Only a hint: what it misses raises in the first forward, on all ranks, as "mixed torch.Tensor
    and DTensor"; a dry run with ``example_batch`` finds it before.
    """
    name = node.fqn.rpartition(".")[2]
    source = _forward_source(type(outer.module))  # type: ignore[arg-type]
    if "forward" in vars(outer.module):  # set on the instance, as kernel patchers do
        source += _source(outer.module.forward)
    if f"{name}." not in source:
        return False
    attributes = "|".join(map(re.escape, [*node.module._parameters, "forward"]))
    return re.search(rf"\b{re.escape(name)}\.({attributes})\b{_WITHOUT_VALUE}", source) is not None


def _source(function: Any) -> str:
    try:
        return inspect.getsource(inspect.unwrap(function))
    except (OSError, TypeError):
        return ""


@cache
def _forward_source(cls: type[nn.Module]) -> str:
    """The source of a class's forward and of the methods that it calls on self; "" if unknown."""
    source = ""
    pending, seen = ["forward"], set(dir(nn.Module)) - {"forward"}
    while pending:
        method = pending.pop()
        if method in seen:
            continue
        seen.add(method)
        text = _source(getattr(cls, method, None))
        source += text
        pending += re.findall(r"\bself\.(\w+)\(", text)
    return source
