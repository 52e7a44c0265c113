"""Saving what trains, freezing that changes, ties that a file does not have, and state before the
first step.
"""

import pytest
import torch
from cpu_ranks import on_ranks
from meshes import mesh_of
from torch import nn
from torch.distributed.fsdp import fully_shard
from trees import assert_same

from shardkit.checkpoint import load_checkpoint, load_pretrained, save_checkpoint
from shardkit.errors import CheckpointError, ShardkitError
from shardkit.state import (
    full_optimizer_state_dict,
    full_state_dict,
)

WIDTH = 512


class Adapted(nn.Module):
    """A frozen layer with an adapter beside it, and statistics that train with the adapter."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH)
        self.down = nn.Linear(WIDTH, 2, bias=False)
        self.up = nn.Linear(2, WIDTH, bias=False)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.base.requires_grad_(False)

    def forward(self, x):
        return self.norm(self.base(x) + self.up(self.down(x)))


def build(seed=0, mesh=True, layers=3):
    torch.manual_seed(seed)
    net = nn.Sequential(*(Adapted() for _ in range(layers)))
    if mesh:
        for layer in net:
            fully_shard(layer, mesh=mesh_of((2,)))
        fully_shard(net, mesh=mesh_of((2,)))
    return net


def adamw(net):
    return torch.optim.AdamW([param for param in net.parameters() if param.requires_grad], lr=1e-2)


def step(net, optimizer):
    optimizer.zero_grad()
    net(torch.arange(4.0 * WIDTH).reshape(4, WIDTH).sin()).square().mean().backward()
    optimizer.step()


def whole(net, optimizer=None):
    state = {"model": dict(full_state_dict(net, rank0_only=False))}
    if optimizer is not None:
        state["optimizer"] = full_optimizer_state_dict(net, optimizer, rank0_only=False)
    return state


@on_ranks(2)
def test_what_trains_is_saved_and_the_rest_stays(tmp_path):
    net = build()
    optimizer = adamw(net)
    step(net, optimizer)
    save_checkpoint(tmp_path / "c", net, optimizer, trainable_only=True, extra=1)
    size = sum(file.stat().st_size for file in (tmp_path / "c").iterdir())
    base = sum(param.numel() * 4 for param in net.parameters() if not param.requires_grad)
    assert base > 3_000_000 > 400_000 > size

    other = build(seed=1)
    untouched = {name: value for name, value in whole(other)["model"].items() if ".base." in name}
    resumed = adamw(other)
    assert load_checkpoint(tmp_path / "c", other, resumed) == 1
    expected, got = whole(net, optimizer), whole(other, resumed)
    assert len(untouched) == 6
    assert_same(got["model"], expected["model"] | untouched)
    assert_same(got["optimizer"], expected["optimizer"])


def test_as_pretrained_weights_its_frozen_tensors_are_missing(tmp_path):
    net = build(mesh=False)
    save_checkpoint(tmp_path / "c", net, trainable_only=True)
    with pytest.raises(CheckpointError, match="6 missing"):
        load_pretrained(build(mesh=False), tmp_path / "c")
    with pytest.raises(ShardkitError, match="no parameter that trains"):
        save_checkpoint(tmp_path / "none", net.requires_grad_(False), trainable_only=True)
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("trainable_only", [True, False])
def test_freezing_that_changed_is_one_error_or_left_alone(trainable_only, tmp_path):
    net = build(mesh=False)
    optimizer = adamw(net)
    step(net, optimizer)
    save_checkpoint(tmp_path / "c", net, optimizer, trainable_only=trainable_only)

    thawed = build(seed=1, mesh=False)
    thawed[0].base.requires_grad_(True)
    resumed, before = adamw(thawed), thawed[0].base.weight.detach().clone()
    with pytest.raises(CheckpointError, match=r"0\.base\.weight[^$]*0\.base\.bias"):
        load_checkpoint(tmp_path / "c", thawed, resumed)
    assert torch.equal(thawed[0].base.weight, before)
    assert not resumed.state
    load_checkpoint(tmp_path / "c", thawed, resumed, strict=False)
    assert torch.equal(thawed[0].base.weight, before if trainable_only else net[0].base.weight)
    assert torch.equal(
        resumed.state[thawed[0].up.weight]["exp_avg"], optimizer.state[net[0].up.weight]["exp_avg"]
    )
    assert not resumed.state.get(thawed[0].base.weight)
    step(thawed, resumed)

    frozen = thawed
    for layer in (frozen[0].base, frozen[0].up):
        layer.requires_grad_(False)
    resumed = adamw(frozen)
    with pytest.raises(CheckpointError, match=r"- unexpected: 0\.up\.weight"):
        load_checkpoint(tmp_path / "c", frozen, resumed)
    load_checkpoint(tmp_path / "c", frozen, resumed, strict=False)
    assert torch.equal(frozen[0].up.weight, net[0].up.weight)


class Tied(nn.Module):
    def __init__(self, tied):
        super().__init__()
        self.embed, self.head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
        if tied:
            self.head.weight = self.embed.weight


@on_ranks(2)
def test_an_untied_file_in_a_tied_model_is_reported(tmp_path):
    untied = Tied(False)
    with torch.no_grad():
        untied.head.weight.copy_(untied.embed.weight)
        save_checkpoint(tmp_path / "same", untied)
        untied.head.weight[4, 2] += 1  # the last rank's part alone
        save_checkpoint(tmp_path / "differs", untied)

    def from_pretrained(path, net, **options):
        load_pretrained(net, path, **options)

    for load in (from_pretrained, load_checkpoint):
        net = Tied(True)
        fully_shard(net, mesh=mesh_of((2,)))
        load(tmp_path / "same", net)
        before = whole(net)
        with pytest.raises(
            CheckpointError, match=r"head\.weight differs from embed\.weight|1 of 2 ranks failed"
        ):
            load(tmp_path / "differs", net)
        assert_same(whole(net), before)
        load(tmp_path / "differs", net, strict=False)
        assert torch.equal(whole(net)["model"]["embed.weight"], untied.embed.weight)
