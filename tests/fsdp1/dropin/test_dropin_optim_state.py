"""The drop-in's optimizer state: as plain training has it, and loaded back."""

from __future__ import annotations

import copy
import inspect
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from shim_optimizers import (
    FULL,
    ID,
    NAME,
    OPTIMIZERS,
    SHARDED,
    Parent,
    set_type,
    train,
    two_groups,
    wrapped,
)
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
from torch.distributed.fsdp import (
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.optim import _NamedOptimizer
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer
from trees import assert_same

from shardkit.errors import TranslationError
from shardkit.fsdp1.fully_sharded_data_parallel import FullyShardedDataParallel as FSDP
from shardkit.testing import distributed

pytestmark = pytest.mark.filterwarnings("ignore")


STATICS = [
    "optim_state_dict",
    "optim_state_dict_to_load",
    "full_optim_state_dict",
    "sharded_optim_state_dict",
    "shard_full_optim_state_dict",
    "scatter_full_optim_state_dict",
    "flatten_sharded_optim_state_dict",
    "rekey_optim_state_dict",
]


def test_signatures_are_torchs():
    for name in STATICS:
        ours, theirs = (inspect.signature(getattr(cls, name)).parameters for cls in (FSDP, TorchFSDP))
        assert [(p.name, p.default, p.kind) for p in ours.values()] == [
            (p.name, p.default, p.kind) for p in theirs.values()
        ], name


def test_rekeying_goes_there_and_back_as_torchs_does():
    model = Parent()
    optimizer = OPTIMIZERS["adamw"](two_groups(model))
    train(model, optimizer, range(2))
    by_id = optimizer.state_dict()
    by_name = FSDP.rekey_optim_state_dict(by_id, NAME, model, optim=optimizer)
    assert_same(by_name, TorchFSDP.rekey_optim_state_dict(by_id, NAME, model, optim=optimizer))
    assert [group["params"][:1] for group in by_name["param_groups"]] == [
        ["body.apart.weight"],
        [],
        ["body.apart.bias"],
    ]
    assert "body.frozen.weight" not in by_name["state"]
    assert "body.head.weight" not in by_name["state"], "tied to embed.weight, which comes first"
    assert_same(FSDP.rekey_optim_state_dict(by_name, ID, model, optim=optimizer), by_id)
    with pytest.warns(FutureWarning, match="`optim_input` argument is deprecated"):
        given = FSDP.rekey_optim_state_dict(by_name, ID, model, two_groups(model))
    assert_same(given, by_id)
    assert FSDP.rekey_optim_state_dict(by_id, ID, model) is by_id
    assert FSDP.rekey_optim_state_dict(by_name, NAME, model) is by_name

    fresh = torch.optim.AdamW(model.parameters()).state_dict()  # torch's leaves the numbers where there is no state
    assert FSDP.rekey_optim_state_dict(fresh, NAME, model)["param_groups"][0]["params"][-1] == "shift"


def test_rekeying_says_what_does_not_fit():
    model = Parent()
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    train(model, optimizer, range(1))
    state = optimizer.state_dict()
    fewer = torch.optim.SGD([model.shift])
    with pytest.raises(KeyError, match="1, 2, 3, 4, 5, 8, 9, 6, 7 is not a parameter"):
        FSDP.rekey_optim_state_dict(state, NAME, model, optim=fewer)
    with pytest.raises(ValueError, match="Invalid parameter keys"):
        FSDP.rekey_optim_state_dict({**state, "state": {**state["state"], "mine": 1}}, NAME, model)
    with pytest.raises(ValueError, match='the keys "state"'):
        FSDP.rekey_optim_state_dict({}, NAME, model)
    with pytest.raises(TypeError, match="optim_input: Optimizer input should be an iterable"):
        FSDP.rekey_optim_state_dict(state, NAME, model, optim_input=3)
    with pytest.raises(ValueError, match="should not be empty"):
        FSDP.rekey_optim_state_dict(state, NAME, model, optim_input=iter(()))
    with pytest.raises(TranslationError, match="no part of it is wrapped"):
        FSDP.optim_state_dict(model, optimizer)


def plain_state(name: str) -> tuple[dict[str, Any], list[float], list[float]]:
    """By name, after three steps without any sharding; the losses of those and of the three after."""
    model = Parent()
    optimizer = OPTIMIZERS[name](two_groups(model))
    losses = train(model, optimizer, range(3))
    by_name = FSDP.rekey_optim_state_dict(optimizer.state_dict(), NAME, model, optim=optimizer)
    return copy.deepcopy(by_name), losses, train(model, optimizer, range(3, 6))


def resumed(how: str, model: nn.Module, optimizer: Optimizer, full: dict[str, Any], sharded: dict[str, Any]) -> None:
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
        result = FSDP.shard_full_optim_state_dict(full, model, optim_input=optimizer.param_groups)
    elif how == "scatter":
        result = FSDP.scatter_full_optim_state_dict(on_rank0, model, optim=optimizer)
    else:
        result = FSDP.flatten_sharded_optim_state_dict(sharded, model, optimizer)
    return optimizer.load_state_dict(result)


@distributed(world_size=2, backend="gloo")
def test_state_is_that_of_plain_training_and_training_goes_on_from_it():
    """Gathered in the model's order although the optimizers of the ranks have another one each."""
    backwards = dist.get_rank() == 1
    ways = ["to_load", "from_rank0", "shard", "scatter", "flatten"]
    for number, (name, make) in enumerate(OPTIMIZERS.items()):
        expected, losses, later = plain_state(name)
        whole = name in ("adam_fused", "adamw_foreach")  # whose kernels take no plain tensors beside DTensors
        model = wrapped(whole)
        optimizer = make(two_groups(model, backwards))
        assert train(model, optimizer, range(3)) == losses
        weights = copy.deepcopy(model.state_dict())
        full = FSDP.optim_state_dict(model, optimizer)
        assert_same(full["state"], expected["state"])
        assert list(full["state"]) == [fqn for fqn, _ in Parent().named_parameters() if fqn in expected["state"]]
        for found, group in zip(full["param_groups"], expected["param_groups"], strict=True):
            assert_same({**found, "params": sorted(found["params"])}, group)
        assert_same(FSDP.optim_state_dict(model, optimizer, copy.deepcopy(optimizer.state_dict())), full)
        on_rank0 = FSDP.full_optim_state_dict(model, optimizer)
        assert_same(on_rank0, {} if backwards else full)
        sharded = FSDP.sharded_optim_state_dict(model, optimizer)
        assert_same(sharded["state"], as_held(model, full["state"]))
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


def as_held(model: nn.Module, full: dict[str, Any]) -> dict[str, Any]:
    """Full state in the kinds of tensors that a sharded optimizer has: DTensors where the parameter is one."""
    params = dict(model.named_parameters())

    def held(param: nn.Parameter, value: Any) -> Any:
        if isinstance(value, Tensor) and value.ndim and isinstance(param, DTensor):
            return distribute_tensor(value, param.device_mesh, param.placements)
        return value

    return {fqn: {key: held(params[fqn], value) for key, value in entry.items()} for fqn, entry in full.items()}


@distributed(world_size=2, backend="gloo")
def test_what_is_no_parameters_and_what_is_no_tensor_stays():
    model = wrapped()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    assert FSDP.optim_state_dict(model, optimizer)["state"] == {}
    train(model, optimizer, range(1))
    raw = copy.deepcopy(optimizer.state_dict())
    for entry in raw["state"].values():
        entry["value1"], entry["value2"] = 2.74, None
    raw["state"]["mine"] = {"count": torch.tensor(3), "words": ["a", "b"]}
    del raw["param_groups"]
    set_type(model, FULL, rank0_only=True)
    full = FSDP.optim_state_dict(model, optimizer, raw)
    assert full.keys() == ({"state"} if dist.get_rank() == 0 else set())
    assert not full or full["state"]["body.up.bias"]["value2"] is None
    before = optimizer.state_dict()
    loaded = FSDP.optim_state_dict_to_load(model, optimizer, full)
    assert loaded.keys() == {"state"}
    assert loaded["state"]["mine"] == {"count": torch.tensor(3), "words": ["a", "b"]}
    numbered = {key: entry for key, entry in loaded["state"].items() if key != "mine"}
    assert numbered.keys() == before["state"].keys()
    assert all((entry.pop("value1"), entry.pop("value2")) == (2.74, None) for entry in numbered.values())
    assert_same(numbered, before["state"])
    optimizer.load_state_dict({**loaded, "param_groups": before["param_groups"]})
    assert optimizer.state_dict()["state"]["mine"]["words"] == ["a", "b"]

    set_type(model, SHARDED, offload_to_cpu=False)
    named = _NamedOptimizer(model.named_parameters(), torch.optim.Adam, None, model, lr=0.01)
    train(model, named, range(1, 2))
    sharded = FSDP.optim_state_dict(model, named)
    assert "body.up.weight" in sharded["state"]
    by_name = FSDP.optim_state_dict_to_load(model, named, sharded, is_named_optimizer=True)
    assert_same(by_name["state"], named.state_dict()["state"])
    assert by_name["param_groups"][0]["params"] == sorted(named.ordered_param_keys)
    train(model, named, range(2, 3))
    named.load_state_dict(by_name)
    assert_same(FSDP.optim_state_dict(model, named)["state"], sharded["state"])

    flat = FSDP(nn.Linear(3, 3), sharding_strategy=ShardingStrategy.NO_SHARD)
    whole = torch.optim.Adam(flat.parameters())
    flat(torch.ones(2, 3)).sum().backward()
    whole.step()
    held = copy.deepcopy(whole.state_dict())
    whole.load_state_dict(FSDP.optim_state_dict_to_load(flat, whole, FSDP.optim_state_dict(flat, whole)))
    assert_same(whole.state_dict(), held)


@distributed(world_size=2, backend="gloo")
def test_every_rank_says_what_does_not_fit():
    model = wrapped()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    train(model, optimizer, range(1))
    full = FSDP.optim_state_dict(model, optimizer)
    second = dist.get_rank() == 1

    sharded = [param for name, param in model.named_parameters() if name != "body.up.bias"]
    fewer = torch.optim.Adam(sharded if second else model.parameters(), lr=0.01)
    train(model, fewer, range(1))
    lacks = "FSDP currently requires each rank to have at least the optimizer states needed by rank 0's optimizer"
    with pytest.raises(RuntimeError, match=f"(?s){lacks}.*- rank 1: body.up.bias/exp_avg"):
        FSDP.optim_state_dict(model, fewer)
    few = torch.optim.Adam([model.shift, *model.body.embed.parameters(), *model.body.up.parameters()])
    with pytest.raises(KeyError, match=re.escape("body.down.weight, body.down.bias, body.frozen.weight")):
        FSDP.optim_state_dict_to_load(model, few, full)
    with pytest.raises(KeyError, match=r"is by number.*rekey_optim_state_dict"):
        FSDP.optim_state_dict_to_load(model, optimizer, optimizer.state_dict())
    if second:  # alone, as in FSDP1: programs load full state one rank after another
        with pytest.raises(ValueError, match='must have the keys "state"'):
            FSDP.optim_state_dict_to_load(model, optimizer, {})
        alone = FSDP.optim_state_dict_to_load(model, optimizer, full)
        assert alone["state"].keys() == optimizer.state_dict()["state"].keys()
    set_type(model, FULL, rank0_only=True)
    with pytest.raises(ValueError, match='must have the keys "state"'):
        FSDP.optim_state_dict_to_load(model, optimizer, full if second else None)
    wrong = copy.deepcopy(full)
    wrong["state"]["body.up.weight"]["exp_avg"] = torch.zeros(5, 7)
    with pytest.raises(
        ValueError, match=re.escape("body.up.weight/exp_avg of shape (5, 7) for a parameter of (5, 32)")
    ):
        FSDP.scatter_full_optim_state_dict(wrong if not second else None, model, optim=optimizer)
    unit = copy.deepcopy(full)
    del unit["state"]["body.up.bias"]
    unit["param_groups"][0]["params"].remove("body.up.bias")
    alike = "^All unflattened parameters comprising a single flat parameter must have scalar state with the same value"
    with pytest.raises(ValueError, match=alike):
        FSDP.shard_full_optim_state_dict(unit, model, optim=optimizer)
    split = torch.optim.Adam(two_groups(model))
    train(model, split, range(1))
    with pytest.raises(ValueError, match=r"group of shift: .*lr differs"):
        FSDP.optim_state_dict_to_load(model, optimizer, FSDP.full_optim_state_dict(model, split, rank0_only=False))
    set_type(model, StateDictType.LOCAL_STATE_DICT)
    with pytest.raises(TranslationError, match="SHARDED_STATE_DICT"):
        FSDP.optim_state_dict(model, optimizer)
    with pytest.raises(TranslationError, match="SHARDED_STATE_DICT"):
        FSDP.optim_state_dict_to_load(model, optimizer, full)
