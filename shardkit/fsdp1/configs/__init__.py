"""Configuration files of other tools, translated: ``from_config``.

``recognise`` says whose file it is. That format's tables answer for its keys, which a ``reader`` walks, and make a
``target`` of them, which makes a plan of a model; ``write`` makes a file or code of it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
import torch.nn as nn

from shardkit.errors import TranslationError, message
from shardkit.fsdp1.configs.reader import Reader, load
from shardkit.fsdp1.configs.recognise import FORMATS, recognise
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
    """The plan that a configuration of another tool asks for, and a note for every key of it.

    Pure and local: nothing of the model changes, and it may be on the meta device. Formats are recognised by their
    keys: accelerate, transformers' TrainingArguments, axolotl, ROLL, Lightning, DeepSpeed, and a plain YAML with
    ``fsdp: True``. A key is mapped, implied, noted or refused; of those that are not about sharding, or that shardkit
    does not know, the notes say so.

    Args:
        config: the configuration, or the path of a JSON or YAML file; YAML needs PyYAML.
        model: the whole model, not sharded yet.
        world_size: ranks to plan for; None is what the configuration says, else the process group or torchrun.
        ranks_per_node: ranks of a node, for hybrid strategies; None is what the configuration or torchrun says.
        format: ``"accelerate"``, ``"transformers"``, ...; None recognises it.
        strict: raise where a key is refused; False leaves that to you, by ``Translation.refused``.

    Raises:
        TranslationError: the file or its format is unknown, values are not of their kind, or keys are refused.
        PlanError: the model cannot be sharded so.
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
    """What a configuration asks for, without a model.

    Raises:
        TranslationError: as for ``from_config``, but for refused keys, which are among the notes.
    """
    for name, value in (("world_size", ranks.world_size), ("ranks_per_node", ranks.per_node)):
        if value is not None:
            check_ranks(name, value)
    values = config if isinstance(config, Mapping) else load(config)
    name, saw = recognise(values, format)
    reader = Reader(values)
    target = FORMATS[name].read(reader, _ranks_of(ranks))
    return Reading(name, saw, target, reader.finish())


def _ranks_of(ranks: Ranks) -> Ranks:
    """Those that were asked for, else those that run: a file's own number is for the job that it was written for."""
    if ranks.world_size is not None or not (dist.is_initialized() or "WORLD_SIZE" in os.environ):
        return ranks
    world = dist.get_world_size() if dist.is_initialized() else int(os.environ["WORLD_SIZE"])
    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    return Ranks(world, ranks.per_node or (int(local) if local.isdecimal() else None))
