"""Translate configuration files of other tools: ``from_config``.

A format's tables answer for its keys through a ``reader``, and make a ``target`` of them, which builds the plan of a
model or is written as accelerate's file.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist
import torch.nn as nn

from shardkit.errors import TranslationError, listing, message
from shardkit.fsdp1.configs import accelerate, roll, trainers
from shardkit.fsdp1.configs.reader import Reader, load
from shardkit.fsdp1.configs.target import Ranks, Reading, Target, build
from shardkit.fsdp1.translate.arguments import Note
from shardkit.fsdp1.translate.shard import Translation
from shardkit.fsdp1.translate.strategy import check_ranks

FORMATS: dict[str, Callable[[Reader, Ranks], Target]] = {
    "accelerate": accelerate.read,
    "axolotl": trainers.read_axolotl,
    "transformers": trainers.read_transformers,
    "roll": roll.read,
}
_SIGNS = {  # keys that only one tool has; transformers' come last, since axolotl passes them on
    "accelerate": "distributed_type compute_environment main_training_function num_machines parallelism_config",
    "axolotl": "base_model datasets micro_batch_size sequence_len fsdp_version fsdp_final_state_dict_type "
    "dp_shard_size dp_replicate_size context_parallel_size adapter load_in_8bit load_in_4bit fp32_norms",
    "roll": "strategy_args strategy_config strategy_name fsdp_size wrap_policy",
    "transformers": "per_device_train_batch_size num_train_epochs fsdp",
}
_WHOLE = (
    "The root is the only unit, so the whole model is gathered at once, which is rarely intended. Name the classes "
    "of its blocks in a wrap policy, or call shard_model(model), which makes a unit of each block."
)


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
    keys: accelerate, transformers' TrainingArguments, axolotl and ROLL. Each note says whether its key is mapped,
    implied, noted, refused, not about sharding, or unknown.

    Args:
        config: the configuration, or the path of a JSON or YAML file. YAML needs PyYAML.
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
    """Return what a configuration asks for, without a model; refused keys are among the notes."""
    for name, value in (("world_size", ranks.world_size), ("ranks_per_node", ranks.per_node)):
        if value is not None:
            check_ranks(name, value)
    values = config if isinstance(config, Mapping) else load(config)
    if isinstance(values.get("fsdp_config"), str):  # the path of a JSON file, for transformers
        values = {**values, "fsdp_config": load(values["fsdp_config"])}
    name = _format_of(values) if format is None else format
    if name not in FORMATS:
        raise TranslationError(message("format", f"must be one of {listing(FORMATS)}, got {name!r}", "", ""))
    reader = Reader(values)
    # The ranks that run come before those in the file, which may have been written for another job.
    if ranks.world_size is None and (dist.is_initialized() or "WORLD_SIZE" in os.environ):
        world = dist.get_world_size() if dist.is_initialized() else int(os.environ["WORLD_SIZE"])
        local = os.environ.get("LOCAL_WORLD_SIZE", "")
        ranks = Ranks(world, ranks.per_node or (int(local) if local.isdecimal() else None))
    target = FORMATS[name](reader, ranks)
    notes = reader.finish()
    alone = (Note("units", "the root alone", "noted", _WHOLE),) if target.wrap.by == "root" else ()
    return Reading(name, target, (*notes, *alone))


def _format_of(config: Mapping[Any, Any]) -> str:
    found = {each: tuple(sign for sign in signs.split() if sign in config) for each, signs in _SIGNS.items()}
    roles = (key for key, value in config.items() if isinstance(value, Mapping) and "strategy_args" in value)
    found["roll"] += tuple(f"{key}.strategy_args" for key in roles)
    found = {each: keys for each, keys in found.items() if keys}
    if len(found) > 1:
        found.pop("transformers", None)
    if len(found) != 1:
        seen = ", and of ".join(f"{each} ({listing(keys, 3)})" for each, keys in found.items())
        problem = f"has keys of {seen}" if seen else "has none of the keys of a known format"
        known = "; ".join(f"{each} ({listing(signs.split(), 3)})" for each, signs in _SIGNS.items())
        rule = f"Formats and some of their keys are {known}"
        raise TranslationError(message("config", problem, rule, "Name the format with format=, or --format"))
    return next(iter(found))
