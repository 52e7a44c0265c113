"""What programs do to parameters and gradients by hand, and what FSDP1 let them do."""

from __future__ import annotations

import copy
import io
import weakref

import pytest
import torch
from torch import nn

from shardkit import TranslationError
from shardkit.fsdp1 import FullyShardedDataParallel as FSDP
from shardkit.fsdp1.dropin.tensors import ShardGrad
from shardkit.fsdp1.sharded_grad_scaler import ShardedGradScaler
from shardkit.fsdp1.wrap import ModuleWrapPolicy
from shardkit.testing import distributed

DATA = torch.linspace(-1, 1, 12).view(4, 3)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.below = nn.Sequential(nn.Linear(3, 5), nn.Tanh())
        self.head = nn.Linear(5, 1)  # on two ranks, one of them has nothing of it

    def forward(self, x):
        return self.head(self.below(x))


def wrapped():
    torch.manual_seed(0)
    return FSDP(Net(), auto_wrap_policy=ModuleWrapPolicy({nn.Sequential}), use_orig_params=True)


def step(model, optimizer):
    loss = model(DATA).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


@distributed(world_size=2, backend="gloo")
def test_weights_are_exchanged_by_assigning_data():
    """As EMA classes do: the average in place for evaluation, then the trained weights again, which train on."""
    torch.manual_seed(0)
    plain, model = Net(), wrapped()
    losses = {}
    for each in (plain, model):
        optimizer = torch.optim.SGD(each.parameters(), 0.1, momentum=0.9)
        found = losses[each] = [step(each, optimizer)]
        shadow = {name: param.data.clone() * 0.5 for name, param in each.named_parameters()}
        trained = {}
        for name, param in each.named_parameters():
            trained[name], param.data = param.data, shadow[name]
        with torch.no_grad():
            found.append(each(DATA).square().mean().item())
        for name, param in each.named_parameters():
            param.data = trained[name]
        found += [step(each, optimizer), step(each, optimizer)]
    model.half().float()  # torch.utils.swap_tensors, which takes no parameters with weak references
    assert losses[model] == pytest.approx(losses[plain], rel=1e-6)  # two ranks add up gradients of the same data
    assert len(set(losses[model])) == 4
    with pytest.raises(TranslationError, match="or gradient takes a DTensor of its own shape"):
        model.module.head.weight.data = torch.zeros(1, 5)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
@distributed(world_size=2, backend="gloo")
def test_an_optimizer_built_before_wrapping_is_scaled_clipped_and_stepped(kind):
    """With no other way to know it than the step: not even the collector's, whose objects may answer by raising."""
    dead = weakref.proxy(nn.Linear(1, 1))
    options = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    losses = []
    for plain in (True, False):
        torch.manual_seed(0)
        model = Net()
        optimizer = kind(model.parameters(), lr=0.1, **options)
        old = list(model.parameters())
        model = model if plain else FSDP(model, ignored_modules=[model.head], use_orig_params=True)
        scaler = (torch.amp.GradScaler if plain else ShardedGradScaler)("cpu", init_scale=4.0)
        found = []
        for _ in range(3):
            loss = model(DATA).square().mean()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            found += [loss.item(), torch.nn.utils.clip_grad_norm_(old if plain else model.parameters(), 0.1).item()]
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        losses.append(found)
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert len(set(losses[0])) == 6
    with pytest.raises(ReferenceError):
        isinstance(dead, torch.optim.Optimizer)


@distributed(world_size=2, backend="gloo")
def test_state_that_begins_as_a_gradient_is_saved_and_copied():
    model = wrapped()
    model(DATA).sum().backward()
    grads = [param.grad for param in model.parameters()]
    file = io.BytesIO()
    torch.save([grad.clone() for grad in grads], file)
    file.seek(0)
    for grad, loaded, copied in zip(grads, torch.load(file), copy.deepcopy(grads), strict=True):
        assert torch.equal(loaded.to_local(), grad.to_local())
        assert torch.equal(copied.to_local(), grad.to_local())
        assert type(copied) is type(grad)
        assert copied.to_local().data_ptr() != grad.to_local().data_ptr() or not grad.to_local().numel()
        local = grad.to_local()
        assert torch.tensordot(grad, copied, dims=grad.ndim) == torch.tensordot(local, local, dims=local.ndim)
        grad.data = grad.data * 2
        assert torch.equal(grad.to_local(), copied.to_local() * 2)


@distributed(world_size=2, backend="gloo")
def test_torchs_clipping_returns_a_plain_norm_of_whole_gradients():
    torch.manual_seed(0)
    plain, net = Net(), wrapped()
    inner = copy.deepcopy(plain)
    ignoring = FSDP(inner, ignored_modules=[inner.head], use_orig_params=True)
    norms = []
    for each in (plain, net, ignoring):
        each(DATA).sum().backward()
        norms.append(torch.nn.utils.clip_grad_norm_(each.parameters(), 0.5))
        assert type(norms[-1]) is torch.Tensor
        assert f"{torch.nn.utils.get_total_norm([param.grad for param in each.parameters()]):.4f}" == "0.5000"
    assert norms[0] > 1
    torch.testing.assert_close(norms[1:], norms[:1] * 2, rtol=1e-6, atol=0)


@distributed(world_size=2, backend="gloo")
def test_data_that_resharding_would_drop_is_refused():
    model = wrapped()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = model(DATA).sum()
    assert model.module.head.weight.data.shape == (1, 5)
    for value in (torch.zeros(1, 5), dict(model.named_parameters())["head.weight"].data * 0):
        with pytest.raises(TranslationError, match=r"^param\.data: assigned while .*named_parameters"):
            model.module.head.weight.data = value
    copied = copy.deepcopy(model.module.head.weight)
    copied.data = torch.zeros(1, 5)
    assert type(copied) is nn.Parameter
    assert not copied.any()
    assert model.module.head.weight.any()
    loss.backward()
    optimizer.step()
    model.module.head.weight.data = model.module.head.weight.data * 0
    assert not model.module.head.weight.full_tensor().any()
    with torch.no_grad():
        assert torch.equal(model(DATA), model.module.head.bias.full_tensor().expand(4, 1))


@distributed(world_size=2, backend="gloo")
def test_lbfgs_on_parameters_that_are_split_unevenly_is_refused_by_name():
    model = wrapped()
    optimizer = torch.optim.LBFGS(model.parameters())
    for _ in range(2):
        with pytest.raises(
            TranslationError, match=r"^LBFGS: parameters of shape \(5, 3\), \(1, 5\) are sharded uneven"
        ):
            optimizer.step(lambda: model(DATA).sum())
    FSDP.optim_state_dict(model, optimizer)


class Failing(torch.optim.SGD):
    def step(self, closure=None):
        if closure is not None:
            return closure()
        raise ValueError("mine")


@distributed(world_size=2, backend="gloo")
def test_a_step_that_raises_leaves_parameters_as_they_were():
    model = wrapped()
    optimizer = Failing(model.parameters(), lr=0.1)
    before = [type(param) for param in model.parameters()]
    with pytest.raises(ZeroDivisionError):
        optimizer.step(lambda: 1 / 0)
    assert [type(param) for param in model.parameters()] == before
    with pytest.raises(ValueError, match="mine"):
        optimizer.step()
    model(DATA).sum().backward()
    assert [type(param) for param in model.parameters()] == before
    assert all(type(param.grad) is ShardGrad for param in model.parameters())
