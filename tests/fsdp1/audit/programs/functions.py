# ruff: noqa
"""A fine-tuning script made of functions that hand the model to each other; each use says what the audit must find."""

import functools
import os

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP  # audit: mapped import
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    FullStateDictConfig,
    MixedPrecision,
    ShardingStrategy,
    StateDictType,
)  # audit: mapped import
from torch.distributed.fsdp.fully_sharded_data_parallel import FullOptimStateDictConfig  # audit: mapped import
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler  # audit: mapped import
from torch.distributed.fsdp.wrap import (
    transformer_auto_wrap_policy,
    size_based_auto_wrap_policy,
)  # audit: mapped import

bf16 = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)  # audit: mapped MixedPrecision
save_policy = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)  # audit: noted FullStateDictConfig


def get_policies(config):
    strategy = (
        ShardingStrategy.HYBRID_SHARD if config.hsdp else ShardingStrategy.FULL_SHARD
    )  # audit: mapped ShardingStrategy, mapped ShardingStrategy
    wrapping = functools.partial(
        transformer_auto_wrap_policy, transformer_layer_cls={DecoderLayer}
    )  # audit: mapped transformer_auto_wrap_policy
    small = functools.partial(
        size_based_auto_wrap_policy, min_num_params=1_000_000
    )  # audit: noted size_based_auto_wrap_policy
    return strategy, wrapping if config.by_layer else small


def train(model, loader, optimizer, scaler, config):
    for epoch in range(config.epochs):
        for step, batch in enumerate(loader):
            with model.no_sync():  # audit: mapped likely no_sync
                loss = model(**batch).loss
            scaler.scale(loss).backward()
            if config.clip:
                scaler.unscale_(optimizer)
                model.clip_grad_norm_(config.clip)  # audit: mapped likely clip_grad_norm_
            scaler.step(optimizer)
        save(model, optimizer, epoch)


def save(model, optimizer, epoch):
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, save_policy):  # audit: noted state_dict_type
        state = model.state_dict()  # audit: noted likely state_dict
    with FSDP.state_dict_type(
        model,
        StateDictType.SHARDED_STATE_DICT,
    ):  # audit: noted state_dict_type
        shards = model.state_dict()  # audit: noted likely state_dict
    with FSDP.state_dict_type(
        model, StateDictType.LOCAL_STATE_DICT
    ):  # audit: noted state_dict_type, refused StateDictType
        local = model.state_dict()  # audit: noted likely state_dict
    optimizer_state = FSDP.full_optim_state_dict(model, optimizer)  # audit: noted full_optim_state_dict
    if dist.get_rank() == 0:
        torch.save({"model": state, "optimizer": optimizer_state}, f"{epoch}.pt")


def load(model, optimizer, path):
    FSDP.set_state_dict_type(
        model,
        StateDictType.FULL_STATE_DICT,
        FullStateDictConfig(rank0_only=False),
        FullOptimStateDictConfig(rank0_only=False),
    )  # audit: noted set_state_dict_type, noted FullStateDictConfig, noted FullOptimStateDictConfig
    checkpoint = torch.load(path)
    model.load_state_dict(checkpoint["model"])  # audit: noted likely load_state_dict
    sharded = FSDP.shard_full_optim_state_dict(
        checkpoint["optimizer"], model
    )  # audit: noted shard_full_optim_state_dict
    optimizer.load_state_dict(sharded)


def main(config):
    model = build(config)
    strategy, policy = get_policies(config)
    model = FSDP(
        model,
        auto_wrap_policy=policy,
        mixed_precision=bf16 if config.bf16 else None,
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        cpu_offload=CPUOffload(offload_params=True) if config.offload else None,
        backward_prefetch=BackwardPrefetch.BACKWARD_POST,
        device_id=torch.cuda.current_device(),
        limit_all_gathers=True,
        sync_module_states=config.low_cpu,
        param_init_fn=(lambda module: module.to_empty(device="cuda")) if config.low_cpu else None,
    )  # audit: noted FullyShardedDataParallel, mapped CPUOffload
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr)
    scaler = ShardedGradScaler()  # audit: mapped ShardedGradScaler
    if os.path.exists(config.path):
        load(model, optimizer, config.path)
    train(model, data(config), optimizer, scaler, config)
    print(sum(parameter.numel() for parameter in model.parameters()))
