"""Private names of torch's FSDP1 that programs import all the same.

Where one does no harm it is torch's own. What asks about a wrapped model answers for ours. What works on FSDP1's state,
handles or flat parameters can be imported, and raises one TranslationError when it is called, which names what to use.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from types import FunctionType, ModuleType
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardkit.errors import TranslationError, message
from shardkit.fsdp1.dropin.record import is_wrapper, wrappers_of
from shardkit.fsdp1.dropin.rewrite import OURS, SUBMODULES, TORCH
from shardkit.fsdp1.instead import PRIVATE, private

# Parameters of functions that work on what FSDP2 does not have.
_FSDP1S_OWN = {"state", "fsdp_state", "handle", "handles", "fsdp_param_info", "flat_param"}


def resolve(module: str, name: str) -> Any:
    """Return the name of a module of ``torch.distributed.fsdp``, as a program that runs on FSDP2 may use it.

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
    """Make ``shardkit.fsdp1._common_utils`` and the like importable: modules without a file, filled when asked."""
    for name in filter(_is_private, SUBMODULES):
        sys.modules.setdefault(f"{OURS}.{name}", _Private(name))


def _is_private(name: str) -> bool:
    return name.startswith("_")


class _Private(ModuleType):
    """One of torch's private modules, by :func:`resolve`."""

    def __init__(self, name: str) -> None:
        super().__init__(f"{OURS}.{name}", f"``torch.distributed.fsdp.{name}``, for FSDP2.")
        self.__spec__ = ModuleSpec(self.__name__, None)
        self.__package__ = OURS

    def __getattr__(self, name: str) -> Any:
        return resolve(self.__name__.rpartition(".")[2], name)


def _served(name: str, original: Any) -> Any:
    if name in _ANSWERS:
        return functools.partial(_ANSWERS[name], original)
    refused = name in PRIVATE and PRIVATE[name].fate == "refused"
    if isinstance(original, FunctionType) and (refused or _FSDP1S_OWN & {*inspect.signature(original).parameters}):
        return _refusing(name, original)
    return original


def _refusing(name: str, original: FunctionType) -> Callable[..., Any]:
    @functools.wraps(original)
    def refuse(*args: Any, **kwargs: Any) -> Any:
        problem = f"a private function of torch's FSDP1 ({original.__module__})"
        rule = "It works on FlatParameters and their handles, which FSDP2 does not have"
        raise TranslationError(message(name, problem, rule, private(name).fix()))

    return refuse


def _is_ours(module: object) -> bool:
    return isinstance(module, nn.Module) and is_wrapper(module)


@dataclass(frozen=True)
class Handle:
    """What programs that average weights shard by shard read of FSDP1's handles, for one parameter.

    Attributes:
        flat_param: this rank's part of it, in the parameter's own memory: what is written to its ``data`` stays.
    """

    flat_param: Tensor


def _get_fsdp_root_states(original: Callable[..., list[Any]], module: nn.Module) -> list[Any]:
    ours = list(wrappers_of(module))
    inner = {child for each in ours for child in wrappers_of(each) if child is not each}
    return [each for each in ours if each not in inner] or original(module)


def _get_fsdp_handles(original: Callable[..., list[Any]], module: nn.Module) -> list[Any]:
    """One for each parameter rather than for each wrapper."""
    params = [param for param in module.parameters() if isinstance(param, DTensor)]
    return [Handle(param.to_local()) for param in params] if any(wrappers_of(module)) else original(module)


_ANSWERS: dict[str, Callable[..., Any]] = {
    "_get_fsdp_root_states": _get_fsdp_root_states,
    "_get_fsdp_handles": _get_fsdp_handles,
    "_get_fsdp_states": lambda original, module: list(wrappers_of(module)) or original(module),
    # The wrapper itself, as in FSDP1.
    "_get_module_fsdp_state": lambda original, module: module if _is_ours(module) else original(module),
    # Nothing to do: FSDP2 does it in the first forward.
    "_lazy_init": lambda original, state, root_module: state if _is_ours(root_module) else original(state, root_module),
    "_is_fsdp_root": lambda original, state, module: (
        module.check_is_root() if _is_ours(module) else original(state, module)
    ),
    # Whether FSDP shards the tensor, which programs ask by this name.
    "_is_fsdp_flattened": lambda original, tensor: isinstance(tensor, DTensor) or original(tensor),
}
