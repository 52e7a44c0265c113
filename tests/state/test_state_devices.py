"""Loading a state dict whose tensors are on several devices, one of which is pretended."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import shardkit
from shardkit.testing import RankPool, pretend_accelerator


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


def test_tied_tensors_on_two_devices_are_compared() -> None:
    with RankPool(
        2, backend="cpu:gloo,pretend:gloo"
    ) as ranks:  # processes of their own, since a pretended device stays
        ranks.run(check_ties)
