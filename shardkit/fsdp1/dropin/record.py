"""What a wrapper keeps beside FSDP1's own attributes, in one place, so that no name of the user's model is hidden."""

from __future__ import annotations

from collections.abc import Iterator
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

from shardkit._fsdp.fsdp1 import full_precision_classes
from shardkit.fsdp1.translate.arguments import Arguments
from shardkit.fsdp1.translate.shard import Translation
from shardkit.fsdp1.translate.strategy import RESHARDING, parse_strategy
from shardkit.fsdp1.translate.units import casts_inputs

KEY = "_shardkit"
WRAPPED = "_fsdp_wrapped_module"  # FSDP1's own name for it, which programs know


def _full() -> StateDictSettings:
    return StateDictSettings(StateDictType.FULL_STATE_DICT, FullStateDictConfig(), FullOptimStateDictConfig())


@dataclass(eq=False)
class Record:
    """How a wrapper came about, and its settings since.

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
    def process_group(self) -> dist.ProcessGroup:
        """Return the group that shards, or for NO_SHARD the one that replicates."""
        axis = 0 if self.strategy is ShardingStrategy.NO_SHARD else self.mesh.ndim - 1
        return self.mesh.get_group(axis)

    @property
    def reshards(self) -> bool:
        """Return whether its parameters are freed after forward: the root's are not."""
        return not self.root and parse_strategy(self.given.sharding_strategy).name in RESHARDING

    @property
    def casts_inputs(self) -> bool:
        """Return whether its inputs are cast, by which the first forward makes the root differ from the others."""
        return casts_inputs(self.mixed_precision, self.root is True)

    def ignored_in(self, inner: nn.Module) -> set[nn.Module]:
        """Return the ignored modules at and below the wrapped one; what a policy wrapped names none itself."""
        return self.translation.ignored_in(inner) if self.top else set()


def record_of(wrapper: nn.Module) -> Record:
    """Return the record of a wrapper."""
    record: Record = vars(wrapper)[KEY]
    return record


def is_wrapper(module: nn.Module) -> bool:
    """Return whether it is one of the drop-in's wrappers."""
    return KEY in vars(module)


def wrappers_of(model: nn.Module) -> Iterator[nn.Module]:
    """Return the wrappers at and below ``model``, parents first. Local, pure."""
    return filter(is_wrapper, model.modules())


def outermost(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield FQN and module of each wrapper below ``model`` that is inside of no other one, each once; not ``model``."""
    seen: set[nn.Module] = {model}
    pending = [(name, child) for name, child in model.named_children()]
    while pending:
        fqn, module = pending.pop(0)
        if module in seen:
            continue
        seen.add(module)
        if is_wrapper(module):
            yield fqn, module
        else:
            pending += [(f"{fqn}.{name}", child) for name, child in module.named_children()]


def without_wrappers(fqn: str) -> str:
    """Return the FQN in the plain model, as it was before any wrapping; ``checkpoint_wrapper`` and compile stay."""
    return ".".join(part for part in fqn.split(".") if part != WRAPPED)


def inner_of(wrapper: nn.Module) -> nn.Module:
    """Return the wrapped module, within a ``checkpoint_wrapper`` that was put around it later."""
    inner = wrapper._modules[WRAPPED]
    assert inner is not None, "set by the constructor"
    return getattr(inner, "_checkpoint_wrapped_module", inner)


def sharded_of(wrapper: nn.Module) -> FSDPModule | None:
    """Return the module that ``fully_shard`` was called on; None where it had no parameters left to hold."""
    candidates: tuple[object, ...] = (wrapper._modules[WRAPPED], inner_of(wrapper))
    return next((each for each in candidates if isinstance(each, FSDPModule)), None)


def in_full_precision(wrapper: nn.Module) -> bool:
    """Return whether FSDP1 wrapped it to run in float32 under mixed precision, as it does BatchNorm."""
    record = record_of(wrapper)
    return not record.top and isinstance(inner_of(wrapper), full_precision_classes(record.mixed_precision))
