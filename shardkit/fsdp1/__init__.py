"""From FSDP1 to FSDP2: arguments, configuration files and source code, translated, and a drop-in for its class.

Every public name of ``torch.distributed.fsdp`` is found here too, and those of its modules ``wrap``, ``api``,
``fully_sharded_data_parallel`` and ``sharded_grad_scaler`` in the modules of the same name. All but
``FullyShardedDataParallel`` and ``ShardedGradScaler`` are torch's own objects.
"""

import typing

from torch.distributed.fsdp import __all__ as __all__  # what a program's star import brings: FSDP1's names, not ours

from shardkit.fsdp1.configs import from_config as from_config
from shardkit.fsdp1.dropin import private as private
from shardkit.fsdp1.dropin.module import FullyShardedDataParallel as FullyShardedDataParallel
from shardkit.fsdp1.instead import FATES as FATES
from shardkit.fsdp1.instead import Fate as Fate
from shardkit.fsdp1.translate.notes import Note as Note
from shardkit.fsdp1.translate.shard import Translation as Translation
from shardkit.fsdp1.translate.strategy import Resolved as Resolved
from shardkit.fsdp1.translate.strategy import parse_strategy as parse_strategy
from shardkit.fsdp1.translate.strategy import resolve_strategy as resolve_strategy
from shardkit.fsdp1.translate.translate import shard_like_fsdp1 as shard_like_fsdp1
from shardkit.fsdp1.translate.translate import translate_fsdp1 as translate_fsdp1

if typing.TYPE_CHECKING:  # at run time by __getattr__, with whatever the installed torch has beside these
    from torch.distributed.fsdp import BackwardPrefetch as BackwardPrefetch
    from torch.distributed.fsdp import CPUOffload as CPUOffload
    from torch.distributed.fsdp import CPUOffloadPolicy as CPUOffloadPolicy
    from torch.distributed.fsdp import FlatParameter as FlatParameter
    from torch.distributed.fsdp import FSDPModule as FSDPModule
    from torch.distributed.fsdp import FullOptimStateDictConfig as FullOptimStateDictConfig
    from torch.distributed.fsdp import FullStateDictConfig as FullStateDictConfig
    from torch.distributed.fsdp import LocalOptimStateDictConfig as LocalOptimStateDictConfig
    from torch.distributed.fsdp import LocalStateDictConfig as LocalStateDictConfig
    from torch.distributed.fsdp import MixedPrecision as MixedPrecision
    from torch.distributed.fsdp import MixedPrecisionPolicy as MixedPrecisionPolicy
    from torch.distributed.fsdp import OffloadPolicy as OffloadPolicy
    from torch.distributed.fsdp import OptimStateDictConfig as OptimStateDictConfig
    from torch.distributed.fsdp import OptimStateKeyType as OptimStateKeyType
    from torch.distributed.fsdp import ShardedOptimStateDictConfig as ShardedOptimStateDictConfig
    from torch.distributed.fsdp import ShardedStateDictConfig as ShardedStateDictConfig
    from torch.distributed.fsdp import ShardingStrategy as ShardingStrategy
    from torch.distributed.fsdp import StateDictConfig as StateDictConfig
    from torch.distributed.fsdp import StateDictSettings as StateDictSettings
    from torch.distributed.fsdp import StateDictType as StateDictType
    from torch.distributed.fsdp import UnshardHandle as UnshardHandle
    from torch.distributed.fsdp import fully_shard as fully_shard
    from torch.distributed.fsdp import register_fsdp_forward_method as register_fsdp_forward_method
    from torch.distributed.fsdp import share_comm_ctx as share_comm_ctx

private.register_private_modules()


def __getattr__(name: str) -> typing.Any:
    return private.resolve("", name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
