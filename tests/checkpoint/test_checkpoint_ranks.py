"""save_checkpoint and load_checkpoint on ranks: into the same world, into others, and what is
refused together.
"""

import json
import os
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from checkpoint_net import build, is_first, train, whole
from cpu_ranks import on_ranks
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor.debug import CommDebugMode
from trees import assert_same

from shardkit.checkpoint import (
    convert_checkpoint,
    latest_checkpoint,
    load_checkpoint,
    save_checkpoint,
    save_pretrained,
)
from shardkit.checkpoint.format import find_tensors
from shardkit.errors import CheckpointError, ShardkitError


def save_trained(path, shape, async_=False):
    """Train, save, and leave beside it what a load must give, and how training goes on."""
    state = build(shape)
    train(*state)
    handle = save_checkpoint(
        path, *state, extra={"step": 2, "tokens": torch.arange(3)}, async_=async_
    )
    at_save = whole(*state)
    losses = train(*state, steps=3)
    handle.wait()
    end = whole(*state)
    if is_first():
        torch.save({"at_save": at_save, "losses": losses, "end": end}, f"{path}.expected")


def load_and_compare(path, shape, goes_on=False):
    """Load into what differs in every value, and compare; where the arithmetic is the same, train
    on too.
    """
    expected = torch.load(f"{path}.expected", weights_only=False)
    state = build(shape, seed=1, lr=0.5)
    if goes_on:  # also into an optimizer that has stepped
        train(*state, steps=1)
    extra = load_checkpoint(path, *state)
    assert_same(extra, {"step": 2, "tokens": torch.arange(3)})
    got = whole(*state)
    if is_first():
        assert_same(got, expected["at_save"])
    if goes_on:
        assert train(*state, steps=3) == expected["losses"]
        end = whole(*state)
        if is_first():
            assert_same(end, expected["end"])


save_on_4 = on_ranks(4)(save_trained)
load_on_2, load_on_3, load_on_4 = (on_ranks(n)(load_and_compare) for n in (2, 3, 4))


@pytest.mark.parametrize("async_", [False, True])
@pytest.mark.parametrize("mesh", [(4,), (2, 2)], ids=["fsdp", "hsdp"])
def test_training_goes_on_bit_for_bit(mesh, async_, tmp_path):
    save_on_4(tmp_path / "step-2", mesh, async_)
    load_on_4(tmp_path / "step-2", mesh, goes_on=True)
    stored = find_tensors(tmp_path / "step-2")
    assert "embed.weight" in stored
    assert "head.weight" not in stored  # what is tied is written once
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-2", "step-2.expected"]


def test_into_other_worlds_and_meshes(tmp_path):
    path = tmp_path / "step-2"
    save_on_4(path, (4,))
    load_on_4(path, (4, 1))
    load_on_4(path, None)
    load_on_2(path, (2,))
    load_on_3(path, (3,))
    load_and_compare(path, None)
    save_on_4(tmp_path / "from-hsdp", (2, 2))
    load_on_3(tmp_path / "from-hsdp", (3,))
    save_trained(tmp_path / "from-1", None)
    load_on_3(tmp_path / "from-1", (3,))


# --- DCP, both ways -------------------------------------------------------------------------------


@on_ranks(4)
def test_plain_dcp_code_reads_what_we_write_and_we_read_what_it_writes(tmp_path):
    state = build((4,))
    train(*state)
    expected = whole(*state)
    save_checkpoint(tmp_path / "native", *state)
    if is_first():
        convert_checkpoint(tmp_path / "native", tmp_path / "ours")
    dist.barrier()
    theirs = {"model": tensors(state[0]), "optimizer": get_optimizer_state_dict(state[0], state[1])}
    dcp.save(theirs, checkpoint_id=tmp_path / "theirs")
    other = build((2, 2), seed=1)
    optimizer_state = get_optimizer_state_dict(other[0], other[1])
    del optimizer_state["state"]["unused"]
    # torch's load raises for state that a parameter without gradient never had, so such code has to
    # leave it out.
    tree = {"model": tensors(other[0]), "optimizer": optimizer_state}
    dcp.load(tree, checkpoint_id=tmp_path / "ours")
    set_optimizer_state_dict(
        other[0], other[1], tree["optimizer"], options=StateDictOptions(strict=False)
    )
    assert_same_training(whole(*other), expected)
    another = build((2, 2), seed=2)
    with pytest.raises(CheckpointError, match="- missing: _extra_state"):
        load_checkpoint(tmp_path / "theirs", another[0], another[1])
    assert load_checkpoint(tmp_path / "theirs", another[0], another[1], strict=False) is None
    assert_same_training(whole(*another), expected)


def tensors(net):
    return {
        name: value for name, value in net.state_dict().items() if isinstance(value, torch.Tensor)
    }


def assert_same_training(got, expected):
    if is_first():
        assert_same(got["model"], expected["model"])
        for name, entries in expected["optimizer"]["state"].items():
            assert_same(got["optimizer"]["state"][name], entries, name)
        assert_same(
            got["optimizer"]["param_groups"][0]["lr"],
            expected["optimizer"]["param_groups"][0]["lr"],
        )


# --- What is refused, together, with nothing changed ----------------------------------------------


def flip(file, at):
    if is_first():
        data = bytearray(file.read_bytes())
        data[at] ^= 4
        file.write_bytes(data)
    dist.barrier()


@on_ranks(2)
def test_damage_of_any_file_is_one_error_on_every_rank_and_changes_nothing(tmp_path):
    state = build((2,))
    train(*state)
    path = tmp_path / "a"
    save_checkpoint(path, *state, extra=torch.arange(100))
    train(*state, steps=1)
    before = whole(*state)
    files = json.loads((path / "manifest.json").read_text())["files"]
    assert "state.pt" in files
    for name, (size, _) in files.items():
        for at in (3, size // 2, size - 1):
            flip(path / name, at)
            with pytest.raises(CheckpointError) as caught:
                load_checkpoint(path, *state)
            assert name in str(caught.value) or "cannot be read" in str(caught.value)
            flip(path / name, at)
    after = whole(*state)
    if is_first():
        assert_same(after, before)
    load_checkpoint(path, *state)


@on_ranks(2)
def test_what_does_not_fit_is_listed_at_once(tmp_path):
    state = build((2,))
    train(*state)
    path = tmp_path / "a"
    save_checkpoint(path, *state)
    one = torch.optim.AdamW([state[0].gain])
    with pytest.raises(
        CheckpointError, match=r"optimizer.* 10 unexpected[^$]*- unexpected: embed\.weight"
    ):
        load_checkpoint(path, state[0], one)
    assert not one.state
    load_checkpoint(path, state[0], one, strict=False)
    assert int(one.state[state[0].gain]["step"]) == 2
    save_checkpoint(tmp_path / "b", state[0])
    with pytest.raises(CheckpointError, match="has no optimizer"):
        load_checkpoint(tmp_path / "b", *state)
    state[0].extra = state[0].narrow
    del state[0].narrow
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(path, state[0])
    for words in ("missing: extra.weight", "missing: extra.bias", "unexpected: narrow.weight"):
        assert words in str(caught.value)


@on_ranks(4)
def test_ranks_that_mean_different_things_all_raise(tmp_path):
    state = build((4,))
    rank = dist.get_rank()
    with pytest.raises(
        CheckpointError, match=r"ranks 1, 2, 3 differ from rank 0 in path \(.*rank-1 instead"
    ):
        save_checkpoint(tmp_path / f"rank-{rank}", *state)
    with pytest.raises(
        CheckpointError, match=r"extra cannot be saved, since it holds checkpoint_net\.is_first"
    ):
        save_checkpoint(tmp_path / "a", *state, extra=[1, is_first if rank == 2 else 0])
    for call in (
        save_checkpoint,
        load_checkpoint,
        lambda path, model, _: save_pretrained(model, path),
    ):
        with pytest.raises(ShardkitError, match=r"^model must be an nn\.Module, got AdamW"):
            call(tmp_path, *state[1::-1])
    with pytest.raises(
        ShardkitError, match=r"^optimizer must be .*, got LambdaLR\. Pass the model first"
    ):
        save_checkpoint(tmp_path, state[0], state[2])
    assert not any(tmp_path.iterdir())


@on_ranks(2)
def test_ranks_that_see_different_checkpoints_load_none(tmp_path):
    state = build((2,))
    for name in ("step-0", "step-1"):
        save_checkpoint(tmp_path / name, *state)
    with pytest.raises(CheckpointError, match="rank 1 differs from rank 0 in manifest at path"):
        load_checkpoint(tmp_path / f"step-{dist.get_rank()}", *state, verify=False)


@on_ranks(2)
def test_a_save_exchanges_little_and_flushes_each_file_and_two_directories(tmp_path):
    state = build((2,))
    train(*state)
    with mock.patch.object(os, "fsync", wraps=os.fsync) as fsync, CommDebugMode() as comms:
        save_checkpoint(tmp_path / "a", *state, extra={"step": 1})
    # errors, arguments, what is equal, the plan, what was written, its sums, and the commit
    assert comms.get_total_counts() == 7
    assert fsync.call_count == (6 if is_first() else 2)


@on_ranks(2)
def test_keep_rotates_on_rank_0(tmp_path):
    state = build((2,))
    for step in range(4):
        save_checkpoint(
            tmp_path / f"step-{step}", *state, extra=step, keep=2, async_=step % 2 == 1
        ).wait()
        assert latest_checkpoint(tmp_path) == tmp_path / f"step-{step}"
        dist.barrier()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-2", "step-3"]
    with pytest.raises(CheckpointError, match=r"files: step-2, step-3"):
        load_checkpoint(tmp_path, *state)


@on_ranks(2)
def test_names_can_be_mapped_for_model_and_optimizer(tmp_path):
    state = build((2,))
    train(*state)
    save_checkpoint(tmp_path / "a", *state)
    net, optimizer, _ = build((2,), seed=1)
    net.renamed = net.narrow
    del net.narrow
    load_checkpoint(tmp_path / "a", net, optimizer, key_map=[(r"^narrow\.", "renamed.")])
    weight, expected = net.renamed.weight, state[0].narrow.weight
    assert torch.equal(weight.to_local(), expected.to_local())
    moment, expected_moment = (
        optimizer.state[weight]["exp_avg"],
        state[1].state[expected]["exp_avg"],
    )
    assert torch.equal(moment.to_local(), expected_moment.to_local())
    assert expected_moment.full_tensor().abs().sum() > 0
