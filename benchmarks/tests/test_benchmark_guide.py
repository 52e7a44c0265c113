"""The guide of docs/choosing.md is what the code says."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks import guide
from shardkit.memory.tracing import trace


def test_the_page_has_what_the_code_says():
    in_page = guide.in_page(guide.PAGE.read_text())
    assert in_page == guide.guide(), "run: python -m benchmarks.guide --write"
    assert in_page.count("| 70B |") == 6


@pytest.mark.parametrize("checkpointed", [range(0), range(7)])
def test_a_trace_of_few_blocks_is_stretched_to_that_of_all(checkpointed):
    shape = replace(guide.SHAPES["1B"], layers=7)
    policies = {f"layers.{number}": True for number in checkpointed}
    model, plan = guide.planned(shape)
    whole = trace(model, guide.with_checkpoints(plan, policies), guide.tokens(*guide.TOKENS))
    assert guide.stretched(shape, policies) == whole
    assert {f"layers.{number}" for number in range(7)} < {
        interval.unit for interval in whole.intervals
    }
