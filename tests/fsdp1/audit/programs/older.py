# ruff: noqa
"""The older way: positional arguments, wrapping by hand, internals."""

import torch
import torch.nn as nn
from torch.optim import Adam

try:
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP  # audit: mapped import
    from torch.distributed.fsdp import ShardingStrategy, CPUOffload  # audit: mapped import
    from torch.distributed.fsdp.wrap import enable_wrap, wrap, always_wrap_policy as wrap_all  # audit: mapped import
    from torch.distributed.fsdp._common_utils import (
        clean_tensor_name,
        _get_module_fsdp_state,
    )  # audit: refused import
    import torch.distributed.fsdp._traversal_utils as traversal_utils  # audit: refused import

    has_fsdp = True
except ImportError:
    has_fsdp = False


class Encoder(nn.Module):
    def __init__(self, group):
        super().__init__()
        self.first = wrap(nn.Linear(8, 8))  # audit: decision wrap
        self.blocks = nn.ModuleList(
            [FSDP(Block(), group) for _ in range(4)]
        )  # audit: decision FullyShardedDataParallel
        self.last = FSDP(nn.Linear(8, 8), group)  # audit: decision FullyShardedDataParallel


class Sharded(FSDP):  # audit: decision FullyShardedDataParallel
    def forward(self, *args):
        with self.no_sync():
            return super().forward(*args)

    def state_dict(self, *args):
        return super().state_dict(*args)


def setup(group, rank):
    model = Encoder(group)
    groups = [p for p in model.parameters() if p.requires_grad]
    optimizer = Adam(groups, lr=1e-3)
    with enable_wrap(
        wrapper_cls=FSDP, process_group=group
    ):  # audit: decision enable_wrap, mapped FullyShardedDataParallel
        inner = wrap(nn.Linear(8, 8))  # audit: decision wrap
    model = FSDP(
        model, group, ShardingStrategy.NO_SHARD, CPUOffload(True), wrap_all, None
    )  # audit: noted FullyShardedDataParallel
    other = Sharded(nn.Linear(4, 4))
    model.register_comm_hook(None, hook)  # audit: decision likely register_comm_hook
    model.apply(reset)  # audit: decision likely apply
    return model, optimizer, other


def step(group):
    model, optimizer, other = setup(group, 0)
    model(batch).backward()
    norm = model.clip_grad_norm_(max_norm=1.0)  # audit: mapped likely clip_grad_norm_
    for name, parameter in model.named_parameters():  # audit: noted likely named_parameters
        print(clean_tensor_name(name))  # audit: mapped torch.distributed.fsdp._common_utils.clean_tensor_name
    for handle in traversal_utils._get_fsdp_handles(
        model
    ):  # audit: refused torch.distributed.fsdp._traversal_utils._get_fsdp_handles
        print(handle.flat_param)  # audit: refused likely flat_param
    print(model._flat_param, model.module[0].weight)  # audit: refused likely _flat_param, mapped likely module
    state = _get_module_fsdp_state(model)  # audit: refused torch.distributed.fsdp._common_utils._get_module_fsdp_state
    if (
        model.check_is_root() and other.sharding_strategy == ShardingStrategy.FULL_SHARD
    ):  # audit: decision likely check_is_root, mapped ShardingStrategy
        optimizer.step()
    return norm
