"""``torch.distributed.fsdp.fully_sharded_data_parallel``, whose class runs on FSDP2."""

from typing import Any

from torch.distributed.fsdp.fully_sharded_data_parallel import OptimStateKeyType as OptimStateKeyType

from shardkit.fsdp1.dropin.module import FullyShardedDataParallel as FullyShardedDataParallel
from shardkit.fsdp1.dropin.private import resolve

__all__ = ["FullyShardedDataParallel", "OptimStateKeyType"]


def __getattr__(name: str) -> Any:
    return resolve("fully_sharded_data_parallel", name)
