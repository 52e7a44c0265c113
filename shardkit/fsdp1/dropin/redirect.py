"""Run a program with ``torch.distributed.fsdp`` turned to ``shardkit.fsdp1`` in its own files, and only there.

Own is what is imported from elsewhere than the standard library and ``site-packages``: the program's folder, the
current directory, editable installs. Python's loader of source files is asked for code as ever; where a file is the
program's own, it compiles what :func:`shardkit.fsdp1.dropin.rewrite.rewrite` makes of it. Files without the word
``fsdp`` are not even parsed. Processes that the program starts through multiprocessing do the same.
"""

from __future__ import annotations

import functools
import importlib.util
import multiprocessing.spawn
import os
import site
import sys
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec, SourceFileLoader
from types import CodeType, ModuleType
from typing import Any

import torch

from shardkit.errors import ShardkitError, message
from shardkit.fsdp1.dropin.rewrite import mentions, rewrite

MAIN = "__shardkit_main__"  # what multiprocessing calls the program's file when a child imports it once more

_INSTALLED = {"site-packages", "dist-packages"}  # also those of another environment


class Redirect:
    """What is redirected, and what was. ``also`` are installed packages that count as the program's own."""

    def __init__(self, also: Sequence[str] = ()) -> None:
        self.also = tuple(also)
        self.count = 0  # imports turned so far
        self.modules: list[str] = []  # the program's own that were imported

    def owns(self, module: str, path: str) -> bool:
        """Return whether a module is the program's own: its main one, one of ``also``, or by the place of its file."""
        inside = any(module == name or module.startswith(f"{name}.") for name in (*self.also, "__main__", MAIN))
        return inside or not _is_library(path)

    def compile(self, source: bytes, path: str, loader: SourceFileLoader) -> CodeType:
        """Return the code of one own file."""
        tree, count = rewrite(source, path)
        self.count += count
        return loader.source_to_code(tree, path)


class Program:
    """A program as ``python`` would run it: a file, a folder with a ``__main__.py``, or a module by name (``-m``).

    Made inside of :func:`redirected`, since finding a module imports its packages.

    Raises:
        ShardkitError: there is none.
    """

    def __init__(self, name: str, redirect: Redirect, as_module: bool = False) -> None:
        if as_module:
            redirect.also += (name.partition(".")[0],)
        spec = _spec_of(name) if as_module else None
        self.folder = None if as_module else _folder(name)  # which ``python FILE`` puts first in sys.path
        self.file = (spec.origin if spec else os.path.join(name, "__main__.py") if os.path.isdir(name) else name) or ""
        self.file = os.path.abspath(self.file)
        self.argument = self.file if as_module else name  # sys.argv[0]
        self.module = _main_module(self.file, spec)
        self.redirect = redirect

    def run(self, argv: Sequence[str]) -> dict[str, Any]:
        """Run it as ``__main__`` and return its globals; what it raises, SystemExit too, is raised."""
        loader = SourceFileLoader("__main__", self.file)
        sys.argv[:] = [self.argument, *argv]
        # Where pickle and inspect look for its classes; multiprocessing has a second name for those of its children.
        sys.modules["__main__"] = sys.modules["__mp_main__"] = self.module
        exec(self.redirect.compile(loader.get_data(self.file), self.file, loader), self.module.__dict__)
        return self.module.__dict__


@contextmanager
def redirected(also: Sequence[str] = ()) -> Iterator[Redirect]:
    """In this context the program's own modules are imported with ``torch.distributed.fsdp`` turned to ours.

    Modules that are imported already stay as they are, and those imported in it are forgotten at its end. It replaces
    ``importlib.machinery.SourceFileLoader.get_code`` and ``multiprocessing.spawn.get_preparation_data``.
    """
    redirect = Redirect(also)
    undo = _install(redirect)
    try:
        yield redirect
    finally:
        undo()
        for name in redirect.modules:
            sys.modules.pop(name, None)


def redirect_for_good(also: Sequence[str] = (), main: str | None = None) -> Redirect:
    """As :func:`redirected`, until the process ends.

    ``main`` is the program's file, in a process that multiprocessing started, which imports it as ``MAIN``.
    """
    redirect = Redirect(also)
    _install(redirect)
    if main is not None:
        placeholder = ModuleType(MAIN)  # runpy asks importlib for the spec, and importlib asks sys.modules first
        placeholder.__spec__ = importlib.util.spec_from_file_location(MAIN, main)
        sys.modules[MAIN] = placeholder
    return redirect


def _install(redirect: Redirect) -> Callable[[], None]:
    inherited = SourceFileLoader.__dict__.get("get_code")
    original, prepare = SourceFileLoader.get_code, multiprocessing.spawn.get_preparation_data

    def get_code(self: SourceFileLoader, fullname: str) -> CodeType | None:
        path = self.get_filename(fullname)
        if not redirect.owns(fullname, path):
            return original(self, fullname)
        redirect.modules.append(fullname)
        source = self.get_data(path)
        # Not from the cache of bytecode nor into it, since it is not what the file says.
        return redirect.compile(source, path, self) if mentions(source) else original(self, fullname)

    def get_preparation_data(name: str) -> dict[str, Any]:
        return _prepared(redirect, prepare(name))

    def undo() -> None:
        multiprocessing.spawn.get_preparation_data = prepare
        if inherited is None:
            del SourceFileLoader.get_code
        else:
            SourceFileLoader.get_code = inherited  # type: ignore[method-assign]

    SourceFileLoader.get_code = get_code  # type: ignore[method-assign, assignment]
    multiprocessing.spawn.get_preparation_data = get_preparation_data
    return undo


def _prepared(redirect: Redirect, data: dict[str, Any]) -> dict[str, Any]:
    """Return what a child process receives, with an entry that redirects as soon as it is unpickled.

    The child imports the program's file by runpy, whose way of reading a path cannot be redirected, so it is given
    the name of a module instead.
    """
    main = data.pop("init_main_from_path", None)
    if main is not None:
        data["init_main_from_name"] = MAIN
    return {"shardkit": _Redirecting(redirect.also, main, data.get("sys_path")), **data}


class _Redirecting:
    """Unpickled before multiprocessing prepares anything else, so it first finds the way to shardkit."""

    def __init__(self, also: tuple[str, ...], main: str | None, path: list[str] | None) -> None:
        self.also, self.main, self.path = also, main, path

    def __reduce__(self) -> tuple[Callable[..., None], tuple[str, dict[str, Any]]]:
        lines = [
            "import sys",
            f"sys.path[:] = {self.path!r} or sys.path",
            f"from {__name__} import {redirect_for_good.__name__} as redirect",
            f"redirect({self.also!r}, {self.main!r})",
        ]
        return exec, ("\n".join(lines), {})


def _spec_of(name: str) -> ModuleSpec:
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:  # a package
            spec = importlib.util.find_spec(f"{name}.__main__")
    except (ModuleNotFoundError, ValueError) as error:
        raise _no_program(name, str(error)) from error
    if spec is None or not isinstance(spec.loader, SourceFileLoader):
        raise _no_program(name, "there is no such module in a file of Python source")
    return spec


def _folder(path: str) -> str:
    if not os.path.exists(path) or (os.path.isdir(path) and not os.path.exists(os.path.join(path, "__main__.py"))):
        raise _no_program(path, "there is no such program")
    return os.path.abspath(path) if os.path.isdir(path) else os.path.dirname(os.path.realpath(path))


def _no_program(name: str, problem: str) -> ShardkitError:
    return ShardkitError(message(name, problem, "A program is a file, or -m and a module", "See --help"))


def _main_module(file: str, spec: ModuleSpec | None) -> ModuleType:
    module = ModuleType("__main__")
    module.__file__ = file
    module.__spec__ = spec
    module.__package__ = spec.parent if spec else None
    module.__loader__ = spec.loader if spec else SourceFileLoader("__main__", file)
    module.__dict__["__builtins__"] = sys.modules["builtins"]
    module.__dict__["__cached__"] = spec.cached if spec else None
    return module


def _is_library(path: str) -> bool:
    places = (os.path.abspath(path), os.path.realpath(path))
    return any(place.startswith(_libraries()) or _INSTALLED & set(place.split(os.sep)) for place in places)


@functools.cache
def _libraries() -> tuple[str, ...]:
    """Return the folders of Python, of what is installed, and of torch and shardkit, wherever they were built."""
    schemes = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    places = [*schemes, *site.getsitepackages(), site.getusersitepackages(), os.path.dirname(torch.__file__)]
    places.append(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
    return tuple({path(place) + os.sep for place in places for path in (os.path.abspath, os.path.realpath)})
