"""Optimizer state by FQN: gathered as torch gathers it, and restored so that training goes on to
the bit.
"""

import copy

import pytest
import torch
import torch.distributed as dist
from cpu_ranks import on_ranks
from meshes import mesh_of
from state_models import LAYOUTS, Net, fsdp, seeded, train, two_groups
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from trees import assert_same

from shardkit.checkpoint import save_checkpoint
from shardkit.errors import ShardkitError
from shardkit.optim import step_on_local_shards
from shardkit.state import (
    full_optimizer_state_dict,
    full_state_dict,
    load_full_optimizer_state_dict,
    load_full_state_dict,
    sharded_optimizer_state_dict,
)

FULL = StateDictOptions(full_state_dict=True)


class RowSums(Optimizer):
    """State of a shape that is not the parameter's, as factored optimizers have it, and some that
    is no tensor.

    torch's Adafactor itself cannot step on DTensors (torch 2.13: "in-place operations that require
    placement changes are not supported").
    """

    def __init__(self, groups):
        super().__init__(groups, {"lr": 0.01, "betas": (0.9, 0.5)})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["rows"] = param.grad.new_zeros(param.shape[0])
                    state["nested"] = {"history": []}
                rows = param.grad.abs()
                state["rows"].add_(rows.flatten(1).sum(1) if param.ndim > 1 else rows)
                state["nested"]["history"].append(len(state["nested"]["history"]))
                scale = _full(state["rows"]).mean().item() + len(state["nested"]["history"])
                param.add_(param.grad, alpha=-group["lr"] / scale)


def _full(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


OPTIMIZERS = {
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.01),
    "adam_amsgrad": lambda groups: torch.optim.Adam(groups, lr=0.01, amsgrad=True, foreach=False),
    "adamw_tensor_lr": lambda groups: torch.optim.AdamW(
        groups, lr=torch.tensor(0.01), foreach=False
    ),
    "momentum": lambda groups: torch.optim.SGD(groups, lr=0.01, momentum=0.9, nesterov=True),
    "adagrad": lambda groups: torch.optim.Adagrad(groups, lr=0.01),
    "row_sums": lambda groups: RowSums(groups),
    "local_adamw": lambda groups: step_on_local_shards(torch.optim.AdamW(groups, lr=0.01)),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@on_ranks(2)
def test_training_goes_on_to_the_bit_in_a_fresh_model_and_optimizer(name):
    make = OPTIMIZERS[name]
    model = fsdp(seeded(Net))
    optimizer = make(two_groups(model))
    losses = train(model, optimizer, range(2))
    assert losses[0] != losses[1]
    state = full_state_dict(model)
    full = full_optimizer_state_dict(model, optimizer)
    assert bool(full) == (dist.get_rank() == 0)
    before = copy.deepcopy(full)
    expected = train(model, optimizer, range(2, 4))

    torch.manual_seed(5)
    model = fsdp(Net())
    optimizer = make(two_groups(model))
    lrs = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = torch.tensor(9.0) if isinstance(group["lr"], Tensor) else 9.0
    load_full_state_dict(model, state)
    load_full_optimizer_state_dict(model, optimizer, full)
    lrs[1] = 9.0  # of the group without parameters
    assert [group["lr"] for group in optimizer.param_groups] == lrs
    assert_same(full, before)
    assert train(model, optimizer, range(2, 4)) == expected


# others in test_state_layouts
@pytest.mark.parametrize("layout", ["offloaded", "tensor_parallel", "wrapped"])
@on_ranks(4)
def test_every_layout_gathers_and_takes_the_same_state(layout):
    donor = fsdp(seeded(Net))
    optimizer = OPTIMIZERS["adamw"](two_groups(donor))
    train(donor, optimizer, range(2))
    full = full_optimizer_state_dict(donor, optimizer, rank0_only=False)
    assert full["state"]["embed.weight"]["exp_avg"].any(), "nothing was trained"
    assert "head.weight" not in full["state"]
    for src in ("rank0", "all"):
        model = LAYOUTS[layout](seeded(Net))
        fresh = OPTIMIZERS["adamw"](two_groups(model))
        load_full_optimizer_state_dict(
            model, fresh, full if src == "all" or dist.get_rank() == 0 else {}, src=src
        )
        moments = fresh.state[
            next(p for n, p in model.named_parameters() if n.endswith(".up.weight"))
        ]
        assert isinstance(moments["exp_avg"], DTensor)
        assert not isinstance(moments["step"], DTensor)
        assert_same(full_optimizer_state_dict(model, fresh, rank0_only=False), full)


@pytest.mark.parametrize("name", ["adamw", "momentum"])
@on_ranks(2)
def test_torch_gathers_the_same_and_each_loads_the_others(name):
    make = OPTIMIZERS[name]
    model = fsdp(seeded(Net))
    # torch cannot load an empty group of several
    optimizer = make([{"params": list(model.parameters())}])
    train(model, optimizer, range(2))
    theirs = get_optimizer_state_dict(model, optimizer, options=FULL)
    ours = full_optimizer_state_dict(model, optimizer, rank0_only=False)
    assert_same(ours, theirs)
    fresh = make([{"params": list(model.parameters())}])
    load_full_optimizer_state_dict(model, fresh, theirs, src="all")
    assert_same(full_optimizer_state_dict(model, fresh, rank0_only=False), ours)
    if ours["state"]:  # without any torch raises "Expected device to be set"
        other = make([{"params": list(model.parameters())}])
        set_optimizer_state_dict(
            model, other, ours, options=StateDictOptions(full_state_dict=True, strict=False)
        )
        assert_same(
            full_optimizer_state_dict(model, other, rank0_only=False)["state"], ours["state"]
        )


@on_ranks(2)
def test_parameters_without_gradients_frozen_ones_and_several_optimizers():
    def optimizers(model):
        inside = list(model.blocks.parameters())
        rest = [
            param for param in model.parameters() if all(param is not other for other in inside)
        ]
        return [torch.optim.SGD(inside, lr=0.1, momentum=0.9), torch.optim.AdamW(rest, lr=0.01)]

    model = fsdp(seeded(Net))
    model.gain.requires_grad_(False)
    both = optimizers(model)
    model(torch.zeros(2, 3, dtype=torch.long)).sum().backward()
    for optimizer in both:
        optimizer.step()
    full = full_optimizer_state_dict(model, both, rank0_only=False)
    assert {"gain", "frozen.weight"} <= set(full["param_groups"][1]["params"])
    assert not {"gain", "frozen.weight"} & full["state"].keys()
    fresh = optimizers(model)
    load_full_optimizer_state_dict(model, reversed(fresh), full, src="all")
    assert_same(full_optimizer_state_dict(model, fresh, rank0_only=False), full)


@on_ranks(2)
def test_a_load_replaces_all_state_and_writes_lr_tensors_in_place():
    model = fsdp(seeded(Net))
    fresh, used = (
        torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.01), foreach=False)
        for _ in range(2)
    )
    train(model, used, range(1))
    empty = full_optimizer_state_dict(model, fresh, rank0_only=False)
    assert empty["state"] == {}
    lr = used.param_groups[0]["lr"]
    lr.fill_(3.0)
    load_full_optimizer_state_dict(model, used, empty, src="all")
    assert not used.state
    assert used.param_groups[0]["lr"] is lr
    assert lr == torch.tensor(0.01)


@on_ranks(2)
def test_after_a_forward_the_optimizers_parameters_are_still_known():
    model = LAYOUTS["unsharded"](seeded(Net))
    optimizer = torch.optim.AdamW(seeded(lambda: fsdp(Net())).parameters())
    with pytest.raises(ShardkitError, match=r"not in the model: of shape \(1,\) of group 0, "):
        full_optimizer_state_dict(model, optimizer)
    model = fsdp(seeded(Net))
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, range(1))
    expected = full_optimizer_state_dict(model, optimizer, rank0_only=False)
    model(torch.zeros(2, 3, dtype=torch.long))  # the root is gathered now
    assert not isinstance(model.gain, DTensor)
    assert_same(full_optimizer_state_dict(model, optimizer, rank0_only=False), expected)


@on_ranks(2)
def test_sharded_state_is_the_optimizers_own():
    model = fsdp(seeded(Net))
    optimizer = OPTIMIZERS["adamw"](two_groups(model))
    train(model, optimizer, range(1))
    sharded = sharded_optimizer_state_dict(model, optimizer)
    assert sharded["state"]["gain"]["exp_avg"] is optimizer.state[model.gain]["exp_avg"]
    assert isinstance(sharded["state"]["gain"]["exp_avg"], DTensor)


def test_state_of_no_parameter_is_refused():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    optimizer.state["k"] = torch.zeros(1)  # as MADGRAD counts steps
    with pytest.raises(ShardkitError, match="SGD has 'k' in its state_dict"):
        full_optimizer_state_dict(model, optimizer)
    with pytest.raises(ShardkitError, match="SGD has 'k' in its state_dict"):
        save_checkpoint("not written", model, optimizer)


def test_state_of_another_class_of_optimizer_is_warned_of(caplog):
    """torch's SGD raises for a missing option in its step; here it keeps its own, and would begin
    again.
    """
    model = nn.Linear(2, 2)
    adamw, sgd, adam = (
        torch.optim.AdamW(model.parameters()),
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        torch.optim.Adam(model.parameters()),
    )
    state = full_optimizer_state_dict(model, adamw)
    state["param_groups"][0]["initial_lr"] = 0.1  # as an LR scheduler adds it
    load_full_optimizer_state_dict(model, adam, state)
    assert not caplog.records
    load_full_optimizer_state_dict(model, sgd, state)
    (record,) = caplog.records
    assert all(word in record.getMessage() for word in ("betas", "momentum", "not by SGD"))


@pytest.mark.parametrize("first", [0, 1])
def test_an_option_that_only_one_of_two_groups_has_is_a_difference(first):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = full_optimizer_state_dict(model, optimizer)
    groups = [{**state["param_groups"][0], "params": [name]} for name in ("weight", "bias")]
    groups[first]["initial_lr"] = None
    with pytest.raises(ShardkitError, match="group of weight: initial_lr"):
        load_full_optimizer_state_dict(model, optimizer, state | {"param_groups": groups})


@pytest.mark.parametrize("src", ["rank0", "all"])
@on_ranks(2)
def test_what_does_not_fit_is_listed_and_changes_nothing(src):
    model = fsdp(seeded(Net))
    optimizer = OPTIMIZERS["adamw"](two_groups(model))
    train(model, optimizer, range(1))
    before = full_optimizer_state_dict(model, optimizer, rank0_only=False)
    bad = copy.deepcopy(before)
    bad["param_groups"][0]["params"][0] = "stranger"
    moved = bad["param_groups"][2]["params"].pop()
    bad["param_groups"][1] |= {"params": [moved], "lr": 0.5}
    with pytest.raises(ShardkitError) as caught:
        load_full_optimizer_state_dict(
            model, optimizer, bad if src == "all" or dist.get_rank() == 0 else {}, src=src
        )
    for part in (
        "missing: gain",
        "unexpected: stranger",
        "with different options: group of",
        ": lr",
    ):
        assert part in str(caught.value), str(caught.value)
    with pytest.raises(ShardkitError, match="State by number"):
        load_full_optimizer_state_dict(model, optimizer, optimizer.state_dict(), src=src)
    with pytest.raises(ShardkitError, match=r"must be \{'state'"):
        load_full_optimizer_state_dict(model, optimizer, {"a": 1}, src=src)
    assert_same(full_optimizer_state_dict(model, optimizer, rank0_only=False), before)


@on_ranks(2)
def test_state_that_one_rank_lacks_is_an_error_on_both():
    """Its messages would be read as those of other parameters."""
    model = fully_shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), mesh=mesh_of((2,)))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    if dist.get_rank() == 1:
        model[0].weight.grad = None
    optimizer.step()
    with pytest.raises(
        ShardkitError, match=r"rank 1 differs from rank 0 in which tensors are sharded"
    ):
        full_optimizer_state_dict(model, optimizer)
