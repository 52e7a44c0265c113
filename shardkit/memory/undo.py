"""Python state that a forward may change, saved and put back: caches, counters, hooks, what is registered lazily."""

from __future__ import annotations

import functools
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn

_LruCache = type(functools.lru_cache(lambda: None))
_ATOMS = (str, bytes, int, float, complex, type(None))
_CONTAINERS = (dict, list, set, deque, _LruCache)
# Not followed: other threads may change what these hold, and torch's own objects match state outside of Python.
_SHARED = {"_thread", "asyncio", "concurrent", "logging", "multiprocessing", "queue", "threading", "weakref", "torch"}


@contextmanager
def undone(model: nn.Module) -> Iterator[None]:
    """Whatever the body changes in what is reachable from the modules is as before when it ends, however it ends.

    Dicts, lists, sets, deques and the attributes of any object, as far down as they go; the classes of the modules,
    and the containers in the globals of their files; variables that functions close over; gradients of tensors. An
    ``lru_cache`` that the body filled is emptied. Values of tensors are not saved. Local.
    """
    saved: list[Callable[[], None]] = []
    _save([model], saved)
    try:
        yield
    finally:
        for restore in saved:
            restore()


def _save(pending: list[Any], saved: list[Callable[[], None]]) -> None:
    """Add what restores each object that is reachable from ``pending``, once."""
    seen: dict[int, Any] = {}  # kept, so that an id is of one object only
    while pending:
        each = pending.pop()
        if id(each) in seen or not _is_followed(each):
            continue
        seen[id(each)] = each
        restore = _restorer(each)
        if restore is not None:
            saved.append(restore)
        pending.extend(_inside(each))


def _is_followed(each: Any) -> bool:
    kind = type(each)  # and not isinstance, which a dead weakref.proxy answers by an error
    if issubclass(kind, (nn.Module, Tensor)):
        return True
    home = (each.__module__ or "") if kind in (FunctionType, type) else kind.__module__
    return home.partition(".")[0] not in _SHARED and not issubclass(kind, (*_ATOMS, ModuleType))


def _inside(each: Any) -> Iterable[Any]:
    """What an object holds or is bound to."""
    kind = type(each)
    if issubclass(kind, type):  # of a module: others are not followed
        return [*vars(each).values(), *_globals(each)] if issubclass(each, nn.Module) else ()
    held: list[Any] = [getattr(each, "__dict__", None)]
    if issubclass(kind, nn.Module):
        held += type(each).__mro__
    if issubclass(kind, dict):
        held += dict.values(each)  # past a subclass's own
    elif issubclass(kind, (list, tuple, set, frozenset, deque)):
        held += each
    elif issubclass(kind, FunctionType):
        held += [*(each.__closure__ or ()), *(each.__defaults__ or ()), each.__kwdefaults__]
    elif issubclass(kind, MethodType):
        held += [each.__self__, each.__func__]
    elif issubclass(kind, functools.partial):
        held += [each.func, each.args, each.keywords]
    elif issubclass(kind, CellType) and _is_filled(each):
        held.append(each.cell_contents)
    return held


def _restorer(each: Any) -> Callable[[], None] | None:
    """What puts back the content of one object, where it can change."""
    kind = type(each)
    if issubclass(kind, dict):
        base: type[dict[Any, Any]] = OrderedDict if issubclass(kind, OrderedDict) else dict
        return functools.partial(_restore_dict, base, each, list(base.items(each)))
    if issubclass(kind, (list, set, deque)):
        return functools.partial(_restore_sequence, each, list(each))
    if issubclass(kind, _LruCache):
        return functools.partial(_empty_if_filled, each, each.cache_info().misses)
    if issubclass(kind, CellType):
        return functools.partial(setattr, each, "cell_contents", each.cell_contents) if _is_filled(each) else None
    if issubclass(kind, Tensor):
        return functools.partial(setattr, each, "grad", each.grad) if each.is_leaf else None
    if issubclass(kind, type) and issubclass(each, nn.Module):
        return functools.partial(_restore_class, each, dict(vars(each)))
    return None


def _restore_dict(kind: type[dict[Any, Any]], each: dict[Any, Any], before: list[tuple[Any, Any]]) -> None:
    """By the methods of ``kind``: those of a subclass may do more."""
    after = kind.items(each)
    if len(after) == len(before) and all(a is c and b is d for (a, b), (c, d) in zip(before, after, strict=True)):
        return
    kind.clear(each)
    for key, value in before:
        kind.__setitem__(each, key, value)


def _restore_sequence(each: Any, before: list[Any]) -> None:
    if len(each) != len(before) or any(a is not b for a, b in zip(before, each, strict=True)):
        each.clear()
        (each.update if isinstance(each, set) else each.extend)(before)


def _restore_class(each: type, before: dict[str, Any]) -> None:
    for name in [name for name in vars(each) if name not in before]:
        delattr(each, name)
    for name, value in before.items():
        if vars(each).get(name) is not value:
            setattr(each, name, value)


def _empty_if_filled(cache: Any, misses: int) -> None:
    if cache.cache_info().misses != misses:
        cache.cache_clear()


def _globals(cls: type) -> Iterator[Any]:
    """The containers that functions of the class's file may use as a cache."""
    for value in list(vars(sys.modules.get(cls.__module__, functools)).values()):
        if isinstance(value, _CONTAINERS):  # no more of the file, which is other people's too
            yield value


def _is_filled(cell: CellType) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False
