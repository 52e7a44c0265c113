"""The audit on whole programs: each says in comments what must be found in its lines, and nothing else may be."""

import ast
import re
from pathlib import Path

import pytest

from shardkit.fsdp1.audit import audit
from shardkit.fsdp1.audit.visit import SUPPORT

PROGRAMS = sorted((Path(__file__).parent / "programs").glob("*.py"))
MARK = re.compile(r"# audit: (.+)$")
Found = tuple[int, str, str, bool]  # first line of the statement, support, last part of the name, likely


def statements(text: str) -> dict[int, int]:
    """For each line the first line of the innermost statement around it."""
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.stmt)]
    nodes.sort(key=lambda node: (node.lineno, -(node.end_lineno or 0)))
    return {line: node.lineno for node in nodes for line in range(node.lineno, (node.end_lineno or 0) + 1)}


def expected(program: Path) -> list[Found]:
    """What the comments of a program ask for: ``# audit: support [likely] name, ...``."""
    text, found = program.read_text(), []
    starts = statements(text)
    for line, code in enumerate(text.splitlines(), start=1):
        mark = MARK.search(code)
        for use in mark[1].split(", ") if mark else ():
            support, *likely, name = use.split()
            assert support in SUPPORT
            found.append((starts[line], support, name, bool(likely)))
    return sorted(found)


def found_in(program: Path) -> list[Found]:
    starts = statements(program.read_text())
    findings = audit(program).findings
    return sorted(
        (starts[f.line], f.support, f.name.removeprefix("FullyShardedDataParallel."), f.likely) for f in findings
    )


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.stem)
def test_the_uses_in_a_program_are_found_and_none_is_invented(program):
    assert found_in(program) == expected(program)
    assert expected(program) or program.stem == "native"
