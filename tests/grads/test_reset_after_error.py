"""reset_after_error: the next step is that of a model that never failed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from accumulate_net import batches, loss, micro_steps, shard
from grads_net import MESHES, Net
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from shardkit.errors import ShardkitError
from shardkit.grads import accumulate, reset_after_error
from shardkit.optim import step_on_local_shards
from shardkit.testing import distributed, fake_world

SETTINGS: dict[str, dict[str, Any]] = {
    "fewer ranks": {"reshard_after_forward": 2},
    "hsdp": {"shape": MESHES["hsdp"], "reshard_after_forward": True},
    "offload": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
    "bf16": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)},
}


FAILURES: list[tuple[str, int, dict[str, bool]]] = [
    ("forward", 1, {}),
    ("backward", 1, {}),
    ("forward", 2, {"keep_unsharded": True}),
    ("backward", 2, {}),
    ("backward", 2, {"shard_gradients": True}),
]


class Broken(Exception):
    pass


class Raising(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise Broken


class Failing:
    """A hook on the second block, inside of FSDP's own, that raises in forward or in backward when it is told to."""

    def __init__(self) -> None:
        self.where = ""

    def __call__(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        if self.where == "forward":
            raise Broken
        return Raising.apply(output) if self.where == "backward" else output


def failing_net(settings: dict[str, Any]) -> tuple[nn.Module, Failing]:
    torch.manual_seed(0)
    net, failing = Net(), Failing()
    net.blocks[1].register_forward_hook(failing)
    return shard(net, **settings), failing


def step(net: nn.Module, optimizer: torch.optim.Optimizer, ids: Tensor, **options: Any) -> list[Tensor]:
    """A step of all micro-batches; returns this rank's gradients and then parameters."""
    micro_steps(net, ids, **options)
    grads = [param.grad.to_local().clone() for param in net.parameters() if param.grad is not None]
    optimizer.step()
    optimizer.zero_grad()
    return [*grads, *(param.detach().to_local().clone() for param in net.parameters())]


def fail(net: nn.Module, failing: Failing, where: str, ids: Tensor, **options: Any) -> None:
    """Raise in the last of the micro-batches, after the others have left gradients behind, or in the first alone."""
    for i, mine in enumerate(ids[:, dist.get_rank()]):
        failing.where = where if i == len(ids) - 1 else ""
        with pytest.raises(Broken) if failing.where else accumulate(net, last=False, **options):
            loss(net, mine).backward()
    failing.where = ""


@pytest.mark.parametrize("settings", SETTINGS)
@distributed(world_size=4, backend="gloo")
def test_the_next_step_is_that_of_a_model_that_never_failed(settings):
    (net, failing), (twin, _) = failing_net(SETTINGS[settings]), failing_net(SETTINGS[settings])
    optimizers = [step_on_local_shards(torch.optim.AdamW(model.parameters(), lr=0.1)) for model in (net, twin)]
    sharded = list(net.parameters())
    dirty = 0
    for seed, (where, micro_batches, options) in enumerate(FAILURES):
        fail(net, failing, where, batches(100 + seed, micro_batches), **options)
        dirty += any(param.grad is not None for param in sharded)
        dirty += any(not isinstance(param, DTensor) for param in net.parameters())
        reset_after_error(net)
        assert all(param.grad is None for param in net.parameters())
        assert all(isinstance(param, DTensor) for param in net.parameters())
        ids = batches(seed, 2)
        expected = step(twin, optimizers[1], ids, **options)
        actual = step(net, optimizers[0], ids, **options)
        assert len(actual) == len(expected)
        assert all(map(torch.equal, actual, expected)), (where, micro_batches, options)
    assert dirty >= len(FAILURES), "there was nothing to reset"


def test_several_roots_before_and_after_their_first_forward_and_plain_models():
    with fake_world(4):
        both = nn.ModuleList([Net(), Net()])
        for net in both:
            for block in net.blocks:
                fully_shard(block, reshard_after_forward=False)
            fully_shard(net)
        reset_after_error(both)
        ids = torch.zeros(2, 5, dtype=torch.long)
        for net in both:
            net(ids)
        assert not isinstance(both[1].blocks[0].weight, DTensor)
        reset_after_error(both)
        assert all(isinstance(param, DTensor) for param in both.parameters())
        with pytest.raises(
            ShardkitError, match=r"^model holds modules of an FSDP root outside of it: blocks\.0, blocks\.1"
        ):
            reset_after_error(nn.ModuleDict({"blocks": both[0].blocks}))
    plain = nn.Linear(2, 2)
    plain(torch.ones(1, 2)).sum().backward()
    reset_after_error(plain)
    assert plain.weight.grad is None
