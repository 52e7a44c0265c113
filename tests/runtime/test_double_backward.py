"""Double backward on sharded models: gradients of gradients are those of the plain model."""

from __future__ import annotations

import pytest
import torch
from entry_nets import OPTIONS, Critic, assert_trains_alike, differences, gathered, pair, vectors
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from shardkit import ShardkitError, accumulate, reset_after_error, shard_model
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


def of_a_linear_model() -> nn.Module:
    """Its penalty reaches no unit's output, nor most inputs."""
    return Critic(nn.Identity)


@pytest.mark.parametrize("build", [Critic, of_a_linear_model])
@pytest.mark.parametrize("loss", [penalty_alone, penalty_first, penalty_last])
@distributed(world_size=2)
def test_a_gradient_penalty(loss, build):
    for name, options in OPTIONS.items():
        plain, model = pair(build, **options)
        assert_trains_alike(plain, model, loss)
        assert not gathered(model), name


@distributed(world_size=2)
def test_a_gradient_penalty_of_recomputed_and_accumulated_steps():
    plain, model = pair(Critic, checkpoint_activations=True)
    assert_trains_alike(plain, model, penalty_last)

    def accumulated(model: nn.Module, seed: int) -> Tensor:
        if isinstance(model, FSDPModule):
            with accumulate(model, last=False):
                penalty_first(model, seed + 3).backward()
        else:
            penalty_first(model, seed + 3).backward()
        return penalty_last(model, seed)

    plain, model = pair(Critic)
    assert_trains_alike(plain, model, accumulated)


@distributed(world_size=2)
def test_a_graph_that_is_kept_is_walked_twice():
    plain, model = pair(Critic)
    for each in (plain, model):
        found = penalty_last(each, 0)
        found.backward(retain_graph=True)
        found.backward()
    assert not differences(plain, model)
    assert not gathered(model)


@distributed(world_size=2)
def test_a_graph_that_is_abandoned():
    def loss(model: nn.Module, seed: int) -> Tensor:
        penalty_alone(model, seed)  # its backward never comes
        return model(vectors(seed)[0]).square().mean()

    plain, model = pair(Critic)
    assert_trains_alike(plain, model, loss)
    outputs = []
    for each in (plain, model):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        loss(each, 1).backward()
        penalty_alone(each, 2)
        optimizer.step()
        outputs.append(each(vectors(3)[0]))  # not of what was gathered before the step
    assert torch.equal(*outputs)


def test_a_graph_sharded_over_fewer_ranks() -> None:
    with fake_world(4):
        model = shard_model(Critic(), reshard_after_forward=2)
        penalty_first(model, 0).backward()
        assert not gathered(model)


@distributed(world_size=2)
def test_parameters_get_no_gradients_with_graphs():
    plain, model = pair(Critic)
    with pytest.raises(ShardkitError, match=r"create_graph=True.*torch.autograd.grad.*reset_after_error"):
        model(vectors(0)[0]).mean().backward(create_graph=True)
    reset_after_error(model)
    assert_trains_alike(plain, model, penalty_last)
