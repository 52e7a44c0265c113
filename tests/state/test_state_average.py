"""sharded_average: the bits of AveragedModel on the plain model, saved and loaded on any mesh."""

import pytest
import torch
from cpu_ranks import on_ranks
from meshes import mesh_of
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, get_swa_multi_avg_fn

from shardkit import full_state_dict, load_full_state_dict, shard_model, sharded_average
from shardkit.checkpoint import load_checkpoint, save_checkpoint
from shardkit.errors import ShardkitError
from shardkit.state import sleep
from shardkit.testing import fake_world


def build(shape=None, seed=0):
    torch.manual_seed(seed)
    net = nn.Sequential(
        nn.Embedding(11, 6), nn.Linear(6, 7), nn.BatchNorm1d(7), nn.Linear(7, 6), nn.Linear(6, 11)
    )
    net[4].weight = net[0].weight  # tied
    net[3].bias.requires_grad_(False)
    return net if shape is None else shard_model(net, mesh=mesh_of(shape))


def values_at(step):
    return build(seed=100 + step).state_dict() | {"3.bias": build()[3].bias.detach()}  # frozen


def give(model, step):
    load_full_state_dict(model, values_at(step), src="all")


def full(module):
    return full_state_dict(module, rank0_only=False)


def check(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def warm_up(updates):
    return min(0.99, (1 + updates) / (10 + updates))


@pytest.mark.parametrize("shape", [(4,), (2, 2)])
@on_ranks(4)
def test_the_bits_of_the_average_of_the_plain_model(shape, tmp_path):
    for decay, use_buffers in ((0.9, False), (0.3, True), (None, False), (warm_up, True)):
        model, plain = build(shape), build()
        multi_avg_fn = (
            get_swa_multi_avg_fn()
            if decay is None
            else get_ema_multi_avg_fn(decay if decay != warm_up else 1)
        )
        average, expected = (
            sharded_average(model, decay, use_buffers=use_buffers),
            AveragedModel(plain, multi_avg_fn=multi_avg_fn, use_buffers=use_buffers),
        )
        for step in range(3):
            if decay is warm_up:
                expected.multi_avg_fn = get_ema_multi_avg_fn(warm_up(max(step, 1)))
            plain.load_state_dict(values_at(step))
            give(model, step)
            average.update_parameters(model)
            expected.update_parameters(plain)
        check(full(average), expected.state_dict())
        assert not torch.equal(expected.module[1].weight, plain[1].weight), "averaged nothing"
        assert average.module.get_submodule("3").bias is model[3].bias, (
            "a frozen parameter has no copy"
        )
        with average.swapped(model) as swapped:
            check(full(swapped), expected.module.state_dict())
            with pytest.raises(ShardkitError, match=r"was called inside of swapped\(\)"):
                average.update_parameters(model)
        check(full(model), plain.state_dict())
        check(full(average), expected.state_dict())


@on_ranks(2)
def test_buffers_that_count_are_copied_and_others_averaged():
    model = build((2,))
    average = sharded_average(model, 0.5, use_buffers=True)
    norm, averaged = model[2], average.module.get_submodule("2")
    for count in range(1, 4):
        norm.num_batches_tracked.fill_(count)
        norm.running_mean.fill_(count)
        average.update_parameters(model)
        assert averaged.num_batches_tracked == count
        assert torch.equal(averaged.running_mean, torch.full((7,), (1.0, 1.5, 2.25)[count - 1]))


@on_ranks(4)
def test_saved_and_resumed_on_other_meshes_and_in_torch(tmp_path):
    model = build((4,))
    average = sharded_average(model, 0.9)
    for step in range(3):
        give(model, step)
        average.update_parameters(model)
    save_checkpoint(tmp_path / "average", average)
    expected = full(average)
    for shape in ((2, 2), None):
        other = build(shape, seed=7)
        give(other, 2)
        resumed = sharded_average(other, 0.9)
        load_checkpoint(tmp_path / "average", resumed)
        check(full(resumed), expected)
        for each, of in ((average, model), (resumed, other)):
            give(of, 3)
            each.update_parameters(of)
        check(full(resumed), full(average))
        load_checkpoint(tmp_path / "average", average)
    torchs = AveragedModel(build(), multi_avg_fn=get_ema_multi_avg_fn(0.9))
    torchs.load_state_dict(expected)
    assert torchs.n_averaged == 3


@on_ranks(4)
def test_units_that_are_gathered_compute_with_the_average_and_then_with_their_own():
    model = shard_model(build(), mesh=mesh_of((4,)), reshard_after_forward=False).eval()
    average, tokens = sharded_average(model, 0.5), torch.arange(4)
    for step in range(2):
        give(model, step)
        average.update_parameters(model)
    own = model(tokens).detach()
    with average.swapped(model):
        averaged = model(tokens).detach()
    plain = build().eval()
    plain.load_state_dict(
        {name[7:]: value for name, value in full(average).items() if name != "n_averaged"}
    )
    assert torch.allclose(averaged, plain(tokens), atol=1e-5)
    assert not torch.allclose(averaged, own, atol=1e-3)
    assert torch.equal(model(tokens), own)


@fake_world(4)
def test_what_does_not_fit_is_one_error():
    model = shard_model(build())
    average = sharded_average(model, 0.9)
    with pytest.raises(ShardkitError, match=r"1.weight.*differs from the average"):
        average.update_parameters(shard_model(nn.Sequential(nn.Embedding(11, 6), nn.Linear(6, 8))))
    with pytest.raises(ShardkitError, match="meta"), torch.device("meta"):
        sharded_average(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="decay"):
        sharded_average(model, 1.5)


def test_what_trains_only_later_is_refused_unless_the_average_was_made_before_freezing():
    model = build()
    average = sharded_average(model)
    average.update_parameters(model)
    model[3].bias.requires_grad_(True)
    with pytest.raises(ShardkitError, match=r"3\.bias trains now, and was frozen"):
        average.update_parameters(model)
    with (
        pytest.raises(ShardkitError, match=r"3\.bias trains now, and was frozen"),
        average.swapped(model),
    ):
        pass
    average, expected = (
        sharded_average(model, 0.5),
        AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5)),
    )
    model[3].bias.requires_grad_(False)
    for step in range(4):
        model[3].bias.requires_grad_(step >= 2)
        model.load_state_dict(build(seed=step).state_dict())
        average.update_parameters(model)
        expected.update_parameters(model)
    check(full(average), expected.state_dict())


@on_ranks(2)
def test_swapped_is_undone_after_an_error_that_leaves_them_asleep():
    model = build((2,))
    average = sharded_average(model, 0.5)
    for step in range(2):
        give(model, step)
        average.update_parameters(model)
    own, averaged = full(model), full(average)

    def fail(*holders):
        with average.swapped(model):
            for holder in holders:
                sleep(holder)
            raise ValueError("out of memory, for example")

    for holders in ((), (model,), (model, average), (model[1],)):
        with pytest.raises(ValueError, match="out of memory"):
            fail(*holders)
        check(full(model), own)
        check(full(average), averaged)
