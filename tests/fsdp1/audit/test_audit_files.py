"""Which files the audit reads, what it says of those that it cannot, and the command."""

import json
import os

import pytest

from shardkit.__main__ import main
from shardkit.fsdp1.audit import audit

USE = "from torch.distributed.fsdp import FullyShardedDataParallel as FSDP\nmodel = FSDP(net)\n"


@pytest.fixture
def tree(tmp_path):
    """A directory with programs where they are read and where they are not."""
    for name in ("a.py", "b/c.py", "b/tests/d.py", ".git/e.py", "env/lib/f.py", "node_modules/g.py", "h.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(USE)
    (tmp_path / "env" / "pyvenv.cfg").touch()
    (tmp_path / "plain.py").write_text("print(1)")
    return tmp_path


def paths(found, root):
    found = dict.fromkeys(finding.path for finding in found.findings)
    return [os.path.relpath(path, root).replace(os.sep, "/") for path in found]


def test_directories_are_read_in_order_and_environments_left_out(tree):
    found = audit(tree)
    assert paths(found, tree) == ["a.py", "b/c.py", "b/tests/d.py"]
    assert found.read == 4  # and plain.py
    assert audit(tree / "h.txt").findings  # a file is read whatever its name

    assert audit(tree / "a.py", tree).read == 4  # once


@pytest.mark.parametrize(("exclude", "left"), [("tests", ["a.py", "b/c.py"]), ("b/*", ["a.py"]), ("*.py", [])])
def test_what_matches_is_left_out(tree, exclude, left):
    assert paths(audit(tree, exclude=[exclude]), tree) == left


UNREAD = [
    (b"import fsdp\nprint 'two'\n", "Missing parentheses in call to 'print'"),
    (b"# coding: nonsense\nimport fsdp\n", "unknown encoding"),
    (b"fsdp = '\xff'\n", "invalid or missing encoding declaration"),
    (b"fsdp = " + b"-" * 20000 + b"1", ""),
]


@pytest.mark.parametrize(("content", "reason"), UNREAD, ids=["python2", "encoding", "bytes", "deep"])
def test_what_cannot_be_read_is_said_with_the_reason(tmp_path, content, reason):
    (tmp_path / "odd.py").write_bytes(content)
    found = audit(tmp_path)
    assert len(found.unread) == 1
    assert reason in found.unread[str(tmp_path / "odd.py")]
    assert not found.is_settled


@pytest.mark.parametrize("encoding", ["utf-8-sig", "latin-1"])
def test_other_encodings_are_read(tmp_path, encoding):
    cookie = "" if encoding.startswith("utf") else f"# coding: {encoding}\n"
    code = f"{cookie}x = 'ä'; import torch.distributed.fsdp as f; f.wrap.wrap(x)\n"
    (tmp_path / "odd.py").write_bytes(code.encode(encoding))
    found = audit(tmp_path)
    assert [finding.code for finding in found.findings] == ["f.wrap.wrap(x)"]
    assert found.findings[0].column == 46


def test_a_broken_file_without_fsdp_is_of_no_concern(tmp_path):
    (tmp_path / "old.py").write_text("print 'two'")
    assert audit(tmp_path).is_settled


# --- The command ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "exit_code"), [("print(1)", 0), (USE, 0), (USE + "FSDP(net, **unknown)", 1), ("fsdp = (", 1)]
)
def test_the_exit_code_says_whether_something_is_left_to_decide(tmp_path, code, exit_code, capsys):
    (tmp_path / "program.py").write_text(code)
    assert main(["audit", str(tmp_path)]) == exit_code
    assert "of FSDP1 in" in capsys.readouterr().out


def test_a_path_that_is_not_there_is_a_wrong_call(tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["audit", str(tmp_path / "nothing")])
    assert stopped.value.code == 2
    assert "no such file or directory" in capsys.readouterr().err


def test_the_text_has_places_replacements_and_counts(tmp_path, capsys, monkeypatch):
    (tmp_path / "program.py").write_text(
        "o = Adam(net.parameters())\n" + USE.replace("model", "net") + "net.no_sync()\n"
    )
    monkeypatch.chdir(tmp_path)
    assert main(["audit", "program.py"]) == 1
    text = capsys.readouterr().out
    assert "program.py:3:7  exact  FSDP(net)\n    -> shard_like_fsdp1(net)\n" in text
    assert "program.py:4:1  exact, likely  net.no_sync()\n    -> no_sync(net)\n" in text
    assert "4 uses of FSDP1 in 1 of 1 files: 3 exact, 0 with a note, 1 check by hand, 0 not possible" in text


def test_json_holds_the_same(tree, capsys):
    assert main(["audit", str(tree), "--exclude", "b", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["counts"] == {"mapped": 2, "noted": 0, "decision": 0, "refused": 0}
    assert [(f["line"], f["column"], f["replacement"]) for f in data["findings"]][1] == (2, 9, "shard_like_fsdp1(net)")
    assert data["read"] == 2
