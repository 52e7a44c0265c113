"""Translate configuration files of other tools: ``from_config``.

``recognize`` finds the format. The format's tables answer for its keys through a ``reader``, and make a ``target`` of
them. ``target`` builds the plan of a model; ``write`` writes a file or code.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
import torch.nn as nn

from shardkit.errors import TranslationError, message
from shardkit.fsdp1.configs.reader import Reader, load
from shardkit.fsdp1.configs.recognize import FORMATS, recognize
from shardkit.fsdp1.configs.target import Ranks, Reading, build
from shardkit.fsdp1.translate.shard import Translation
from shardkit.fsdp1.translate.strategy import check_ranks


def from_config(
    config: Mapping[Any, Any] | str | os.PathLike[str],
    model: nn.Module,
    *,
    world_size: int | None = None,
    ranks_per_node: int | None = None,
    format: str | None = None,
    strict: bool = True,
) -> Translation:
    """Return the plan that a configuration of another tool asks for, and a note for every key of it.

    Pure and local: the model does not change, and it may be on the meta device. Formats are recognized by their
    keys: accelerate, transformers' TrainingArguments, axolotl, ROLL, Lightning, DeepSpeed, and a plain YAML with
    ``fsdp: True``. Each note says whether its key is mapped, implied, noted, refused, not about sharding, or unknown.

    Args:
        config: the configuration, or the path of a JSON or YAML file, or of a program that calls
            ``TrainingArguments(fsdp=...)`` or accelerate's ``FullyShardedDataParallelPlugin(...)``. YAML needs PyYAML.
        model: the whole model, not sharded yet.
        world_size: ranks to plan for; None takes the process group's or torchrun's, else what the configuration says.
        ranks_per_node: ranks per node, for hybrid strategies; None takes torchrun's, or what the configuration says.
        format: ``"accelerate"``, ``"transformers"``, ...; None recognizes it by the keys.
        strict: raise if a key is refused; with False, look at ``Translation.refused`` yourself.

    Raises:
        TranslationError: the file cannot be read, its format is unknown, values are invalid, or keys are refused.
        PlanError: the model cannot be sharded as the configuration asks.
    """
    ranks = Ranks(world_size, ranks_per_node)
    reading = read_config(config, ranks, format=format)
    if strict and reading.refused:
        refusals = [message(note.argument, f"{note.value} is refused", note.sentence, "") for note in reading.refused]
        raise TranslationError("\n".join(refusals))
    return build(reading.target, model, reading.notes, ranks)


def read_config(
    config: Mapping[Any, Any] | str | os.PathLike[str], ranks: Ranks, *, format: str | None = None
) -> Reading:
    """Return what a configuration asks for, without a model.

    Raises:
        TranslationError: as ``from_config``, but not for refused keys, which are among the notes.
    """
    for name, value in (("world_size", ranks.world_size), ("ranks_per_node", ranks.per_node)):
        if value is not None:
            check_ranks(name, value)
    values = config if isinstance(config, Mapping) else load(config)
    name, saw = recognize(values, format)
    reader = Reader(values)
    # The ranks that run come before those in the file, which may have been written for another job.
    if ranks.world_size is None and (dist.is_initialized() or "WORLD_SIZE" in os.environ):
        world = dist.get_world_size() if dist.is_initialized() else int(os.environ["WORLD_SIZE"])
        local = os.environ.get("LOCAL_WORLD_SIZE", "")
        ranks = Ranks(world, ranks.per_node or (int(local) if local.isdecimal() else None))
    target = FORMATS[name].read(reader, ranks)
    return Reading(name, saw, target, reader.finish())
