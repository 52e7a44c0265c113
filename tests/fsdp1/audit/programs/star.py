# ruff: noqa
"""A star import, partials, and classes kept in variables."""

from functools import partial

import torch
from torch.distributed.fsdp import *  # audit: mapped import
from torch.distributed.fsdp.wrap import *  # audit: mapped import

STRATEGIES = {
    "full": ShardingStrategy.FULL_SHARD,
    "none": ShardingStrategy["NO_SHARD"],
}  # audit: mapped ShardingStrategy, mapped ShardingStrategy
policy = ModuleWrapPolicy([Attention, Mlp])  # audit: mapped ModuleWrapPolicy
other = CustomPolicy(choose)  # audit: noted CustomPolicy
by_lambda = partial(lambda_auto_wrap_policy, lambda_fn=choose)  # audit: mapped lambda_auto_wrap_policy
wrapper = partial(
    FullyShardedDataParallel, auto_wrap_policy=policy, sharding_strategy=STRATEGIES["full"]
)  # audit: mapped FullyShardedDataParallel
Wrapping = FullyShardedDataParallel  # audit: mapped FullyShardedDataParallel
fallback = always_wrap_policy  # audit: mapped always_wrap_policy

model = wrapper(torch.nn.Linear(2, 2))
model.no_sync()
second = Wrapping(
    torch.nn.Linear(2, 2), None, ShardingStrategy._HYBRID_SHARD_ZERO2, limit_all_gathers=False
)  # audit: mapped ShardingStrategy
compiled = torch.compile(second)
compiled.clip_grad_norm_(1)  # audit: mapped likely clip_grad_norm_
precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
fully_shard(torch.nn.Linear(2, 2), mp_policy=precision)
key = OptimStateKeyType.PARAM_ID  # audit: noted OptimStateKeyType
rekeyed = FullyShardedDataParallel.rekey_optim_state_dict({}, key, model)  # audit: decision rekey_optim_state_dict
print(FlatParameter, key)  # audit: refused FlatParameter


def annotated(
    model: "FullyShardedDataParallel | None", models: list[FullyShardedDataParallel]
):  # audit: mapped FullyShardedDataParallel
    with model.no_sync():
        for each in models:
            each.clip_grad_norm_(1.0)  # audit: mapped likely clip_grad_norm_
