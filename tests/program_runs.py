"""Runs a program of ``tests/programs`` in a rank: as it stands, on torch's FSDP1, or with its imports changed.

The one-import change is what a user does with ``sed``: the package's name in the program's own import lines.
"""

from __future__ import annotations

import contextlib
import re
import sys
import types
import warnings
from collections.abc import Iterator
from pathlib import Path

from torch.distributed.fsdp import _init_utils

PROGRAMS = Path(__file__).parent / "programs"
IMPORT = re.compile(r"^(\s*(?:from|import)\s+)torch\.distributed\.fsdp\b", re.MULTILINE)


def with_changed_imports(source: str) -> str:
    """The program with shardkit.fsdp1 for torch.distributed.fsdp in its import lines, and nothing else changed."""
    changed, count = IMPORT.subn(r"\1shardkit.fsdp1", source)
    assert count, "imports nothing of torch.distributed.fsdp"
    return changed


def for_a_cpu(source: str) -> str:
    """The program as torch's own FSDP1 can run it on a CPU: what it copies to the CPU there, it then frees."""
    return source.replace("offload_to_cpu=True", "offload_to_cpu=False").replace("offload_params=True", "")


@contextlib.contextmanager
def fsdp1_on_a_cpu() -> Iterator[None]:
    """Without torch's check that sync_module_states broadcasts from a GPU: gloo broadcasts from the CPU as well."""
    check = _init_utils._check_module_states_for_sync_module_states
    _init_utils._check_module_states_for_sync_module_states = lambda states: None
    try:
        yield
    finally:
        _init_utils._check_module_states_for_sync_module_states = check


def load(name: str, *, changed: bool) -> types.ModuleType:
    """The program as a fresh module; modules beside it that it imports are its own files, and fresh too."""
    module = types.ModuleType(f"{name}_{'shim' if changed else 'torch'}")
    sys.modules[module.__name__] = module  # dataclasses and pickle look there
    path = PROGRAMS / f"{name}.py"
    source = path.read_text()
    module.__file__ = str(path)
    with own_files(changed):
        exec(
            compile(with_changed_imports(source) if changed else for_a_cpu(source), str(path), "exec"), module.__dict__
        )
    return module


@contextlib.contextmanager
def own_files(changed: bool) -> Iterator[None]:
    """Imports find the files beside the program, each loaded like the program itself, and are then forgotten."""
    finder = OwnFiles(changed)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in finder.loaded:
            sys.modules.pop(name, None)


class OwnFiles:
    """Finds top-level modules in ``tests/programs`` and loads them with or without changed imports."""

    def __init__(self, changed: bool) -> None:
        self.changed = changed
        self.loaded: list[str] = []

    def find_spec(self, name: str, path: object = None, target: object = None) -> object:
        """A spec for a file beside the program."""
        from importlib.machinery import ModuleSpec

        file = PROGRAMS / f"{name}.py"
        return ModuleSpec(name, self, origin=str(file)) if path is None and file.exists() else None

    def create_module(self, spec: object) -> None:
        """An ordinary module."""

    def exec_module(self, module: types.ModuleType) -> None:
        """Run the file."""
        self.loaded.append(module.__name__)
        source = (PROGRAMS / f"{module.__name__}.py").read_text()
        if IMPORT.search(source):
            source = with_changed_imports(source) if self.changed else for_a_cpu(source)
        exec(compile(source, module.__spec__.origin, "exec"), module.__dict__)


def losses(name: str, arguments: list[str], *, changed: bool) -> list[float]:
    """What the program's main returns on this rank."""
    with warnings.catch_warnings(), contextlib.nullcontext() if changed else fsdp1_on_a_cpu():
        warnings.simplefilter("ignore")  # torch's FSDP1 says at each call that it is deprecated
        return load(name, changed=changed).main([str(argument) for argument in arguments])
