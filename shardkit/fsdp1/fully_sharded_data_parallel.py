"""``torch.distributed.fsdp.fully_sharded_data_parallel``, whose class runs on FSDP2."""

import typing as _typing

import torch.distributed.fsdp.fully_sharded_data_parallel as _torchs
from torch.distributed.fsdp.fully_sharded_data_parallel import (
    OptimStateKeyType as OptimStateKeyType,
)

from shardkit.fsdp1.dropin.module import FullyShardedDataParallel as FullyShardedDataParallel

__all__ = ["FullyShardedDataParallel", "OptimStateKeyType"]


def __getattr__(name: str) -> _typing.Any:  # names that it imports, such as CPUOffload
    return getattr(_torchs, name)
