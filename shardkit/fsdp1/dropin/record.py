"""What a wrapper remembers, as one object in its ``__dict__``, so that no attribute of the user's model is hidden."""

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

from shardkit._fsdp.fsdp1 import full_precision_classes
from shardkit.errors import TranslationError, message
from shardkit.fsdp1.translate import casts_inputs
from shardkit.fsdp1.translate.arguments import Arguments
from shardkit.fsdp1.translate.shard import Translation
from shardkit.fsdp1.translate.strategy import RESHARDING, parse_strategy
from shardkit.replacements import MEMBERS

KEY = "_shardkit"
WRAPPED = "_fsdp_wrapped_module"  # FSDP1's own name for it, which programs know


@dataclass(eq=False)
class Record:
    """How a wrapper was constructed, and its state since."""

    given: Arguments  # of the constructor; for a module that a policy chose, with the policy's own in their place
    translation: Translation  # of the whole constructor call
    mesh: DeviceMesh
    top: bool  # the constructor was called with this module, to which the translation's FQNs are relative
    root: bool | None = None  # None until the first forward, or another call that needs the root
    # The original dtypes of buffers that the first forward cast, by module and name.
    buffer_dtypes: dict[tuple[nn.Module, str], torch.dtype] = field(default_factory=dict)
    state_dict_settings: StateDictSettings = field(
        default_factory=lambda: StateDictSettings(
            StateDictType.FULL_STATE_DICT, FullStateDictConfig(), FullOptimStateDictConfig()
        )
    )
    summoned: bool = False  # in summon_full_params

    @property
    def strategy(self) -> ShardingStrategy:
        """Return the strategy; NO_SHARD on a single rank, as in FSDP1."""
        alone = self.mesh.size() == 1
        return ShardingStrategy.NO_SHARD if alone else parse_strategy(self.given.sharding_strategy)

    @property
    def mixed_precision(self) -> MixedPrecision:
        """Return the mixed precision; never None, as in FSDP1."""
        return self.given.mixed_precision or MixedPrecision()

    @property
    def process_group(self) -> dist.ProcessGroup:
        """Return the group that shards, or for NO_SHARD the one that replicates."""
        return self.mesh.get_group(0 if self.strategy is ShardingStrategy.NO_SHARD else self.mesh.ndim - 1)

    @property
    def reshards(self) -> bool:
        """Return whether its parameters are resharded after forward; the root's are not."""
        return not self.root and parse_strategy(self.given.sharding_strategy).name in RESHARDING

    @property
    def casts_inputs(self) -> bool:
        """Return whether its inputs are cast; the root has a setting of its own."""
        return casts_inputs(self.mixed_precision, self.root is True)

    def ignored_in(self, inner: nn.Module) -> set[nn.Module]:
        """Return the ignored modules at and below the wrapped module ``inner``."""
        return self.translation.ignored_in(inner) if self.top else set()


def record_of(wrapper: nn.Module) -> Record:
    """Return the record of a wrapper."""
    record: Record = vars(wrapper)[KEY]
    return record


def is_wrapper(module: object) -> bool:
    """Return whether it is a wrapper of the drop-in."""
    return isinstance(module, nn.Module) and KEY in vars(module)


def wrappers_of(model: nn.Module) -> list[nn.Module]:
    """Return the wrappers at and below ``model``, parents first. Local, pure."""
    return [module for module in model.modules() if is_wrapper(module)]


def wrappers_or_refuse(model: nn.Module, name: str) -> list[nn.Module]:
    """Return ``wrappers_of(model)`` for a static method of FSDP1's. Local, pure."""
    found = wrappers_of(model)
    if not found and any(isinstance(module, FSDPModule) for module in model.modules()):
        rule = "It is for models wrapped by FullyShardedDataParallel, and would do nothing"
        problem = "was called on a model that is sharded by shard_model or fully_shard"
        raise TranslationError(message(f"FSDP.{name}", problem, rule, MEMBERS[name].fix()))
    return found


def roots_of(model: nn.Module) -> list[nn.Module]:
    """Return the wrappers at and below ``model`` that are not inside another one. Local, pure."""
    found = wrappers_of(model)
    inside = {below for each in found for below in wrappers_of(each) if below is not each}
    return [each for each in found if each not in inside]


def without_wrappers(fqn: str) -> str:
    """Return the FQN before wrapping; the names that ``checkpoint_wrapper`` and ``torch.compile`` add stay."""
    return ".".join(part for part in fqn.split(".") if part != WRAPPED)


def inner_of(wrapper: nn.Module) -> nn.Module:
    """Return the wrapped module, also where ``checkpoint_wrapper`` was put around it later."""
    inner = wrapper._modules[WRAPPED]
    assert inner is not None, "set by the constructor"
    return getattr(inner, "_checkpoint_wrapped_module", inner)


def sharded_of(wrapper: nn.Module) -> FSDPModule | None:
    """Return the module that ``fully_shard`` was called on; None where it had no parameters left to shard."""
    outer = wrapper._modules[WRAPPED]
    found = outer if isinstance(outer, FSDPModule) else inner_of(wrapper)  # every forward asks
    return found if isinstance(found, FSDPModule) else None


def in_full_precision(wrapper: nn.Module) -> bool:
    """Return whether FSDP1 kept it in float32 under mixed precision, as it did BatchNorm."""
    record = record_of(wrapper)
    return not record.top and isinstance(inner_of(wrapper), full_precision_classes(record.mixed_precision))


# Errors that are also of the class that FSDP1 raised, because programs catch that one.


class Unavailable(TranslationError, RuntimeError):
    """What FSDP2 cannot do, where FSDP1 or torch raised a RuntimeError."""


class UnavailableAttribute(TranslationError, AttributeError):
    """An attribute that only FSDP1 has, so that ``hasattr`` and ``getattr`` with a default keep working."""
