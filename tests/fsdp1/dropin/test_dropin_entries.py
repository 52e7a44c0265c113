"""Ways into a model of the drop-in besides the wrapper's forward."""

import copy

import pytest
import torch
from torch import nn

from shardkit.errors import TranslationError
from shardkit.fsdp1 import FullyShardedDataParallel as FSDP
from shardkit.fsdp1.wrap import ModuleWrapPolicy
from shardkit.testing import distributed


class Penalised(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Sequential(nn.Linear(3, 4), nn.Tanh()), nn.Linear(4, 1)

    def forward(self, x):
        return self.head(self.body(x))


def penalised(model, x):
    x = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return slope.square().sum() + model(x).square().sum()


ENTRIES = {
    "child first": lambda wrapper: lambda x: (wrapper.body(x), wrapper(x))[1],
    "inference first": lambda wrapper: lambda x: (torch.inference_mode()(wrapper)(x), wrapper(x))[1],
    "double backward": lambda wrapper: lambda x: penalised(wrapper, x),
}


@pytest.mark.parametrize("entry", ENTRIES)
@distributed(world_size=2, backend="gloo")
def test_entries_besides_the_wrappers_forward(entry):
    torch.manual_seed(0)
    x = torch.randn(2, 3)
    plain = Penalised()
    model = FSDP(copy.deepcopy(plain), auto_wrap_policy=ModuleWrapPolicy({nn.Sequential}), use_orig_params=True)
    for _ in range(2):
        plain.zero_grad()
        model.zero_grad()
        expected = penalised(plain, x) if entry == "double backward" else plain(x)
        expected.sum().backward()
        found = ENTRIES[entry](model)(x)
        assert torch.equal(found, expected)
        found.sum().backward()
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad, rtol=1e-6, atol=1e-6)  # sums of two equals
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(0)
        assert torch.equal(twin(x), plain(x))


class Judge(Penalised):
    def generate(self, x):
        return self(x)


@distributed(world_size=2, backend="gloo")
def test_forward_by_name_is_right_and_a_part_of_the_roots_unit_is_named():
    torch.manual_seed(0)
    plain, x = Judge(), torch.randn(2, 3)
    model = FSDP(copy.deepcopy(plain), auto_wrap_policy=ModuleWrapPolicy({nn.Sequential}), use_orig_params=True)
    assert torch.equal(model.module.forward(x), plain(x))
    with torch.no_grad():
        assert torch.equal(model.module.forward(x), plain(x))
    twin = copy.deepcopy(model)
    for wrapper in (model, twin):
        for head in (wrapper.head, wrapper.module.head):
            with pytest.raises(TranslationError, match=r"^head: .* FSDP.summon_full_params\(model\)"):
                head(torch.randn(2, 4))
        with FSDP.summon_full_params(wrapper):
            wrapper.head(torch.randn(2, 4))
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(0)
        for entry in (twin, twin.module.forward, twin.generate):
            assert torch.equal(entry(x), plain(x)), "a copy's entries are its own"
    assert torch.equal(model.generate(x), torch.zeros(2, 1))
