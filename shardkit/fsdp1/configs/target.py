"""What a configuration asks of FSDP2, without a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from shardkit.fsdp1.translate.notes import Note
from shardkit.plan import MeshSpec


@dataclass(frozen=True)
class Wrap:
    """Which modules become units, besides the root.

    Attributes:
        by: ``"classes"`` that it names, those that the model has ``"declared"`` (``_no_split_modules``), modules of
            a ``"size"``, the ``"default"`` rule of shardkit, or none but the ``"root"``.
        classes: class names, for ``"classes"``, or beside the declared ones.
        min_num_params: elements, for ``"size"``.
        embeddings: whether input embeddings are units too.
        head: whether the output head is one too.
    """

    by: Literal["classes", "declared", "size", "default", "root"]
    classes: tuple[str, ...] = ()
    min_num_params: int = 0
    embeddings: bool = False
    head: bool = False


@dataclass(frozen=True)
class Precision:
    """The dtypes of mixed precision; None keeps the parameter's own, or for ``reduce`` the one computed in."""

    param: torch.dtype | None = None
    reduce: torch.dtype | None = None
    output: torch.dtype | None = None
    buffer: torch.dtype | None = None


@dataclass(frozen=True)
class Target:
    """An FSDP2 configuration: all of a plan that does not depend on the model.

    Attributes:
        mesh: shape and axis names, in ranks; None where nothing says how many ranks there are.
        reshard_after_forward: of all units but the root; an int is the number of ranks to reshard to.
        root_reshards: the root's ``reshard_after_forward``.
        wrap: which modules are units.
        precision: the dtypes of mixed precision.
        casts: ``"all"`` units cast what they are called with, ``"root"`` only, or all but the blocks of a vision
            encoder, ``"text"``.
        offload: whether shards, gradients and optimizer state live on the CPU.
        pin_memory: for ``offload``; None pins where there is an accelerator.
        checkpoint_activations: whether blocks recompute their forward in backward.
        compile: whether blocks are compiled.
        prefetch: units ahead to gather explicitly.
        sync_module_states: whether the first rank's parameters and buffers are broadcast before sharding.
        rank0_loads: whether only the first rank loads the weights, and the others start from meta.
        state_dict_type: ``"full"`` or ``"sharded"``, or None where it is not said.
        axes: further axes of ranks by name, which the user brings: tensor, context, sequence or expert parallel.
        fsdp1: arguments of FSDP1 that decide the plan where the configuration is one of FSDP1; None where it is not.
    """

    mesh: MeshSpec | None
    reshard_after_forward: bool | int = True
    root_reshards: bool | int = False
    wrap: Wrap = field(default_factory=lambda: Wrap("default"))
    precision: Precision = field(default_factory=Precision)
    casts: Literal["all", "root", "text"] = "all"
    offload: bool = False
    pin_memory: bool | None = None
    checkpoint_activations: bool = False
    compile: bool = False
    prefetch: int = 0
    sync_module_states: bool = False
    rank0_loads: bool = False
    state_dict_type: str | None = None
    axes: Mapping[str, int] = field(default_factory=dict)
    fsdp1: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Ranks:
    """What is known of the number of ranks besides the configuration; None is unknown."""

    world_size: int | None = None
    per_node: int | None = None


@dataclass(frozen=True)
class Reading:
    """A configuration that was read.

    Attributes:
        format: ``"accelerate"``, ``"transformers"``, ...
        saw: the keys that gave the format away.
        target: what it asks for.
        notes: what became of each key, in the order of the file.
    """

    format: str
    saw: tuple[str, ...]
    target: Target
    notes: tuple[Note, ...]

    @property
    def refused(self) -> tuple[Note, ...]:
        """The notes on what FSDP2 cannot do."""
        return tuple(note for note in self.notes if note.fate == "refused")
