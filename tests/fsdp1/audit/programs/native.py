# ruff: noqa
"""FSDP2, DDP and others: nothing here is FSDP1's."""

import torch
import torch.distributed as dist
from torch.distributed._composable.fsdp import fully_shard as composable
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

model = fully_shard(torch.nn.Linear(2, 2), mp_policy=MixedPrecisionPolicy(), offload_policy=CPUOffloadPolicy())
assert isinstance(model, FSDPModule)
torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
ddp = DDP(torch.nn.Linear(2, 2))
with ddp.no_sync():
    ddp.module(torch.ones(2))
ddp.state_dict(), ddp.load_state_dict({}), ddp.apply(print), ddp.register_comm_hook(None, None)
rank, state_dict_type, params = ddp.rank, ddp.state_dict_type, ddp.params
