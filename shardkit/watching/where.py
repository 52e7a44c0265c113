"""Where a rank is in the user's code, and what has become of its process."""

from __future__ import annotations

import linecache
import sys
import sysconfig
from pathlib import Path
from types import TracebackType

import torch

_PATHS = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
_LIBRARIES = ("<", *(str(path) for path in (*_PATHS, Path(torch.__file__).parent, Path(__file__).parents[1])))


def line_of_thread(thread: int) -> str:
    """Return the innermost line of a thread that is the user's: not Python's, of installed packages or shardkit. Local.

    As ``model.py:8: x = layer(x), from train.py:20``, with at most two callers; empty if there is none.
    """
    frame, lines = sys._current_frames().get(thread), list[tuple[str, int]]()
    while frame is not None and len(lines) < 3:
        if not frame.f_code.co_filename.startswith(_LIBRARIES):
            lines.append((frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back
    return _line(lines)


def line_of_error(trace: TracebackType | None) -> str:
    """Return the innermost line of the user's that an exception passed, like :func:`line_of_thread`."""
    lines = []
    while trace is not None:
        if not trace.tb_frame.f_code.co_filename.startswith(_LIBRARIES):
            lines.append((trace.tb_frame.f_code.co_filename, trace.tb_lineno))
        trace = trace.tb_next
    return _line(lines[:-4:-1])


def _line(lines: list[tuple[str, int]]) -> str:
    places = [f"{Path(file).name}:{number}" for file, number in lines]
    code = [linecache.getline(*line).strip() for line in lines[:1]]
    return ", from ".join([": ".join([*places[:1], *filter(None, code)]), *places[1:]])


def host() -> str:
    """Return what processes have in common that see each other's ids; empty where that is unknown."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + str(Path("/proc/self/ns/pid").readlink())
    except OSError:  # not Linux
        return ""


def fate(of_host: str, pid: int) -> str:
    """Return "ended" or "is stopped" for such a process of this host, else an empty string. Local."""
    if not of_host or of_host != host():
        return ""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "ended"
    return {"T": "is stopped", "t": "is stopped", "Z": "ended", "X": "ended"}.get(state, "")
