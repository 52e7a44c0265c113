"""docs/data-and-logging.md: no sample is lost or repeated by a resume on another number of ranks."""

import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

PAGE = (Path(__file__).parents[2] / "docs" / "data-and-logging.md").read_text()


@pytest.fixture
def page():
    """The functions of the page, by name."""
    functions = {"torch": torch, "dist": dist}
    for code in re.findall(r"^def .*?(?=^\S(?!ef))", PAGE, re.M | re.S):
        exec(code, functions)
    return functions


def test_an_epoch_that_other_ranks_finish_has_each_sample_once(monkeypatch, page):
    position, batch, seen = 0, 3, []
    for ranks, steps in ((4, 3), (2, 5), (6, 3)):  # 36, 30 and 54 samples
        monkeypatch.setattr(dist, "get_world_size", lambda ranks=ranks: ranks)
        for rank in range(ranks):
            monkeypatch.setattr(dist, "get_rank", lambda rank=rank: rank)
            samples = page["samples_from"](position, 125, epoch=1)
            assert len(samples) == (125 - position) // ranks  # the same number on every rank
            seen += samples[: steps * batch]
        position += steps * batch * ranks
    assert len(seen) == len(set(seen)) == position == 120


def test_a_mean_over_ranks_counts_exactly_what_bf16_cannot(monkeypatch, page):
    monkeypatch.setattr(dist, "all_reduce", lambda sums: None)
    assert page["mean_over_ranks"](torch.ones((), dtype=torch.bfloat16), 4097) == 1 / 4097
