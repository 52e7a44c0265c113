"""``python -m shardkit audit``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from shardkit.fsdp1.audit import audit


def add_parser(commands: Any) -> argparse.ArgumentParser:
    """Add the command to ``commands``, which ``ArgumentParser.add_subparsers`` returned, and return its parser."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "audit",
        help="list the uses of FSDP1 in a codebase, with their FSDP2 replacements",
        description="Read Python files, without importing anything, and list the uses of FSDP1 with the "
        "lines that replace them. Exit code: 0 if every use has a replacement, 1 if something must be checked by hand, "
        "is not possible or could not be read, 2 if the command itself is invalid.",
    )
    parser.add_argument("paths", nargs="+", type=_path, metavar="PATH", help="files and directories")
    parser.add_argument(
        "--exclude", action="append", default=[], metavar="GLOB", help="skip matching paths; may be repeated"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    return parser


def run(options: argparse.Namespace) -> int:
    """Print the audit and return the exit code."""
    found = audit(*options.paths, exclude=options.exclude)
    print(found.as_json() if options.json else found)
    return 0 if found.is_settled else 1


def _path(text: str) -> Path:
    path = Path(text)
    if not path.exists():
        raise argparse.ArgumentTypeError(f"{text}: no such file or directory")
    return path
