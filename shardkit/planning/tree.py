"""One walk over a model, of which planning asks all: every module and parameter, under each of its names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property

import torch.nn as nn
from torch.distributed.tensor import DTensor

from shardkit.errors import PlanError, message
from shardkit.plan import ParamSpec


class ModelTree:
    """The modules of a model in pre-order, one entry per path, and its parameters with all their names.

    Attributes:
        fqns: the path of each entry, ``""`` for the root.
        modules: the module of each entry; a module reachable under two paths has two entries.
        parents: the entry each one hangs below, -1 for the root.
        ends: one past the last entry below each one, so that ``range(i, ends[i])`` is its subtree.
        post_order: the entries, children before parents.
        owned: the parameters that each entry's module registers itself.
        params: each parameter once, by its first FQN, in pre-order.
        names: the first FQN of each parameter, by its ``id``.
        ties: the further FQNs of each parameter that has several, by its first.
        uncalled: the entries that a dry run saw used without being called; empty without one.
    """

    def __init__(self, model: nn.Module) -> None:
        if not isinstance(model, nn.Module):
            rule = "Planning and sharding take one torch.nn.Module"
            problem = f"a {type(model).__name__} is not a module"
            raise PlanError(message("model", problem, rule, "Pass the model itself"))
        self.fqns: list[str] = []
        self.modules: list[nn.Module] = []
        self.parents: list[int] = []
        self.ends: list[int] = []
        self.post_order: list[int] = []
        self.owned: list[Sequence[nn.Parameter]] = []
        self.params: dict[str, nn.Parameter] = {}
        self.names: dict[int, str] = {}
        self.ties: dict[str, list[str]] = {}
        self.uncalled: set[int] = set()
        self._walk("", model, -1, set())

    @cached_property
    def places(self) -> dict[str, int]:
        """The entry of each FQN."""
        return {fqn: entry for entry, fqn in enumerate(self.fqns)}

    @cached_property
    def unshardable(self) -> frozenset[str]:
        """The parameters that FSDP2 cannot cut along a dim: scalars and empty ones."""
        return frozenset(fqn for fqn, param in self.params.items() if not param.dim() or not param.numel())

    def _walk(self, fqn: str, module: nn.Module, parent: int, path: set[int]) -> None:
        if id(module) in path:
            return  # a module that is its own descendant: torch's named_modules() stops here too
        entry = len(self.fqns)
        prefix = fqn + "." if fqn else ""
        own, children = module._parameters, module._modules
        self.fqns.append(fqn)
        self.modules.append(module)
        self.parents.append(parent)
        self.owned.append(self._name(prefix, own) if own else ())
        self.ends.append(entry + 1)
        if children:
            path.add(id(module))
            for name, child in children.items():
                if child is not None:
                    self._walk(prefix + name, child, entry, path)
            path.discard(id(module))
            self.ends[entry] = len(self.fqns)
        self.post_order.append(entry)

    def _name(self, prefix: str, own: Mapping[str, nn.Parameter | None]) -> list[nn.Parameter]:
        params = []
        for name, param in own.items():
            if param is not None:
                params.append(param)
                fqn = prefix + name
                first = self.names.setdefault(id(param), fqn)
                if first == fqn:
                    self.params[fqn] = param
                else:
                    self.ties.setdefault(first, []).append(fqn)
        return params

    def children(self, entry: int) -> Iterator[int]:
        """The entries directly below ``entry``, in order."""
        child = entry + 1
        while child < self.ends[entry]:
            yield child
            child = self.ends[child]

    def paths(self, entry: int) -> list[int]:
        """All entries of the module at ``entry``."""
        return [path for path, module in enumerate(self.modules) if module is self.modules[entry]]

    def subtree(self, entry: int) -> range:
        """The entry itself and all below it."""
        return range(entry, self.ends[entry])

    def contains(self, outer: int, inner: int) -> bool:
        """Whether ``inner`` is ``outer`` or below it."""
        return outer <= inner < self.ends[outer]

    def numel(self, entry: int) -> int:
        """Elements of all parameters at or below ``entry``, each counted once."""
        seen = {id(param): param.numel() for below in self.subtree(entry) for param in self.owned[below]}
        return sum(seen.values())

    def has_params(self, entry: int) -> bool:
        """Whether the module at ``entry`` or one below it has a parameter."""
        return any(self.owned[below] for below in self.subtree(entry))

    def specs(self) -> tuple[ParamSpec, ...]:
        """What a plan records of each parameter, in order."""
        ties = self.ties
        parallel = any(issubclass(kind, DTensor) for kind in set(map(type, self.params.values())))
        return tuple(
            ParamSpec(
                fqn,
                tuple(param.shape),
                param.dtype,
                param.requires_grad,
                tuple(ties[fqn]) if fqn in ties else (),
                parallel and isinstance(param, DTensor),
            )
            for fqn, param in self.params.items()
        )
