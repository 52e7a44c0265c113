"""What a wrapper remembers, in one object, so that no attribute of the user's model is hidden."""

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

from shardkit._fsdp.plain import PlainUnit
from shardkit.errors import TranslationError
from shardkit.fsdp1.translate.arguments import Arguments
from shardkit.fsdp1.translate.strategy import parse_strategy

KEY = "_shardkit"
WRAPPED = "_fsdp_wrapped_module"  # FSDP1's own name for it, which programs know


def _full() -> StateDictSettings:
    kind = StateDictType.FULL_STATE_DICT
    return StateDictSettings(kind, FullStateDictConfig(), FullOptimStateDictConfig())


@dataclass(eq=False)
class Record:
    """How a wrapper was constructed, and its state since."""

    given: Arguments  # for a module that a policy chose, with the policy's own in their place
    mesh: DeviceMesh
    is_root: bool
    precision: MixedPrecision  # never None, as in FSDP1
    buffer_dtypes: dict[str, torch.dtype] = field(default_factory=dict)  # before they were cast
    state_dict_settings: StateDictSettings = field(default_factory=_full)
    summoned: bool = False  # in summon_full_params
    has_run: bool = False  # a forward
    units: list[PlainUnit] = field(default_factory=list)  # at and below a root, from a forward on

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


def record_of(wrapper: nn.Module) -> Record:
    record: Record = vars(wrapper)[KEY]
    return record


def is_wrapper(module: object) -> bool:
    return isinstance(module, nn.Module) and KEY in vars(module)


def wrappers_of(model: nn.Module) -> list[nn.Module]:
    """Return the wrappers at and below ``model``, parents first. Local, pure."""
    return [module for module in model.modules() if is_wrapper(module)]


def wrappers_or_refuse(model: nn.Module, name: str) -> list[nn.Module]:
    """Return ``wrappers_of(model)`` for a static method of FSDP1's. Local, pure."""
    wrappers = wrappers_of(model)
    if not wrappers and any(isinstance(module, FSDPModule) for module in model.modules()):
        raise TranslationError(
            f"FSDP.{name} was called on a model that is sharded by shard_model or fully_shard, "
            "where it would do nothing. Use full_params, full_state_dict or "
            "full_optimizer_state_dict."
        )
    return wrappers


def without_wrappers(fqn: str) -> str:
    """Return the FQN before wrapping.

    The names that checkpoint_wrapper and torch.compile add stay.
    """
    return ".".join(part for part in fqn.split(".") if part != WRAPPED)


def inner_of(wrapper: nn.Module) -> nn.Module:
    """Return the wrapped module, also where ``checkpoint_wrapper`` was put around it later."""
    inner = wrapper._modules[WRAPPED]
    assert inner is not None, "set by the constructor"
    return getattr(inner, "_checkpoint_wrapped_module", inner)


# Errors that are also of the class that FSDP1 raised, because programs catch that one.


class Unavailable(TranslationError, RuntimeError):
    """What FSDP2 cannot do, where FSDP1 or torch raised a RuntimeError."""


class UnavailableAttribute(TranslationError, AttributeError):
    """An attribute that only FSDP1 has; ``hasattr`` and ``getattr`` with a default keep working."""
