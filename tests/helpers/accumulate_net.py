"""A model of integers, whose gradients are integers too: every sum of them is exact
in any order.
"""

import torch
import torch.distributed as dist
from grads_net import Net
from grads_net import shard as shard

from shardkit.grads import accumulate

WEIGHTS = torch.randint(-2, 3, (7,), generator=torch.Generator().manual_seed(5)).float()


def integer_net(seed=0):
    """Net with parameters of -1, 0 and 1; its gradients stay far below 2**24."""
    net = Net()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for param in net.parameters():
            param.copy_(torch.randint(-1, 2, param.shape, generator=generator))
        net.gain.fill_(2)
    return net


def batches(seed, micro_batches, ranks=4):
    """Token ids of every micro-batch of every rank: (micro_batches, ranks, 2, 5)."""
    return torch.randint(
        0, 7, (micro_batches, ranks, 2, 5), generator=torch.Generator().manual_seed(seed)
    )


def loss(model, ids):
    return (model(ids) * WEIGHTS.to(model.head.weight.dtype)).sum().float()


def micro_steps(model, ids, after=None, **options):
    """A step of this rank's micro-batches; ``after`` is called inside, after each backward."""
    for i, mine in enumerate(ids[:, dist.get_rank()]):
        with accumulate(model, last=i == len(ids) - 1, **options):
            loss(model, mine).backward()
            if after is not None:
                after(i)


def one_large_batch(plain, ids):
    """The mean over the ranks of the gradients of all micro-batches, by one backward in one
    process.
    """
    plain.zero_grad()
    (loss(plain, ids.flatten(0, 2)) / ids.shape[1]).backward()
    return {name: param.grad for name, param in plain.named_parameters() if param.grad is not None}
