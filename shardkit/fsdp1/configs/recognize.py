"""Recognise the tool that a configuration is for, by its keys."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from shardkit.errors import TranslationError, listing, message
from shardkit.fsdp1.configs import accelerate, axolotl, deepspeed, lightning, plain, roll, transformers
from shardkit.fsdp1.configs.reader import Reader
from shardkit.fsdp1.configs.target import Ranks, Target


class Format(NamedTuple):
    """A tool's configuration.

    ``signs`` are keys that only this tool has. ``shared`` are groups of keys, as in ``a+b``, that decide where no
    format's own keys are present; all keys of a group must be.
    """

    read: Callable[[Reader, Ranks], Target]
    signs: str
    shared: str = ""


FORMATS: dict[str, Format] = {
    "accelerate": Format(
        accelerate.read,
        "distributed_type compute_environment main_training_function num_machines machine_rank rdzv_backend "
        "parallelism_config megatron_lm_config downcast_bf16 dynamo_config",
        "fsdp_config+num_processes fsdp_config+mixed_precision",
    ),
    "axolotl": Format(
        axolotl.read,
        "base_model datasets micro_batch_size sequence_len sample_packing fsdp_version fsdp_final_state_dict_type "
        "dp_shard_size dp_replicate_size context_parallel_size adapter load_in_8bit load_in_4bit fp32_norms",
    ),
    "transformers": Format(
        transformers.read,
        "per_device_train_batch_size num_train_epochs fsdp_transformer_layer_cls_to_wrap fsdp_min_num_params "
        "evaluation_strategy save_strategy",
        "fsdp+fsdp_config fsdp",
    ),
    "roll": Format(roll.read, "strategy_args strategy_config strategy_name fsdp_size wrap_policy *.strategy_args"),
    "lightning": Format(
        lightning.read,
        "trainer class_path init_args activation_checkpointing_policy data_parallel_size parallelize_fn "
        "save_distributed_checkpoint process_group_backend parallel_devices",
        "strategy+devices strategy+precision",
    ),
    "deepspeed": Format(
        deepspeed.read,
        "zero_optimization train_micro_batch_size_per_gpu zero_allow_untested_optimizer steps_per_print",
    ),
    "plain": Format(
        plain.read,
        "",
        "fsdp+sharding_strategy fsdp+world_size sharding_strategy+world_size",
    ),
}


def recognize(config: Mapping[Any, Any], name: str | None = None) -> tuple[str, tuple[str, ...]]:
    """Return the format of a configuration, which ``name`` may say, and the keys that show it.

    Raises:
        TranslationError: no format's keys are there, or keys of several formats, or there is no format of that name.
    """
    if name is not None and name not in FORMATS:
        raise TranslationError(message("format", repr(name), f"Formats are {listing(FORMATS)}", "Use one of them"))
    found = {each: keys for each, form in FORMATS.items() if (keys := _own(config, form))}
    if name is not None:
        return name, found.get(name, ())
    found = found or _shared(config)
    if len(found) != 1:
        signs = ((name, (form.signs or form.shared.replace("+", " ")).split()) for name, form in FORMATS.items())
        known = "; ".join(f"{name} ({listing(dict.fromkeys(keys), 3)})" for name, keys in signs)
        problem = "has keys of " + ", and of ".join(f"{each} ({listing(keys, 5)})" for each, keys in found.items())
        if not found:
            problem = f"has none of the keys of a known format. Its keys are {listing(map(str, config), 10) or 'none'}"
        rule = f"Formats and some of their keys are {known}"
        raise TranslationError(message("config", problem, rule, "Name the format with format=, or --format"))
    return next(iter(found.items()))


def _own(config: Mapping[Any, Any], form: Format) -> tuple[str, ...]:
    inner = [key for key, value in config.items() if isinstance(value, Mapping) and "strategy_args" in value]
    roles = [f"{key}.strategy_args" for key in inner] if "*.strategy_args" in form.signs else []
    return (*(sign for sign in form.signs.split() if sign in config), *roles)


def _shared(config: Mapping[Any, Any]) -> dict[str, tuple[str, ...]]:
    """Return the largest complete group of shared keys; ``fsdp: true`` alone is a plain file's."""
    groups = [(name, tuple(group.split("+"))) for name, form in FORMATS.items() for group in form.shared.split()]
    complete = [(name, keys) for name, keys in groups if {*keys} <= config.keys()]
    most = max((len(keys) for _, keys in complete), default=0)
    return {name: keys for name, keys in complete if len(keys) == most}
