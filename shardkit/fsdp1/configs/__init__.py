"""Translate configuration files of other tools: ``from_config``.

``keys`` says what each key means, ``reader`` reads a file by it, ``formats`` puts the values of one
tool together as a ``target``, which builds the plan of a model.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
import torch.nn as nn

from shardkit.errors import TranslationError, listing
from shardkit.fsdp1.configs.formats import FORMATS, format_of
from shardkit.fsdp1.configs.reader import Config, load
from shardkit.fsdp1.configs.target import Ranks, Target, build
from shardkit.fsdp1.translate.notes import Note
from shardkit.fsdp1.translate.shard import Translation
from shardkit.fsdp1.translate.strategy import check_ranks

_ROOT_ALONE = Note(
    "units",
    "the root alone",
    "noted",
    "So the whole model is unsharded at once, which is rarely intended. Name the classes of its "
    "blocks in a wrap policy, or call shard_model(model), which makes a unit of each block.",
)


@dataclass(frozen=True)
class Reading:
    """A configuration that was read: its format, its target, and a note on each key."""

    format: str
    target: Target
    notes: tuple[Note, ...]

    @property
    def refused(self) -> list[Note]:
        """Return the notes on keys that are refused."""
        return [note for note in self.notes if note.support == "refused"]


def from_config(
    config: Mapping[Any, Any] | str | os.PathLike[str],
    model: nn.Module,
    *,
    world_size: int | None = None,
    ranks_per_node: int | None = None,
    format: str | None = None,
    strict: bool = True,
) -> Translation:
    """Return the plan that a configuration of another tool asks for, and a note for every key of
    it.

    Pure and local: the model does not change, and it may be on the meta device. Formats are
    recognized by their keys: accelerate, transformers' TrainingArguments and axolotl.

    Args:
        config: the configuration, or the path of a JSON or YAML file. YAML needs PyYAML.
        model: the whole model, not sharded yet.
        world_size: ranks to plan for; None takes the process group's or torchrun's, else what the
            configuration says.
        ranks_per_node: ranks per node, for hybrid strategies; None likewise.
        format: ``"accelerate"``, ``"transformers"``, ...; None recognizes it by the keys.
        strict: raise if a key is refused; with False, look at ``Translation.refused`` yourself.

    Raises:
        TranslationError: the file cannot be read, its format is unknown, values are invalid, or
            keys are refused.
        PlanError: the model cannot be sharded as the configuration asks.
    """
    ranks = Ranks(world_size, ranks_per_node)
    reading = read_config(config, ranks, format=format)
    if strict and reading.refused:
        lines = [
            f"{note.argument} {note.value} is refused. {note.sentence}" for note in reading.refused
        ]
        raise TranslationError("\n".join(lines))
    return build(reading.target, model, reading.notes)


def read_config(
    config: Mapping[Any, Any] | str | os.PathLike[str], ranks: Ranks, *, format: str | None = None
) -> Reading:
    """Return what a configuration asks for, without a model; refused keys are among the notes."""
    for name, value in (("world_size", ranks.world_size), ("ranks_per_node", ranks.per_node)):
        if value is not None:
            check_ranks(name, value)
    values = config if isinstance(config, Mapping) else load(config)
    if isinstance(values.get("fsdp_config"), str):  # the path of a JSON file, for transformers
        values = {**values, "fsdp_config": load(values["fsdp_config"])}
    name = format_of(values) if format is None else format
    if name not in FORMATS:
        raise TranslationError(
            f"format must be one of {listing(FORMATS)}, got {name!r}. For other tools pass the "
            "settings of the file to shard_model."
        )
    read = Config(values)
    target = FORMATS[name](read, _ranks_that_run(ranks))
    notes = read.finish()
    if not target.wraps:
        notes = (*notes, _ROOT_ALONE)
    return Reading(name, target, notes)


def _ranks_that_run(ranks: Ranks) -> Ranks:
    """Return the ranks that run, which come before those in a file, perhaps of another job."""
    if ranks.world_size is not None:
        return ranks
    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    per_node = ranks.per_node or (int(local) if local.isdecimal() else None)
    if dist.is_initialized():
        return Ranks(dist.get_world_size(), per_node)
    if "WORLD_SIZE" in os.environ:
        return Ranks(int(os.environ["WORLD_SIZE"]), per_node)
    return ranks
