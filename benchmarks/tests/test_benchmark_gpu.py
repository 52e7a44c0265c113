"""``benchmarks.gpu``: which groups a card gets, and that its directory always has all results."""

from __future__ import annotations

import json
import re
import sys
import time

import pytest
import torch

from benchmarks import gpu
from benchmarks.train import records, report
from benchmarks.train.estimate import seconds
from benchmarks.train.suites import on_cpu, one_card, without_compiler

FACTS = {"torch": "2.11.0", "gpu": None, "gib": None, "cc": True, "Python.h": True}


def test_an_h100_gets_the_lean_8b_and_an_h200_the_whole_one() -> None:
    small = [group.name for group in one_card(80).groups]
    large = [group.name for group in one_card(141).groups]
    assert small[:4] == ["8b-engines", "1b-engines", "1b-one", "8b-lean"]
    assert large[:4] == ["8b-engines", "1b-engines", "1b-one", "8b-one"]
    assert "8b-kempner" in large
    assert "8b-kempner" not in small
    # what six minutes have room for after the tests, by the estimate
    first = sum(seconds(group) for group in one_card(80).groups[:8])
    assert first < 6 * 60 - gpu.TESTS_SECONDS


def test_without_a_compiler_no_case_compiles() -> None:
    compiled = {case.name for group in one_card(80).groups for case in group.cases if case.compile}
    suite = gpu.suite_for({**FACTS, "gib": 80, "cc": False}, cpu=False)
    left = {case.name for group in suite.groups for case in group.cases}
    assert compiled
    assert not compiled & left
    assert suite.groups == without_compiler(one_card(80)).groups


def test_a_cpu_gets_the_same_groups_with_a_tiny_model() -> None:
    suite = on_cpu(one_card(80))
    names = [group.name for group in suite.groups]
    assert names == [group.name for group in without_compiler(one_card(80)).groups]
    assert {case.model for group in suite.groups for case in group.cases} == {"tiny"}


def test_one_group_on_the_cpu_and_its_table(tmp_path, capsys) -> None:
    out = tmp_path / "out"
    assert gpu.main(["--cpu", "--only", "8b-peaks", "--minutes", "5", "--out", str(out)]) == 0
    names = {path.name for path in out.iterdir()}
    assert {"results.json", "README.md", "log.txt"} <= names
    assert len(names) <= 8
    known = records.read(out)
    assert set(known) == {"8b-512-shardkit", "8b-512-naive", "8b-512-expert"}
    assert not any(record["error"] for record in known.values())
    assert "8b-512-naive: " in (out / "log.txt").read_text()
    assert "## 8b-peaks" in capsys.readouterr().out
    assert "not yet measured" in report.short(out)  # nothing of a CPU fills the goals


def test_tests_that_fail_and_what_had_no_time_are_said(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(gpu, "TESTS", (gpu.sys.executable, "-c", "print('1 failed'); exit(1)"))
    code = gpu.main(["--cpu", "--minutes", "0.02", "--out", str(tmp_path)])
    assert code == 1
    assert json.loads((tmp_path / "results.json").read_text())["tests"] == "1 failed"
    assert "left out, no time" in (tmp_path / "log.txt").read_text()


def test_a_published_run_stands_beside_the_case_that_repeats_it() -> None:
    record = {"tokens_per_second_per_gpu": 11_000.0, "mfu": {"full": 0.57}}
    table = gpu.published({"8b-kempner": record, "7b-thunder": {"mfu": None}})
    assert "| `8b-kempner` | 11,000 | 57.0% | KempnerForge, 1 H200 | 10,471 | 54.5% |" in table
    assert "thunder" not in table


def test_no_gpu_is_said(tmp_path, capsys) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert gpu.main(["--out", str(tmp_path)]) == 2
    assert "Pass --cpu" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        gpu.main(["--only", "none", "--cpu", "--out", str(tmp_path)])
    assert "Pass one of tests, memory, 8b-engines" in capsys.readouterr().err


def test_the_table_of_memory_has_a_row_for_each_model(tmp_path, monkeypatch) -> None:
    script = "from benchmarks import memory\n"
    script += "memory.models = lambda width, all=memory.models: {'Llama': all(width)['Llama']}\n"
    monkeypatch.setattr(
        gpu, "MEMORY", (sys.executable, "-c", script + "print(memory.table_of_models())")
    )
    kit = gpu.Kit(tmp_path, FACTS, time.monotonic() + 300)
    kit.run_memory(cpu=True)
    page = (tmp_path / "README.md").read_text()
    assert re.search(r"\| Llama \| [\d,]+ \| .* \| \+0\.0\d% \|", page), page
    assert not kit.has_failed
