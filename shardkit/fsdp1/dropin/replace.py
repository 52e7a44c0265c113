"""Run a program with the drop-in's classes in the place of torch's: ``python -m shardkit.fsdp1
train.py``.
"""

from __future__ import annotations

import importlib
import importlib.util
import multiprocessing.spawn
import os
import sys
from collections.abc import Sequence
from types import CodeType, ModuleType
from typing import Any

from shardkit.errors import ShardkitError
from shardkit.fsdp1.dropin import guards
from shardkit.fsdp1.dropin.module import FullyShardedDataParallel

_prepared = multiprocessing.spawn.get_preparation_data
# Which names of which modules of torch.distributed.fsdp.
_CLASSES = {
    "": FullyShardedDataParallel,
    ".fully_sharded_data_parallel": FullyShardedDataParallel,
}


def replace() -> None:
    """Put the drop-in's classes into ``torch.distributed.fsdp``, in this process and those that it
    spawns.
    """
    # while it gets torch's class, as it knows FSDP2
    importlib.import_module("torch.distributed.checkpoint.state_dict")
    for module, kind in _CLASSES.items():
        setattr(importlib.import_module(f"torch.distributed.fsdp{module}"), kind.__name__, kind)
    guards.install(FullyShardedDataParallel)  # before the program imports functions by name
    multiprocessing.spawn.get_preparation_data = _preparation_data


class _Replacing:
    """Replaces in a child process when it is unpickled there."""

    def __reduce__(self) -> tuple[Any, ...]:
        return replace, ()


def _preparation_data(name: str) -> dict[str, Any]:
    return {"shardkit": _Replacing(), **_prepared(name)}


def find(name: str, as_module: bool = False) -> tuple[CodeType, dict[str, Any]]:
    """Return the code of a file, a folder with a ``__main__.py``, or a module by name, and its
    first globals.
    """
    if as_module:
        spec = _spec_of(name)
        code = spec.loader.get_code(spec.name)
        return code, {
            "__file__": spec.origin,
            "__spec__": spec,
            "__package__": spec.parent,
            "__loader__": spec.loader,
        }
    path = os.path.abspath(os.path.join(name, "__main__.py") if os.path.isdir(name) else name)
    if not os.path.exists(path):
        raise _no_program(name, "is not a file")
    with open(path, "rb") as file:
        return compile(file.read(), path, "exec"), {"__file__": path, "__package__": None}


def run(
    name: str, arguments: Sequence[str], code: CodeType, begin: dict[str, Any]
) -> dict[str, Any]:
    """Run a program that :func:`find` found, as ``python`` would, on the drop-in, and return its
    globals.
    """
    replace()
    module = ModuleType("__main__")
    vars(module).update(begin, __builtins__=sys.modules["builtins"])
    if "__spec__" not in begin:
        sys.path[0] = os.path.dirname(begin["__file__"])
    sys.argv[:] = [begin["__file__"] if "__spec__" in begin else name, *arguments]
    # Where pickle looks for the program's classes; multiprocessing has a second name for those of
    # its children.
    sys.modules["__main__"] = sys.modules["__mp_main__"] = module
    exec(code, vars(module))
    return vars(module)


def _spec_of(name: str) -> Any:
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:  # a package
            spec = importlib.util.find_spec(f"{name}.__main__")
    except (ModuleNotFoundError, ValueError) as error:
        raise _no_program(name, f"cannot be run: {error}") from error
    if spec is None or not hasattr(spec.loader, "get_code"):
        raise _no_program(name, "is not a module with Python source")
    return spec


def _no_program(name: str, problem: str) -> ShardkitError:
    return ShardkitError(
        f"{name} {problem}. A program is a Python file, a directory with __main__.py, or -m and a "
        "module. See --help."
    )
