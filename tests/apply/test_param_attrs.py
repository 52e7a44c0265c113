"""Attributes and hooks of parameters go over to the sharded ones; a hook that FSDP2 would not call is refused."""

from __future__ import annotations

import pytest
import torch
from refusals import refused
from small_models import Decoder, sharded, step
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardkit import shard_model
from shardkit.testing import distributed, fake_world


class Marked(nn.Module):
    """Reads an attribute of its parameter in forward, as custom layers do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4))
        self.weight.gain = 3.0
        self.weight._no_weight_decay = True

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight * getattr(self.weight, "gain", 1.0)


def marked() -> nn.Module:
    return nn.Sequential(Marked())


@pytest.mark.parametrize("on_meta", [False, True])
@distributed(world_size=2)
def test_attributes(on_meta: bool) -> None:
    model = sharded(marked, on_meta)
    assert [name for name, param in model.named_parameters() if getattr(param, "_no_weight_decay", False)] == [
        "0.weight"
    ]
    assert torch.equal(model(torch.ones(1, 4)), torch.full((1, 4), 12.0))
    model[0].weight.gain = 5.0  # later changes are seen too
    assert torch.equal(model(torch.ones(1, 4)), torch.full((1, 4), 20.0))


def test_what_torch_keeps_there_stays() -> None:
    model = marked()
    model[0].weight._is_param = "mine"
    with fake_world(2):
        shard_model(model)
    assert vars(model[0].weight)["_is_param"] is True
    assert not any(name.startswith("_fsdp") for name in vars(model[0].weight))


@pytest.mark.parametrize("on_meta", [False, True])
@distributed(world_size=2)
def test_post_accumulate_hooks_see_the_reduced_gradient(on_meta: bool) -> None:
    seen, handles = [], []

    def build() -> nn.Module:
        model = Decoder()
        handles.append(model.head.weight.register_post_accumulate_grad_hook(lambda param: seen.append(param)))
        return model

    model = sharded(build, on_meta)
    step(model)
    assert seen == [model.head.weight]
    assert isinstance(seen[0].grad, DTensor)
    if not on_meta:
        handles[0].remove()
        step(model)
        assert len(seen) == 1


def test_hooks_that_would_never_be_called() -> None:
    model = Decoder()
    handles = [layer.up.weight.register_hook(lambda grad: grad * 0.5) for layer in model.layers]
    with fake_world(8):
        with refused(model, "layers.0.up.weight, layers.1.up.weight", "register_post_accumulate_grad_hook"):
            shard_model(model)
        for handle in handles:
            handle.remove()
        shard_model(model)
