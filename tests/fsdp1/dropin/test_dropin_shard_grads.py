"""Norms of gradients that a program computes by hand, each rank of its shards, as on FSDP1."""

import gc
import weakref
from types import FunctionType

import pytest
import torch
import torch.distributed as dist
from small_models import Block
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import _global_optimizer_pre_hooks

from shardkit.fsdp1 import FullyShardedDataParallel as FSDP
from shardkit.fsdp1 import ShardingStrategy
from shardkit.fsdp1.dropin import guards
from shardkit.testing import distributed, fake_world


def trained(strategy=ShardingStrategy.FULL_SHARD):
    """A wrapped block after a backward whose gradients differ between ranks before they are reduced."""
    torch.manual_seed(0)
    model = FSDP(Block(8), sharding_strategy=strategy)
    model(torch.randn(2, 8, generator=torch.Generator().manual_seed(dist.get_rank()))).pow(2).sum().backward()
    return model, model.clip_grad_norm_(1e9).item()


def in_place(grads):
    total = torch.tensor(0.0)
    for grad in grads:
        total += grad.norm(dtype=torch.float32) ** 2
    return total


WAYS = {
    "norm, added in place": in_place,
    "stacked vector norms": lambda grads: torch.stack([torch.linalg.vector_norm(g, 2.0) for g in grads]).pow(2).sum(),
    "torch.norm of detached ones": lambda grads: sum(torch.norm(grad.detach(), p=2) ** 2 for grad in grads),
    "squares of data in float64": lambda grads: sum(grad.data.double().pow(2).sum() for grad in grads),
    "an item each": lambda grads: torch.tensor(sum(grad.norm().item() ** 2 for grad in grads)),
}


@pytest.mark.parametrize("way", list(WAYS))
@distributed(world_size=2, backend="gloo")
def test_squares_of_shards_add_up_to_the_norm(way):
    model, norm = trained()
    squares = WAYS[way]([param.grad for param in model.parameters()])
    assert type(squares) is torch.Tensor
    dist.all_reduce(squares)
    assert norm > 0.1
    assert squares.sqrt().item() == pytest.approx(norm, rel=1e-6)


@distributed(world_size=2, backend="gloo")
def test_replicas_each_have_all_squares():
    model, norm = trained(ShardingStrategy.NO_SHARD)
    assert in_place(param.grad for param in model.parameters()).sqrt().item() == pytest.approx(norm, rel=1e-6)


@distributed(world_size=2, backend="gloo")
def test_torchs_own_functions_see_whole_gradients():
    model, norm = trained()
    clipped = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    assert clipped.item() == pytest.approx(norm, rel=1e-6)
    for param in model.parameters():
        assert isinstance(param.grad, DTensor)
        assert isinstance(param.grad.sum(dim=0), DTensor)  # not all of its elements
        assert isinstance(param.grad * 2, DTensor)
    before = [param.full_tensor() for param in model.parameters()]
    torch.optim.AdamW(model.parameters(), lr=0.1).step()
    assert not any(torch.equal(param.full_tensor(), old) for param, old in zip(model.parameters(), before, strict=True))


# What may be asked of a gradient of 4 x 4 ones of which a rank has 2 x 4.
QUESTIONS = {
    "numel": (lambda g: g.numel(), 8),
    "size": (lambda g: (g.size(), g.shape, len(g), g.size(0)), ((2, 4), (2, 4), 2, 2)),
    "sum": (lambda g: g.sum().item(), 8.0),
    "mean": (lambda g: g.mean().item(), 1.0),
    "sum over numel": (lambda g: (torch.sum(g) / g.numel()).item(), 1.0),
    "norm": (lambda g: torch.norm(g).item() ** 2, pytest.approx(8)),
    "map": (lambda g: next(map(torch.sum, [g])).item(), 8.0),
    "tree_map": (lambda g: torch.utils._pytree.tree_map(torch.sum, [g])[0].item(), 8.0),
    "max": (lambda g: (g.max().item(), g.abs().amax().item()), (1.0, 1.0)),
    "nan": (lambda g: (g.isnan().any().item(), torch.isfinite(g).all().item()), (False, True)),
    "equal": (lambda g: (torch.equal(g, torch.ones(2, 4)), torch.equal(torch.ones(2, 4), g)), (True, True)),
    "allclose": (lambda g: (torch.allclose(g, torch.ones(4, 4)), g.allclose(g * 2)), (True, False)),
    "flat": (lambda g: [each.shape for each in (g.view(-1), g.reshape(-1), g.flatten(), torch.ravel(g))], [(8,)] * 4),
    "cat": (lambda g: torch.cat([g.view(-1), g.view(-1)]).tolist(), [1.0] * 16),
    "std": (lambda g: (g.std().item(), (g * 2).var().item()), (0.0, 0.0)),
    "a list": (lambda g: g.tolist(), [[1.0] * 4] * 2),
    "columns": (lambda g: g.sum(dim=0).full_tensor().tolist(), [4.0] * 4),  # not of all elements: a DTensor
    "whole": (lambda g: g.full_tensor().sum().item(), 16.0),
    "plain beside": (lambda g: ((g + torch.ones(4, 4)).sum().item(), (torch.ones(2, 4) - g).sum().item()), (16.0, 0.0)),
}


class Weight(nn.Module):
    def __init__(self, rows=4, columns=4):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(rows, columns))

    def forward(self):
        return self.weight.sum()


@distributed(world_size=2, backend="gloo")
def test_every_question_is_of_this_ranks_shard_whoever_asks():
    model = FSDP(Weight())
    model().backward()
    grad = model.weight.grad
    for name, (ask, expected) in QUESTIONS.items():
        within_torch = FunctionType(ask.__code__, {"__name__": "torch.optim.copied", "torch": torch})
        assert ask(grad) == within_torch(grad) == expected, name
    one = FSDP(Weight(1, 3))  # 2 ranks divide neither dim, so one has nothing
    one().backward()
    assert one.weight.grad.numel() == 3 * (dist.get_rank() == 0)
    assert one.weight.grad.max() == (1 if dist.get_rank() == 0 else -torch.inf)  # so that all-reduce finds the largest


@distributed(world_size=2, backend="gloo")
def test_weights_and_buffers_that_are_whole_take_part():
    torch.manual_seed(0)
    full = torch.randn(4, 4)
    model = FSDP(Weight())
    model.weight.data.copy_(full)
    assert torch.equal(model.weight.full_tensor(), full)
    model.weight.data.add_(full, alpha=2)
    assert torch.equal(model.weight.full_tensor(), full + 2 * full)
    momentum = torch.zeros(model.weight.shape)
    plain = full + 2 * full
    for _ in range(2):  # by hand, with a buffer of the whole's shape
        model().backward()
        assert momentum.mul_(0.5).add_(model.weight.grad) is momentum
        model.weight.data.sub_(momentum, alpha=0.1)
        model.weight.grad = None
    for update in (1.0, 1.5):
        plain = plain - 0.1 * update
    torch.testing.assert_close(model.weight.full_tensor(), plain)
    with pytest.raises(RuntimeError, match=r"^add: a plain tensor of shape \(3, 1\) is combined .* this rank's shard"):
        torch.add(model.weight.data, torch.ones(3, 1))


@distributed(world_size=2, backend="gloo")
def test_an_optimizer_sees_dtensors_and_pays_nothing():
    """torch's and a user's, in the step alone: what is whole there, such as a norm, is the same on every rank."""
    kinds = []

    class Watching(torch.optim.SGD):
        def step(self, closure=None):
            kinds.append([type(p.grad) for group in self.param_groups for p in group["params"]])
            return super().step(closure)

    model, _ = trained()
    twin, _ = trained()
    before = [type(param.grad) for param in model.parameters()]
    Watching(model.parameters(), lr=0.1).step()
    assert kinds == [[DTensor] * len(before)]
    assert [type(param.grad) for param in model.parameters()] == before
    assert DTensor not in before
    torch.optim.SGD(twin.parameters(), lr=0.1).step()
    for mine, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine.to_local(), other.to_local())


def test_what_is_replaced_is_for_drop_in_models_forgets_them_and_goes():
    guards.uninstall()
    data, norm, hooks = vars(DTensor).get("data"), nn.utils.get_total_norm, len(_global_optimizer_pre_hooks)
    with fake_world(2):
        model, other = FSDP(nn.Linear(4, 4)), fully_shard(nn.Linear(4, 4))
        assert vars(DTensor).get("data") is not data
        assert type(other.weight.data) is DTensor
        assert isinstance(model.weight.data, DTensor)
        other.weight.data = other.weight.data * 0 + 7  # nothing, as ever
        owners = len(guards.tensors._owners)
        gone = weakref.ref(model)
        del model
        gc.collect()
        assert gone() is None
        assert len(guards.tensors._owners) < owners
        guards.uninstall()
    assert (vars(DTensor).get("data"), nn.utils.get_total_norm) == (data, norm)
    assert len(_global_optimizer_pre_hooks) == hooks
