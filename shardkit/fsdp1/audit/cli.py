"""``python -m shardkit audit``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from shardkit.fsdp1.audit import audit
from shardkit.fsdp1.audit.report import as_json

EACH = 200  # files between two updates of the progress line


def add_parser(commands: Any) -> argparse.ArgumentParser:
    """Add the command to ``commands``, which ``ArgumentParser.add_subparsers`` returned, and return its parser."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "audit",
        help="list every use of FSDP1 in a codebase, with its FSDP2 replacement",
        description="Read Python files and notebooks, without importing anything, and list every use of FSDP1 with the "
        "line that replaces it. Exit code: 0 if every use has a replacement, 1 if something needs a decision, is not "
        "possible or could not be read, 2 if the command itself is invalid.",
    )
    parser.add_argument("paths", nargs="+", type=_path, metavar="PATH", help="files and directories")
    parser.add_argument(
        "--exclude", action="append", default=[], metavar="GLOB", help="skip matching paths; may be repeated"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    return parser


def run(options: argparse.Namespace) -> int:
    """Print the audit and return the exit code."""
    found = audit(*options.paths, exclude=options.exclude, progress=_progress if sys.stderr.isatty() else None)
    print(as_json(found) if options.json else found)
    return 0 if found.is_settled else 1


def _path(text: str) -> Path:
    path = Path(text)
    if not path.exists():
        raise argparse.ArgumentTypeError(f"{text}: no such file or directory")
    return path


def _progress(done: int, total: int) -> None:
    """Write the number of files read as one line on stderr, and clear it at the end."""
    if total >= EACH and (done % EACH == 0 or done == total):
        line = f"\rread {done:,} of {total:,} files"
        print("\r" + " " * len(line) + "\r" if done == total else line, end="", file=sys.stderr, flush=True)
