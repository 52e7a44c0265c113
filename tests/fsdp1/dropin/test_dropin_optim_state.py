"""The drop-in's optimizer state: as plain training has it, and loaded back."""

import copy

import pytest
import torch
import torch.distributed as dist
from cpu_ranks import on_ranks
from state_models import train, two_groups
from torch import nn
from torch.distributed.fsdp import FullOptimStateDictConfig, ShardingStrategy, StateDictType
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
from torch.distributed.fsdp.fully_sharded_data_parallel import OptimStateKeyType
from torch.distributed.tensor import DTensor
from trees import assert_same

from shardkit.errors import ShardkitError, TranslationError
from shardkit.fsdp1.fully_sharded_data_parallel import FullyShardedDataParallel as FSDP
from shardkit.state.model import clean_name

pytestmark = pytest.mark.filterwarnings("ignore")
FULL, SHARDED = StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT


class Body(nn.Module):
    """Tied, frozen, and an inner module that the tests let FSDP ignore; 7 and 5 do not divide by 2.

    Rows of 32, so that vectors of 8 or 16 cover shards and full tensors alike: what is left over is
    rounded otherwise.
    """

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 32)
        self.up, self.down = nn.Linear(32, 5), nn.Linear(5, 32)
        self.frozen = nn.Linear(32, 32).requires_grad_(False)
        self.ignored = nn.Linear(32, 32)
        self.head = nn.Linear(32, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids)
        return self.head(self.ignored(self.frozen(x + self.down(self.up(x).relu()))))


class Parent(nn.Module):
    """Has a parameter that is not wrapped."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.shift = nn.Parameter(torch.ones(7))
        self.body = Body()

    def forward(self, ids):
        return self.body(ids) + self.shift


def wrapped(whole=False):
    """Frozen and trained parameters have wrappers of their own; ``whole``: so has the rest."""
    net = Parent()
    net.body.frozen, net.body.up = FSDP(net.body.frozen), FSDP(net.body.up)
    if whole:
        return FSDP(net)
    net.body = FSDP(net.body, ignored_modules=[net.body.ignored])
    return net


OPTIMIZERS = {
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.01),
    "adam_fused": lambda groups: torch.optim.Adam(groups, lr=0.01, fused=True),
    "adamw_foreach": lambda groups: torch.optim.AdamW(groups, lr=0.01, foreach=True, amsgrad=True),
    "momentum": lambda groups: torch.optim.SGD(groups, lr=0.01, momentum=0.9),
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.01),
    "adagrad": lambda groups: torch.optim.Adagrad(groups, lr=0.01),
}


def set_type(model, kind, **options):
    FSDP.set_state_dict_type(
        model, kind, None, FullOptimStateDictConfig(**options) if kind is FULL else None
    )


def test_what_is_not_supported_says_what_to_use():
    model = Parent()
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    calls = {
        "rekey_optim_state_dict is not supported.*optim_state_dict_to_load": lambda: (
            FSDP.rekey_optim_state_dict({}, OptimStateKeyType.PARAM_NAME, model, optim=optimizer)
        ),
        "optim_input is not supported.*pass optim": lambda: FSDP.full_optim_state_dict(
            model, optimizer, optim_input=model.parameters()
        ),
        "is_named_optimizer=True is not supported": lambda: FSDP.optim_state_dict_to_load(
            model, optimizer, {}, is_named_optimizer=True
        ),
        "No part of the model is wrapped": lambda: FSDP.optim_state_dict(model, optimizer),
    }
    for text, call in calls.items():
        with pytest.raises(TranslationError, match=text):
            call()


def plain_state(name):
    """By name, after three steps without sharding; the losses of those and of the next three."""
    model = Parent()
    optimizer = OPTIMIZERS[name](two_groups(model))
    losses = train(model, optimizer, range(3))
    state, named = optimizer.state_dict(), {param: fqn for fqn, param in model.named_parameters()}
    names = [named[param] for group in optimizer.param_groups for param in group["params"]]
    groups = [
        {**group, "params": sorted(names[n] for n in group["params"])}
        for group in state["param_groups"]
    ]
    by_name = {
        "state": {names[n]: entry for n, entry in state["state"].items()},
        "param_groups": groups,
    }
    return copy.deepcopy(by_name), losses, train(model, optimizer, range(3, 6))


def resumed(how, model, optimizer, full, sharded):
    """Load in one of FSDP1's ways; only rank 0 has the full state where that is enough."""
    on_rank0 = full if dist.get_rank() == 0 else None
    set_type(model, FULL)
    if how == "to_load":
        return optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, full))
    if how == "from_rank0":
        set_type(model, FULL, rank0_only=True)
        FSDP.optim_state_dict_to_load(model, optimizer, on_rank0, load_directly=True)
        return None
    if how == "shard":
        result = FSDP.shard_full_optim_state_dict(full, model, optim=optimizer)
    elif how == "scatter":
        result = FSDP.scatter_full_optim_state_dict(on_rank0, model, optim=optimizer)
    else:
        result = FSDP.flatten_sharded_optim_state_dict(sharded, model, optimizer)
    return optimizer.load_state_dict(result)


def unsharded(state):
    """State of DTensors in full tensors."""
    full = {}
    for fqn, values in sorted(state.items()):  # the same order on all ranks
        full[fqn] = dict(values)
        for key, value in values.items():
            if isinstance(value, DTensor):
                full[fqn][key] = value.full_tensor()
    return full


@on_ranks(2)
def test_state_is_that_of_plain_training_and_training_goes_on_from_it():
    """Gathered in the model's order although the optimizers of the ranks have another one each."""
    backwards = dist.get_rank() == 1
    ways = ["to_load", "from_rank0", "shard", "scatter", "flatten"]
    for number, (name, make) in enumerate(OPTIMIZERS.items()):
        expected, losses, later = plain_state(name)
        whole = name in (
            "adam_fused",
            "adamw_foreach",
        )  # whose kernels take no plain tensors beside DTensors
        model = wrapped(whole)
        optimizer = make(two_groups(model, backwards))
        assert train(model, optimizer, range(3)) == losses
        weights = copy.deepcopy(model.state_dict())
        full = FSDP.optim_state_dict(model, optimizer)
        assert_same(full["state"], expected["state"])
        for own, group in zip(full["param_groups"], expected["param_groups"], strict=True):
            assert_same({**own, "params": sorted(own["params"])}, group)
        assert_same(
            FSDP.optim_state_dict(model, optimizer, copy.deepcopy(optimizer.state_dict())), full
        )
        on_rank0 = FSDP.full_optim_state_dict(model, optimizer)
        assert_same(on_rank0, {} if backwards else full)
        sharded = FSDP.sharded_optim_state_dict(model, optimizer)
        assert_same(unsharded(sharded["state"]), full["state"])
        if name == "adamw":
            assert isinstance(sharded["state"]["body.up.weight"]["exp_avg"], DTensor)
        before = copy.deepcopy(full)
        assert train(model, optimizer, range(3, 6)) == later
        assert_same(full, before)

        for how in ways if name == "adamw" else [ways[number % 5]]:
            fresh = wrapped(whole)
            fresh.load_state_dict(weights)
            other = make(two_groups(fresh, not backwards))
            resumed(how, fresh, other, full, sharded)
            assert train(fresh, other, range(3, 6)) == later, (name, how)
            assert_same(full, before)


@pytest.mark.parametrize("use_orig_params", [False, True])
@on_ranks(2)
def test_sharded_state_of_torchs_fsdp1_is_loaded(use_orig_params):
    """Of ShardedTensors. The programs exchange full state."""
    net, own, make = (
        Parent(),
        {"use_orig_params": use_orig_params, "device_id": torch.device("cpu")},
        OPTIMIZERS["adamw"],
    )
    net.body.frozen, net.body.up = TorchFSDP(net.body.frozen, **own), TorchFSDP(net.body.up, **own)
    net.body = TorchFSDP(net.body, ignored_modules=[net.body.ignored], **own)
    theirs = make(list(net.parameters()))
    train(net, theirs, range(3))
    ours = wrapped()
    ours.load_state_dict(copy.deepcopy(net.state_dict()))
    optimizer = make(ours.parameters())
    with TorchFSDP.state_dict_type(net, SHARDED):
        state = TorchFSDP.optim_state_dict(net, theirs)
    optimizer.load_state_dict(FSDP.optim_state_dict_to_load(ours, optimizer, state))
    assert train(ours, optimizer, range(3, 6)) == train(net, theirs, range(3, 6))


@on_ranks(2)
def test_given_state_is_saved_and_what_does_not_fit_is_said():
    model = wrapped()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    assert FSDP.optim_state_dict(model, optimizer)["state"] == {}
    train(model, optimizer, range(1))
    raw = copy.deepcopy(optimizer.state_dict())
    for entry in raw["state"].values():
        entry["value1"], entry["value2"] = 2.74, None
    full = FSDP.optim_state_dict(model, optimizer, raw)
    assert full["state"]["body.up.bias"]["value2"] is None
    loaded = FSDP.optim_state_dict_to_load(model, optimizer, full)
    assert all(
        (entry.pop("value1"), entry.pop("value2")) == (2.74, None)
        for entry in loaded["state"].values()
    )
    assert_same(loaded["state"], optimizer.state_dict()["state"])

    second = dist.get_rank() == 1
    if second:  # alone, as in FSDP1: programs load full state one rank after another
        alone = FSDP.optim_state_dict_to_load(model, optimizer, full)
        assert alone["state"].keys() == optimizer.state_dict()["state"].keys()
    some = [param for name, param in model.named_parameters() if clean_name(name) != "body.up.bias"]
    fewer = torch.optim.Adam(some if second else model.parameters(), lr=0.01)
    train(model, fewer, range(1))
    with pytest.raises(
        ShardkitError, match=r"rank 1 differs from rank 0 in which tensors are sharded"
    ):
        FSDP.optim_state_dict(model, fewer)
    few = torch.optim.Adam(
        [model.shift, *model.body.embed.parameters(), *model.body.up.parameters()]
    )
    with pytest.raises(ShardkitError, match=r"- unexpected: body\.down\.weight"):
        FSDP.optim_state_dict_to_load(model, few, full)
    other = copy.deepcopy(full)
    other["state"]["body.up.bias"]["exp_avg"] = torch.zeros(2)
    with pytest.raises(ShardkitError, match=r"exp_avg of up.bias has the shape \(2,\)"):
        FSDP.optim_state_dict_to_load(model, optimizer, other)
    for wrong in (optimizer.state_dict(), {}):
        with pytest.raises(ShardkitError, match="State by number depends on the order"):
            FSDP.optim_state_dict_to_load(model, optimizer, wrong)
    set_type(model, StateDictType.LOCAL_STATE_DICT)
    loaded = FSDP.optim_state_dict_to_load(
        model, optimizer, FSDP.optim_state_dict(model, optimizer)
    )
    assert_same(loaded["state"], optimizer.state_dict()["state"])

    net = nn.Sequential(*[nn.Linear(3, 3) for _ in range(3)])
    net[1] = FSDP(net[1], sharding_strategy=ShardingStrategy.NO_SHARD)  # between the root's
    flat = FSDP(net, sharding_strategy=ShardingStrategy.NO_SHARD)
    whole = torch.optim.Adam(flat.parameters())
    flat(torch.ones(2, 3)).sum().backward()
    whole.step()
    held, full = copy.deepcopy(whole.state_dict()), FSDP.optim_state_dict(flat, whole)
    without_optim = FSDP.scatter_full_optim_state_dict(full, flat)  # of model.parameters()
    for state in (FSDP.optim_state_dict_to_load(flat, whole, full), without_optim):
        whole.load_state_dict(state)
        assert_same(whole.state_dict()["state"], held["state"])
