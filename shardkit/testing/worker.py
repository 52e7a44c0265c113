"""One rank of a pool: it joins the process group, then runs one call after the other."""

from __future__ import annotations

import faulthandler
import gc
import importlib.util
import multiprocessing
import os
import pickle
import random
import shutil
import signal
import sys
import threading
import traceback
import unittest
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.process import parent_process
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist

from shardkit.errors import ShardkitError

STACK_SIGNAL = signal.SIGUSR2  # not SIGUSR1, which Slurm's requeue hooks take
# The parent ends a call that takes too long and reports where each rank was; the group must not
# time out first.
GROUP_TIMEOUT = timedelta(days=1)
STARTED = "started"  # the rank has imported what the call needs, and begins to run it


class Seat(NamedTuple):
    """One rank's place in its pool."""

    rank: int
    world_size: int
    backend: str
    directory: str  # with the rendezvous file, and each rank's output and stack

    @property
    def output(self) -> Path:
        return Path(self.directory, f"output{self.rank}")

    @property
    def stack(self) -> Path:  # written on STACK_SIGNAL and in a crash
        return Path(self.directory, f"stack{self.rank}")


class Call(NamedTuple):
    """One call as sent to every rank, with the parent's ``sys.path``, working directory and
    environment.
    """

    module: str
    file: str | None  # that the module was loaded from
    name: str  # of the function, qualified
    rewritten: bool  # whether pytest rewrote the module's asserts, which ranks then do too
    arguments: bytes  # pickled ``(args, kwargs)``, unpickled only after the module is imported
    path: list[str]
    directory: str
    environment: dict[str, str]


class Returned(NamedTuple):
    """The pickled return value, and the number of process groups of the rank now; 0 when the pool's
    own is gone.
    """

    value: bytes
    groups: int


class Failure(NamedTuple):
    """The failure of one rank that did not return."""

    kind: Literal["died", "raised", "stuck"]
    title: str  # to follow "rank 1": "raised KeyError", "was killed by SIGABRT"
    detail: str  # the traceback, or the Python stack and its last output; may be empty
    skip: str | None = None  # the reason, if it asked to skip the test


# The undecorated functions under @distributed, by module and qualified name. Each rank fills its
# own dict by importing the module, so that it finds the body even if other decorators replace the
# name.
bodies: dict[tuple[str, str], Callable[..., Any]] = {}


def serve(seat: Seat, connection: Connection) -> None:
    """Run as one rank until the parent closes the connection or dies."""
    _settle(seat)
    try:
        _join_group(seat)
    except Exception as error:
        connection.send_bytes(pickle.dumps(_raised(error)))
        return
    group = dist.group.WORLD
    while True:
        try:
            call = pickle.loads(Path(connection.recv()).read_bytes())
        except EOFError:  # the parent is gone; _exit_with_parent notices too, and cleans up
            threading.Event().wait()
        reply = _answer(call, seat, connection, group)
        sys.stdout.flush()
        sys.stderr.flush()
        connection.send_bytes(pickle.dumps(reply))
        del call, reply
        gc.collect()  # sharded models are reference cycles; free their memory before the next test


def _settle(seat: Seat) -> None:
    """Send output to a file, write the stack on demand, and exit with the parent."""
    # Ctrl-C reaches all processes; the parent ends the ranks
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with seat.output.open("ab") as output:
        for descriptor in (1, 2):  # also for C++ libraries
            os.dup2(output.fileno(), descriptor)
    # Line by line, so that the output of a rank that dies is kept.
    sys.stdout = open(1, "w", 1, "utf-8", "replace", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", 1, "utf-8", "replace", closefd=False)  # noqa: SIM115
    stack = open(seat.stack, "w")  # noqa: SIM115  # never closed: faulthandler keeps writing to it
    # Of the main thread, which gets signals.
    faulthandler.register(STACK_SIGNAL, file=stack, all_threads=False)
    faulthandler.enable(file=stack, all_threads=False)
    threading.Thread(target=_exit_with_parent, args=(seat.directory,), daemon=True).start()
    # As under torchrun, and not the fork server that started this process: a lock for it, such as
    # tqdm's, which torch.compile takes, would outlive a rank that is killed ("leaked semaphore
    # objects").
    multiprocessing.set_start_method(None, force=True)
    torch.set_num_threads(1)


def _exit_with_parent(directory: str) -> None:
    """Wait for the parent to end, then end too, even inside of a collective that never finishes."""
    parent = parent_process()
    assert parent is not None
    parent.join()
    shutil.rmtree(directory, ignore_errors=True)  # the parent removes it unless it was killed
    os._exit(1)


def _join_group(seat: Seat) -> None:
    if seat.backend == "nccl":
        torch.cuda.set_device(seat.rank)
    dist.init_process_group(
        # Objects and CPU tensors need gloo even where the model uses NCCL.
        "cpu:gloo,cuda:nccl" if seat.backend == "nccl" else seat.backend,
        init_method=Path(seat.directory, "rendezvous").as_uri(),
        rank=seat.rank,
        world_size=seat.world_size,
        timeout=GROUP_TIMEOUT,
    )


def _answer(
    call: Call, seat: Seat, connection: Connection, group: dist.ProcessGroup | None
) -> Returned | Failure:
    try:
        _follow(call, seat)
        function = _find(call)
        gc.freeze()  # imported objects stay: collecting after the call need not look at them
        args, kwargs = pickle.loads(call.arguments)
        torch.manual_seed(0)
        random.seed(0)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(0)
        connection.send_bytes(pickle.dumps(STARTED))
        value = pickle.dumps(function(*args, **kwargs))
    except BaseException as error:  # SystemExit and pytest's skip are not Exceptions
        return _raised(error)
    return Returned(value, dist.get_pg_count() if dist.group.WORLD is group else 0)


def _follow(call: Call, seat: Seat) -> None:
    """Take over the parent's import path, working directory and environment, all of which tests
    change.
    """
    sys.path[:] = call.path
    os.chdir(call.directory)
    wanted = dict(call.environment)
    wanted["RANK"] = wanted["LOCAL_RANK"] = str(seat.rank)  # as torchrun sets them
    wanted["WORLD_SIZE"] = wanted["LOCAL_WORLD_SIZE"] = str(seat.world_size)
    # Never emptied, and written only where it differs: threads of libraries may read it meanwhile.
    for name in os.environ.keys() - wanted.keys():
        del os.environ[name]
    for name, value in wanted.items():
        if os.environ.get(name) != value:
            os.environ[name] = value


def _raised(error: BaseException) -> Failure:
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    text = "".join(traceback.format_exception(type(error), error, frames))
    name = type(error).__name__
    skips = name == "Skipped" or isinstance(error, unittest.SkipTest)  # ranks may lack pytest
    return Failure("raised", f"raised {name}", text, str(error) if skips else None)


def key_of(module: str, name: str) -> tuple[str, str]:
    """Return where ``bodies`` has a function; a script's module has another name in child
    processes.
    """
    return "__main__" if module == "__mp_main__" else module, name


def attribute(module: ModuleType, name: str) -> Any:
    """Return the object of that qualified name, or None."""
    value: Any = module
    for part in name.split("."):
        value = getattr(value, part, None)
    return value


def _find(call: Call) -> Callable[..., Any]:
    """Import the module of a call and return its function."""
    module = sys.modules.get(call.module)
    is_main = call.module == "__main__"
    if module is None or (not is_main and getattr(module, "__file__", None) != call.file):
        module = _imported(call)
    function = bodies.get(key_of(call.module, call.name)) or attribute(module, call.name)
    if function is None:
        raise ShardkitError(
            f"{call.module}.{call.name} is not found in {call.file}. Ranks import the module and "
            "look the function up by name. Define it where importing defines it."
        )
    return function


def _imported(call: Call) -> ModuleType:
    hook: Any = None
    if call.rewritten:
        # Not public; without it asserts only say less.
        with suppress(ImportError, AttributeError, TypeError):
            hook = _assertion_hook()
            hook.mark_rewrite(call.module)
    try:
        module = importlib.import_module(call.module)
    except ModuleNotFoundError as error:
        if not f"{call.module}.".startswith(f"{error.name}."):
            raise
        module = None
    if module is None or getattr(module, "__file__", None) != call.file:
        # The file is not on ``sys.path``, or another one of its name comes first. pytest can import
        # such a file too.
        spec: Any = importlib.util.spec_from_file_location(
            call.module, call.file or "", loader=hook
        )
        module = sys.modules[call.module] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return module


def _assertion_hook() -> Any:
    """Return pytest's hook, or that of the process which this is a fork of."""
    from _pytest.assertion import install_importhook, rewrite
    from _pytest.config import get_config

    for finder in sys.meta_path:
        if isinstance(finder, rewrite.AssertionRewritingHook):
            return finder
    return install_importhook(get_config())


def call_stack(seat: Seat) -> str:
    """Return the call's frames in faulthandler's dump, most recent last, without the worker's."""
    dump = seat.stack.read_text()
    frames: list[str] = []
    for line in dump.splitlines():
        if line.startswith("  File"):
            if __file__ in line:
                return "\n".join(["Stack (most recent call last):", *reversed(frames)])
            frames.append(line)
    return dump
