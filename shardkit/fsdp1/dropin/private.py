"""Private names of torch's FSDP1 that programs import nevertheless.

Most are torch's own. Functions that query a wrapped model also accept ours. Functions of FSDP1's state, handles or flat
parameters can be imported, and raise a TranslationError when called, which names what to use instead.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import FunctionType, ModuleType
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from shardkit.errors import TranslationError, message
from shardkit.fsdp1.dropin.flat import Handle, handles
from shardkit.fsdp1.dropin.record import is_wrapper, roots_of, wrappers_of
from shardkit.fsdp1.dropin.rewrite import OURS, SUBMODULES, TORCH
from shardkit.replacements import PRIVATE, private

# Parameters of functions that work on what FSDP2 does not have.
_FSDP1S_OWN = {"state", "fsdp_state", "handle", "handles", "fsdp_param_info", "flat_param"}


def resolve(module: str, name: str) -> Any:
    """Return an attribute of a module of ``torch.distributed.fsdp``, adapted to FSDP2.

    Args:
        module: the module's name in the package; empty for the package.
        name: the attribute.

    Raises:
        AttributeError: torch has no such name; an ``import`` then raises ImportError, as for torch.
    """
    if not module and name in SUBMODULES:  # before torch's, which are attributes of its package
        return importlib.import_module(f"{OURS}.{name}")
    original = importlib.import_module(f"{TORCH}.{module}".rstrip("."))
    if name.startswith("__") or not hasattr(original, name):
        where = f"{OURS}.{module}".rstrip(".")
        raise AttributeError(f"module {where!r} has no attribute {name!r}, as {original.__name__} has none")
    return _served(name, getattr(original, name))


def register_private_modules() -> None:
    """Make ``shardkit.fsdp1._common_utils`` and the like importable, as modules without a file."""
    for name in SUBMODULES:
        if name.startswith("_"):
            sys.modules.setdefault(f"{OURS}.{name}", _Private(name))


class _Private(ModuleType):
    """One of torch's private modules; its attributes come from :func:`resolve`."""

    def __init__(self, name: str) -> None:
        super().__init__(f"{OURS}.{name}", f"``torch.distributed.fsdp.{name}``, for FSDP2.")
        self.__spec__ = ModuleSpec(self.__name__, None)
        self.__package__ = OURS

    def __getattr__(self, name: str) -> Any:
        return resolve(self.__name__.rpartition(".")[2], name)


def _served(name: str, original: Any) -> Any:
    if name in _ANSWERS:
        return functools.partial(_ANSWERS[name], original)
    refused = name in PRIVATE and PRIVATE[name].support == "refused"
    if isinstance(original, FunctionType) and (refused or _FSDP1S_OWN & {*inspect.signature(original).parameters}):
        return _refusing(name, original)
    return original


def _refusing(name: str, original: FunctionType) -> Callable[..., Any]:
    @functools.wraps(original)
    def refuse(*args: Any, **kwargs: Any) -> Any:
        problem = f"is a private function of torch's FSDP1 ({original.__module__})"
        rule = "It works on FlatParameters and their handles, which FSDP2 does not have"
        raise TranslationError(message(name, problem, rule, private(name).fix()))

    return refuse


def _lazy_init(original: Callable[..., Any], state: Any, root_module: nn.Module) -> Any:
    """Make the wrapper the root; FSDP2 does the rest in the first forward."""
    if not is_wrapper(root_module):
        return original(state, root_module)
    root_module.check_is_root()  # type: ignore[operator]
    return state


def _reshard(original: Callable[..., None], state: Any, handle: Any, free_unsharded_flat_param: bool) -> None:
    if isinstance(handle, Handle):
        handle.reshard(free_unsharded_flat_param)
    else:
        original(state, handle, free_unsharded_flat_param)


_ANSWERS: dict[str, Callable[..., Any]] = {
    "_get_fsdp_root_states": lambda original, module: roots_of(module) or original(module),
    # One for each parameter, not for each wrapper.
    "_get_fsdp_handles": lambda original, module: handles(module) if wrappers_of(module) else original(module),
    "_get_fsdp_states": lambda original, module: wrappers_of(module) or original(module),
    # The wrapper itself, as in FSDP1.
    "_get_module_fsdp_state": lambda original, module: module if is_wrapper(module) else original(module),
    "_lazy_init": _lazy_init,
    "_reshard": _reshard,
    "_is_fsdp_root": lambda original, state, module: (
        module.check_is_root() if is_wrapper(module) else original(state, module)
    ),
    # Whether FSDP shards the tensor.
    "_is_fsdp_flattened": lambda original, tensor: isinstance(tensor, DTensor) or original(tensor),
}
