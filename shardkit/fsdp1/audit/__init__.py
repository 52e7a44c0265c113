"""``python -m shardkit audit``: find every use of FSDP1 in a codebase, with its replacement.

``flow`` and ``values`` find what each expression may be, ``uses`` which of them use FSDP1, and ``judge`` the
replacement, by the table in ``instead``. ``program`` audits one file, ``files`` finds files, ``report`` prints.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from os import PathLike
from pathlib import Path

from shardkit.fsdp1.audit.files import audit_file, files_below
from shardkit.fsdp1.audit.report import Audit as Audit
from shardkit.fsdp1.audit.report import Finding as Finding
from shardkit.fsdp1.audit.report import Unread as Unread


def audit(
    *paths: str | PathLike[str],
    exclude: Sequence[str] = (),
    progress: Callable[[int, int], None] | None = None,
) -> Audit:
    """Find every use of FSDP1 in the Python files and notebooks at or below ``paths``, without importing them. Local.

    Skips directories of version control, environments and caches, and does not follow links to directories. The order
    is the same on every machine.

    Args:
        paths: files, which are read whatever their names, and directories.
        exclude: globs; paths below a directory that match, or whose name matches, are skipped.
        progress: called after each file with the number of files done and in all.
    """
    files = list(dict.fromkeys(file for path in paths for file in files_below(Path(path), exclude)))
    audited = []
    for done, file in enumerate(files, start=1):
        audited.append(audit_file(file))
        if progress is not None:
            progress(done, len(files))
    return Audit(tuple(each for each in audited if each.findings or each.unread), len(files))
