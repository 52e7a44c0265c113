"""Simulated scale: what is committed, the comparison with published runs, the picture."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks import published, scale
from benchmarks.published import Run, Series, compare, llama, solved
from shardkit.memory import HARDWARE

TINY = llama(64, 128, 4, 4, 4, 100)


@pytest.fixture(scope="module")
def one():
    return scale.scaled("Llama 1B")


def test_the_committed_tables_are_what_the_code_says(one):
    text = scale.RESULTS.read_text()
    assert scale.every_row(one) in text
    assert scale.summary([one]).splitlines()[-1] in text
    assert scale.PICTURE.stat().st_size > 50_000


def test_bytes_and_steps_are_those_of_the_librarys_rows(one):
    rows = one.table.rows
    assert {row.ranks for row in rows} == {2**power for power in range(3, 15)}
    assert [row.strategy for row in rows[:4]] == ["FSDP", "FSDP", "HSDP", "hpZ"]
    assert max(map(scale.imbalance, rows)) > min(map(scale.imbalance, rows)) >= 1
    assert one.parameters == 1_235_814_400
    assert scale.faster(one, "HSDP") != "none"
    assert scale.first(one.table.of("FSDP"), lambda row: row.ranks > 99) == "128"
    assert one.at("HSDP", 8) is None


def test_the_first_run_of_a_series_is_fitted_and_the_others_are_predicted():
    hardware = replace(HARDWARE["h100"], hook_time=0, latency=0, network_latency=0)  # else a tiny step is all latency
    series = Series("a", "b", "tiny", lambda: TINY, 16, True, hardware, (Run(8, 2, 1e6), Run(64, 2, 9e5)))
    first, second = compare(series)
    step = series.traced(2, recomputed=True)
    reached = replace(hardware, matmul_flops=hardware.matmul_flops * first.share)
    assert series.tokens_per_second(first.run, step, reached) == pytest.approx(1e6, rel=1e-6)
    assert first.fitted is first.fitted_error is None
    assert second.fitted == pytest.approx(series.tokens_per_second(second.run, step, reached))
    assert second.fitted_error == pytest.approx(second.fitted / 9e5 - 1)
    assert first.modeled > 1e6
    assert first.error > 0
    weights = 4 * (4 * 64 * 64 + 3 * 64 * 128) + 64 * 100
    flops = 6 * weights + 12 * 4 * 64 * 16
    assert first.mfu == pytest.approx(flops * 1e6 / 989e12)
    hybrid = replace(series, hybrid=True)
    assert hybrid.tokens_per_second(second.run, step, reached) != second.fitted


def test_solving():
    assert solved(lambda x: x**3, 8, 100) == pytest.approx(2)


def test_a_whole_page(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(scale, "MODELS", {"Llama 1B": lambda: TINY, "tiny": lambda: TINY})
    runs = (Run(8, 1, 100.0), Run(16, 1, 90.0))
    monkeypatch.setattr(scale, "SERIES", (Series("a", "b", "tiny", lambda: TINY, 16, False, HARDWARE["h100"], runs),))
    monkeypatch.setattr(scale, "TOKENS", 16)
    monkeypatch.setattr(published, "llama_2_7b", lambda: TINY)
    monkeypatch.setattr(scale, "RESULTS", tmp_path / "scale.md")
    monkeypatch.setattr(scale, "PICTURE", tmp_path / "scale.png")
    monkeypatch.setattr("sys.argv", ["scale", "--write"])
    scale.main()
    text = (tmp_path / "scale.md").read_text()
    assert capsys.readouterr().out.strip() in text
    assert text.count("## tiny") == 1
    assert "- a: b" in text
    assert "lost 37%" in text
    assert (tmp_path / "scale.png").stat().st_size > 10_000
