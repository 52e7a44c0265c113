"""``python -m shardkit audit``: every use of FSDP1 in a codebase, and what becomes of it.

Read ``flow`` (what each expression may be) with ``values``, ``uses`` (what is a use) and ``judge`` (what becomes of it,
by the table in ``instead``); ``program`` does it for one file, ``files`` finds them, ``report`` shows what was found.
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
    """Every use of FSDP1 in the Python files and notebooks at or below ``paths``. Local; imports nothing of them.

    Directories of version control, environments and caches are left out, and links to directories not followed.
    The order is the same on every machine.

    Args:
        paths: files, which are read whatever their names, and directories.
        exclude: globs; what matches a path below its directory, or one name in it, is left out.
        progress: called with the files done and the files in all, after each.
    """
    files = list(dict.fromkeys(file for path in paths for file in files_below(Path(path), exclude)))
    audited = []
    for done, file in enumerate(files, start=1):
        audited.append(audit_file(file))
        if progress is not None:
            progress(done, len(files))
    return Audit(tuple(each for each in audited if each.findings or each.unread), len(files))
