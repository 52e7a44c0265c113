"""Find and read Python files and notebooks, in order, without importing anything."""

from __future__ import annotations

import ast
import codecs
import fnmatch
import io
import json
import os
import re
import tokenize
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from shardkit.fsdp1.audit.program import findings_of
from shardkit.fsdp1.audit.report import FileAudit, Finding, Unread

SUFFIXES = (".py", ".pyw", ".ipynb")
SKIPPED = {".git", ".hg", ".svn", "__pycache__", "node_modules", "site-packages", ".tox", ".nox", ".eggs"}
# A file without any of these uses no FSDP1 that could be found, so it is not parsed.
WORDS = (
    *(b"FSDP", b"FullyShard", b"fairscale", b"ShardedGradScaler", b"_fsdp_wrapped", b"fsdp_auto_wrap", b"fsdp_modules"),
    *(b"flat_param", b"_all_handles", b"summon_full", b"state_dict_type(", b"optim_state_dict", b".clip_grad_norm_("),
    *(b"sharded_optimizer_state_dict", b"check_is_root"),
)
WORD = re.compile(rb"\bfsdp")
_WIDE = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE, codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE)
_BROKEN = (SyntaxError, ValueError, RecursionError, MemoryError)


def files_below(root: Path, exclude: Sequence[str] = ()) -> Iterator[Path]:
    """Yield the programs and notebooks at or below ``root``, sorted; links to directories are not followed.

    Args:
        root: a file, which is read whatever its name, or a directory.
        exclude: globs; paths below ``root`` that match, or whose name matches, are skipped.
    """

    def is_excluded(path: Path) -> bool:
        names = [path.name, path.relative_to(root).as_posix()]
        return any(fnmatch.fnmatch(name, glob.rstrip("/")) for name in names for glob in exclude)

    def is_entered(directory: Path) -> bool:
        is_environment = (directory / "pyvenv.cfg").exists() or (directory / "conda-meta").exists()
        return directory.name not in SKIPPED and not is_environment and not is_excluded(directory)

    if not root.is_dir():
        yield root
        return
    for directory, names, files in os.walk(root):
        below = Path(directory)
        names[:] = sorted(name for name in names if is_entered(below / name))
        paths = [below / name for name in sorted(files) if name.endswith(SUFFIXES)]
        yield from (path for path in paths if not is_excluded(path))


def audit_file(path: Path) -> FileAudit:
    """Return the findings in ``path``; a file that cannot be read becomes an ``Unread``, not an error."""
    try:
        if not path.is_file():  # a pipe would wait for ever
            return _unread(path, "not a regular file")
        content = path.read_bytes()
    except OSError as error:
        return _unread(path, error.strerror or type(error).__name__)
    if content.startswith(_WIDE):
        return _unread(path, "UTF-16 or UTF-32, which Python does not read")
    if not any(word in content for word in WORDS) and not WORD.search(content):
        return FileAudit(str(path))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # invalid escapes in the program are not ours to report
        try:
            return _notebook(path, content) if path.suffix == ".ipynb" else _program(path, content)
        except _BROKEN as error:
            return _unread(path, _reason(error))


def _unread(path: Path, reason: str) -> FileAudit:
    return FileAudit(str(path), unread=(Unread(str(path), reason),))


def _reason(error: BaseException) -> str:
    if isinstance(error, SyntaxError):
        where = f"line {error.lineno}: " if error.lineno else ""
        hint = " (Python 2?)" if "print" in str(error.msg) or "exec" in str(error.msg) else ""
        return f"{where}{error.msg}{hint}"
    return "nested too deeply" if isinstance(error, (RecursionError, MemoryError)) else str(error)


def _program(path: Path, content: bytes) -> FileAudit:
    encoding, _ = tokenize.detect_encoding(io.BytesIO(content).readline)
    try:
        text = content.decode(encoding)
    except LookupError as error:  # an encoding of bytes, such as hex
        return _unread(path, str(error))
    findings, names_fsdp2 = findings_of(str(path), text)
    return FileAudit(str(path), tuple(findings), mixes=names_fsdp2 and bool(findings))


def _notebook(path: Path, content: bytes) -> FileAudit:
    """Audit all cells as one program; invalid cells are skipped and reported as unread."""
    try:
        cells = _code_cells(json.loads(content))
    except (ValueError, RecursionError, TypeError, AttributeError, KeyError) as error:
        return _unread(path, f"not a notebook: {error}")
    unread, starts, text = [], [], ""
    for number, code in cells:
        starts.append((text.count("\n") + 1, number))
        try:
            ast.parse(code)
        except _BROKEN as error:
            unread.append(Unread(f"{path}#cell{number}", _reason(error)))
            continue
        text += f"{code}\n"
    findings, names_fsdp2 = findings_of(str(path), text)
    placed = tuple(_in_cell(finding, starts) for finding in findings)
    return FileAudit(str(path), placed, tuple(unread), names_fsdp2 and bool(findings))


def _code_cells(notebook: object) -> list[tuple[int, str]]:
    """Return the number, counting all cells from 1, and the code of each code cell."""
    cells = notebook["cells"] if isinstance(notebook, dict) else []
    sources = [(n, cell["source"]) for n, cell in enumerate(cells, start=1) if cell.get("cell_type") == "code"]
    return [(n, _plain("".join(source) if isinstance(source, list) else str(source))) for n, source in sources]


def _plain(cell: str) -> str:
    """Return the cell's Python, line by line; empty for a cell in another language."""
    lines = cell.split("\n")
    if lines[0].startswith("%%") and not re.match(r"%%(time|timeit|capture|prun)\b", lines[0]):
        return ""
    return "\n".join(re.sub(r"^(\s*)[%!].*", r"\1pass", line) for line in lines)


def _in_cell(finding: Finding, starts: Sequence[tuple[int, int]]) -> Finding:
    """Return the finding with its line in its cell; ``starts`` are the first line and number of each cell."""
    start, number = max(each for each in starts if each[0] <= finding.line)
    return replace(finding, line=finding.line - start + 1, cell=number)
