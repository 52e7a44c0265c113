"""State on several devices, one of which is pretended."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from pretend import pretend_accelerator
from torch import nn

import shardkit
from shardkit.testing import RankPool


def check_ties() -> None:
    with pretend_accelerator():
        model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
        model[0].weight = model[1].weight
        state = {"0.weight": torch.ones(2, 2), "1.weight": torch.ones(2, 2, device="pretend")}
        shardkit.load_full_state_dict(model, state, src="all")
        assert torch.equal(model[0].weight, torch.ones(2, 2))
        state["1.weight"][0, 0] = 4
        with pytest.raises(shardkit.ShardkitError, match=r"1\.weight differs from 0\.weight"):
            shardkit.load_full_state_dict(model, state, src="all")


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPool]:
    # Processes of their own, since a pretended device stays.
    with RankPool(2) as pool:
        yield pool


def test_tied_tensors_on_two_devices_are_compared(ranks: RankPool) -> None:
    ranks.run(check_ties)
