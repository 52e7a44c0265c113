"""One walk over a model: every module and parameter by FQN, and who is inside whom.

Planning asks many questions of the same model; the walk is done once and answers them all. It visits every
path, so a module or parameter that is reachable under several names keeps them all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

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
        owned: the parameters that each entry's module registers itself, by name.
        places: the entry of each FQN.
        names: all FQNs of a parameter, by the ``id`` of the parameter.
        params: each parameter once, by its first FQN, in pre-order.
        ties: the first FQNs of parameters that have several.
    """

    def __init__(self, model: nn.Module) -> None:
        if not isinstance(model, nn.Module):
            raise PlanError(
                message(
                    "model",
                    f"a {type(model).__name__} is not a module",
                    "Planning and sharding take one torch.nn.Module",
                    "Pass the model itself",
                )
            )
        self.fqns: list[str] = []
        self.modules: list[nn.Module] = []
        self.parents: list[int] = []
        self.ends: list[int] = []
        self.post_order: list[int] = []
        self.owned: list[Sequence[tuple[str, nn.Parameter]]] = []
        self._walk("", model, -1, set())
        self.places = {fqn: entry for entry, fqn in enumerate(self.fqns)}
        self.names: dict[int, list[str]] = {}
        self.params: dict[str, nn.Parameter] = {}
        self._name_params()
        self.ties = {names[0] for names in self.names.values() if len(names) > 1}

    def _walk(self, fqn: str, module: nn.Module, parent: int, path: set[int]) -> None:
        if id(module) in path:
            return  # a module that is its own descendant: torch's named_modules() stops here too
        entry = len(self.fqns)
        own, children = module._parameters, module._modules
        self.fqns.append(fqn)
        self.modules.append(module)
        self.parents.append(parent)
        self.owned.append([(name, param) for name, param in own.items() if param is not None] if own else ())
        self.ends.append(entry + 1)
        if children:
            path.add(id(module))
            prefix = fqn + "." if fqn else ""
            for name, child in children.items():
                if child is not None:
                    self._walk(prefix + name, child, entry, path)
            path.discard(id(module))
            self.ends[entry] = len(self.fqns)
        self.post_order.append(entry)

    def _name_params(self) -> None:
        names, params = self.names, self.params
        for fqn, pairs in zip(self.fqns, self.owned, strict=True):
            if pairs:
                prefix = fqn + "." if fqn else ""
                for name, param in pairs:
                    full_name = prefix + name
                    known = names.get(id(param))
                    if known is None:
                        names[id(param)] = [full_name]
                        params[full_name] = param
                    else:
                        known.append(full_name)

    def children(self, entry: int) -> Iterator[int]:
        """The entries directly below ``entry``, in order."""
        child = entry + 1
        while child < self.ends[entry]:
            yield child
            child = self.ends[child]

    def subtree(self, entry: int) -> range:
        """The entry itself and all below it."""
        return range(entry, self.ends[entry])

    def contains(self, outer: int, inner: int) -> bool:
        """Whether ``inner`` is ``outer`` or below it."""
        return outer <= inner < self.ends[outer]

    def numel(self, entry: int) -> int:
        """Elements of all parameters at or below ``entry``, each counted once."""
        seen = {id(param): param.numel() for below in self.subtree(entry) for _, param in self.owned[below]}
        return sum(seen.values())

    def has_params(self, entry: int) -> bool:
        """Whether the module at ``entry`` or one below it has a parameter."""
        return any(self.owned[below] for below in self.subtree(entry))

    def spec(self, fqn: str) -> ParamSpec:
        """What a plan records of the parameter ``fqn``."""
        param = self.params[fqn]
        aliases = tuple(self.names[id(param)][1:]) if fqn in self.ties else ()
        return ParamSpec(fqn, tuple(param.shape), param.dtype, param.requires_grad, aliases, isinstance(param, DTensor))
