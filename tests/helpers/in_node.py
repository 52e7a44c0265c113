"""``in_node.py PID NAME=VALUE ... PROGRAM ARGUMENT ...``: run a Python program on the node whose
first process is PID.

For ``forks.start``: a fork of pytest enters the node, where a new interpreter would import torch
again.
"""

import ctypes
import os
import runpy
import sys
from pathlib import Path

from nodes import NAMESPACES


def enter(pid):
    """Enter the namespaces of a process; only children of this one enter that of processes."""
    here = Path.cwd()
    for each in [os.open(f"/proc/{pid}/ns/{kind}", os.O_RDONLY) for kind in NAMESPACES]:
        if ctypes.CDLL(None, use_errno=True).setns(each, 0):  # os.setns is new in Python 3.12
            raise OSError(ctypes.get_errno(), f"cannot enter the node of {pid}")
        os.close(each)
    os.chdir(here)


if __name__ == "__main__":
    _, pid, *words = sys.argv
    while "=" in words[0]:
        os.environ.__setitem__(*words.pop(0).split("=", 1))
    enter(pid)
    if child := os.fork():
        sys.exit(abs(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])))
    sys.argv = words
    runpy.run_path(words[0], run_name="__main__")
