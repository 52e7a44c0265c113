"""load_full_state_dict: the dict's values in every layout, checked before anything changes, each
rank its own part.
"""

import copy

import pytest
import torch
import torch.distributed as dist
from cpu_ranks import on_ranks
from state_models import LAYOUTS, OTHERS, Net, assert_same_state, fsdp, hsdp, seeded
from torch import Tensor, nn

from shardkit import MeshSpec, init_on_meta, shard_model
from shardkit.checkpoint import load_checkpoint, save_checkpoint
from shardkit.errors import ShardkitError
from shardkit.state import full_state_dict, load_full_state_dict
from shardkit.testing import comm_counts


def new_state():
    """A state of ``Net`` that no seeded model has; tied tensors are one."""
    torch.manual_seed(1)
    state = dict(Net().state_dict())
    for name, value in state.items():
        if isinstance(value, Tensor) and value.is_floating_point():
            state[name] = value * 3 + 1
    state["head.weight"] = state["embed.weight"]
    state["_extra_state"] = "two"
    return state


def given(state, src="rank0"):
    """What a rank passes: only rank 0 has the dict, or all."""
    return state if src == "all" or dist.get_rank() == 0 else {}


def full(model):
    return full_state_dict(model, rank0_only=False)


@pytest.mark.parametrize("layout", OTHERS)
@on_ranks(4)
def test_every_layout_gets_the_values_in_place(layout):
    model = LAYOUTS[layout](seeded(Net))
    plain = full(model)  # reshards what is unsharded
    objects = {id(param) for param in model.parameters()}
    state = new_state()
    before = copy.deepcopy(state)
    for src, values in (("rank0", state), ("all", plain), ("all", state)):
        assert load_full_state_dict(model, given(values, src), src=src) == ([], [])
        assert_same_state(full(model), values)
    assert objects == {id(param) for param in model.parameters()}
    assert_same_state(state, before)


@pytest.mark.parametrize(
    ("layout", "src"),
    [
        ("fsdp", "all"),
        ("hsdp", "rank0"),
        ("tensor_parallel", "rank0"),
        ("columns", "all"),
        ("ignoring", "rank0"),
        ("offloaded", "rank0"),
    ],
)
@on_ranks(4)
def test_meta_models_are_materialized(layout, src):
    with init_on_meta():
        model = Net()
    model = LAYOUTS[layout](model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = new_state()
    load_full_state_dict(model, given(state, src), src=src)
    assert_same_state(full(model), state)
    assert torch.equal(model.table, torch.ones(3)), "not in the dict, but in the construction"
    assert model.head.weight is model.embed.weight
    assert {id(p) for p in optimizer.param_groups[0]["params"]} == {
        id(p) for p in model.parameters()
    }
    model(torch.zeros(2, 3, dtype=torch.long)).sum().backward()
    optimizer.step()


@pytest.mark.parametrize("src", ["rank0", "all"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@on_ranks(4)
def test_values_become_the_models_dtype_or_with_assign_the_dicts(dtype, src):
    state = {
        n: v.to(dtype) if isinstance(v, Tensor) and v.is_floating_point() else v
        for n, v in new_state().items()
    }
    model = fsdp(seeded(Net))
    load_full_state_dict(model, given(state, src), src=src)
    own = seeded(Net).state_dict()
    expected = {n: v.to(own[n].dtype) if isinstance(v, Tensor) else v for n, v in state.items()}
    assert_same_state(full(model), expected)
    with init_on_meta():
        model = Net()
    model = hsdp(model)
    load_full_state_dict(model, given(state, src), src=src, assign=True)
    assert_same_state(full(model), state)


@on_ranks(4)
def test_names_with_wrappers_and_one_name_of_a_tie():
    state = new_state()
    renamed = {
        ("_orig_mod." + name).replace("blocks.0.", "blocks.0._checkpoint_wrapped_module."): state[
            name
        ]
        for name in state
    }
    del renamed["_orig_mod.embed.weight"]
    model = fsdp(seeded(Net))
    load_full_state_dict(model, given(renamed))
    assert_same_state(full(model), state)


# What is exchanged.


@on_ranks(4)
def test_every_rank_is_sent_its_own_part_and_nothing_when_all_have_the_dict():
    model = fsdp(
        nn.Sequential(*(nn.Linear(256, 1024, bias=False) for _ in range(3)), nn.Linear(1024, 8))
    )
    state = full(model)
    with comm_counts() as counts:
        load_full_state_dict(model, given(state))
    sent = {"send": 12} if dist.get_rank() == 0 else {"recv_": 4}
    assert counts.other == sent | {"broadcast_": 2}  # which tell what the dict has
    with comm_counts() as counts:
        load_full_state_dict(model, state, src="all")
    assert counts.other == {}
    assert counts.all_reduces == 3  # whether all pass the same arguments, and are content


# Refused, on every rank, with nothing changed.


@pytest.mark.parametrize("src", ["rank0", "all"])
@on_ranks(4)
def test_everything_that_does_not_fit_is_listed_at_once(src):
    model = fsdp(seeded(Net))
    state = new_state()
    del state["gain"], state["blocks.1.up.bias"]
    state |= {"stranger": torch.ones(2), "narrow.weight": torch.ones(6, 3), "counts": 5}
    with pytest.raises(ShardkitError) as caught:
        load_full_state_dict(model, given(state, src), src=src)
    text = str(caught.value)
    assert (
        "state_dict does not match: 2 of a different shape or dtype, 2 missing, 1 unexpected"
        in text
    )
    for part in (
        "- missing: gain",
        "- missing: blocks.1.up.bias",
        "- unexpected: stranger",
        "- of a different shape or dtype: narrow.weight (shape (6, 3), the model has (3, 6))",
        "- of a different shape or dtype: counts (int, not a tensor)",
    ):
        assert part in text, text
    assert_same_state(full(model), seeded(Net).state_dict())


@on_ranks(4)
def test_not_strict_loads_the_rest():
    model = fsdp(seeded(Net))
    state = new_state()
    gain = state.pop("gain")
    result = load_full_state_dict(model, given(state | {"stranger": gain}), strict=False)
    assert result == (["gain"], ["stranger"])
    expected = state | {"gain": torch.ones(1)}
    found = full(model)
    assert_same_state(found, {name: expected[name] for name in found})


@on_ranks(4)
def test_an_error_of_one_rank_is_raised_by_all():
    model = fsdp(seeded(Net))
    state = new_state()
    if dist.get_rank() == 2:
        state["gain"] = torch.ones(2)
    with pytest.raises(ShardkitError, match="gain"):
        load_full_state_dict(model, state, src="all")
    with pytest.raises(ShardkitError, match="DTensor"):
        load_full_state_dict(model, given(model.state_dict()))
    with pytest.raises(ShardkitError, match="meta device"):
        load_full_state_dict(model, given({**state, "gain": torch.ones(1, device="meta")}))
    with pytest.raises(ShardkitError, match=r"src must be .*rank1"):
        load_full_state_dict(model, state, src="rank1")
    assert_same_state(full(model), seeded(Net).state_dict())


def transpose(module, state, prefix, metadata):
    state[prefix + "weight"] = state[prefix + "weight"].T


@on_ranks(4)
def test_what_a_hook_made_cannot_be_written_to():
    model = fsdp(nn.Sequential(nn.Linear(4, 3)))
    model[0].register_state_dict_post_hook(transpose)
    with pytest.raises(ShardkitError, match=r"0\.weight was replaced by a hook on state_dict"):
        load_full_state_dict(
            model, {"0.weight": torch.ones(4, 3), "0.bias": torch.ones(3)}, src="all"
        )


class WithExtraTensor(nn.Linear):
    def get_extra_state(self):
        return torch.tensor([3, 5])

    def set_extra_state(self, state):
        self.seen = state


@on_ranks(4)
def test_extra_state_may_be_a_tensor():
    model = fsdp(WithExtraTensor(6, 6))
    state = full(model)
    load_full_state_dict(model, given(state))
    assert torch.equal(model.seen, torch.tensor([3, 5]))


@on_ranks(4)
def test_different_values_of_one_tied_tensor_are_reported():
    state = new_state()
    state["head.weight"] = state["embed.weight"].clone()
    model = fsdp(seeded(Net))
    load_full_state_dict(model, given(state))
    assert_same_state(full(model), state)
    state["head.weight"][0, 0] += 1
    model = fsdp(seeded(Net))
    for src in ("rank0", "all"):
        with pytest.raises(
            ShardkitError, match=r"head\.weight differs from embed\.weight|ranks: 1 failed"
        ):
            load_full_state_dict(model, given(state, src), src=src)
        assert_same_state(full(model), seeded(Net).state_dict())
    load_full_state_dict(model, given(state), strict=False)
    state["head.weight"] = state["embed.weight"]
    assert_same_state(full(model), state)


def test_a_process_alone_needs_no_group():
    model, state = seeded(Net), new_state()
    assert load_full_state_dict(model, state) == ([], [])
    assert_same_state(full_state_dict(model), state)
    with init_on_meta():
        model = Net()
    load_full_state_dict(model, state)
    assert_same_state(full_state_dict(model), state)


def test_a_buffer_that_nothing_gives_a_value_is_named():
    with torch.device("meta"):
        model = Net()
    with pytest.raises(
        ShardkitError, match="table was made on the meta device outside init_on_meta"
    ):
        load_full_state_dict(model, new_state())
    assert model.embed.weight.is_meta


@on_ranks(2)
def test_buffers_of_expand_are_loaded(tmp_path):
    def build(value):
        model = seeded(lambda: nn.Linear(4, 4))
        model.register_buffer("mask", torch.tensor([[value], [1.0]]).expand(2, 3))
        return fsdp(model)

    model, other = build(2.0), build(3.0)
    load_full_state_dict(other, full_state_dict(model))
    assert torch.equal(other.mask, model.mask)
    save_checkpoint(tmp_path / "a", other)
    load_checkpoint(tmp_path / "a", resumed := build(4.0))
    assert torch.equal(resumed.mask, model.mask)


@on_ranks(4)
def test_a_file_of_another_ranks_shards_is_refused(tmp_path):
    """torch would copy them as if they were this rank's own."""
    model = shard_model(seeded(Net), mesh=MeshSpec.hybrid(2, 2))
    torch.save(model.state_dict(), tmp_path / f"{dist.get_rank()}.pt")
    dist.barrier()
    for saved in range(4):
        state = torch.load(tmp_path / f"{saved}.pt")
        if (saved - dist.get_rank()) % 2:
            with pytest.raises(ShardkitError, match="gain is a shard of another rank"):
                model.load_state_dict(state)
        else:  # its own, and its replica's
            model.load_state_dict(state)
