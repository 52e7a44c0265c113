"""Which tool a configuration is of, by its keys."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from shardkit.errors import TranslationError, listing, message
from shardkit.fsdp1.configs import accelerate, axolotl, deepspeed, lightning, plain, roll, transformers
from shardkit.fsdp1.configs.reader import Reader
from shardkit.fsdp1.configs.target import Ranks, Target


class Format(NamedTuple):
    """A tool's configuration.

    ``signs`` are keys that only this tool has. ``shared`` are those that tools share, for where nobody's own are there;
    all of a group, as in ``a+b``, must be.
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


def recognise(config: Mapping[Any, Any], name: str | None = None) -> tuple[str, tuple[str, ...]]:
    """The format's name, and the keys that gave it away.

    Args:
        config: the configuration.
        name: the format, where it is known.

    Raises:
        TranslationError: no format's keys are there, or those of several, or there is no such format.
    """
    if name is not None:
        if name not in FORMATS:
            raise TranslationError(message("format", repr(name), f"Formats are {listing(FORMATS)}", "Use one of them"))
        shared = (key for group in _groups(FORMATS[name]) for key in group)
        return name, _own(config, FORMATS[name]) or tuple(key for key in shared if key in config)
    found = {name: seen for name, each in FORMATS.items() if (seen := _own(config, each))} or _shared(config)
    if len(found) != 1:
        known = "; ".join(f"{name} ({listing(_examples(form), 3)})" for name, form in FORMATS.items())
        problem = "has keys of " + ", and of ".join(f"{name} ({listing(seen, 5)})" for name, seen in found.items())
        if not found:
            problem = f"has none of the keys of a known format. Its keys are {listing(map(str, config), 10) or 'none'}"
        rule = f"Formats and some of their keys are {known}"
        raise TranslationError(message("config", problem, rule, "Name it with format=, or --format"))
    return next(iter(found.items()))


def _own(config: Mapping[Any, Any], form: Format) -> tuple[str, ...]:
    seen = [sign for sign in form.signs.split() if sign in config]
    if "*.strategy_args" in form.signs:
        inner = [key for key, value in config.items() if isinstance(value, Mapping) and "strategy_args" in value]
        seen += [f"{key}.strategy_args" for key in inner]
    return tuple(seen)


def _shared(config: Mapping[Any, Any]) -> dict[str, tuple[str, ...]]:
    """Of groups of shared keys, the largest that is there whole; ``fsdp: true`` alone is a plain file's."""
    whole = [(name, keys) for name, form in FORMATS.items() for keys in _groups(form) if {*keys} <= config.keys()]
    most = max((len(keys) for _, keys in whole), default=0)
    found: dict[str, tuple[str, ...]] = {}
    for name, keys in whole:
        if len(keys) == most:
            found.setdefault(name, keys)
    return found


def _groups(form: Format) -> list[tuple[str, ...]]:
    return [tuple(group.split("+")) for group in form.shared.split()]


def _examples(form: Format) -> list[str]:
    return form.signs.split() or list(dict.fromkeys(key for group in _groups(form) for key in group))
