"""Parameters of the drop-in, handled by hand: their hooks, attributes, sums, values, and their names when compiled."""

import copy
import io

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.tensor import DTensor

from shardkit.errors import PlanError
from shardkit.fsdp1 import FullyShardedDataParallel as FSDP
from shardkit.fsdp1.dropin.tensors import Sharded, ShardGrad
from shardkit.testing import distributed, fake_world


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))


def inputs(rank):
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(rank))


@distributed(world_size=2, backend="gloo")
def test_a_hook_sees_this_ranks_shard_whenever_it_was_registered_and_attributes_go_over():
    plain, seen = net(), []
    plain[0].weight.tag = "embedding-like"
    plain[0].weight.register_post_accumulate_grad_hook(lambda p: seen.append(("before", type(p.grad), p.grad.shape)))
    model = FSDP(plain)
    weight = model[0].weight
    handle = weight.register_post_accumulate_grad_hook(lambda p: seen.append(("after", type(p.grad), p.grad.shape)))
    assert weight.tag == "embedding-like"
    for _ in range(2):
        model(inputs(dist.get_rank())).sum().backward()
        assert seen == [("before", ShardGrad, (2, 4)), ("after", ShardGrad, (2, 4))]
        seen.clear()
    handle.remove()
    model(inputs(0)).sum().backward()
    assert [when for when, _, _ in seen] == ["before"]
    twin = copy.deepcopy(model)
    twin(inputs(0)).sum().backward()
    assert twin[0].weight.tag == "embedding-like"
    assert all(type(param.grad) is ShardGrad for param in twin.parameters())


def test_a_training_step_reads_parameters_without_torch_function(monkeypatch):
    """It takes five times as long, for each of the attributes that FSDP2 and optimizers read in every step."""
    names, original = [], Sharded.__torch_function__.__func__

    def noting(cls, func, types, args=(), kwargs=None):
        names.append(getattr(getattr(func, "__self__", func), "__name__", ""))
        return original(cls, func, types, args, kwargs)

    with fake_world(2):
        model = FSDP(net())
        optimizer = torch.optim.AdamW(model.parameters())
        monkeypatch.setattr(Sharded, "__torch_function__", classmethod(noting))
        for _ in range(2):
            names.clear()
            model(inputs(0)).sum().backward()
            model.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
        assert names == []
        model[0].weight.norm()
        assert names[0] == "norm"


@distributed(world_size=2, backend="gloo")
def test_a_tensor_hook_is_refused_by_name_which_fsdp1_never_called():
    model = net()
    model[2].weight.register_hook(lambda grad: grad * 2)
    with pytest.raises(PlanError, match=r"^2\.weight: has a hook from register_hook"):
        FSDP(model)


@pytest.mark.parametrize("strategy", [ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD])
@distributed(world_size=2, backend="gloo")
def test_a_penalty_on_the_weights_by_hand_trains(strategy):
    plain, model = net(), FSDP(net(), sharding_strategy=strategy)  # one unit has a row for two ranks
    ours, theirs = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, plain))
    for step in range(3):
        penalty = sum(param.pow(2).sum() for param in model.parameters())
        loss = model(inputs(10 * step + dist.get_rank())).square().sum() + 0.5 * penalty
        assert type(loss) is torch.Tensor
        loss.backward()
        batches = [plain(inputs(10 * step + rank)).square().sum() for rank in range(2)]
        (sum(batches) / 2 + 0.5 * sum(param.pow(2).sum() for param in plain.parameters())).backward()
        for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
            whole = mine.grad.full_tensor()
            torch.testing.assert_close(whole, other.grad, rtol=1e-6, atol=1e-6)  # sums of three in another order
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()


@distributed(world_size=2, backend="gloo")
def test_whole_values_are_written_outside_of_summon_full_params():
    model, full = FSDP(nn.Linear(4, 4)), torch.arange(16.0).view(4, 4)
    weight = model.weight
    with torch.no_grad():
        weight.copy_(full)
        assert torch.equal(weight.full_tensor(), full)
        weight.mul_(0.5).add_(full, alpha=0.5)
        assert torch.equal(weight.full_tensor(), full)
        weight.lerp_(torch.zeros(4, 4), 0.5)
        assert torch.equal(weight.full_tensor(), full / 2)
        with pytest.raises(
            RuntimeError, match=r"^copy_: a plain tensor of shape \(3, 4\) is combined with a sharded one"
        ):
            weight.copy_(torch.ones(3, 4))
        # A batch may have a weight's shape by chance: what is not element by element takes no part of it.
        with pytest.raises(RuntimeError, match=r"^linear: .*param\.full_tensor\(\)"):
            torch.nn.functional.linear(torch.ones(4, 4), weight)
        for left, right in ((torch.ones(4, 4), weight), (weight, torch.ones(4, 4))):
            with pytest.raises(RuntimeError, match=r"^mul: .*param\.full_tensor\(\)"):
                torch.mul(left, right)
        with pytest.raises(RuntimeError, match=r"^add_: .*param\.full_tensor\(\)"):  # an average that would get a part
            torch.zeros(4, 4).add_(weight)
    assert torch.equal(weight.full_tensor(), full / 2)


@distributed(world_size=2, backend="gloo")
def test_under_no_shard_parameters_are_whole_beside_plain_tensors():
    rank, torchs, full = dist.get_rank(), nn.functional.linear, torch.arange(16.0).view(4, 4)
    model = FSDP(nn.Linear(4, 4), sharding_strategy=ShardingStrategy.NO_SHARD)
    with torch.no_grad():
        model.weight.copy_(full)
    x = torch.full((4, 4), 1.0 + rank, requires_grad=True)
    (torchs(x, model.weight) + x * model.weight).sum().backward()
    assert torch.equal(x.grad, full.sum(0).expand(4, 4) + full)
    (torch.full((4, 4), 2.0 * rank) * model.weight).sum().backward()  # a batch of the weight's shape, by chance
    assert torch.equal(model.weight.grad.to_local(), torch.full((4, 4), (5.0 * 1 + 5.0 * 2) / 2 + 1))  # the means


@distributed(world_size=2, backend="gloo")
def test_a_whole_tensor_beside_a_shard_is_no_target_and_indices_are_no_elements():
    model, zeros = FSDP(nn.Linear(4, 4)), torch.zeros(4, 4)
    weight, bias = (each.full_tensor() for each in (model.weight, model.bias))
    for write in (zeros.copy_, zeros.add_, zeros.__iadd__):
        with pytest.raises(RuntimeError, match=r"param\.full_tensor\(\)"):
            write(model.weight.data)
    assert not zeros.any()
    index, of_rows = torch.tensor([0, 1]), torch.zeros(4, 4, dtype=torch.int64)
    with torch.no_grad(), pytest.raises(RuntimeError, match=r"^index_copy_: .*param\.full_tensor\(\)"):
        model.bias.index_copy_(0, index, torch.ones(2))
    with torch.no_grad(), pytest.raises(RuntimeError, match=r"^scatter_: .*param\.full_tensor\(\)"):
        model.weight.scatter_(0, of_rows, torch.ones(4, 4))
    assert torch.equal(model.weight.full_tensor(), weight)
    assert torch.equal(model.bias.full_tensor(), bias)


@distributed(world_size=2, backend="gloo")
def test_each_value_out_of_one_storage_is_used_in_forward():
    model = FSDP(nn.Linear(4, 4, bias=False))
    weight = model.weight
    for number, value in enumerate(torch.stack([torch.ones_like(weight.data), torch.full_like(weight.data, 2.0)]), 1):
        weight.data = value
        assert torch.equal(model(torch.ones(1, 4)), torch.full((1, 4), 4.0 * number))


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.LBFGS])
@distributed(world_size=2, backend="gloo")
def test_the_closure_of_a_step_sees_the_parameters_as_outside_of_it(kind):
    torch.manual_seed(0)
    plain = nn.Linear(4, 4)
    model = FSDP(copy.deepcopy(plain))
    for module in (plain, model):
        optimizer = kind(module.parameters(), lr=0.1)

        def closure(module=module, optimizer=optimizer):
            optimizer.zero_grad()
            loss = module(inputs(0)).square().mean() + 0.1 * sum(p.pow(2).sum() for p in module.parameters())
            loss.backward()
            return loss

        for _ in range(2):
            optimizer.step(closure)
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert type(mine) is Sharded
        torch.testing.assert_close(mine.full_tensor(), other, rtol=1e-5, atol=1e-5)


@distributed(world_size=2, backend="gloo")
def test_a_parameter_is_copied_and_saved_as_one():
    model = FSDP(nn.Linear(4, 4))
    twin = copy.deepcopy(model.weight)
    assert type(twin) is type(model.weight) is Sharded
    assert isinstance(twin, nn.Parameter)
    assert twin.requires_grad
    assert torch.equal(twin.to_local(), model.weight.to_local())
    assert twin.to_local().data_ptr() != model.weight.to_local().data_ptr()
    torch.save([model.weight], buffer := io.BytesIO())
    buffer.seek(0)
    (loaded,) = torch.load(buffer, weights_only=False)
    assert type(loaded) is DTensor
    assert torch.equal(loaded.to_local(), model.weight.to_local())


@distributed(world_size=2, backend="gloo")
def test_names_under_compile_are_those_of_fsdp1():
    plain = list(net().state_dict())
    for model in (FSDP(torch.compile(net(), backend="eager")), torch.compile(FSDP(net()), backend="eager")):
        assert list(model.state_dict()) == [f"_orig_mod.{name}" for name in plain]
        optimizer = torch.optim.Adam(model.parameters())
        for param in model.parameters():
            param.grad = torch.zeros_like(param)
        optimizer.step()
        state = FSDP.optim_state_dict(model, optimizer)
        assert set(state["state"]) == {f"_orig_mod.{name}" for name in plain}
