"""Checkpointed blocks advance buffers once, and compute exact gradients."""

import copy
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from step_settings import Block
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy

from shardkit import MeshSpec, PlanError, ShardkitError, apply_plan, plan_model, shard_model
from shardkit._torch.dispatch import TorchDispatchMode
from shardkit.testing import distributed


class Changing(nn.Module):
    """Changes buffers in forward, and computes with one that stays."""

    def __init__(self):
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("average", torch.zeros(4))
        self.register_buffer("constant", torch.ones(4))

    def forward(self, x):
        x = x * (1 + self.average) / (1 + self.count)
        self.count += 1
        with torch.no_grad():
            self.average.lerp_(x.mean(0), 0.1)
        return x + self.down(F.relu(self.norm(self.up(x * self.constant))))


class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Changing() for _ in range(2))
        self.head = nn.Linear(4, 2)

    def forward(self, x, twice=False):
        for layer in self.layers:
            x = layer(layer(x)) if twice else layer(x)
        return self.head(x).clone()


def trained(model):
    """Losses and buffers over steps that call blocks once, twice, and keep the graph for a second
    backward.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    found = []
    for number in range(4):
        x = torch.arange(24.0).view(6, 4).sin() + number
        loss = model(x, twice=number == 1).square().mean()
        loss.backward(retain_graph=number == 2)
        if number == 2:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
    return [*found, *model.buffers()]


@distributed(world_size=2)
def test_what_forward_changes_is_changed_once():
    torch.manual_seed(0)
    model = Blocks()
    expected = trained(copy.deepcopy(model))
    shard_model(model, checkpoint_activations=True)
    found = trained(model)
    assert len(found) == len(expected) > 12
    assert all(map(torch.equal, found, expected))
    assert model.layers[0].count == 5


class Counts(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.ops = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ops[func.name().split("::")[1]] += 1
        return func(*args, **(kwargs or {}))


def never_save(context, op, *args, **kwargs):
    return CheckpointPolicy.PREFER_RECOMPUTE


# How often a block runs its four products and its attention, in forward and in backward, which
# never needs the last.
RECOMPUTED = {False: (4, 1), "selective": (5, 1), never_save: (7, 2), True: (7, 2)}


@distributed(world_size=2)
def test_what_each_policy_recomputes():
    x = torch.arange(80.0).view(2, 5, 8).sin()
    grads = []
    for policy, expected in RECOMPUTED.items():
        torch.manual_seed(0)
        model = nn.Sequential(Block(has_buffers=False), Block(has_buffers=False))
        shard_model(model, checkpoint_activations=policy)
        with Counts() as counts:
            model(x).square().mean().backward()
        attentions = sum(
            number for name, number in counts.ops.items() if name.endswith("attention_for_cpu")
        )
        assert (counts.ops["addmm"] / 2, attentions / 2) == expected, policy
        grads.append([param.grad.full_tensor() for param in model.parameters()])
    assert all(
        torch.equal(one, other) for each in grads for one, other in zip(each, grads[0], strict=True)
    )


class Gated(nn.Module):
    """Three products of one shape, so that every other one is another product the second time."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(8, 8, bias=False) for _ in range(3))

    def forward(self, x):
        return x + torch.tanh(self.q(x)) * torch.tanh(self.k(x)) * torch.tanh(self.v(x))


@distributed(world_size=2)
def test_selective_of_an_odd_number_of_products():
    """torch 2.11 and 2.12 ask the policy again in the recomputation."""
    grads = []
    for policy in (False, "selective"):
        torch.manual_seed(0)
        model = shard_model(nn.Sequential(Gated(), Gated()), checkpoint_activations=policy)
        for x in torch.arange(80.0).view(2, 5, 8).sin():
            model(x).square().mean().backward()
        grads.append([param.grad.full_tensor() for param in model.parameters()])
    assert all(map(torch.equal, *grads))


@torch.library.custom_op("shardkit::attention", mutates_args=())
def attention(x: Tensor, dropout_p: float) -> tuple[Tensor, Tensor]:
    """Draws random numbers inside of one operator, as attention on a GPU does."""
    kept = (torch.rand_like(x) >= dropout_p).to(x.dtype)
    return x * kept, kept


attention.register_autograd(
    lambda ctx, grad, _: (grad * ctx.saved_tensors[0], None),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output[1]),
)


class Dropping(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.drop, self.down = nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8)

    def forward(self, x):
        return self.down(self.drop(attention(self.up(x), 0.5)[0]))


@pytest.mark.parametrize("by_its_code", [False, True])
@distributed(world_size=2)
def test_dropout_after_attention_with_dropout_is_the_same_again(by_its_code):
    grads = []
    for policy in (False, "selective"):
        torch.manual_seed(0)
        model = nn.Sequential(Dropping(), Dropping())
        plan = plan_model(model, checkpoint_activations=policy)
        exec(plan.to_python(), {"model": model}) if by_its_code else apply_plan(model, plan)
        model(torch.arange(80.0).view(2, 5, 8).sin()).square().mean().backward()
        grads.append([param.grad.full_tensor() for param in model.parameters()])
    assert all(map(torch.equal, *grads))


@pytest.mark.parametrize("policy", ["some", 2, lambda *args: True])
def test_a_policy_without_a_name_is_refused(policy):
    with pytest.raises(
        PlanError, match=r'checkpoint_activations must be True, False, "selective" or a policy, got'
    ):
        plan_model(
            nn.Sequential(Block(has_buffers=False)),
            mesh=MeshSpec.sharded(2),
            checkpoint_activations=policy,
        )


def test_a_policy_around_another_unit_is_refused():
    """torch raises in backward: the all-gather of the unit inside is not what the policy saw in
    forward.
    """
    model = nn.Sequential(Block(has_buffers=False), Block(has_buffers=False))
    with pytest.raises(
        PlanError, match=r"0 has checkpoint_activations='selective', and 0.qkv inside is a unit"
    ):
        plan_model(
            model,
            units=["0", "0.qkv"],
            mesh=MeshSpec.sharded(2),
            checkpoint_activations="selective",
        )


@distributed(world_size=2)
def test_a_cache_is_refused_where_it_is_passed():
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "vocab_size": 11}
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, **sizes))
    assert model.config.use_cache
    shard_model(model, checkpoint_activations=True)
    tokens = torch.arange(10).view(2, 5)
    model(tokens, labels=tokens, use_cache=False).loss.backward()
    with torch.no_grad():
        model(tokens)
    with pytest.raises(
        ShardkitError, match=r"model\.layers\.0 is checkpointed.* called with a Dynamic.*use_cache"
    ):
        model(tokens)
