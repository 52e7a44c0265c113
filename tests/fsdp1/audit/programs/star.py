# ruff: noqa
"""A star import, partials, and classes kept in variables."""

from functools import partial

import torch
from torch.distributed.fsdp import *  # audit: exact import
from torch.distributed.fsdp.wrap import *  # audit: exact import

STRATEGIES = {
    "full": ShardingStrategy.FULL_SHARD,
    "none": ShardingStrategy["NO_SHARD"],
}  # audit: exact ShardingStrategy, exact ShardingStrategy
policy = ModuleWrapPolicy([Attention, Mlp])  # audit: exact ModuleWrapPolicy
other = CustomPolicy(choose)  # audit: note CustomPolicy
by_lambda = partial(lambda_auto_wrap_policy, lambda_fn=choose)  # audit: exact lambda_auto_wrap_policy
wrapper = partial(
    FullyShardedDataParallel, auto_wrap_policy=policy, sharding_strategy=STRATEGIES["full"]
)  # audit: exact FullyShardedDataParallel
Wrapping = FullyShardedDataParallel  # audit: exact FullyShardedDataParallel
fallback = always_wrap_policy  # audit: exact always_wrap_policy

model = wrapper(torch.nn.Linear(2, 2))
model.no_sync()  # audit: exact no_sync
second = Wrapping(
    torch.nn.Linear(2, 2), None, ShardingStrategy._HYBRID_SHARD_ZERO2, limit_all_gathers=False
)  # audit: note FullyShardedDataParallel
compiled = torch.compile(second)
compiled.clip_grad_norm_(1)  # audit: exact clip_grad_norm_
precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
fully_shard(torch.nn.Linear(2, 2), mp_policy=precision)
key = OptimStateKeyType.PARAM_ID  # audit: note OptimStateKeyType
rekeyed = FullyShardedDataParallel.rekey_optim_state_dict({}, key, model)  # audit: decision rekey_optim_state_dict
print(FlatParameter, key)  # audit: impossible FlatParameter


def shadowed(FullyShardedDataParallel, policy):
    return FullyShardedDataParallel(policy)


def annotated(
    model: "FullyShardedDataParallel | None", models: list[FullyShardedDataParallel]
):  # audit: exact FullyShardedDataParallel, exact FullyShardedDataParallel
    with model.no_sync():  # audit: exact no_sync
        for each in models:
            each.clip_grad_norm_(1.0)  # audit: exact clip_grad_norm_
