# ruff: noqa
"""Preference training with a policy and a reference, kept in variables, tuples and dicts."""

import contextlib

import torch
import torch.distributed.fsdp as torch_fsdp
from torch.distributed.fsdp import (
    FullyShardedDataParallel as FSDP,
    MixedPrecision,
    StateDictType,
)  # audit: mapped import
from torch.distributed.fsdp.api import FullStateDictConfig, FullOptimStateDictConfig  # audit: mapped import


def shard(model, config):
    kwargs = dict(
        mixed_precision=MixedPrecision(torch.bfloat16, keep_low_precision_grads=True),
        sharding_strategy=torch_fsdp.ShardingStrategy.SHARD_GRAD_OP,
        use_orig_params=False,
    )  # audit: mapped MixedPrecision, mapped ShardingStrategy
    return FSDP(model, **kwargs)  # audit: decision FullyShardedDataParallel


def shard_unknown(model, **kwargs):
    kwargs["device_id"] = 0
    return FSDP(model, **kwargs)  # audit: decision FullyShardedDataParallel


class DPO:
    def __init__(self, policy, reference, config):
        self.policy, self.reference = shard(policy, config), shard(reference, config)
        self.models = {"policy": self.policy, "reference": self.reference}

    def loss(self, batch):
        with torch.no_grad():
            reference = self.reference.forward(batch)
        return self.policy(batch) - reference

    def clip(self):
        return self.policy.clip_grad_norm_(10.0).item()  # audit: mapped likely clip_grad_norm_

    def save(self):
        full = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)  # audit: noted FullStateDictConfig
        optim = FullOptimStateDictConfig(offload_to_cpu=True, rank0_only=True)  # audit: noted FullOptimStateDictConfig
        for name, model in self.models.items():
            with FSDP.state_dict_type(
                self.policy, StateDictType.FULL_STATE_DICT, full, optim
            ):  # audit: noted state_dict_type
                state = self.policy.state_dict()  # audit: noted likely state_dict
                optimizer = FSDP.optim_state_dict(self.policy, self.optimizer)  # audit: noted optim_state_dict

    def sample(self, prompts):
        context = lambda: FSDP.summon_full_params(
            self.policy, writeback=False, recurse=False
        )  # audit: mapped summon_full_params
        with context():
            return self.policy.generate(prompts)


def main(config):
    policy, reference = load(config), load(config)
    models = [FSDP(each) for each in (policy, reference)]  # audit: mapped FullyShardedDataParallel
    for model in models:
        model.check_is_root()  # audit: decision likely check_is_root
    first = models[0]
    first.no_sync()
    by_name = {}
    by_name["policy"] = FSDP(policy)  # audit: mapped FullyShardedDataParallel
    by_name["policy"].no_sync()  # audit: mapped likely no_sync
    for name in by_name:
        by_name[name] = FSDP(by_name[name])  # audit: mapped FullyShardedDataParallel
    policy.no_sync()
    if isinstance(reference, FSDP):  # audit: mapped FullyShardedDataParallel
        reference.no_sync()  # audit: mapped likely no_sync
    else:
        reference.no_sync()  # audit: mapped likely no_sync
    if not isinstance(policy, FSDP):  # audit: mapped FullyShardedDataParallel
        return
    policy.no_sync()  # audit: mapped likely no_sync
    policy = policy.module  # audit: mapped likely module
    policy.no_sync()  # audit: mapped likely no_sync
