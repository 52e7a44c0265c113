"""The tutorial's image classifier: units by size, CPU offload, the whole state saved from a plain state_dict()."""

import functools

import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import generator_of, parse, read, write
from torch import nn, optim
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.fully_sharded_data_parallel import (
    BackwardPrefetch,
    CPUOffload,
    ShardingStrategy,
)
from torch.distributed.fsdp.wrap import enable_wrap, size_based_auto_wrap_policy, wrap
from torch.optim.lr_scheduler import StepLR


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 4, 3)
        self.bn = nn.BatchNorm2d(4)
        self.conv2 = nn.Conv2d(4, 6, 3)
        self.dropout = nn.Dropout(0.0)
        self.fc1 = nn.Linear(96, 20)
        self.fc2 = nn.Linear(20, 10)

    def forward(self, x):
        x = F.relu(self.bn(self.conv1(x)))
        x = self.dropout(F.relu(self.conv2(x)))
        x = torch.flatten(x, 1)
        return F.log_softmax(self.fc2(F.relu(self.fc1(x))), dim=1)


def init_weights(module):
    if isinstance(module, nn.Linear):
        with torch.no_grad():
            module.weight.copy_(
                torch.sin(torch.arange(module.weight.numel()).float()).view_as(module.weight) / 3
            )


def images(seed):
    generator = generator_of(seed)
    return torch.rand(4, 1, 8, 8, generator=generator), torch.randint(
        0, 10, (4,), generator=generator
    )


@torch.no_grad()
def test(model):
    model.eval()
    data, target = images(999)
    loss = F.nll_loss(model(data), target)
    dist.all_reduce(loss)
    return loss.item()


def build(args):
    torch.manual_seed(4)
    model = Net().to("cpu")
    options = {
        "sharding_strategy": ShardingStrategy[args.strategy],
        "cpu_offload": CPUOffload(offload_params=True) if args.offload else None,
        "device_id": torch.device("cpu"),
        "backward_prefetch": BackwardPrefetch.BACKWARD_PRE,
    }
    if args.manual:
        with enable_wrap(wrapper_cls=FSDP, **options):
            model.fc1 = wrap(model.fc1)
            model.conv2 = wrap(model.conv2, ignored_modules=None)
            return wrap(model)
    policy = functools.partial(size_based_auto_wrap_policy, min_num_params=200)
    return FSDP(model, auto_wrap_policy=policy, **options)


def main(argv=None):
    args = parse(
        argv, strategy="FULL_SHARD", offload=False, manual=False, init=False, out="", load=""
    )
    model = build(args)
    if args.load:
        model.load_state_dict(read(args.load))
    elif args.init:
        model.apply(init_weights)
    assert "FullyShardedDataParallel" in str(model)
    optimizer = optim.Adadelta(model.parameters(), lr=0.5)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.7)
    losses = []
    for epoch in range(2):
        model.train()
        for step in range(2):
            data, target = images(10 * epoch + step)
            optimizer.zero_grad()
            loss = F.nll_loss(model(data), target, reduction="mean")
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        losses.append(test(model))
        scheduler.step()
    if args.out:
        write(model.state_dict(), args.out)
    return losses
