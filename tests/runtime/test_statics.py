"""FSDP1's methods, called on the class with a model that shardkit sharded, name what to use."""

import pytest
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from shardkit import ShardkitError, shard_model
from shardkit.runtime.statics import METHODS
from shardkit.testing import fake_world

CALLS = {
    "clip_grad_norm_": lambda model: FullyShardedDataParallel.clip_grad_norm_(model, 1.0),
    "no_sync": lambda model: FullyShardedDataParallel.no_sync(model).__enter__(),
    "apply": lambda model: FullyShardedDataParallel.apply(model, print),
    "named_parameters": lambda model: list(FullyShardedDataParallel.named_parameters(model)),
    "named_buffers": lambda model: list(FullyShardedDataParallel.named_buffers(model)),
    "check_is_root": FullyShardedDataParallel.check_is_root,
    "register_comm_hook": lambda model: FullyShardedDataParallel.register_comm_hook(model, None, print),
}


@pytest.mark.parametrize("name", METHODS)
def test_each_is_one_error(name: str) -> None:
    assert set(METHODS) == CALLS.keys()
    with fake_world(2):
        model = shard_model(nn.Linear(2, 2))
        with pytest.raises(ShardkitError, match=rf"FullyShardedDataParallel\.{name}: the model is sharded by fully"):
            CALLS[name](model)
        assert not hasattr(model, "_is_root")  # which FSDP1's functions alone are told
        model._is_root = True
        assert model._is_root
