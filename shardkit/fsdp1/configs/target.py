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
    """Which modules become units, besides the root."""

    # "classes" that are named, those that the model has "declared" (_no_split_modules), modules of a "size", the
    # "default" rule of shardkit, or none but the "root".
    by: Literal["classes", "declared", "size", "default", "root"]
    classes: tuple[str, ...] = ()  # names, also beside the declared ones
    min_num_params: int = 0  # elements
    embeddings: bool = False  # whether input embeddings are units too
    head: bool = False  # whether the output head is one too
    policy: Any = None  # FSDP1's auto_wrap_policy, where it is given as an object


@dataclass(frozen=True)
class Precision:
    """The dtypes of mixed precision; None keeps the parameter's own, or for ``reduce`` the one computed in."""

    param: torch.dtype | None = None
    reduce: torch.dtype | None = None
    output: torch.dtype | None = None
    buffer: torch.dtype | None = None

    @classmethod
    def of(cls, dtype: torch.dtype | None, version: int) -> Precision:
        """accelerate computes, reduces and returns in a dtype, and in version 1 of FSDP casts buffers instead."""
        return cls(dtype, dtype, dtype if version == 2 else None, dtype if version == 1 else None)


@dataclass(frozen=True)
class Target:
    """An FSDP2 configuration: all of a plan that does not depend on the model."""

    mesh: MeshSpec | None  # in ranks; None where nothing says how many ranks there are
    reshard_after_forward: bool | int = True  # of all units but the root; an int is ranks to reshard to
    root_reshards: bool = False
    wrap: Wrap = Wrap("default")
    precision: Precision = Precision()
    # "all" units cast what they are called with, "root" only, or all but the blocks of a vision encoder, "text".
    casts: Literal["all", "root", "text"] = "all"
    offload: bool = False  # whether shards, gradients and optimizer state live on the CPU
    pin_memory: bool | None = None  # None pins where there is an accelerator
    checkpoint_activations: bool = False  # of blocks
    compile: bool = False  # of blocks
    prefetch: int = 0  # units ahead to gather explicitly
    sync_module_states: bool = False  # whether the first rank's parameters and buffers are broadcast before sharding
    rank0_loads: bool = False  # whether only the first rank loads the weights, and the others start from meta
    state_dict_type: str | None = None  # "full" or "sharded"
    # Further axes of ranks, which the user brings: tensor, context, sequence or expert parallel, and their sizes.
    axes: Mapping[str, int] = field(default_factory=dict)
    # Arguments of FSDP1 that decide the plan, where the configuration is one of FSDP1.
    fsdp1: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Ranks:
    """What is known of the number of ranks besides the configuration; None is unknown."""

    world_size: int | None = None
    per_node: int | None = None

    def told(self, world_size: int | None) -> str:
        """The answer for a key that gives the ranks in all."""
        return _told("ranks in all", world_size, self.world_size)

    def told_of_a_node(self, per_node: int | None) -> str:
        """The answer for a key that gives the ranks of a node."""
        return _told("ranks of a node", per_node, self.per_node)


def _told(what: str, found: int | None, asked: int | None) -> str:
    if asked is not None and asked != found:
        return f"noted: {asked} {what} were asked for instead."
    return f"mapped: {found} {what}." if found is not None else f"mapped: Unknown {what}."


@dataclass(frozen=True)
class Reading:
    """A configuration that was read: its format, the keys that gave the format away, what it asks for, and what became
    of each key, in the order of the file.
    """

    format: str
    saw: tuple[str, ...]
    target: Target
    notes: tuple[Note, ...]

    @property
    def refused(self) -> tuple[Note, ...]:
        """The notes on what FSDP2 cannot do."""
        return tuple(note for note in self.notes if note.fate == "refused")
