"""Processes that need not import torch: forks of pytest, as it is when all tests are collected.

``serve`` makes one such fork the fork server of ``multiprocessing``, for pytest and all processes
that come of it: the ranks of every pool start there. ``python`` runs a program there, as
``subprocess.run`` does in a new interpreter. Only on Linux, where a fork before the first test is
safe.
"""

import logging
import multiprocessing
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import warnings
from multiprocessing import connection, forkserver, get_context, resource_tracker, util
from pathlib import Path

from shardkit._torch.dispatch import RANK_IMPORTS
from shardkit.testing import worker

SERVES = sys.platform == "linux"
TIMEOUT = 120  # seconds for one program; then it is killed, and its exit code is -9


def serve():
    """Fork the server, unless there is one. It ends with the last process that could ask it."""
    server = forkserver._forkserver
    if not SERVES or server._forkserver_address is not None:
        return
    resource_tracker.ensure_running()  # else each process that asks would start its own
    # It would start another server, which imports everything anew, where the server is not this
    # process's child: in forks of pytest, and in what the server starts.
    server.ensure_running = lambda: None
    address = connection.arbitrary_address("AF_UNIX")
    alive, alive_here = os.pipe()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        if not os.fork():
            os.close(alive_here)
            _forget_pytest()
            try:
                forkserver.main(
                    listener.detach(),
                    alive,
                    [*RANK_IMPORTS, worker.__name__, "numpy", "hypothesis"],
                )
            finally:
                os._exit(0)
    os.close(alive)
    server._forkserver_address, server._forkserver_alive_fd = address, alive_here


def python(*words, cwd=None):
    """Run ``python SCRIPT ...``, ``python -m MODULE ...`` or ``python -c CODE``; what it printed
    and returned.

    For programs that may find modules imported and are not about how an interpreter begins or ends.
    """
    if not SERVES:
        command = [sys.executable, *map(str, words)]
        return subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    with tempfile.TemporaryDirectory() as folder:
        process = start(Path(folder), *words, cwd=cwd)
        process.join(TIMEOUT)
        if process.is_alive():
            process.kill()
            process.join()
        stdout, stderr = (Path(folder, name).read_text() for name in ("stdout", "stderr"))
    assert process.exitcode is not None
    return subprocess.CompletedProcess(words, process.exitcode, stdout, stderr)


def start(folder, *words, cwd=None):
    """Start such a program; what it prints goes to the files ``stdout`` and ``stderr`` of the
    folder.
    """
    environment = {
        name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")
    }
    args = [str(word) for word in words], cwd or Path.cwd(), environment, folder
    process = get_context("forkserver").Process(target=_run, args=args)
    process.start()
    return process


def _run(command, cwd, environment, folder):
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        file = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, descriptor)
        setattr(sys, name, open(file, "w", buffering=1))  # noqa: SIM115
    signal.signal(signal.SIGINT, signal.default_int_handler)  # under nohup, pytest ignores it
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    code = 1
    try:
        _run_as_main(command)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        sys.excepthook(type(error), error, trace)
        if isinstance(error, KeyboardInterrupt):
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
    sys.stdout.flush()
    util._run_finalizers()
    os._exit(code)  # what else ends with an interpreter is pytest's; ranks end with their parent


def _run_as_main(command):
    sys.argv = command if command[0] not in ("-m", "-c") else command[1:]
    sys.path.insert(0, str(Path(command[0]).parent) if sys.argv is command else "")
    if command[0] == "-m":
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    elif command[0] == "-c":
        exec(command[1], {"__name__": "__main__"})
    else:
        runpy.run_path(command[0], run_name="__main__")


def _forget_pytest():
    """Take back what pytest sets while it collects: where logs go, and which
    warnings are errors.
    """
    logging.root.handlers.clear()
    warnings.resetwarnings()
    warnings.filterwarnings("default", category=DeprecationWarning, module="__main__")
    for kind in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
        warnings.simplefilter("ignore", kind, append=True)


def start_method():
    """How multiprocessing starts processes here: torch.compile's locks end with a rank only if that
    is not changed.
    """
    return multiprocessing.get_start_method()
