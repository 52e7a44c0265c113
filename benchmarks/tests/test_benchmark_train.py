"""The benchmark suite of training steps: its arithmetic, its suites and its pages."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.models import SHAPES, Llama
from benchmarks.train import estimate, figures, peaks, plots, ratios, records, report, run, world
from benchmarks.train.__main__ import main
from benchmarks.train.agreement import compare
from benchmarks.train.case import Case
from benchmarks.train.flops import matmul_weights, mfu, per_token
from benchmarks.train.group import Group
from benchmarks.train.sides import SIDES
from benchmarks.train.suites import h200, smoke
from benchmarks.train.watch import Watch, thinned

ROOT = Path(__file__).parents[2]
CASE = Case("a", "shardkit", "tiny", sequence=8, bf16=False)


# Arithmetic.


@pytest.mark.parametrize("tied", [False, True])
def test_the_flops_are_those_that_torch_counts(tied):
    shape, rows, positions = replace(SHAPES["tiny"], tied=tied), 2, 24
    model = Llama(shape)
    # fused CPU attention has no formula
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(torch.randint(shape.vocabulary, (rows, positions))).backward()
    assert counter.get_total_flops() == per_token(shape, positions).full * rows * positions
    flops = per_token(shape, positions)
    attention = 12 * shape.layers * shape.width * positions
    assert flops.full - flops.causal == attention / 2 > 0


def test_n_leaves_out_the_lookup_and_the_norms_alone():
    shape = SHAPES["8B"]
    with torch.device("meta"):
        model = Llama(shape)
    norms = sum(param.numel() for param in model.parameters() if param.dim() == 1)
    every = sum(param.numel() for param in model.parameters())
    assert matmul_weights(shape) == every - norms - model.embed.weight.numel() == 7_504_658_432 - 0


def test_mfu_needs_a_gpu_that_is_known_by_its_whole_name():
    assert peaks.peak("NVIDIA H200") == 989e12
    for name in (None, "NVIDIA H200 MIG 1g.18gb", "NVIDIA H200 NVL", "a GPU of tomorrow"):
        assert peaks.peak(name) is None
        assert mfu(1e9, 1e3, peaks.peak(name)) is None
    assert mfu(989e9, 500.0, peaks.peak("NVIDIA H200")) == 0.5


# Suites.


def test_the_gpu_suite_fits_into_nine_minutes_and_its_names_are_unique():
    for suite in (h200(), smoke(), h200().for_ranks(8)):
        names = [case.name for group in suite.groups for case in group.cases]
        assert len(names) == len(set(names)) > 5
        assert len({group.name for group in suite.groups}) == len(suite.groups)
        assert all(case.side in SIDES for group in suite.groups for case in group.cases)
        assert all(
            set(group.watch) <= {case.name for case in group.cases} for group in suite.groups
        )
    assert 300 < sum(map(estimate.seconds, h200().groups)) < 60 * 8.9


def test_the_gpu_suite_has_every_side_and_every_axis():
    cases = [case for group in h200().groups for case in group.cases]
    seen = {name: {getattr(case, name) for case in cases} for name in vars(CASE)}
    assert seen["side"] == set(SIDES)
    assert seen["reshard"] == {None, False, 4}
    assert seen["fake_ranks"] == {0, 8, 64, 256}
    assert seen["checkpointing"] == {"none", "unit", "selective"}
    assert seen["stepping"] == {"fused", "foreach", "local", "in_backward"}
    assert seen["strategy"] == {
        None,
        "SHARD_GRAD_OP",
        "NO_SHARD",
        "HYBRID_SHARD",
        "_HYBRID_SHARD_ZERO2",
    }
    for name in ("bf16", "masters", "compile", "offload"):
        assert seen[name] == {True, False}
    for name, least in (
        ("sequence", 3),
        ("micro_batch", 4),
        ("replicas", 2),
        ("model", 4),
        ("budget_gib", 2),
    ):
        assert len(seen[name]) >= least, name


def test_on_real_ranks_the_same_cases_run_on_them():
    suite = h200().for_ranks(8)
    cases = [case for group in suite.groups for case in group.cases]
    assert {case.fake_ranks for case in cases} == {0}
    assert {"8b-shardkit-on8", "8b-fsdp1-on8", "1b-bare-on8", "1b-world1-ddp-on8"} <= {
        case.name for case in cases
    }
    assert not any(case.name.startswith(("8b-fake64", "disk", "outside")) for case in cases)
    assert records.world_of(cases[0], 8) == {
        "kind": "real",
        "size": 8,
        "label": "8 ranks",
        "communication": True,
    }
    assert Group.of(json.loads(json.dumps(run.asdict(suite.groups[0])))) == suite.groups[0]


# Agreement of losses.


def test_losses_of_one_engine_agree_to_the_bit_and_others_within_rounding():
    expert, fsdp1 = replace(CASE, side="expert"), replace(CASE, side="fsdp1")
    off = 7.0 * (1 + 1e-6)
    assert compare(expert, [7.0, 6.9], CASE, [7.0, 6.9])["holds"] is True
    assert compare(expert, [off, 6.9], CASE, [7.0, 6.9])["holds"] is False
    assert compare(fsdp1, [off, 6.9], CASE, [7.0, 6.9])["holds"] is True
    assert compare(fsdp1, [7.001, 6.9], CASE, [7.0, 6.9])["holds"] is False
    assert compare(fsdp1, [7.0, 6.9], CASE, [7.0, 6.0])["holds"] is False
    compiled = replace(expert, compile=True)
    assert compare(compiled, [off, 6.9], CASE, [7.0, 6.9])["holds"] is True
    fake = replace(CASE, fake_ranks=8)
    assert compare(replace(fake, side="fsdp1"), [9.0], fake, [7.0])["holds"] is None
    assert compare(replace(fake, side="naive"), [9.0], fake, [7.0])["holds"] is False


# A pretended world.


def test_gradients_of_a_pretended_rank_are_its_part_on_every_torch():
    with world.world(4, torch.device("cpu"), "test"):
        output = torch.full((2,), torch.nan)
        getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)(
            output, torch.arange(8.0)
        )
        assert torch.equal(output, torch.tensor([0.0, 1.0]))
        model = nn.Linear(8, 8, bias=False)
        fully_shard(model)
        model(torch.randn(3, 8)).sum().backward()
        assert model.weight.grad.to_local().isfinite().all()
    assert not dist.is_initialized()


def test_a_step_is_watched_operator_by_operator():
    model, counted = nn.Linear(4, 4), iter(range(10_000))
    with Watch(lambda: next(counted)) as watch:
        model(torch.randn(2, 4)).sum().backward()
    assert len(watch.points) > 4
    assert watch.points == sorted(watch.points)
    assert thinned([1, 5, 2, 3, 9, 4, 0], most=3) == [5, 9, 0]
    assert thinned([], most=3) == []


# Pages.


def gpu_record(case: Case, seconds: float, gib: float, **changes: Any) -> records.Record:
    """What one H200 might have written; made up, and never leaves a test."""
    group = next(group for group in h200().groups if case in group.cases)
    flops = per_token(SHAPES[case.model.removeprefix("hf-")], case.sequence)
    rounds = [[seconds, seconds * 1.02], [seconds * 1.01, seconds]]
    facts = {
        "device": "cuda",
        "gpu": "NVIDIA H200",
        "driver": "1",
        "cuda": "13.0",
        "torch": "2.11.0",
        "python": "3.12",
    }
    facts |= {"packages": {}, "settings": {}, "commit": "0" * 40, "cpus": 16}
    record = {
        "name": case.name,
        "case": vars(case),
        "group": group.name,
        "kind": group.kind,
        "machine": facts,
    }
    record |= {
        "world": records.world_of(case, 1),
        "run": group.name,
        "finished": 0.0,
        "error": None,
        "seconds": rounds,
    }
    record |= {"allocated": int(gib * 2**30), "reserved": int(gib * 2**30 * 1.1), "agreement": None}
    record |= {"timeline": [1, 2] if case.name in group.watch else None}
    return record | records.speed(case, rounds, flops, peaks.peak(facts["gpu"])) | changes


def made_up(**changes: Any) -> dict[str, records.Record]:
    cases = [
        case
        for group in h200().groups
        for case in group.cases
        if group.kind in ("each", "apart", "together")
    ]
    known = {case.name: gpu_record(case, 1.0, 50.0, **changes) for case in cases}
    known["8b-512-naive"] = gpu_record(
        next(case for case in cases if case.name == "8b-512-naive"), 1.0, 60.0
    )
    return known


def test_nothing_measured_is_said_so_and_needs_no_torch(tmp_path, capsys):
    assert main(["--table", str(tmp_path / "nothing")]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")][2:]
    assert len(rows) == len(figures.FIGURES)
    assert all("not yet measured" in row for row in rows)
    code = "import sys, benchmarks.train.__main__; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_every_figure_names_cases_that_the_suite_has():
    known = made_up()
    known["outside"] = known["8b-shardkit"] | {"values": [[1.0, 2.0], [1.0, 2.2]]}
    known["disk"] = known["8b-shardkit"] | {"values": dict.fromkeys(DISK, 2.0)}
    rows = [figure.row(known) for figure in figures.FIGURES]
    assert not [row for row in rows if row[2] == figures.NOT_YET]
    assert len({row[0] for row in rows}) == len(rows)
    found = {row[0]: row[2:] for row in rows}
    assert found["8B, fake 8, 512 tokens: peak allocated of shardkit / blocks and root"] == [
        "0.833x",
        "yes",
    ]
    assert found["8B, fake 8, 4,096 tokens: peak allocated of shardkit / blocks and root"] == [
        "1.000x",
        "no",
    ]
    assert {"outside", "disk"} <= {case.name for group in h200().groups for case in group.cases}


DISK = ("load", "save", "read", "write", "to_gpu", "from_gpu")


def test_a_cpu_fills_no_figure_and_losses_that_differ_withhold_the_ratio():
    on_cpu = {
        name: record | {"machine": record["machine"] | {"device": "cpu"}}
        for name, record in made_up().items()
    }
    assert all(figure.row(on_cpu)[2] == figures.NOT_YET for figure in figures.FIGURES)
    ours, other = (
        gpu_record(h200().groups[0].cases[0], 1.0, 50.0),
        gpu_record(h200().groups[0].cases[1], 2.0, 50.0),
    )
    assert ratios.throughput(ours, other).median == pytest.approx(2.0)
    assert ratios.memory(ours, other, "allocated").median == 1.0
    assert ratios.throughput(ours, other | {"run": "another process"}) is None
    assert ratios.throughput(ours, other | {"error": "out of memory"}) is None
    differ = {"first": 1.0, "later": 1.0, "allowed": [0.0, 0.1], "holds": False}
    assert ratios.memory(ours, other | {"agreement": differ}, "allocated") is None


def test_the_page_labels_every_world_and_says_what_is_missing():
    known = made_up(agreement={"first": 1.0, "later": 1.0, "allowed": [0.0, 0.1], "holds": False})
    failed = records.failed(CASE, "8b-engines", "out of memory: too much", now=1.0, size=1)
    known["8b-expert"] = failed | {"name": "8b-expert"}
    del known["8b-axis-hsdp"]
    page = report.page(known, h200(), skipped=["70b-fake64"])
    rows = [
        line
        for line in page.splitlines()
        if line.startswith(("| 8b-", "| 1b-")) and line.count("|") == 12
    ]
    assert len(rows) > 40
    for row in rows:
        name, side, shown = (cell.strip() for cell in row.split("|")[1:4])
        fake = known[name]["world"]["size"] if known[name]["world"]["kind"] == "fake" else 0
        assert shown == (
            "not sharded" if side == "bare" else f"1 of {fake} pretended" if fake else "1 rank"
        )
    for text in (
        "`8b-expert` failed: out of memory",
        "**differ**",
        "`8b-axis-hsdp`: not yet measured",
        "NVIDIA H200",
    ):
        assert text in page


def test_a_folder_gets_a_page_with_pictures(tmp_path):
    known = made_up()
    for name in ("8b-shardkit", "1b-bare", "1b-axis-1x4k", "1b-axis-2x4k"):
        records.write(tmp_path, known[name])
    report.write(tmp_path, h200())
    page = (tmp_path / "README.md").read_text()
    assert all((tmp_path / f"{name}.png").stat().st_size > 1000 for name in plots.PICTURES)
    assert all(f"({name}.png)" in page for name in plots.PICTURES)
    assert "| 1 of 8 pretended |" in report.short(tmp_path)


def test_without_matplotlib_there_is_a_line_and_no_plots(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.delitem(sys.modules, "benchmarks.train.plots")
    monkeypatch.delattr(importlib.import_module("benchmarks.train"), "plots")
    records.write(tmp_path, gpu_record(h200().groups[0].cases[0], 1.0, 50.0))
    report.write(tmp_path, h200())
    assert "matplotlib is not installed" in (tmp_path / "README.md").read_text()
