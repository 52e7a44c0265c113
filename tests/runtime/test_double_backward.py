"""Double backward on sharded models: refused outside of its context, and inside equal to the plain model's."""

from __future__ import annotations

import functools

import pytest
import torch
from entry_nets import OPTIONS, Critic, assert_trains_alike, differences, gathered, pair, vectors
from torch import Tensor, nn

from shardkit import ShardkitError, shard_model
from shardkit.runtime.hooks import double_backward
from shardkit.testing import distributed, fake_world


def penalty(model: nn.Module, real: Tensor, fake: Tensor) -> Tensor:
    """A gradient penalty, as of WGAN-GP."""
    between = ((real + fake) / 2).requires_grad_()
    (grad,) = torch.autograd.grad(model(between).sum(), between, create_graph=True)
    return (grad.norm(dim=-1) - 1).square().mean()


def penalty_alone(model: nn.Module, seed: int) -> Tensor:
    return penalty(model, *vectors(seed, seed + 9))


def penalty_first(model: nn.Module, seed: int) -> Tensor:
    """Other forwards, with and without grad, run between the two backwards."""
    real, fake = vectors(seed, seed + 9)
    found = penalty(model, real, fake)
    with torch.no_grad():
        model(fake)
    return model(fake).mean() - model(real).mean() + found


def penalty_last(model: nn.Module, seed: int) -> Tensor:
    real, fake = vectors(seed, seed + 9)
    return model(fake).mean() - model(real).mean() + penalty(model, real, fake)


@pytest.mark.parametrize("loss", [penalty_alone, penalty_first, penalty_last])
@distributed(world_size=2)
def test_a_gradient_penalty(loss):
    for name, options in OPTIONS.items():
        plain, model = pair(Critic, **options)
        for step in range(2):
            with double_backward(model):
                found = loss(model, step)
                found.backward()
            expected = loss(plain, step)
            expected.backward()
            assert torch.equal(found, expected), name
            assert not differences(plain, model), name
            assert not gathered(model), name
            for each in (plain, model):
                torch.optim.SGD(each.parameters(), lr=0.1).step()
                each.zero_grad()
        assert_trains_alike(plain, model, lambda model, seed: model(vectors(seed)[0]).square().mean())


def test_settings_come_back() -> None:
    with fake_world(4):
        model = shard_model(Critic(), reshard_after_forward=2)
        with double_backward(model):
            penalty_first(model, 0).backward()
        assert not gathered(model)
        model(vectors(0)[0]).mean().backward()
        assert not gathered(model)


@distributed(world_size=2)
def test_without_the_context_it_is_refused():
    """Otherwise all ranks would end in SIGSEGV: the second backward reads freed memory."""
    _, model = pair(Critic)
    with pytest.raises(ShardkitError, match=r"create_graph=True.*with shardkit.double_backward\(model\)"):
        penalty_alone(model, 0)
    with pytest.raises(ShardkitError, match="create_graph=True"):
        penalty(lambda x: {"loss": model(x)}["loss"], *vectors(0, 9))


class Odd(Critic):
    """Outputs that are nested, or read once; and a method that gathers."""

    def forward(self, x: Tensor, kind: str = "nested") -> object:
        out = super().forward(x)
        return {"a": ({"b": out},)} if kind == "nested" else (each for each in (out, out))

    def score(self, x: Tensor) -> Tensor:
        return Critic.forward(self, x)


@distributed(world_size=2)
def test_it_is_refused_of_nested_outputs_and_methods_too():
    for call in (lambda model, x: model(x)["a"][0]["b"], lambda model, x: model.score(x)):
        _, model = pair(Odd, forward_methods=["score"])
        with pytest.raises(ShardkitError, match="create_graph=True"):
            penalty(functools.partial(call, model), *vectors(0, 9))
    _, model = pair(Odd)
    assert len(list(model(vectors(0)[0], "generator"))) == 2  # not read by the hook
