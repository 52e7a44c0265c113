"""Runs a program of ``fsdp1/dropin/programs`` in a rank: on torch's FSDP1, or on the drop-in in one
of two ways.

The one-import change is what a user does with ``sed``: the package's name in the program's own
import lines.
"""

import contextlib
import functools
import importlib
import re
import sys
import warnings
from importlib.machinery import SourceFileLoader
from pathlib import Path

import torch
from torch.distributed.fsdp import _init_utils

from shardkit.fsdp1.dropin.program import replace_torchs_class

PROGRAMS = Path(__file__).parents[1] / "fsdp1" / "dropin" / "programs"
IMPORT = re.compile(r"^(\s*(?:from|import)\s+)torch\.distributed\.fsdp\b", re.MULTILINE)
CHANGED = (  # by the command
    "torch.distributed.fsdp",
    "torch.distributed.fsdp.fully_sharded_data_parallel",
    "multiprocessing.spawn",
)


def losses(name, arguments, way):
    """What the program's main returns on this rank."""
    with (
        warnings.catch_warnings(),
        contextlib.nullcontext() if way != "torch" else fsdp1_on_a_cpu(),
    ):
        warnings.simplefilter("ignore")  # torch's FSDP1 says at each call that it is deprecated
        torch.manual_seed(0)
        return load(name, way).main(arguments)


@functools.cache
def torchs_losses(name, arguments):
    """The same on torch's FSDP1, once a rank."""
    return losses(name, list(arguments), "torch")


def load(name, way):
    """The program as a fresh module; modules beside it that it imports are its own files, and fresh
    too.
    """
    with (
        replaced()
        if way == "replaced"
        else sources(with_changed_imports if way == "changed" else for_a_cpu)
    ):
        sys.path.insert(0, str(PROGRAMS))
        try:
            return importlib.import_module(name)
        finally:
            sys.path.remove(str(PROGRAMS))


@contextlib.contextmanager
def replaced():
    """What ``python -m shardkit.fsdp1`` does to torch, undone; modules that are imported in it are
    forgotten.
    """
    before = {name: dict(vars(importlib.import_module(name))) for name in CHANGED}
    replace_torchs_class()
    try:
        with sources(str):
            yield
    finally:
        for name, attributes in before.items():
            vars(sys.modules[name]).update(attributes)


@contextlib.contextmanager
def sources(change):
    """Imports of programs, and of files beside them, see what ``change`` makes of their text, and
    are forgotten.
    """
    original, loaded = SourceFileLoader.get_code, []

    def get_code(self, fullname):
        path = Path(self.get_filename(fullname))
        if path.parent != PROGRAMS or path.stem == "harness":
            return original(self, fullname)
        loaded.append(fullname)
        return compile(change(path.read_text()), str(path), "exec")

    SourceFileLoader.get_code = get_code
    try:
        yield
    finally:
        SourceFileLoader.get_code = original
        for module in loaded:
            sys.modules.pop(module, None)


def with_changed_imports(source):
    """The program with shardkit.fsdp1 for torch.distributed.fsdp in its import lines, and nothing
    else changed.
    """
    changed, count = IMPORT.subn(r"\1shardkit.fsdp1", source)
    assert count, "imports nothing of torch.distributed.fsdp"
    return changed


def for_a_cpu(source):
    """The program as torch's own FSDP1 can run it on a CPU: what it copies to the CPU there, it
    then frees.
    """
    return source.replace("offload_to_cpu=True", "offload_to_cpu=False").replace(
        "offload_params=True", ""
    )


@contextlib.contextmanager
def fsdp1_on_a_cpu():
    """Without torch's check that sync_module_states broadcasts from a GPU: gloo broadcasts from the
    CPU as well.
    """
    check = _init_utils._check_module_states_for_sync_module_states
    _init_utils._check_module_states_for_sync_module_states = lambda states: None
    try:
        yield
    finally:
        _init_utils._check_module_states_for_sync_module_states = check
