"""Find and restore what modules reach besides what they register: through lists, dicts, closures and other objects.

Sharding replaces the parameters that modules register; any other place that holds one would keep the old tensor. A
forward on fake tensors leaves caches and counters behind, and a sharding that fails leaves half a model.
"""

from __future__ import annotations

import functools
import operator
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from itertools import chain
from types import BuiltinMethodType, CellType, FunctionType, MemberDescriptorType, MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

Put = Callable[[Any], object]


class Held(NamedTuple):
    """A place outside of ``nn.Module``'s registries that holds a tensor."""

    name: str  # as in ``blocks.0.heads[1]``
    module: nn.Module  # that it was found from
    owner: str  # the FQN of that module
    tensor: Tensor
    put: Put | None  # puts another tensor there; None where that cannot be done, as for the keys of a dict


Place = tuple[str, Any, "Put | None"]

_REGISTRIES = frozenset(("_parameters", "_buffers", "_modules"))
_CONTAINERS = (dict, OrderedDict, list, deque, tuple, set, frozenset)
_HOOKS = (OrderedDict, set)  # as nn.Module keeps hooks: mostly empty
_LEAVES = {bool, int, float, complex, str, bytes, type(None), type, type(Ellipsis), range, slice}
_LEAVES |= {torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format, torch.Generator}
_LruCache = type(functools.lru_cache(lambda: None))
_CALLABLES = (FunctionType, MethodType, BuiltinMethodType, partial)
_FOLLOWED = (Tensor, nn.Module, dict, list, tuple, set, frozenset, deque, CellType, _LruCache, *_CALLABLES)
# Of torch and of Python itself nothing else is looked into: optimizers, datasets and meshes, threads and loggers. A
# stale optimizer is named by its own check, and FSDP2's objects hold shards on purpose.
_PACKAGES_LEFT_OUT = (sys.stdlib_module_names | {"torch", "numpy"}) - {"types", "argparse", "collections"}


def held_tensors(model: nn.Module) -> list[Held]:
    """Return the tensors that the modules of a model reach and do not register, each place once. Local, pure.

    Buffers are included, since a parameter may be registered as one too. Weak references, optimizers and torch's other
    objects are not followed; modules outside of the model are.
    """
    modules = {module: fqn for fqn, module in model.named_modules()}
    seen: dict[int, Any] = {id(module): module for module in modules}
    sources = [(_own_places(module, fqn + "." if fqn else ""), module, fqn) for module, fqn in modules.items()]
    firsts = {type(module): (module, fqn) for module, fqn in reversed(modules.items())}
    sources += [(list(_class_places(kind)), module, fqn) for kind, (module, fqn) in firsts.items()]
    return [
        Held(name, module, fqn, value, put)
        for places, module, fqn in sources
        for name, value, put in _walk(places, seen)
        if isinstance(value, Tensor)
    ]


@contextmanager
def undone(model: nn.Module) -> Iterator[None]:
    """Undo what the body changes in anything reachable from the modules, also when it raises. Local.

    As :class:`Snapshot` with ``deep``. An ``lru_cache`` that the body filled is cleared. Values of tensors are not
    saved.
    """
    snapshot = Snapshot(model, deep=True)
    try:
        yield
    finally:
        snapshot.restore()


class Snapshot:
    """The dicts, lists, sets, attributes and closure variables that a model reaches, to be restored later.

    Args:
        model: the model, with the class and the attributes of each module.
        deep: also save parameters, gradients and other attributes of tensors, the attributes of the modules' classes,
            and the containers in the globals of their files. Without it no parameter is kept alive.
    """

    def __init__(self, model: nn.Module, *, deep: bool = False) -> None:
        self._restores: list[Callable[[], object]] = []
        seen: dict[int, Any] = {}  # with the objects, so that an id is of one only
        kinds: dict[type, None] = {}
        for _, value, _ in _walk([("", model, None)], seen, deep):
            self._restores += _restores(value, deep)
            if deep and isinstance(value, nn.Module):
                kinds.update(dict.fromkeys(type(value).__mro__))
        for kind in kinds:
            places = [*_class_places(kind), *_globals(kind)]
            self._restores += [partial(_restore_class, kind, dict(vars(kind)))] if places else []
            for _, value, _ in _walk(places, seen, deep):
                self._restores += _restores(value, deep)

    def restore(self) -> None:
        """Restore all of it. Local; in place."""
        for restore in self._restores:
            restore()


# The walk.


def _walk(places: list[Place], seen: dict[int, Any], into_tensors: bool = False) -> Iterator[Place]:
    """Yield these places and all below: each place of a tensor, and each other object once, unless in ``seen``."""
    pending = places[::-1]
    while pending:
        name, value, put = pending.pop()
        kind = type(value)  # and not isinstance, which a dead weakref.proxy answers by an error
        if kind in _LEAVES:
            continue
        if issubclass(kind, Tensor) and not into_tensors:
            yield name, value, put
        elif id(value) not in seen and (issubclass(kind, _FOLLOWED) or _is_followed(kind)):
            seen[id(value)] = value
            yield name, value, put
            pending += list(_inside(name, value, put))[::-1]


def _is_followed(kind: type) -> bool:
    return not issubclass(kind, (type, torch.optim.Optimizer)) and not _is_of_library(kind)


def _is_of_library(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in _PACKAGES_LEFT_OUT


def _own_places(module: nn.Module, prefix: str) -> list[Place]:
    # One comprehension and no call for each: a module has twenty attributes, and most have nothing to look into.
    places: list[Place] = [
        (prefix + name, value, _attribute(module, name))
        for name, value in vars(module).items()
        if type(value) not in _LEAVES and name not in _REGISTRIES and (type(value) not in _HOOKS or value)
    ]
    buffers = module._buffers
    return places + [(prefix + name, buffer, _setter(buffers, name)) for name, buffer in buffers.items()]


def _class_places(kind: type) -> Iterator[Place]:
    """Yield what the model's own classes hold: attributes, and closures of methods."""
    for each in kind.__mro__:
        if not _is_of_library(each):
            for name, value in vars(each).items():
                if not name.startswith("__") or isinstance(value, FunctionType):
                    yield f"{each.__name__}.{name}", value, partial(setattr, each, name)


def _globals(kind: type) -> Iterator[Place]:
    """Yield the containers in the globals of the class's file, which its functions may use as caches."""
    if not _is_of_library(kind):
        for name, value in list(vars(sys.modules.get(kind.__module__, functools)).items()):
            if isinstance(value, (dict, list, set, deque, _LruCache)):
                yield name, value, None


def _inside(name: str, value: Any, put: Put | None) -> Iterator[Place]:
    """Yield what one object holds, without calling methods of its class, which may import, compute or raise."""
    kind = type(value)
    if issubclass(kind, _CONTAINERS) and kind not in _CONTAINERS:  # a subclass may have attributes besides
        own = list((_own_dict(value) or {}).items())
        yield from ((f"{name}.{key}", item, _attribute(value, key)) for key, item in own)
    if issubclass(kind, dict):
        for key, item in list(dict.items(value)):
            plain = isinstance(key, (str, int))
            yield f"{name}[{key!r}]" if plain else f"{name}[...]", item, partial(dict.__setitem__, value, key)
            yield f"a key of {name}", None if plain else key, None
    elif issubclass(kind, list):
        for index, item in enumerate(list.__iter__(value)):
            yield f"{name}[{index}]", item, partial(list.__setitem__, value, index)
    elif issubclass(kind, deque):
        yield from ((f"{name}[{index}]", item, _setter(value, index)) for index, item in enumerate(value))
    elif issubclass(kind, (tuple, set, frozenset)):
        yield from _rebuilt(name, value, put)
    elif issubclass(kind, (*_CALLABLES, CellType, _LruCache)):
        yield from _of_callable(name, value)
    elif issubclass(kind, nn.Module):
        for registry in (value._parameters, value._modules):
            yield from ((f"{name}.{key}", item, _setter(registry, key)) for key, item in registry.items())
        yield from _own_places(value, f"{name}.")
    else:
        yield from ((f"{name}.{key}", item, _attribute(value, key)) for key, item in _attributes(value))


def _rebuilt(name: str, value: Any, put: Put | None) -> Iterator[Place]:
    """Yield the items of a tuple or set. Replacing one makes a new tuple, or changes the set in place."""
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


def _of_callable(name: str, value: Any) -> Iterator[Place]:
    if isinstance(value, FunctionType):
        for variable, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            yield f"{name}, variable {variable}", cell, None
        yield f"{name}, default", value.__defaults__, partial(setattr, value, "__defaults__")
        yield f"{name}, default", value.__kwdefaults__, None
        yield name, vars(value), None
    elif isinstance(value, CellType):
        if _is_filled(value):
            yield name, value.cell_contents, partial(setattr, value, "cell_contents")
    elif isinstance(value, partial):
        yield f"{name}.func", value.func, None
        yield f"{name}.args", value.args, partial(_set_args, value)
        yield f"{name}.keywords", value.keywords, None
    elif isinstance(value, _LruCache):
        yield name, value.__wrapped__, None
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
                with suppress(AttributeError):  # not set
                    yield key, member.__get__(value)
    yield from list((_own_dict(value) or {}).items())


def _own_dict(value: Any) -> dict[str, Any] | None:
    try:
        found = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return None
    return found if isinstance(found, dict) else None


# Putting back.


def _restores(value: Any, deep: bool) -> Iterator[Callable[[], object]]:
    """Yield what puts back the content of one object, where it can change."""
    kind = type(value)
    if issubclass(kind, Tensor) and not deep:
        return
    own = _own_dict(value)
    if own is not None:  # an empty one too: a cache may get its first value as an attribute
        yield partial(_restore_dict, own, list(own.items()))
    if issubclass(kind, nn.Module):
        yield partial(object.__setattr__, value, "__class__", kind)
        registries = ((name, each) for name, each in vars(value).items() if isinstance(each, dict))
        dicts = [each for name, each in registries if deep or name != "_parameters"]
        yield partial(_clear, [each for each in dicts if not each])  # most are empty, and each record costs
        yield from (partial(_restore_dict, each, list(_plain(each).items(each))) for each in dicts if each)
    elif issubclass(kind, dict):
        yield partial(_restore_dict, value, list(_plain(value).items(value)))
    elif issubclass(kind, (list, set, deque)):
        yield partial(_restore_sequence, value, list(value))
    elif issubclass(kind, _LruCache):
        yield partial(_clear_if_filled, value, value.cache_info().misses)
    elif issubclass(kind, CellType) and _is_filled(value):
        yield partial(setattr, value, "cell_contents", value.cell_contents)
    elif issubclass(kind, Tensor) and value.is_leaf:
        yield partial(setattr, value, "grad", value.grad)


def _plain(each: dict[Any, Any]) -> type[dict[Any, Any]]:
    """Return the class whose methods do no more than those of a dict."""
    return OrderedDict if isinstance(each, OrderedDict) else dict


def _restore_dict(each: dict[Any, Any], before: list[tuple[Any, Any]]) -> None:
    kind = _plain(each)
    after = list(kind.items(each))
    if len(after) != len(before) or not _same(chain.from_iterable(before), chain.from_iterable(after)):
        kind.clear(each)
        for key, value in before:
            kind.__setitem__(each, key, value)


def _clear(dicts: list[dict[Any, Any]]) -> None:
    for each in dicts:
        _plain(each).clear(each)


def _restore_sequence(each: Any, before: list[Any]) -> None:
    if len(each) != len(before) or not _same(before, each):
        each.clear()
        (each.update if isinstance(each, set) else each.extend)(before)


def _same(some: Iterable[Any], others: Iterable[Any]) -> bool:
    return all(map(operator.is_, some, others))


def _restore_class(each: type, before: dict[str, Any]) -> None:
    for name in [name for name in vars(each) if name not in before]:
        delattr(each, name)
    for name, value in before.items():
        if vars(each).get(name) is not value:
            setattr(each, name, value)


def _clear_if_filled(cache: Any, misses: int) -> None:
    if cache.cache_info().misses != misses:
        cache.cache_clear()
