"""Norms of gradients that a program computes by hand, each rank of its shards, as on FSDP1."""

import pytest
import torch
import torch.distributed as dist
from small_models import Block
from torch.distributed.tensor import DTensor

from shardkit.fsdp1 import FullyShardedDataParallel as FSDP
from shardkit.fsdp1 import ShardingStrategy
from shardkit.testing import distributed


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
