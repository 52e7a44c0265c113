"""State on several devices, one of which is pretended: a state dict that is loaded, shards that a program moves."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from pretend import pretend_accelerator
from torch import nn

import shardkit
from shardkit.fsdp1 import FullyShardedDataParallel
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


def moved_losses(*devices: str) -> list[float]:
    """Losses of a model in FSDP1's wrapper, whose shards are moved to the devices, one after another, at each step."""
    torch.manual_seed(0)
    model = FullyShardedDataParallel(nn.Linear(5, 5), device_id=torch.device("pretend", 0))  # uneven: FSDP2 pads it
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    losses = []
    for _ in range(3):
        for device in devices:
            for handle in model._all_handles:
                handle.flat_param_to(torch.device(device), non_blocking=True)
            assert {param.to_local().device.type for param in model.parameters()} == {device}
        loss = model(torch.ones(2, 5, device="pretend")).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def check_handles() -> None:
    with pretend_accelerator():
        assert moved_losses("cpu", "pretend") == moved_losses()


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPool]:
    # Processes of their own, since a pretended device stays.
    with RankPool(2) as pool:
        yield pool


def test_tied_tensors_on_two_devices_are_compared(ranks: RankPool) -> None:
    ranks.run(check_ties)


def test_handles_of_the_drop_in_move_shards_to_the_cpu_and_back(ranks: RankPool) -> None:
    ranks.run(check_handles)
