"""The suite in several processes says what it says in one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import side_by_side

RANKS = """
import os, pathlib
def distributed(): ...
def test_with_ranks():
    pathlib.Path("pids").open("a").write(f"{os.getpid()}\\n")
    while not pathlib.Path("forked").exists():  # the fork has begun
        pass
"""
OTHERS = """
import os, pathlib, pytest
def test_passes(capfd):
    os.system("echo heard")
    assert capfd.readouterr().out == "heard\\n"
    pathlib.Path("pids").open("a").write(f"{os.getpid()}\\n")
    pathlib.Path("forked").touch()
@pytest.mark.skip(reason="not today")
def test_skips(): ...
"""
FAILING = """
import pathlib
def test_fails():
    pathlib.Path("forked").touch()
    print("words before")
    assert 1 + 1 == 3
def test_cannot_begin(no_such_fixture): ...
"""
DYING = """
import os, pathlib
def test_dies():
    pathlib.Path("forked").touch()
    os._exit(7)
"""


@pytest.fixture
def run(tmp_path):
    """Runs a project of a file with ranks and others without; returns pytest's exit code and what
    it printed.
    """
    (tmp_path / "conftest.py").write_text("from side_by_side import pytest_runtestloop")
    (tmp_path / "test_a_ranks.py").write_text(RANKS)
    for number in range(side_by_side.WORTH_IT):
        (tmp_path / f"test_other{number}.py").write_text(OTHERS)

    def run(*options, **files):
        for name, text in files.items():
            (tmp_path / f"test_{name}.py").write_text(text)
        command = [sys.executable, "-m", "pytest", "-q", "-ra", "-p", "no:cacheprovider", *options]
        environment = os.environ | {"PYTHONPATH": str(Path(side_by_side.__file__).parent)}
        done = subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, env=environment, timeout=60
        )
        return done.returncode, done.stdout + done.stderr

    run.pids = lambda: set((tmp_path / "pids").read_text().split())
    return run


pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or os.cpu_count() == 1, reason="one process"
)


def test_what_the_fork_runs_is_reported_here(run):
    code, said = run("-vv", other5a=FAILING)
    assert code == 1
    assert 1 < len(run.pids()) <= 1 + side_by_side.FORKS
    assert "1 failed, 11 passed, 10 skipped, 1 error in" in said
    for words in (
        "words before",
        "assert (1 + 1) == 3",
        "fixture 'no_such_fixture' not found",
        "test_other5a.py:6: A",
    ):
        assert words in said
    assert said.count("SKIPPED [1] test_other") == 10
    assert said.count("test_other3.py::test_passes PASSED") == 1


def test_no_test_is_lost_with_the_fork(run):
    code, said = run(before_others=DYING)
    assert code == 1
    assert "FAILED test_before_others.py::test_dies - the process that ran this file" in said
    assert "exit codes of all: [" in said
    assert "7" in said.split("exit codes of all: [")[1].split("]")[0]
    assert "1 failed, 11 passed, 10 skipped in" in said
