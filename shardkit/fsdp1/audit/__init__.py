"""``python -m shardkit audit``: find the uses of FSDP1 in a codebase, with their replacements.

``visit`` finds them in one program, by import aliases and by names of methods; it does not follow values. The
replacements are those of the table in ``shardkit.replacements``.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import re
import tokenize
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from shardkit.fsdp1.audit.visit import SUPPORT, Finding, findings_of

SKIPPED = {"__pycache__", "node_modules", "site-packages"}  # and hidden ones
# A file without any of these uses no FSDP1 that could be found, so it is not parsed.
_WORDS = re.compile(rb"fsdp|FSDP|FullyShard|flat_param|_all_handles|summon_full|optim_state_dict|clip_grad_norm_\(")
_UNSEEN = """
Move optimizers first: one built before sharding has no effect. The audit does not find names built at run time, nor
methods of models that another file wraps, unless only FSDP1 has the method. "likely": only a name suggests FSDP1."""


@dataclass(frozen=True)
class Audit:
    """The uses of FSDP1 in some files; ``print(audit)`` shows them.

    Attributes:
        findings: all uses, in order of file and place.
        unread: files that may use FSDP1 and could not be read, each with the reason.
        read: the number of files read.
    """

    findings: tuple[Finding, ...]
    unread: dict[str, str]
    read: int

    @property
    def counts(self) -> dict[str, int]:
        """Uses for each kind of support, from good to bad."""
        return {support: sum(finding.support == support for finding in self.findings) for support in SUPPORT}

    @property
    def is_settled(self) -> bool:
        """Whether all files were read, and every use has a replacement."""
        return not self.unread and not self.counts["decision"] and not self.counts["refused"]

    def __str__(self) -> str:
        files = len({finding.path for finding in self.findings})
        counts = ", ".join(f"{count} {SUPPORT[support]}" for support, count in self.counts.items())
        lines = [f"{len(self.findings)} uses of FSDP1 in {files} of {self.read} files: {counts}"]
        lines += [f"could not be read: {path}: {reason}" for path, reason in self.unread.items()]
        return "\n".join([*map(str, self.findings), "", *lines, _UNSEEN] if self.findings else lines)

    def as_json(self) -> str:
        """Return the same as one JSON object; the keys are those of ``Audit`` and ``Finding``."""
        return json.dumps({"read": self.read, "counts": self.counts, **asdict(self)}, indent=2)


def audit(*paths: str | PathLike[str], exclude: Sequence[str] = ()) -> Audit:
    """Find the uses of FSDP1 in the Python files at or below ``paths``, without importing them. Local.

    Skips hidden directories, environments and caches, and does not follow links to directories. The order is the same
    on every machine.

    Args:
        paths: files, which are read whatever their names, and directories.
        exclude: globs; paths below a directory that match, or whose name matches, are skipped.
    """
    files = list(dict.fromkeys(file for path in paths for file in _files_below(Path(path), exclude)))
    found: list[Finding] = []
    unread: dict[str, str] = {}
    for file in files:
        try:
            if _WORDS.search(file.read_bytes()):
                with tokenize.open(file) as source, warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # invalid escapes in the program are not ours to report
                    found += findings_of(str(file), source.read())
        except (OSError, SyntaxError, ValueError, LookupError, RecursionError, MemoryError) as error:
            unread[str(file)] = str(error) or "nested too deeply"
    return Audit(tuple(found), unread, len(files))


def _files_below(root: Path, exclude: Sequence[str]) -> Iterator[Path]:
    """Yield the programs at or below ``root``, sorted."""

    def is_left_out(path: Path) -> bool:
        hidden = path.name in SKIPPED or path.name.startswith(".") or (path / "pyvenv.cfg").exists()
        names = [path.name, path.relative_to(root).as_posix()]
        return hidden or any(fnmatch.fnmatch(name, glob.rstrip("/")) for name in names for glob in exclude)

    if not root.is_dir():
        yield root
    for directory, names, files in os.walk(root):
        below = Path(directory)
        names[:] = sorted(name for name in names if not is_left_out(below / name))
        paths = [below / name for name in sorted(files) if name.endswith((".py", ".pyw"))]
        yield from (path for path in paths if not is_left_out(path))


def add_parser(commands: Any) -> argparse.ArgumentParser:
    """Add the command to ``commands``, which ``ArgumentParser.add_subparsers`` returned, and return its parser."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "audit",
        help="list the uses of FSDP1 in a codebase, with their FSDP2 replacements",
        description="List the uses of FSDP1 in Python files, without importing them, with the lines that replace them. "
        "Exit code: 0 if every use has a replacement, 1 if something must be checked by hand, is not possible or could "
        "not be read, 2 if the command itself is invalid.",
    )
    parser.add_argument("paths", nargs="+", type=_path, metavar="PATH", help="files and directories")
    parser.add_argument("--exclude", action="append", default=[], metavar="GLOB", help="skip paths; may be repeated")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    return parser


def run(options: argparse.Namespace) -> int:
    """Print the audit and return the exit code."""
    found = audit(*options.paths, exclude=options.exclude)
    print(found.as_json() if options.json else found)
    return int(not found.is_settled)


def _path(text: str) -> Path:
    if not Path(text).exists():
        raise argparse.ArgumentTypeError(f"{text}: no such file or directory")
    return Path(text)
