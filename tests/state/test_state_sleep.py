"""sleep and wake: the device's memory is free in between, and training goes on bit for bit with the
same objects.
"""

import pytest
import torch
import torch.distributed as dist
from cpu_ranks import on_ranks
from meshes import mesh_of
from torch import nn
from torch.utils._pytree import tree_leaves

import shardkit
from shardkit import ShardkitError, full_params, shard_model, sharded_average, step_on_local_shards
from shardkit.shards import local_value
from shardkit.state import asleep, sleep, wake


class Uneven(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(3, 7), nn.BatchNorm1d(7), nn.Linear(7, 3), nn.Linear(3, 1)
        )
        self.gain = nn.Parameter(torch.tensor(0.5))

    def forward(self, x):
        return self.gain * self.body(x)

    def first(self, x):
        return self.body[0](x)


def local_tensors(*holders):
    """Return this rank's parts of parameters, gradients, buffers and state."""
    tensors = []
    for holder in holders:
        if isinstance(holder, nn.Module):
            tensors += [*holder.parameters(), *holder.buffers()]
            tensors += [param.grad for param in holder.parameters()]
        else:
            tensors += tree_leaves(list(holder.state.values()))
    parts = [local_value(tensor) for tensor in tensors if isinstance(tensor, torch.Tensor)]
    return [part for part in parts if part.numel()]


def trained(shape, naps, local):
    """Train with two optimizers and an average, asleep after each backward and each step."""
    torch.manual_seed(0)
    model = shard_model(Uneven(), mesh=mesh_of(shape), units=shardkit.by_class(nn.Linear))
    params = list(model.parameters())
    optimizers = [torch.optim.AdamW(params[:3]), torch.optim.SGD(params[3:], lr=0.1, momentum=0.9)]
    for optimizer in optimizers if local else ():
        step_on_local_shards(optimizer)
    average = sharded_average(model, 0.5)

    def nap():
        sleep(model, optimizers)
        sleep(average)
        for tensor in local_tensors(model, average, *optimizers):
            assert tensor.untyped_storage().nbytes() == 0
        wake(model, optimizers)
        wake(average)

    for step in range(3):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        model(torch.randn(6, 3, generator=generator)).square().sum().backward()
        if naps:
            nap()
        for optimizer in optimizers:
            optimizer.step()
        average.update_parameters(model)
        if naps:
            nap()
        for optimizer in optimizers:
            optimizer.zero_grad()
    assert all(one is other for one, other in zip(params, model.parameters(), strict=True))
    return [tensor.clone() for tensor in local_tensors(model, average, *optimizers)]


@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize("shape", [(4,), (2, 2)])
@on_ranks(4)
def test_training_with_naps_is_training_without(shape, local):
    rested, expected = (trained(shape, naps, local) for naps in (True, False))
    assert len(rested) == len(expected)
    assert all(map(torch.equal, rested, expected))


@on_ranks(2)
def test_what_needs_the_values_raises_until_wake(tmp_path):
    model, x = shard_model(Uneven(), units=[nn.Linear], forward_methods=["first"]), torch.ones(2, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(x).sum().backward()
    optimizer.step()
    sleep(model)
    with pytest.raises(ShardkitError, match="FSDPUneven is asleep"):
        optimizer.step()
    sleep(model, optimizer)  # the model is already
    with pytest.raises(ShardkitError, match=r"FSDPUneven is asleep.*Pass it to wake\(\) first"):
        model(x)
    reads = [model.state_dict, lambda: shardkit.full_state_dict(model), model.unshard]
    reads += [lambda: model.first(x), lambda: model.load_state_dict({})]
    for read in reads:
        with pytest.raises(ShardkitError, match="FSDPUneven is asleep"):
            read()
    with pytest.raises(ShardkitError, match="AdamW is asleep"):
        optimizer.state_dict()
    wake(model)
    assert model.first(x).shape == (2, 7)
    with pytest.raises(ShardkitError, match="AdamW is asleep"):
        optimizer.step()
    with pytest.raises(ShardkitError, match="AdamW is asleep"):
        shardkit.checkpoint.save_checkpoint(tmp_path / "a", model, optimizer)
    wake(optimizer=optimizer)
    shardkit.checkpoint.save_checkpoint(tmp_path / "a", model, optimizer)


@on_ranks(2)
def test_what_reads_shards_or_gradients_raises_until_wake():
    model = shard_model(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), units=[nn.Linear])
    model(torch.ones(2, 8)).sum().backward()
    optimizer, scaler = torch.optim.SGD(model.parameters()), shardkit.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    sleep(model)
    reads = [
        lambda: shardkit.clip_grad_norm_(model, 1.0),
        lambda: shardkit.clip_grad_norm_(model[0].weight, 1.0),
        lambda: shardkit.scale_grads_(3, model),
        lambda: scaler.unscale_(optimizer),
        lambda: full_params(model[0]).__enter__(),
        lambda: full_params(nn.ModuleDict({"policy": model})).__enter__(),
        lambda: model[0](torch.ones(2, 8)),
    ]
    for read in reads:
        with pytest.raises(ShardkitError, match="FSDPSequential is asleep"):
            read()
    wake(model)
    for read in reads:
        read()


@on_ranks(2)
def test_a_backward_that_steps_raises_while_the_optimizer_is_asleep():
    model, x = shard_model(Uneven()), torch.ones(2, 3)
    optimizer = shardkit.optimizer_in_backward(model, torch.optim.AdamW)
    model(x).sum().backward()
    optimizer.step()
    sleep(optimizer=optimizer)
    loss = model(x).sum()
    with pytest.raises(ShardkitError, match="AdamW is asleep"):
        loss.backward()


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])

    def forward(self, x):
        return self.layers[1](self.layers[0](x))


@pytest.mark.parametrize("sharded", [False, True])
@on_ranks(2)
def test_a_part_of_a_unit_guards_all_of_it(sharded):
    model, x = Layers(), torch.ones(2, 3)
    if sharded:
        shard_model(model, units=[])
    expected = model(x)
    sleep(model.layers)
    with pytest.raises(ShardkitError, match="ModuleList is asleep"):
        model(x)
    wake(model.layers)
    assert torch.equal(model(x), expected)
    sleep(model.layers)
    sleep(model)  # has nothing left to move
    wake(model)
    with pytest.raises(ShardkitError, match="ModuleList is asleep"):
        model(x)
    wake(model.layers)
    assert torch.equal(model(x), expected)


@on_ranks(2)
def test_a_part_asleep_keeps_its_guard_when_the_rest_wakes():
    model, x = shard_model(Uneven(), units=[nn.Linear], forward_methods=["first"]), torch.ones(2, 3)
    sleep(model.body[0])
    sleep(model)
    wake(model)
    for read in (model.first, model):
        with pytest.raises(ShardkitError, match="FSDPLinear is asleep"):
            read(x)
    wake(model.body[0])
    assert model.first(x).shape == (2, 7)


def test_a_model_on_meta_is_refused():
    with shardkit.init_on_meta():
        model = nn.Linear(8, 8)
    with pytest.raises(ShardkitError, match="weight, bias on the meta device"):
        sleep(model)


def test_tensors_of_several_blocks_come_back(monkeypatch):
    monkeypatch.setattr(asleep, "BLOCK", 1 << 10)
    model = nn.Linear(100, 30)
    values = [tensor.detach().clone() for tensor in model.parameters()]
    for _ in range(2):
        sleep(model)
        wake(model)
        for value, tensor in zip(values, model.parameters(), strict=True):
            assert torch.equal(value, tensor)


@on_ranks(2)
def test_an_average_sleeps_without_the_frozen_parameters_of_its_model():
    model = Uneven()
    model.body[0].requires_grad_(False)
    average = sharded_average(shard_model(model))
    sleep(average)
    model(torch.ones(2, 3))
    with pytest.raises(ShardkitError, match="is asleep"):
        average.update_parameters(model)
    wake(average)
    average.update_parameters(model)


def test_memory_that_processes_share_stays():
    model = nn.Linear(2, 2).share_memory()
    sleep(model)
    wake(model)
    assert torch.equal(model(torch.zeros(2)), model.bias)
