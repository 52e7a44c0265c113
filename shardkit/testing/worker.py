"""Run one rank of a pool: join the process group, then run one call after the other."""

from __future__ import annotations

import faulthandler
import gc
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
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import parent_process
from pathlib import Path
from typing import TextIO

import torch
import torch.distributed as dist

from shardkit.errors import ShardkitError, message
from shardkit.testing.report import Failure
from shardkit.testing.target import Target

STACK_SIGNAL = signal.SIGUSR2  # not SIGUSR1, which Slurm's requeue hooks take
# The parent ends a call that takes too long and reports where each rank was; the group must not time out first.
GROUP_TIMEOUT = timedelta(days=1)


@dataclass(frozen=True)
class Seat:
    """One rank's place in its pool.

    ``directory`` holds the rendezvous file, and the output and stack of each rank. The stack is written on
    ``STACK_SIGNAL`` and in a crash.
    """

    rank: int
    world_size: int
    backend: str
    directory: str

    @property
    def output(self) -> Path:
        return Path(self.directory, f"output{self.rank}")

    @property
    def stack(self) -> Path:
        return Path(self.directory, f"stack{self.rank}")


@dataclass(frozen=True)
class Call:
    """One call as sent to every rank, with the parent's ``sys.path``, working directory and environment."""

    target: Target
    arguments: bytes  # pickled ``(args, kwargs)``, unpickled only after the target's module is imported
    path: list[str]
    directory: str
    environment: dict[str, str]


@dataclass(frozen=True)
class Returned:
    """The pickled return value, and the number of process groups of the rank now; 0 when the pool's own is gone."""

    value: bytes
    groups: int


STARTED = "started"  # the rank has imported what the call needs, and begins to run it

seats: list[Seat] = []  # this process's place in a pool; empty outside of pools


def serve(seat: Seat, connection: Connection) -> None:
    """Run as one rank until the parent closes the connection or dies."""
    seats.append(seat)
    _settle(seat)
    try:
        _join_group(seat)
    except Exception as error:
        connection.send_bytes(pickle.dumps(_raised(error)))
        return
    group = dist.group.WORLD
    while True:
        try:
            request = Path(connection.recv())
        except EOFError:  # the parent is gone; exit_with_parent notices too, and cleans up
            threading.Event().wait()
        reply = _answer(pickle.loads(request.read_bytes()), seat, connection, group)
        sys.stdout.flush()
        sys.stderr.flush()
        connection.send_bytes(pickle.dumps(reply))
        del reply
        gc.collect()  # sharded models are reference cycles; free their memory before the next test


def _settle(seat: Seat) -> None:
    """Send output to a file, write the stack on demand, and exit with the parent."""
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C reaches all processes of the terminal; the parent ends the ranks
    sys.stdout, sys.stderr = _redirect(1, seat.output), _redirect(2, seat.output)
    stack = open(seat.stack, "w")  # noqa: SIM115  # never closed: faulthandler keeps writing to it
    faulthandler.register(STACK_SIGNAL, file=stack, all_threads=True)
    faulthandler.enable(file=stack)
    threading.Thread(target=exit_with_parent, args=(seat.directory,), daemon=True).start()
    # As under torchrun, and not the fork server that started this process: a lock for it, such as tqdm's, which
    # torch.compile takes, would outlive a rank that is killed ("leaked semaphore objects").
    multiprocessing.set_start_method(None, force=True)
    torch.set_num_threads(1)


def _redirect(descriptor: int, path: Path) -> TextIO:
    """Redirect a descriptor to the file, also for C++ libraries; return the stream for Python to print to."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, descriptor)
    os.close(file)
    # Line by line, so that the output of a rank that dies is kept.
    return open(descriptor, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)


def exit_with_parent(directory: str) -> None:
    """Wait for the parent to end, then end too, even inside of a collective that never finishes."""
    parent = parent_process()
    assert parent is not None
    wait([parent.sentinel])
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


def _answer(call: Call, seat: Seat, connection: Connection, group: dist.ProcessGroup | None) -> Returned | Failure:
    try:
        _follow(call, seat)
        function = call.target.find()
        gc.freeze()  # imported objects stay, so that collecting after the call need not look at them
        args, kwargs = pickle.loads(call.arguments)
        torch.manual_seed(0)
        random.seed(0)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(0)
        connection.send_bytes(pickle.dumps(STARTED))
        value = function(*args, **kwargs)
        try:
            pickled = pickle.dumps(value)
        except Exception as error:  # pickle raises whatever the value's class raises
            rule = "Return values are pickled on their way to the parent process"
            problem, fix = f"a {type(value).__name__} cannot be pickled ({error})", "Return plain data or plain tensors"
            raise ShardkitError(message("return value", problem, rule, fix)) from None
    except BaseException as error:  # SystemExit and pytest's skip are not Exceptions
        return _raised(error)
    return Returned(pickled, dist.get_pg_count() if dist.group.WORLD is group else 0)


def _follow(call: Call, seat: Seat) -> None:
    """Take over the parent's import path, working directory and environment, all of which tests change."""
    sys.path[:] = call.path
    os.chdir(call.directory)
    rank, size = str(seat.rank), str(seat.world_size)  # as torchrun sets them
    wanted = call.environment | {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    for name in os.environ.keys() - wanted.keys():  # never emptied: threads of libraries may read it meanwhile
        del os.environ[name]
    os.environ.update({name: value for name, value in wanted.items() if os.environ.get(name) != value})


def _raised(error: BaseException) -> Failure:
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    text, name = "".join(traceback.format_exception(type(error), error, frames)), type(error).__name__
    # By name, because ranks may lack pytest. pytest sets its Skipped's module to "builtins", but not its base's.
    of_pytest = any(base.__module__ == "_pytest.outcomes" for base in type(error).__mro__)
    skips = (of_pytest and name == "Skipped") or isinstance(error, unittest.SkipTest)
    return Failure("raised", f"raised {name}", text, str(error) if skips else None)
