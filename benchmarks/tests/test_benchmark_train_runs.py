"""The benchmark suite of training steps: what it measures, in which processes, how it resumes; all
of it on a CPU.
"""

from __future__ import annotations

import os
import sys
import time
import weakref
from dataclasses import replace
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from benchmarks.train import (
    child,
    figures,
    machine,
    measure,
    meter,
    ranks,
    records,
    report,
    run,
    world,
)
from benchmarks.train.__main__ import main
from benchmarks.train.case import Case, Training
from benchmarks.train.group import Group, Suite
from benchmarks.train.suites import SUITES

ROOT = Path(__file__).parents[2]
CASE = Case("a", "shardkit", "tiny", sequence=8, bf16=False)


# Measuring, by hands that compute nothing.


class Hand:
    """A side that takes no time, and does what its case's name says."""

    def __init__(self) -> None:
        self.built: list[str] = []
        self.alive: list[weakref.ref[nn.Module]] = []

    def unavailable(self, case: Case) -> str | None:
        return "cannot" if "unavailable" in case.name else None

    def build(self, case: Case, device: torch.device) -> Training:
        self.built.append(case.name)
        if "large" in case.name and sum(model() is not None for model in self.alive) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB")
        model = nn.Linear(1, 1)
        model.itself = [model]  # in a cycle, as sharded models are
        self.alive.append(weakref.ref(model))

        def step(ids: torch.Tensor) -> torch.Tensor:
            if "oom" in case.name:
                held = model  # in a frame of the traceback
                raise torch.OutOfMemoryError(f"CUDA out of memory of {held.in_features}")
            return torch.tensor(float("nan") if "nan" in case.name and ids is not None else 7.0)

        return Training(model, step)


def measured(monkeypatch, kind, *names, device="cpu", **options):
    hand, done = Hand(), []
    monkeypatch.setattr(measure, "SIDES", {"shardkit": hand})
    group = Group(
        "g", tuple(replace(CASE, name=name) for name in names), kind, rounds=3, steps=2, **options
    )
    measure.Measurement(
        group, group.cases, torch.device(device), lambda *said: None, done.append
    ).run()
    assert [seen.case.name for seen in done] == list(names)
    assert all(model() is None for model in hand.alive)
    return {seen.case.name: seen for seen in done}, hand.built


@pytest.mark.parametrize("kind", ["each", "apart", "together"])
def test_what_fails_is_freed_and_the_next_is_measured(monkeypatch, kind):
    seen, built = measured(monkeypatch, kind, "a", "oom", "nan", "unavailable", "b")
    assert seen["oom"].error.startswith("out of memory: CUDA out of memory of 1 (")
    assert seen["nan"].error.startswith("ArithmeticError: the loss of step 0 is nan")
    assert seen["unavailable"].unavailable == "cannot"
    for name in ("a", "b"):
        assert seen[name].runs
        assert [len(seconds) for seconds in seen[name].seconds] == [2, 2, 2]
        assert seen[name].losses == [7.0, 7.0]
        assert (seen[name].allocated, seen[name].stayed) == (None, None)
    orders = {
        "each": ["a", "oom", "nan", "b"],
        "apart": ["a", "oom", "nan", "b", "b", "a", "b", "a"],  # in turn
        "together": ["a", "oom", "nan", "b", "a", "b"],
    }
    assert built == orders[kind]
    assert (seen["b"].agreement is None) == (kind == "each")


def test_what_does_not_fit_together_is_measured_apart(monkeypatch):
    seen, built = measured(monkeypatch, "together", "a", "b", "large")
    assert built == [
        "a",
        "b",
        "large",
        "a",
        "b",
        "large",
        *"ab",
        "large",
        "b",
        "large",
        "a",
        "large",
        "a",
        "b",
    ]
    assert all(each.runs and len(each.seconds) == 3 for each in seen.values())


class Event:
    """A CUDA event of a GPU on which 10 ms pass between two of them."""

    clock = iter(range(10_000))

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at = next(self.clock)

    def elapsed_time(self, later: Event) -> float:
        return 10.0 * (later.at - self.at)


def test_a_gpu_is_timed_by_events_and_asked_for_its_peaks(monkeypatch):
    called = []
    for name in ("synchronize", "empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda *arguments, name=name: called.append(name))
    for name, value in {
        "max_memory_allocated": 30,
        "max_memory_reserved": 40,
        "memory_allocated": 5,
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(
        meter, "batches", lambda case, device, rank, first, count: [torch.zeros(1)] * count
    )
    seen, _ = measured(monkeypatch, "apart", "a", "b", device="cuda", watch=("b",))
    for each in seen.values():
        assert each.seconds == [[0.01, 0.01]] * 3
        assert (each.allocated, each.reserved, each.stayed) == (30, 40, 5)
    assert seen["a"].timeline is None
    assert set(seen["b"].timeline) == {5}
    assert called.count("reset_peak_memory_stats") == 2
    assert called.count("empty_cache") == 6  # after every build
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=9)
    )
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 9))
    facts = machine.facts(torch.device("cuda"))
    assert (facts["gpu"], facts["gpu_bytes"], facts["nccl"]) == ("NVIDIA H200", 9, "2.28.9")


def test_with_real_ranks_an_error_ends_the_process_for_others_wait(monkeypatch):
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    with pytest.raises(measure.CaseFailed) as failure:
        measured(monkeypatch, "each", "oom", "b")
    assert failure.value.args[0] == "oom"


# Running, with a worker that measures nothing.

WORKER = """
import json, os, pathlib, sys, time
print(json.dumps({"ready": True}), flush=True)
for line in sys.stdin:
    order = json.loads(line)
    for name in order["cases"]:
        print(json.dumps({"case": name, "doing": "building"}), flush=True)
        if "dies" in name:
            print("Segmentation fault", file=sys.stderr)
            os._exit(11)
        if "hangs" in name:
            time.sleep(60)
        record = {"name": name, "finished": time.time(), "error": None, "world": {"kind": "one", "size": 1},
                  "seconds": [], "order": order, "pid": os.getpid(), "allocator": os.environ.get("PYTORCH_ALLOC_CONF")}
        path = pathlib.Path(order["folder"], "cases", name + ".json")
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(record))
        print(json.dumps({"done": name}), flush=True)
    print(json.dumps({"finished": True}), flush=True)
"""


@pytest.fixture
def suite(tmp_path, monkeypatch):
    """Three groups of a worker's double; the page is not what is tested."""
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    monkeypatch.setattr(child, "WORKER", (sys.executable, str(script)))
    monkeypatch.setattr(report, "write", lambda *arguments, **options: None)
    monkeypatch.setattr(run, "estimated", lambda group, names: 10.0 * len(names))
    groups = [
        Group(
            "compared",
            tuple(replace(CASE, name=name) for name in ("ours", "dies", "theirs")),
            "apart",
        ),
        Group(
            "alone",
            tuple(replace(CASE, name=name) for name in ("one", "two")),
            "each",
            allocator="backend:native",
        ),
        Group("long", tuple(replace(CASE, name=f"long{number}") for number in range(3)), "each"),
    ]
    return Suite("test", tuple(groups), "cpu")


def test_what_ends_a_process_is_recorded_and_the_rest_goes_on(suite, tmp_path):
    run.Runner(suite, tmp_path).run()
    known = records.read(tmp_path)
    assert set(known) == {"ours", "dies", "theirs", "one", "two", "long0", "long1", "long2"}
    assert known["dies"]["error"] == "the process ended with code 11: Segmentation fault"
    assert known["ours"]["order"]["cases"] == ["ours", "theirs"]  # measured again, by one process
    assert [known[name]["allocator"] for name in ("one", "two", "long0")] == [
        "backend:native",
        "backend:native",
        None,
    ]
    assert len({known[name]["pid"] for name in ("ours", "one", "long0")}) == 3  # a process each
    before = {name: record["finished"] for name, record in known.items()}
    records.path_of(tmp_path, "two").unlink()
    run.Runner(suite, tmp_path).run()
    again = records.read(tmp_path)
    assert {name for name in again if again[name]["finished"] != before[name]} == {"two"}
    # of a comparison all are measured again that can be
    records.path_of(tmp_path, "theirs").unlink()
    run.Runner(suite, tmp_path).run()
    assert records.read(tmp_path)["ours"]["finished"] != before["ours"]
    run.Runner(suite, tmp_path, retry=True)
    assert "dies" not in records.read(tmp_path)


def test_a_budget_leaves_out_what_does_not_fit_and_ends_what_takes_longer(
    suite, tmp_path, monkeypatch
):
    runner = run.Runner(suite, tmp_path, minutes=25 / 60)
    runner.run()
    assert runner.skipped == ["compared", "long"]
    assert set(records.read(tmp_path)) == {"one", "two"}
    monkeypatch.setattr(run, "estimated", lambda group, names: 0.5)
    slow = replace(suite, groups=(Group("slow", (replace(CASE, name="hangs"),), "each"),))
    runner = run.Runner(slow, tmp_path, minutes=1 / 60)
    runner.run()
    assert time.monotonic() - runner.started < 30
    assert "hangs" not in records.read(tmp_path)  # nobody's fault


def test_several_ranks_decide_and_end_together(monkeypatch):
    shared = dist.HashStore()
    monkeypatch.setattr(world, "store", lambda name: shared)
    heard: dict[int, Any] = {}

    def rank(number: int) -> None:
        me = ranks.Launched.__new__(ranks.Launched)
        me.rank, me.size, me._store = number, 2, shared
        decided = me.decide("0", lambda: ["a", "b"])
        bad = (
            {"case": "a", "error": "OOM"}
            if number
            else {"case": None, "error": "another rank's process ended"}
        )
        heard[number] = (decided, me.ended("0", bad), me.any_ended_badly("0"), me.ended("1", None))

    threads = [Thread(target=rank, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert heard[0] == heard[1] == (["a", "b"], {"case": "a", "error": "OOM"}, True, None)


# The whole, on a CPU.


def test_the_smoke_suite_runs_every_side_and_resumes(tmp_path, capsys):
    assert main(["--suite", "smoke", "--out", str(tmp_path)]) == 0
    page, known = capsys.readouterr().out, records.read(tmp_path)
    assert set(known) == {case.name for group in SUITES["smoke"]().groups for case in group.cases}
    assert {name: record["error"] for name, record in known.items() if record["error"]} == {}
    assert {record["case"]["side"] for record in known.values() if record.get("unavailable")} <= {
        "accelerate",
        "lightning",
    }
    steps = [record for record in known.values() if record.get("step")]
    assert len(steps) >= 14
    for record in steps:
        assert record["mfu"] is record["allocated"] is record["reserved"] is None
        assert record["tokens_per_second_per_gpu"] > 0
        assert record["machine"]["torch"] == torch.__version__
    group = next(group for group in SUITES["smoke"]().groups if group.name == "world1")
    compared = [known[case.name] for case in group.cases[1:] if records.measured(known[case.name])]
    assert len(compared) >= 6
    assert all(record["agreement"]["holds"] and len(record["seconds"]) == 2 for record in compared)
    assert "say nothing about a GPU" in page
    assert page.count("not yet measured") == len(figures.FIGURES)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("cases/*.json")}
    assert main(["--suite", "smoke", "--out", str(tmp_path)]) == 0
    assert {path: path.stat().st_mtime_ns for path in tmp_path.glob("cases/*.json")} == before
    assert os.listdir(tmp_path / "logs")


def test_the_gpu_suite_refuses_a_cpu(tmp_path, capsys):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert main(["--suite", "h200", "--out", str(tmp_path)]) == 2
    assert "sees no GPU" in capsys.readouterr().err
