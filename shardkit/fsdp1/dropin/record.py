"""What the drop-in remembers of a module that FSDP1 would have wrapped."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    FSDPModule,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    MixedPrecision,
    ShardingStrategy,
    StateDictSettings,
    StateDictType,
)

from shardkit.errors import TranslationError, message
from shardkit.fsdp1.translate.arguments import Arguments
from shardkit.fsdp1.translate.strategy import parse_strategy

KEY = "_shardkit"  # in the __dict__ of the module: no attribute of the user's model is hidden


def _full() -> StateDictSettings:
    kind = StateDictType.FULL_STATE_DICT
    return StateDictSettings(kind, FullStateDictConfig(), FullOptimStateDictConfig())


@dataclass(eq=False)
class Record:
    """How FSDP1's class was called for a module, and its state since."""

    given: Arguments  # for a module that a policy chose, with the policy's own in their place
    mesh: DeviceMesh
    is_root: bool
    precision: MixedPrecision  # never None, as in FSDP1
    buffer_dtypes: dict[str, torch.dtype] = field(default_factory=dict)  # before they were cast
    state_dict_settings: StateDictSettings = field(default_factory=_full)
    summoned: bool = False  # in summon_full_params

    @property
    def strategy(self) -> ShardingStrategy:
        """Return the strategy; NO_SHARD on a single rank, as in FSDP1."""
        if self.mesh.size() == 1:
            return ShardingStrategy.NO_SHARD
        return parse_strategy(self.given.sharding_strategy)

    @property
    def process_group(self) -> dist.ProcessGroup:
        """Return the group that shards, or for NO_SHARD the one that replicates."""
        no_shard = self.strategy is ShardingStrategy.NO_SHARD
        return self.mesh.get_group(0 if no_shard else self.mesh.ndim - 1)


def record_of(module: nn.Module) -> Record:
    """Return the record of a wrapped module."""
    record: Record = vars(module)[KEY]
    return record


def is_wrapped(module: object) -> bool:
    """Return whether FSDP1 would have wrapped the module."""
    return isinstance(module, nn.Module) and KEY in vars(module)


def wrapped_in(model: nn.Module) -> list[nn.Module]:
    """Return the wrapped modules at and below ``model``, parents first. Local, pure."""
    return [module for module in model.modules() if is_wrapped(module)]


def wrapped_or_refuse(model: nn.Module, name: str) -> list[nn.Module]:
    """Return ``wrapped_in(model)`` for a static method of FSDP1's. Local, pure."""
    found = wrapped_in(model)
    if not found and any(isinstance(module, FSDPModule) for module in model.modules()):
        problem = "was called on a model that is sharded by shard_model or fully_shard"
        rule = "It is for models wrapped by FullyShardedDataParallel, and would do nothing"
        fix = "Use full_params, full_state_dict or full_optimizer_state_dict of shardkit.state"
        raise TranslationError(message(f"FSDP.{name}", problem, rule, fix))
    return found


def roots_in(model: nn.Module) -> list[nn.Module]:
    """Return the wrapped modules at and below ``model`` that are in no other one. Local, pure."""
    return [module for module in wrapped_in(model) if record_of(module).is_root]


# Errors that are also of the class that FSDP1 raised, because programs catch that one.


class Unavailable(TranslationError, RuntimeError):
    """What FSDP2 cannot do, where FSDP1 or torch raised a RuntimeError."""


class UnavailableAttribute(TranslationError, AttributeError):
    """An attribute that only FSDP1 has; ``hasattr`` and ``getattr`` with a default keep working."""
