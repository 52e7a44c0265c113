"""Any model trains as it would without shardkit, or is refused by name: some of what ``random_models`` can draw."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st
from random_models import CASES, GOOD, Case, drawn, outcomes

from shardkit.testing import distributed


@settings(max_examples=2, deadline=None, derandomize=True)  # tests/helpers/sweep_models.py draws others
@given(st.lists(CASES, min_size=10, max_size=10))
@distributed(world_size=2, backend="gloo")
def test_equal_or_refused(cases: list[Case]) -> None:
    for case, found in zip(cases, outcomes(cases), strict=True):
        assert found.partition(":")[0] in GOOD, (found, case)


@distributed(world_size=2, backend="gloo")
def test_the_generator_finds_models_that_train_and_models_that_are_refused() -> None:
    counts = Counter(found.partition(":")[0] for found in outcomes(drawn(20, 1)))
    assert counts["equal"] >= 8
    assert counts["refused"] >= 1
