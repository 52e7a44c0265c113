"""Shard a whole model with PyTorch FSDP2 in one call, and read the plan before it runs.

``__init__.pyi`` lists the public names. Each is imported from its module when it is first accessed
(PEP 562).
"""

import ast
import importlib
import importlib.util
from pathlib import Path
from typing import Any

# Imported at once: it refuses a torch that is too old, and silences torch's warning where numpy is
# missing.
from shardkit import _torch as _torch

__version__ = "0.1.0"  # the only place: pyproject.toml reads it from here
_STUB = ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
_MODULES = {
    alias.name: node.module
    for node in _STUB.body
    if isinstance(node, ast.ImportFrom)
    for alias in node.names
}
__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    """Import a public name or a submodule."""
    if name in _MODULES:
        globals()[name] = getattr(importlib.import_module(_MODULES[name]), name)
        return globals()[name]
    if not name.startswith("_") and importlib.util.find_spec(f"{__name__}.{name}") is not None:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
