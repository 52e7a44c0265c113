"""Run a program with ``torch.distributed.fsdp`` turned to ``shardkit.fsdp1`` in its own files, and only there.

A program's own files are all but the standard library and ``site-packages``: its folder, the current directory,
editable installs. Python's loader of source files compiles what :func:`shardkit.fsdp1.dropin.rewrite.rewrite` makes of
them. Files without the word ``fsdp`` are not even parsed. Processes that the program starts through multiprocessing do
the same.
"""

from __future__ import annotations

import functools
import importlib.util
import multiprocessing.spawn
import os
import site
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from importlib.machinery import ModuleSpec, SourceFileLoader
from types import CodeType, ModuleType
from typing import Any

import torch

from shardkit.errors import ShardkitError, message
from shardkit.fsdp1.dropin.rewrite import mentions, rewrite

MAIN = "__shardkit_main__"  # what multiprocessing calls the program's file when a child imports it once more

_INSTALLED = {"site-packages", "dist-packages"}  # also those of another environment
_for_good: list[AbstractContextManager[object]] = []  # a context that nobody holds would end


class Redirect:
    """The state of a redirection. ``also`` are installed packages that count as the program's own."""

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

    Made inside :func:`redirected`, since finding a module imports its packages.

    Raises:
        ShardkitError: there is none.
    """

    def __init__(self, name: str, redirect: Redirect, as_module: bool = False) -> None:
        self.redirect, self.argument = redirect, name  # sys.argv[0]
        self.spec: ModuleSpec | None = None
        self.folder: str | None = None  # which ``python FILE`` puts first in sys.path
        if as_module:
            redirect.also += (name.partition(".")[0],)
            self.spec = _spec_of(name)
            self.file = self.argument = os.path.abspath(self.spec.origin or "")
            return
        is_folder = os.path.isdir(name)
        self.file = os.path.abspath(os.path.join(name, "__main__.py") if is_folder else name)
        self.folder = os.path.abspath(name) if is_folder else os.path.dirname(os.path.realpath(name))
        if not os.path.exists(self.file):
            raise _no_program(name, "there is no such file, or no __main__.py in the folder")

    def run(self, argv: Sequence[str]) -> dict[str, Any]:
        """Run it as ``__main__`` and return its globals; its exceptions, SystemExit too, are raised."""
        loader = SourceFileLoader("__main__", self.file)
        module = ModuleType("__main__")
        module.__file__, module.__spec__ = self.file, self.spec
        module.__package__ = self.spec.parent if self.spec else None
        module.__loader__ = self.spec.loader if self.spec else loader
        module.__dict__["__builtins__"] = sys.modules["builtins"]
        module.__dict__["__cached__"] = self.spec.cached if self.spec else None
        sys.argv[:] = [self.argument, *argv]
        # Where pickle and inspect look for its classes; multiprocessing has a second name for those of its children.
        sys.modules["__main__"] = sys.modules["__mp_main__"] = module
        exec(self.redirect.compile(loader.get_data(self.file), self.file, loader), module.__dict__)
        return module.__dict__


def _spec_of(name: str) -> ModuleSpec:
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:  # a package
            spec = importlib.util.find_spec(f"{name}.__main__")
    except (ModuleNotFoundError, ValueError) as error:
        raise _no_program(name, str(error)) from error
    if spec is None or not isinstance(spec.loader, SourceFileLoader):
        raise _no_program(name, "there is no module of that name with Python source")
    return spec


def _no_program(name: str, problem: str) -> ShardkitError:
    return ShardkitError(
        message(
            name, problem, "A program is a Python file, a directory with __main__.py, or -m and a module", "See --help"
        )
    )


@contextmanager
def redirected(also: Sequence[str] = ()) -> Iterator[Redirect]:
    """Import the program's own modules with ``torch.distributed.fsdp`` turned to ours, in this context.

    Modules that are imported already stay as they are, and those imported in it are forgotten at its end. It replaces
    ``importlib.machinery.SourceFileLoader.get_code`` and ``multiprocessing.spawn.get_preparation_data``.
    """
    redirect = Redirect(also)
    original, prepare = SourceFileLoader.get_code, multiprocessing.spawn.get_preparation_data

    def get_code(self: SourceFileLoader, fullname: str) -> CodeType | None:
        path = self.get_filename(fullname)
        if not redirect.owns(fullname, path):
            return original(self, fullname)
        redirect.modules.append(fullname)
        source = self.get_data(path)
        # Neither from the cache of bytecode nor into it, since it is not what the file says.
        return redirect.compile(source, path, self) if mentions(source) else original(self, fullname)

    def get_preparation_data(name: str) -> dict[str, Any]:
        data = prepare(name)
        # The child would import the program's file by runpy, whose reading of a path cannot be redirected, so it is
        # given the name of a module.
        main = data.pop("init_main_from_path", None)
        named = {} if main is None else {"init_main_from_name": MAIN}
        return {"shardkit": _Redirecting(redirect.also, main, data.get("sys_path")), **data, **named}

    SourceFileLoader.get_code = get_code  # type: ignore[method-assign, assignment]
    multiprocessing.spawn.get_preparation_data = get_preparation_data
    try:
        yield redirect
    finally:
        SourceFileLoader.get_code = original  # type: ignore[method-assign]
        multiprocessing.spawn.get_preparation_data = prepare
        for name in redirect.modules:
            sys.modules.pop(name, None)


def redirect_for_good(also: Sequence[str] = (), main: str | None = None) -> Redirect:
    """Redirect as :func:`redirected` does, until the process ends.

    ``main`` is the program's file, in a process that multiprocessing started, which imports it as ``MAIN``.
    """
    _for_good.append(context := redirected(also))
    if main is not None:
        placeholder = ModuleType(MAIN)  # runpy asks importlib for the spec, and importlib asks sys.modules first
        placeholder.__spec__ = importlib.util.spec_from_file_location(MAIN, main)
        sys.modules[MAIN] = placeholder
    return context.__enter__()


class _Redirecting:
    """An entry that redirects a child process when unpickled, before multiprocessing prepares anything else there."""

    def __init__(self, also: tuple[str, ...], main: str | None, path: list[str] | None) -> None:
        self.also, self.main, self.path = also, main, path

    def __reduce__(self) -> tuple[object, ...]:
        lines = [
            "import sys",
            f"sys.path[:] = {self.path!r} or sys.path",  # by which it finds shardkit
            f"from {__name__} import {redirect_for_good.__name__} as redirect",
            f"redirect({self.also!r}, {self.main!r})",
        ]
        return exec, ("\n".join(lines), {})


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
