"""Any model trains as it would without shardkit, or is refused by name: some of what ``random_models`` can draw."""

from __future__ import annotations

from collections import Counter

from random_models import GOOD, drawn, outcomes

from shardkit.testing import distributed


@distributed(world_size=2, backend="gloo")
def test_equal_or_refused() -> None:
    cases = drawn(24, 1)  # tests/helpers/sweep_models.py draws others
    found = outcomes(cases)
    counts = Counter(each.partition(":")[0] for each in found)
    assert not [pair for pair in zip(found, cases, strict=True) if pair[0].partition(":")[0] not in GOOD]
    assert counts["equal"] >= 8
    assert counts["refused"] >= 1
