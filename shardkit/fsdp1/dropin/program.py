"""Run a program with the drop-in's class in the place of torch's:
``python -m shardkit.fsdp1 train.py``.
"""

from __future__ import annotations

import importlib
import multiprocessing.spawn
import os
import runpy
import sys
from collections.abc import Sequence
from typing import Any

from shardkit.fsdp1.dropin import guards
from shardkit.fsdp1.dropin.module import FullyShardedDataParallel

_plain_preparation_data = multiprocessing.spawn.get_preparation_data


def replace_torchs_class() -> None:
    """Put the drop-in's class into ``torch.distributed.fsdp``, in this process and those that it
    spawns.
    """
    # Imported while it gets torch's class, since it treats FSDP2 by itself.
    importlib.import_module("torch.distributed.checkpoint.state_dict")
    for module in ("fsdp", "fsdp.fully_sharded_data_parallel"):
        owner: Any = importlib.import_module(f"torch.distributed.{module}")
        owner.FullyShardedDataParallel = FullyShardedDataParallel
    guards.install(FullyShardedDataParallel)  # before the program imports functions by name
    multiprocessing.spawn.get_preparation_data = _preparation_data


def run_program(program: str, arguments: Sequence[str], is_module: bool) -> None:
    """Run a file, a directory with ``__main__.py``, or a module, as ``python`` would."""
    replace_torchs_class()
    sys.argv[:] = [program, *arguments]
    if is_module:
        runpy.run_module(program, run_name="__main__", alter_sys=True)
        return
    path = os.path.abspath(program)
    sys.path[0] = os.path.dirname(path)
    runpy.run_path(path, run_name="__main__")


class _Replacing:
    """Replaces in a child process when it is unpickled there."""

    def __reduce__(self) -> tuple[Any, ...]:
        return replace_torchs_class, ()


def _preparation_data(name: str) -> dict[str, Any]:
    """Return what a spawned process gets before it imports the program."""
    # The name by which children know the program's classes, which runpy does not set.
    sys.modules["__mp_main__"] = sys.modules["__main__"]
    return {"shardkit": _Replacing(), **_plain_preparation_data(name)}
