"""Translation: what became of FSDP1's arguments, as a plan and a note for each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh

from shardkit.fsdp1.instead import Fate as Fate
from shardkit.plan import ShardingPlan

ParamInitFn: TypeAlias = Callable[[nn.Module], object]


@dataclass(frozen=True)
class Note:
    """What became of one argument of FSDP1, or of one key of a configuration.

    Attributes:
        argument: its name, with a dot for a field of it: ``"mixed_precision.buffer_dtype"``.
        value: its value in short, as text.
        fate: one of ``FATES``.
        sentence: what was done, or why it was not.
    """

    argument: str
    value: str
    fate: Fate
    sentence: str

    def __str__(self) -> str:
        return f"{self.argument}={self.value}: {self.fate}. {self.sentence}"


@dataclass(frozen=True)
class Translation:
    """A plan, a note for every argument that was not left at its default, and what a plan cannot hold.

    Plain data, made without changing the model; ``print(translation)`` shows the plan's table and the notes.

    Attributes:
        plan: the ``fully_shard`` calls.
        notes: what became of each argument, in the order of FSDP1's signature, then what FSDP2 does otherwise.
        device_mesh: FSDP1's ``device_mesh``, where it can be used as it is; None builds one of ``plan.mesh``.
        process_groups: FSDP1's groups, one for each axis of ``plan.mesh``, so the replicating one first; empty for
            all ranks.
        device: FSDP1's ``device_id``, where the model is sharded and computes; None is the accelerator.
        param_init_fn: gives a meta module its values before it is sharded, as FSDP1 called it.
        sync_module_states: whether parameters and buffers are broadcast from the first rank before sharding.
        buffer_dtypes: what FSDP1 casts a floating-point buffer to at the first forward, by FQN.
        ignored_modules: FQNs of the modules that FSDP1 leaves alone.
        wrapped: FQNs of the modules that FSDP1 would have wrapped below the root, each with the arguments that a
            CustomPolicy gave for it.
        apart: FQNs of modules that are wrapped already, which stay as they are; the plan ignores their parameters.
    """

    plan: ShardingPlan
    notes: tuple[Note, ...] = ()
    device_mesh: DeviceMesh | None = None
    process_groups: tuple[dist.ProcessGroup, ...] = ()
    device: torch.device | None = None
    param_init_fn: ParamInitFn | None = None
    sync_module_states: bool = False
    buffer_dtypes: Mapping[str, torch.dtype] = field(default_factory=dict)
    ignored_modules: tuple[str, ...] = ()
    wrapped: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    apart: tuple[str, ...] = ()

    @property
    def refused(self) -> tuple[Note, ...]:
        """The notes on what FSDP2 cannot do; of a configuration file only, since arguments raise."""
        return tuple(note for note in self.notes if note.fate == "refused")

    def apply(self, model: nn.Module) -> nn.Module:
        """Shards ``model`` in place and returns it, as ``shard_like_fsdp1`` does. Collective.

        Raises:
            TranslationError, PlanError: as ``shard_like_fsdp1``.
        """
        from shardkit.fsdp1.translate.shard import apply_translation  # which imports this module

        return apply_translation(model, self)

    def materialize(
        self, model: nn.Module, device: torch.device | str | None = None, seed: int | None = None
    ) -> nn.Module:
        """Gives a meta model that ``apply_plan(model, translation.plan)`` has sharded its values. Collective.

        For those who shard by the plan alone; ``apply`` gives a model its values itself. ``param_init_fn``, if there
        is one, is called as ``shardkit.materialize`` calls ``init``, so it must write in place. Ends with the casts
        of ``buffer_dtypes``.

        Args:
            model: sharded, on meta.
            device, seed: as for ``shardkit.materialize``.

        Raises:
            ShardkitError: as ``shardkit.materialize``.
        """
        from shardkit.fsdp1.translate.shard import materialize_translated  # which imports this module

        return materialize_translated(model, self, device, seed)

    def __str__(self) -> str:
        return "\n".join([str(self.plan), "", *(f"{note}" for note in self.notes)])
