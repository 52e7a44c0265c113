"""Tensors that modules hold besides their parameters and buffers: in lists, dicts, closures, other objects.

Sharding replaces the parameters that modules register. Whoever else holds one would go on with the tensor from before.
"""

from __future__ import annotations

import operator
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from functools import partial
from types import BuiltinMethodType, CellType, FunctionType, MemberDescriptorType, MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

Put = Callable[[Any], object]


class Held(NamedTuple):
    """One place of a tensor outside of ``nn.Module``'s registries.

    Attributes:
        name: as in ``blocks.0.heads[1]``.
        module: the module that it was found from.
        owner: the FQN of that module.
        tensor: what is there.
        put: puts another tensor there; None where that cannot be done, as for the keys of a dict.
    """

    name: str
    module: nn.Module
    owner: str
    tensor: Tensor
    put: Put | None


Place = tuple[str, Any, "Put | None"]

_REGISTRIES = frozenset(("_parameters", "_buffers", "_modules"))
_HOOKS = (OrderedDict, set)  # as nn.Module keeps hooks: mostly empty
_LEAVES = {bool, int, float, complex, str, bytes, type(None), type, type(Ellipsis), range, slice}
_LEAVES |= {torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format, torch.Generator}
# Of torch and of Python itself nothing else is looked into: optimizers, datasets and meshes, threads and loggers. A
# stale optimizer is named by its own check, and FSDP2's objects hold shards on purpose.
_PACKAGES_LEFT_OUT = (sys.stdlib_module_names | {"torch", "numpy"}) - {"types", "argparse", "collections"}


def held_tensors(model: nn.Module) -> list[Held]:
    """Tensors reachable from the modules of a model, each place once, that no module of it registers. Local, pure.

    Buffers are among them, for a parameter may be one too. Weak references, optimizers and torch's other objects are
    not followed; modules outside of the model are.
    """
    modules = {module: fqn for fqn, module in model.named_modules()}
    seen = set(map(id, modules))
    found: list[Held] = []
    for module, fqn in modules.items():
        prefix = fqn + "." if fqn else ""
        found += [
            Held(name, module, fqn, tensor, put) for name, tensor, put in _tensors(_own_places(module, prefix), seen)
        ]
    firsts = {type(module): (module, fqn) for module, fqn in reversed(modules.items())}
    for kind, (module, fqn) in firsts.items():
        places = list(_class_places(kind))
        found += [Held(name, module, fqn, tensor, put) for name, tensor, put in _tensors(places, seen)]
    return found


def _own_places(module: nn.Module, prefix: str) -> list[Place]:
    # One comprehension and no call for each: a module has twenty attributes, and most have nothing to look into.
    places: list[Place] = [
        (prefix + name, value, _attribute(module, name))
        for name, value in vars(module).items()
        if type(value) not in _LEAVES and name not in _REGISTRIES and (type(value) not in _HOOKS or value)
    ]
    buffers = module._buffers
    return places + [(prefix + name, buffer, _setter(buffers, name)) for name, buffer in buffers.items()]


def _class_places(kind: type[nn.Module]) -> Iterator[Place]:
    """What the model's own classes hold: attributes, and closures of methods."""
    for each in kind.__mro__:
        if _package(each) not in _PACKAGES_LEFT_OUT:
            for name, value in vars(each).items():
                if not name.startswith("__") or isinstance(value, FunctionType):
                    yield f"{each.__name__}.{name}", value, partial(setattr, each, name)


def _tensors(places: list[Place], seen: set[int]) -> Iterator[tuple[str, Tensor, Put | None]]:
    """The tensors at and below some places; ``seen`` are ids of objects to pass by, and grows."""
    pending = places[::-1]
    while pending:
        name, value, put = pending.pop()
        if isinstance(value, Tensor):
            yield name, value, put
        elif type(value) not in _LEAVES and id(value) not in seen:
            seen.add(id(value))
            pending += list(_inside(name, value, put))[::-1]


def _inside(name: str, value: Any, put: Put | None) -> Iterator[Place]:
    """What one object holds, read past methods of its class, which may import, compute or refuse."""
    if isinstance(value, dict):
        for key, item in list(dict.items(value)):
            plain = isinstance(key, (str, int))
            yield f"{name}[{key!r}]" if plain else f"{name}[...]", item, partial(dict.__setitem__, value, key)
            yield f"a key of {name}", None if plain else key, None
    elif isinstance(value, list):
        for index, item in enumerate(list.__iter__(value)):
            yield f"{name}[{index}]", item, partial(list.__setitem__, value, index)
    elif isinstance(value, deque):
        yield from ((f"{name}[{index}]", item, _setter(value, index)) for index, item in enumerate(value))
    elif isinstance(value, (tuple, set, frozenset)):
        yield from _rebuilt(name, value, put)
    elif isinstance(value, (FunctionType, MethodType, BuiltinMethodType, partial)):
        yield from _of_callable(name, value, put)
    elif isinstance(value, nn.Module):
        registries = (value._parameters, value._buffers, value._modules)
        yield from ((f"{name}.{key}", item, _setter(each, key)) for each in registries for key, item in each.items())
        own = [(key, item) for key, item in vars(value).items() if key not in _REGISTRIES]
        yield from ((f"{name}.{key}", item, _attribute(value, key)) for key, item in own)
    elif not _left_out(value):
        yield from ((f"{name}.{key}", item, _attribute(value, key)) for key, item in _attributes(value))


def _rebuilt(name: str, value: Any, put: Put | None) -> Iterator[Place]:
    """The items of a tuple or set: a new tuple, or the same set, with one of them replaced."""
    items = list(value)

    def replace(index: int, item: Any) -> None:
        items[index] = item
        if isinstance(value, set):
            value.clear()
            value.update(items)
        else:
            assert put is not None
            put(type(value)(*items) if hasattr(value, "_fields") else type(value)(items))  # a named tuple, or not

    for index, item in enumerate(items):
        can = isinstance(value, set) or put is not None
        yield f"{name}[{index}]", item, partial(replace, index) if can else None


def _of_callable(name: str, value: Any, put: Put | None) -> Iterator[Place]:
    if isinstance(value, FunctionType):
        for variable, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            if _is_filled(cell):
                yield f"{name}, variable {variable}", cell.cell_contents, partial(setattr, cell, "cell_contents")
        yield f"{name}, default", value.__defaults__, partial(setattr, value, "__defaults__")
        yield f"{name}, default", value.__kwdefaults__, None
        yield name, vars(value), None
    elif isinstance(value, partial):
        yield f"{name}.func", value.func, None
        yield f"{name}.args", value.args, partial(_set_args, value)
        yield f"{name}.keywords", value.keywords, None
    else:
        yield f"{name}.__self__", value.__self__, None
        yield name, getattr(value, "__func__", None), None


def _set_args(function: partial[Any], args: tuple[Any, ...]) -> None:
    state = (function.func, args, function.keywords, vars(function))
    function.__setstate__(state)  # type: ignore[attr-defined]  # in place, as unpickling does


def _is_filled(cell: CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _setter(container: Any, key: Any) -> Put:
    return partial(operator.setitem, container, key)


def _attribute(owner: Any, name: str) -> Put:
    """Past ``__setattr__`` of frozen dataclasses and of modules, which would register a parameter."""
    return partial(object.__setattr__, owner, name)


def _attributes(value: Any) -> Iterator[tuple[str, Any]]:
    for each in type(value).__mro__:
        for key, member in vars(each).items():
            if isinstance(member, MemberDescriptorType):  # of __slots__
                yield key, _read(member, value)
            elif key == "__dict__":
                yield from list(member.__get__(value).items())


def _read(member: MemberDescriptorType, value: Any) -> Any:
    try:
        return member.__get__(value)
    except AttributeError:  # not set
        return None


def _left_out(value: Any) -> bool:
    return isinstance(value, (type, torch.optim.Optimizer)) or _package(type(value)) in _PACKAGES_LEFT_OUT


def _package(kind: type) -> str:
    return kind.__module__.partition(".")[0]
