"""What a wrapper keeps beside FSDP1's own attributes, in one place, so that no name of the user's model is hidden."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffload,
    FSDPModule,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    MixedPrecision,
    ShardingStrategy,
    StateDictSettings,
    StateDictType,
)

from shardkit._fsdp.fsdp1 import full_precision_classes
from shardkit.fsdp1.dropin.names import WRAPPED
from shardkit.fsdp1.translate.arguments import Arguments
from shardkit.fsdp1.translate.shard import Translation
from shardkit.fsdp1.translate.strategy import parse_strategy

if TYPE_CHECKING:
    from shardkit.fsdp1.dropin.module import FullyShardedDataParallel

KEY = "_shardkit"


def _full() -> StateDictSettings:
    return StateDictSettings(StateDictType.FULL_STATE_DICT, FullStateDictConfig(), FullOptimStateDictConfig())


@dataclass(eq=False)
class Record:
    """How a wrapper came about, and what it was told since.

    Attributes:
        given: the arguments of its constructor, or of the one that wrapped it by policy, with its own in their place.
        translation: of the whole constructor call.
        mesh: on which the call sharded.
        top: whether it is the module that the constructor was called with, which the translation's FQNs are below.
        root: whether it is the root; None until the first forward, or whatever asks for the root first.
        buffer_dtypes: the original dtypes of buffers that the first forward cast, by their module and name.
        state_dict_settings: what ``state_dict_type`` was set to.
        summoned: whether it is inside of ``summon_full_params``.
    """

    given: Arguments
    translation: Translation
    mesh: DeviceMesh
    top: bool
    root: bool | None = None
    buffer_dtypes: dict[tuple[nn.Module, str], torch.dtype] = field(default_factory=dict)
    state_dict_settings: StateDictSettings = field(default_factory=_full)
    summoned: bool = False

    @property
    def strategy(self) -> ShardingStrategy:
        """As FSDP1 has it, which takes NO_SHARD for a rank alone."""
        alone = self.mesh.size() == 1
        return ShardingStrategy.NO_SHARD if alone else parse_strategy(self.given.sharding_strategy)

    @property
    def mixed_precision(self) -> MixedPrecision:
        """Never None, as FSDP1's attribute."""
        return self.given.mixed_precision or MixedPrecision()

    @property
    def cpu_offload(self) -> CPUOffload:
        """Never None, as FSDP1's attribute."""
        return self.given.cpu_offload or CPUOffload()

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The group that shards, or for NO_SHARD the one that replicates."""
        axis = 0 if self.strategy is ShardingStrategy.NO_SHARD else self.mesh.ndim - 1
        return self.mesh.get_group(axis)

    @property
    def reshards(self) -> bool:
        """Whether its parameters are freed after forward where it is no root."""
        return parse_strategy(self.given.sharding_strategy).name in ("FULL_SHARD", "HYBRID_SHARD")

    @property
    def ignored_modules(self) -> frozenset[str]:
        """FQNs below the module that its constructor was called with."""
        return frozenset(self.translation.ignored_modules)


def record_of(wrapper: nn.Module) -> Record:
    """The record of a wrapper."""
    record: Record = vars(wrapper)[KEY]
    return record


def is_wrapper(module: nn.Module) -> bool:
    """Whether it is one of the drop-in's wrappers."""
    return KEY in vars(module)


def wrappers_of(model: nn.Module) -> Iterator[FullyShardedDataParallel]:
    """The wrappers at and below ``model``, parents first. Local, pure."""
    from shardkit.fsdp1.dropin.module import FullyShardedDataParallel  # which imports this module

    return (module for module in model.modules() if isinstance(module, FullyShardedDataParallel))


def inner_of(wrapper: nn.Module) -> nn.Module:
    """The wrapped module, within a ``checkpoint_wrapper`` that was put around it later."""
    inner = wrapper._modules[WRAPPED]
    assert inner is not None, "set by the constructor"
    return getattr(inner, "_checkpoint_wrapped_module", inner)


def sharded_of(wrapper: nn.Module) -> FSDPModule | None:
    """The module that ``fully_shard`` was called on; None where it had no parameters left to hold."""
    candidates: tuple[object, ...] = (wrapper._modules[WRAPPED], inner_of(wrapper))
    return next((each for each in candidates if isinstance(each, FSDPModule)), None)


def in_full_precision(wrapper: nn.Module) -> bool:
    """Whether FSDP1 wrapped it to run in float32 under mixed precision, as it does BatchNorm."""
    record = record_of(wrapper)
    return not record.top and isinstance(inner_of(wrapper), full_precision_classes(record.mixed_precision))
