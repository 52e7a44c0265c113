"""Find the function that a rank runs, by the names of its module and itself."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from shardkit.errors import ShardkitError, message

# The undecorated functions under @distributed, by module and qualified name. Each rank fills its own dict by importing
# the module, so that it finds the body even if other decorators replace the name.
_bodies: dict[tuple[str, str], Callable[..., Any]] = {}


@dataclass(frozen=True)
class Target:
    """A function of a module, in a form that any process can look up."""

    module: str
    file: str | None  # that the module was loaded from
    name: str  # qualified
    decorated: bool  # whether the body under @distributed is meant
    rewritten: bool  # whether pytest rewrote the module's asserts, which ranks then do too

    @classmethod
    def of(cls, function: Callable[..., Any]) -> Target:
        """Return the target for a function.

        Raises:
            ShardkitError: no other process can find it by name, such as a lambda or a function inside a function.
        """
        module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
        loaded = sys.modules.get(module or "")
        decorated = _bodies.get((_common(module or ""), name or "")) is function
        if loaded is None or name is None or not (decorated or _attribute(loaded, name) is function):
            raise ShardkitError(not_found(function))
        rewritten = "@pytest_ar" in vars(loaded)  # pytest's name for its helper in a rewritten module
        return cls(loaded.__name__, getattr(loaded, "__file__", None), name, decorated, rewritten)

    def find(self) -> Callable[..., Any]:
        """Import the module and return the function."""
        module = _load(self)
        found = _bodies.get((_common(self.module), self.name)) if self.decorated else _attribute(module, self.name)
        if found is None:
            problem = f"the ranks do not find this function in {self.file}"
            rule = "Ranks import the module again and look the function up by name"
            fix = "Define it so that importing the module defines it"
            raise ShardkitError(message(f"{self.module}.{self.name}", problem, rule, fix))
        return found


def register(function: Callable[..., Any]) -> None:
    """Record that ``function`` is the body of a decorated one.

    Raises:
        ShardkitError: it is a function inside a function, which no rank can find.
    """
    if not isinstance(function, FunctionType) or "<" in function.__qualname__:
        raise ShardkitError(not_found(function))
    _bodies[_common(function.__module__), function.__qualname__] = function


def not_found(function: object) -> str:
    """Return the message for a function that no other process can find."""
    name = getattr(function, "__qualname__", repr(function))
    problem = "other processes cannot find it by its module and name"
    rule = "Each rank imports the module and looks the function up, so it must be at the module's top level"
    return message(name, problem, rule, "Move it there and pass what it closes over as arguments")


def _common(module: str) -> str:
    return "__main__" if module == "__mp_main__" else module  # the script's name in child processes


def _attribute(module: ModuleType, name: str) -> Any:
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


def _load(target: Target) -> ModuleType:
    if target.module not in sys.modules:
        if target.rewritten:
            _rewrite_asserts(target.module)
        try:
            importlib.import_module(target.module)
        except ModuleNotFoundError as error:
            if not f"{target.module}.".startswith(f"{error.name}."):
                raise
    loaded = sys.modules.get(target.module)
    if loaded is not None and (target.module == "__main__" or getattr(loaded, "__file__", None) == target.file):
        return loaded
    # The file is not on ``sys.path``, or another one of its name comes first. pytest can import such a file too.
    assert target.file is not None
    file = Path(target.file)
    directory = file.parent.parent if file.name == "__init__.py" else file.parent
    # All finders, because pytest's rewrites asserts.
    specs = (finder.find_spec(target.module, [str(directory)]) for finder in sys.meta_path)
    spec = next(spec for spec in specs if spec is not None)
    assert spec.loader is not None
    module = sys.modules[target.module] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _rewrite_asserts(module: str) -> None:
    """Let pytest's import hook rewrite the module's asserts; it is not public, and without it asserts only say less."""
    try:
        from _pytest.assertion import install_importhook
        from _pytest.config import get_config

        install_importhook(get_config()).mark_rewrite(module)
    except (ImportError, AttributeError, TypeError):
        return
