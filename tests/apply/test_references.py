"""Parameters held outside of nn.Module's registry are refused; attributes and hooks of parameters
survive sharding, or are refused.
"""

import collections
import weakref
from typing import NamedTuple

import pytest
import torch
from refusals import refused
from small_models import Decoder, sharded, step
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardkit import shard_model
from shardkit.references import references
from shardkit.testing import distributed, fake_world


class Pair(NamedTuple):
    first: Tensor
    second: int


class Irreps(tuple):
    """A tuple that cannot be asked for its length, as e3nn's, which all of its modules hold."""

    def __len__(self):
        raise NotImplementedError


def closure(weight):
    return lambda: weight


FORMS = {
    "list": lambda weight: [weight],
    "closure": closure,
    "dict": lambda weight: collections.OrderedDict(a=weight),
    "tuple": lambda weight: (weight, weight),
    "named tuple": lambda weight: Pair(weight, 1),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_held_parameter_is_refused(form):
    model = nn.Sequential(nn.Linear(5, 6), nn.Linear(6, 6))
    model.held, model.irreps = FORMS[form](model[1].weight), Irreps([2, 1])
    with fake_world(2), refused(model, "shares the memory of the parameter 1.weight", "clone it"):
        shard_model(model)


def test_what_is_larger_or_deeper_is_not_searched():
    """As a tokenizer's tables: searching them took seconds."""
    model = nn.Linear(2, 2)
    model.table, model.nested, model.watched = (
        list(range(2_000_000)),
        [[model.bias]],
        weakref.ref(model.bias),
    )
    model.named = collections.OrderedDict(a=model.weight)
    model.irreps = Irreps()
    assert [each.name for each in references(model)] == ["named['a']"]


@pytest.mark.parametrize("place", ["flat[0]", "copy"])
def test_a_held_view_of_a_parameter_is_refused(place):
    model = nn.Linear(5, 6)
    if place == "copy":
        model.register_buffer("copy", model.weight.detach())
    else:
        model.flat = [model.weight.view(-1)]
    with fake_world(2):
        with refused(model, f"{place} shares the memory of the parameter weight", "clone it"):
            shard_model(model)
        shard_model(model, ignored_params=["weight"])


def test_what_forward_computes_is_not_taken_for_a_view():
    """``weight`` is ``weight_orig.data`` until then, and in AWD-LSTM an RNN's list has the data of
    a parameter.
    """
    model = nn.Sequential(nn.utils.spectral_norm(nn.Linear(4, 4)), nn.LSTM(4, 4))
    dropped = model[1]._parameters.pop("weight_hh_l0")
    model[1].register_parameter("weight_hh_l0_raw", nn.Parameter(dropped.data))
    with fake_world(2):
        shard_model(model)


# Attributes and hooks of parameters.


class Marked(nn.Module):
    """Reads an attribute of its parameter in forward, as custom layers do."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4))
        self.weight.gain = 3.0
        self.weight._no_weight_decay = True

    def forward(self, x):
        return x @ self.weight * getattr(self.weight, "gain", 1.0)

    def forward_again(self, x):
        return Marked.forward(self, x)


def marked():
    return nn.Sequential(Marked())


@pytest.mark.parametrize("on_meta", [False, True])
@distributed(world_size=2)
def test_attributes(on_meta):
    model = sharded(marked, on_meta)
    assert [
        name
        for name, param in model.named_parameters()
        if getattr(param, "_no_weight_decay", False)
    ] == ["0.weight"]
    assert torch.equal(model(torch.ones(1, 4)), torch.full((1, 4), 12.0))
    model[0].weight.gain = 5.0  # later changes are seen too
    assert torch.equal(model(torch.ones(1, 4)), torch.full((1, 4), 20.0))
    model.reshard()
    assert model[0].weight.gain == 5.0
    model[0].weight.gain = 6.0
    assert torch.equal(model(torch.ones(1, 4)), torch.full((1, 4), 24.0))


def test_attributes_are_there_however_a_parameter_is_gathered():
    x = torch.ones(1, 4)
    with fake_world(1):
        model = shard_model(Marked(), units=[], forward_methods=["forward_again"])
        assert torch.equal(model.forward_again(x), torch.full((1, 4), 12.0))
        model.reshard()
        model.weight.gain = 5.0
        assert torch.equal(model.forward_again(x), torch.full((1, 4), 20.0))
        model = shard_model(Marked(), units=[])
        model.unshard()
        assert model.weight.gain == 3.0
        model.weight.gain = 7.0
        model.reshard()
        assert model.weight.gain == 7.0


def test_what_torch_keeps_there_stays():
    model = marked()
    model[0].weight._is_param = "mine"
    with fake_world(2):
        shard_model(model)
    assert vars(model[0].weight)["_is_param"] is True
    assert not any(name.startswith("_fsdp") for name in vars(model[0].weight))


@pytest.mark.parametrize("on_meta", [False, True])
@distributed(world_size=2)
def test_post_accumulate_hooks_see_the_reduced_gradient(on_meta):
    seen, handles = [], []

    def build():
        model = Decoder()
        handles.append(
            model.head.weight.register_post_accumulate_grad_hook(lambda param: seen.append(param))
        )
        return model

    model = sharded(build, on_meta)
    step(model)
    assert seen == [model.head.weight]
    assert isinstance(seen[0].grad, DTensor)
    if not on_meta:
        handles[0].remove()
        step(model)
        assert len(seen) == 1


def test_hooks_that_would_never_be_called():
    model = Decoder()
    handles = [layer.up.weight.register_hook(lambda grad: grad * 0.5) for layer in model.layers]
    with fake_world(8):
        with refused(
            model, "layers.0.up.weight, layers.1.up.weight", "register_post_accumulate_grad_hook"
        ):
            shard_model(model)
        for handle in handles:
            handle.remove()
        model.scale = nn.Parameter(torch.tensor(1.0))  # replicated
        handle = model.scale.register_post_accumulate_grad_hook(print)
        with refused(model, "scale has a hook", "before the gradient is reduced"):
            shard_model(model)
        handle.remove()
        shard_model(model)
