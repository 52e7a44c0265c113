"""From nothing to the first step: every side starts, with the same losses, and the page says what
was measured.
"""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from benchmarks import start
from benchmarks.start import INITIALIZE, LOAD, SIDES, STAGES, Measured
from shardkit.testing import RankPool

RUN = Measured(dict.fromkeys(STAGES, 1.0), 4.0, 2 * 2**20, 3 * 2**20, 0.5)


def sides(folder):
    """All of them in the same ranks, one after the other."""
    with RankPool(2, timeout=120) as pool:
        pool.run(start.saved, "tiny", folder)
        found = {}
        for name in SIDES:
            if "accelerate" not in name:
                pool.run(start.started, name, "tiny", folder)
                found[name] = pool.run(start.stepped)
        return found


def test_every_side_starts_with_the_same_loss(tmp_path):
    found = sides(tmp_path)
    losses = {name: {loss for _, loss in ranks} for name, ranks in found.items()}
    assert len(set.union(*(losses[name] for name in LOAD if name in losses))) == 1
    assert len(set.union(*(losses[name] for name in list(INITIALIZE)[:2]))) == 1
    for ranks in found.values():
        stages = [set(clock.seconds) for clock, _ in ranks]
        assert stages[0] == stages[1] == set(ranks[0][0].cpu)
        assert {"shard", "first step"} <= stages[0] <= set(STAGES)


def test_a_page():
    text = start.page(
        "tiny", 2, {name: [RUN, replace(RUN, cpu=2.0, ready=4 * 2**20)] for name in SIDES}
    )
    lines = [
        line
        for line in text.splitlines()
        if line.startswith(("| torch", "| shardkit", "| accelerate"))
    ]
    assert len(lines) == len(SIDES)
    assert all(line.endswith("| 5.00 | 2.0 | 1.00 | 2 | 1.00 | 3 |") for line in lines)


def test_losses_that_differ_are_an_error():
    first, *_, last = LOAD
    with pytest.raises(AssertionError, match="the first losses differ"):
        start.page("tiny", 1, {first: [RUN], last: [replace(RUN, loss=0.6)]})


def test_peaks_are_beyond_what_a_process_had():
    before = start.anonymous(os.getpid())
    assert before > 0
    with start.sampled([os.getpid()]) as peaks:
        held = bytearray(64 * 2**20)
        held[::4096] = b"1" * len(held[::4096])
        while peaks[0] < 60 * 2**20:
            assert len(held) == 64 * 2**20
    assert 60 * 2**20 <= peaks[0] < 200 * 2**20
