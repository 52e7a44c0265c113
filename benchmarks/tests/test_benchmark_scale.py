"""Simulated scale: what is committed, the comparison with published runs, the picture."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from benchmarks.scale import published
from benchmarks.scale import tables as scale
from benchmarks.scale.flops import step_of
from benchmarks.scale.published import Run, Series, compare, llama, solved
from benchmarks.scale.speed import HARDWARE, Traffic, scaling_table
from shardkit import MeshSpec, plan_model

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
    # else a tiny step is all latency
    hardware = replace(HARDWARE["h100"], hook_time=0, latency=0, network_latency=0)
    series = Series(
        "a", "b", "tiny", lambda: TINY, 16, True, hardware, (Run(8, 2, 1e6), Run(64, 2, 9e5))
    )
    first, second = compare(series)
    step = series.traced(2, checkpointed=True)
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
    monkeypatch.setattr(
        scale,
        "SERIES",
        (Series("a", "b", "tiny", lambda: TINY, 16, False, HARDWARE["h100"], runs),),
    )
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


def test_what_a_rank_sends_in_a_step():
    # 16,384 bytes, in a unit that is gathered twice
    model = nn.Sequential(nn.Linear(64, 64, bias=False))
    plan = plan_model(model, units="0", mesh=MeshSpec.sharded(8), reshard_after_forward=True)
    hardware = replace(HARDWARE["h100"], ranks_per_node=2)
    table = scaling_table(model, plan, torch.zeros(1, 64), hardware, worlds=(2, 8))
    assert [(row.strategy, row.time.traffic) for row in table.rows] == [
        ("FSDP", Traffic(3, 3 * 8192, 0, 0)),
        # 7/8 of all bytes; a node shares 3/4 of them
        ("FSDP", Traffic(3, 3 * (14336 - 6144), 9, 3 * 6144)),
        # the half of a rank all-reduced over 4 nodes, as a tree
        ("HSDP", Traffic(3, 3 * 8192, 2 * 2, 2 * 6144)),
        # backward's all-gather stays in the node
        ("hpZ", Traffic(3, 2 * (14336 - 6144) + 8192, 6, 2 * 6144)),
    ]
    assert all(
        row.time.total == row.time.hooks > row.time.device > 0 for row in table.of("FSDP")[:1]
    )


class Attends(nn.Module):
    """Attention of 4 heads of width 8, and a grouped matrix product as transformers' experts
    compute it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.experts = (
            nn.Parameter(torch.ones(8)),
            nn.Parameter(torch.empty(4, 16, 32, dtype=torch.bfloat16)),
        )

    def forward(self, q, tokens):
        ends = torch.empty(4, dtype=torch.int32, device=tokens.device)
        out = nn.functional.scaled_dot_product_attention(q * self.scale, q, q, is_causal=True)
        return (
            out.mean()
            + torch._grouped_mm(tokens * self.experts.sum(), self.experts, offs=ends).mean()
        )


def test_attention_and_experts_count():
    """Of fake CPU tensors too, which torch's own formulas leave out before 2.15."""
    model, heads, tokens = (
        Attends(),
        torch.empty(2, 4, 16, 8),
        torch.empty(24, 16, dtype=torch.bfloat16),
    )
    step = step_of(model, plan_model(model, mesh=MeshSpec.sharded(2)), (heads, tokens))
    # products of queries by keys by width, 2 operations each
    attention = (2 + 5) * 2 * heads.numel() * 16
    assert sum(step.flops.values()) == attention + 3 * 2 * 24 * 16 * 32
