"""How a rank finds the function to run: by the names of its module and itself, never by its code."""

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

# The undecorated functions under @distributed, by module and qualified name. Each rank fills its own by importing
# the module, so that it finds the body whatever other decorators the name stands for in the end.
_bodies: dict[tuple[str, str], Callable[..., Any]] = {}


@dataclass(frozen=True)
class Target:
    """A function of a module, as any process can find it."""

    module: str
    file: str | None  # where the module was loaded from
    name: str  # qualified
    decorated: bool  # the body under @distributed is meant
    rewritten: bool  # pytest has rewritten the module's asserts, so ranks should too

    @classmethod
    def of(cls, function: Callable[..., Any]) -> Target:
        """Where ``function`` is.

        Raises:
            ShardkitError: it cannot be found by name, such as a lambda or a function inside a function.
        """
        module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
        loaded = sys.modules.get(module or "")
        decorated = _bodies.get((_common(module or ""), name or "")) is function
        if loaded is None or name is None or not (decorated or _attribute(loaded, name) is function):
            raise ShardkitError(not_found(function))
        rewritten = "@pytest_ar" in vars(loaded)  # the name pytest gives its helper in a rewritten module
        return cls(loaded.__name__, getattr(loaded, "__file__", None), name, decorated, rewritten)

    def find(self) -> Callable[..., Any]:
        """The function, in this process; imports its module."""
        module = _load(self)
        found = _bodies.get((_common(self.module), self.name)) if self.decorated else _attribute(module, self.name)
        if found is None:
            problem = f"the ranks find no such function in {self.file}"
            rule = "Ranks import the module again and look the function up by name"
            fix = "Define it where an import alone defines it"
            raise ShardkitError(message(f"{self.module}.{self.name}", problem, rule, fix))
        return found


def register(function: Callable[..., Any]) -> None:
    """Note that ``function`` is the body of a decorated one.

    Raises:
        ShardkitError: a function inside a function, which no rank could find.
    """
    if not isinstance(function, FunctionType) or "<" in function.__qualname__:
        raise ShardkitError(not_found(function))
    _bodies[_common(function.__module__), function.__qualname__] = function


def not_found(function: object) -> str:
    """The message for a function that no other process could find."""
    name = getattr(function, "__qualname__", repr(function))
    problem = "other processes cannot find it by its module and name"
    rule = "Each rank imports the module and looks the function up, so it must be at the module's top level"
    return message(name, problem, rule, "Move it there and pass what it closes over as arguments")


def _common(module: str) -> str:
    return "__main__" if module == "__mp_main__" else module  # multiprocessing's name for the script, in children


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
    # ``sys.path`` does not reach the file, or another of its name hides it. pytest can import such a file too.
    assert target.file is not None
    file = Path(target.file)
    directory = file.parent.parent if file.name == "__init__.py" else file.parent
    # All finders, for pytest's among them rewrites asserts.
    specs = (finder.find_spec(target.module, [str(directory)]) for finder in sys.meta_path)
    spec = next(spec for spec in specs if spec is not None)
    assert spec.loader is not None
    module = sys.modules[target.module] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _rewrite_asserts(module: str) -> None:
    """Let pytest's import hook handle the module, which is not public; without it asserts work and only say less."""
    try:
        from _pytest.assertion import install_importhook
        from _pytest.config import get_config

        install_importhook(get_config()).mark_rewrite(module)
    except (ImportError, AttributeError, TypeError):
        return
