"""``TrainingArguments`` of Hugging Face transformers: ``fsdp``, as text, list or switch, and ``fsdp_config``.

Facts from transformers 4.x and 5.23 (``training_args.py``): a string is read for FSDP1 where ``fsdp_config`` has no
version, as transformers 4 did; ``fsdp=True`` for FSDP2, as transformers 5 does.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import torch
from torch.distributed.fsdp import ShardingStrategy

from shardkit.errors import TranslationError
from shardkit.fsdp1.configs.files import load
from shardkit.fsdp1.configs.keys import POLICIES, STRATEGIES, VERSION, VERSION_ANSWER, Given, read_fsdp
from shardkit.fsdp1.configs.reader import Reader
from shardkit.fsdp1.configs.target import Precision, Ranks, Target
from shardkit.fsdp1.configs.values import ANYTHING, BOOLEAN, NAMES, NUMBER
from shardkit.fsdp1.translate.strategy import parse_strategy

_XLA = ("xla", "xla_fsdp_v2", "xla_fsdp_settings", "xla_fsdp_grad_ckpt")


def read(config: Reader, ranks: Ranks) -> Target:
    """The target of a mapping with ``fsdp``, ``fsdp_config`` and other training arguments."""
    section = _section(config)
    written = section.find("version", VERSION)
    section.note("version", *VERSION_ANSWER)
    words = options(config, "fsdp")
    version: Literal[1, 2] = 1 if (written or ("2" if words is None else "1")) == "1" else 2
    strategy = _strategy(config, words or (), version)
    given = Given(
        version,
        ranks,
        read_precision(config, version),
        strategy,
        offload="offload" in (words or ()),
        policy=_policy(config, section, words),
        compile=read_compile(config),
    )
    _refuse_xla(section)
    _elsewhere(config)
    return old_wrap(config, read_fsdp(section, given))


def options(config: Reader, key: str) -> tuple[str, ...] | None:
    """The words of ``fsdp="full_shard auto_wrap"`` or of a list of them; None where it only switches FSDP on."""
    value = config.raw(key)
    if isinstance(value, bool) or str(value).lower() in ("true", "1"):
        return None
    if value is None or value == "":
        return ()
    words = value.split() if isinstance(value, str) else value
    if isinstance(words, (list, tuple)) and all(isinstance(word, str) for word in words):
        return tuple(word.lower().replace(",", "") for word in words)
    config.problem(key, repr(value), "It is true, words such as full_shard auto_wrap, or a list of them", "Use true")
    return ()


def _strategy(config: Reader, words: tuple[str, ...], version: int) -> ShardingStrategy | None:
    strategies = [word for word in words if word.upper() in STRATEGIES]
    unknown = [word for word in words if word not in (*strategies, "offload", "auto_wrap")]
    if unknown or len(strategies) > 1:
        config.problem(
            "fsdp",
            " ".join(words),
            f"Its words are one of {', '.join(name.lower() for name in STRATEGIES)}, and offload and auto_wrap",
            "Use full_shard auto_wrap",
        )
        return None
    strategy = parse_strategy(strategies[0]) if strategies else None
    if strategy is not None and version == 2 and strategy.name not in ("FULL_SHARD", "SHARD_GRAD_OP"):
        sentence = f"Version 2 has no {strategies[0]}. Say version: 1 in fsdp_config, which shardkit then translates."
        config.note("fsdp", "refused", sentence)
        return None
    if config.raw("fsdp") in (False, None, "", []):
        config.note("fsdp", "refused", "It is off, so there is no sharding to translate.")
        return strategy
    told = STRATEGIES[strategy.name.lstrip("_")] if strategy else "FSDP is on; fsdp_config says how."
    also = " offload: CPUOffloadPolicy." if "offload" in words else ""
    wraps = " auto_wrap: units as fsdp_config says." if "auto_wrap" in words else ""
    config.note("fsdp", "mapped", told + also + wraps)
    return strategy


def _section(config: Reader) -> Reader:
    """The keys of ``fsdp_config``, which may be the path of a JSON file."""
    path = config.raw("fsdp_config")
    if not isinstance(path, str):
        return config.section("fsdp_config", prefix="fsdp_")
    try:
        values = load(path)
    except TranslationError as error:
        config.problem("fsdp_config", str(error), "It is a section, or the path of a JSON file", "Give one of them")
        values = {}
    config.note("fsdp_config", "mapped", "Each key of that file has a note of its own.")
    return config.beside(values, path, prefix="fsdp_")


def _policy(config: Reader, section: Reader, words: tuple[str, ...] | None) -> str:
    """What ``auto_wrap`` means where no policy is named: by size where a size is given, else by class."""
    if words is not None and "auto_wrap" not in words:
        return POLICIES[2]
    least = section.get("min_num_params", NUMBER, 0) or config.get("fsdp_min_num_params", NUMBER, 0)
    classes = section.find("transformer_layer_cls_to_wrap", NAMES)
    if least and classes and section.raw("auto_wrap_policy") is None:
        section.problem(
            "min_num_params",
            f"{least}, with transformer_layer_cls_to_wrap",
            "auto_wrap makes units by size or by class",
            "Leave one of them out, or say auto_wrap_policy",
        )
    return POLICIES[1] if least and words is not None else POLICIES[0]


def old_wrap(config: Reader, target: Target) -> Target:
    """The target with the keys that transformers before 4.34 had beside ``fsdp``."""
    least = config.get("fsdp_min_num_params", NUMBER, 0)
    config.note(
        "fsdp_min_num_params", "mapped" if least else "implied", f"Units from {least} elements." if least else "0."
    )
    classes = config.find("fsdp_transformer_layer_cls_to_wrap", NAMES)
    config.note("fsdp_transformer_layer_cls_to_wrap", "mapped", f"A unit of each {' and '.join(classes or ())}.")
    wrap = target.wrap
    if classes and wrap.by == "declared":
        return replace(target, wrap=replace(wrap, by="classes", classes=classes))
    if least and wrap.by in ("declared", "root"):
        return replace(target, wrap=replace(wrap, by="size", min_num_params=least))
    return target


def read_precision(config: Reader, version: int) -> Precision:
    """From ``bf16`` and ``fp16``, which the Trainer hands to accelerate as its mixed precision."""
    dtype: torch.dtype | None = None
    for key, found in (("fp16", torch.float16), ("bf16", torch.bfloat16)):
        value: Any = config.raw(key)
        if value in ("auto", "full"):
            sentence = "auto and full depend on the GPU that axolotl finds: bf16 was taken, as every recent one has it."
            config.note(key, "noted", sentence)
        on = (value in ("auto", "full") and key == "bf16") or (value != "auto" and config.get(key, BOOLEAN, False))
        dtype = found if on else dtype
        also = "buffers" if version == 1 else "outputs"
        scaler = " Scale the loss with torch.amp.GradScaler." if on and key == "fp16" else ""
        told = f"MixedPrecisionPolicy with {key} for parameters, gradients and {also}.{scaler}" if on else "Off."
        if value not in ("auto", "full"):
            config.note(key, "mapped", told)
    for key in ("bf16_full_eval", "fp16_full_eval", "tf32", "half_precision_backend", "fp16_opt_level", "float16"):
        config.note(key, "elsewhere", "It is for the training loop.")
    return Precision(dtype, dtype, dtype if version == 2 else None, dtype if version == 1 else None)


def read_compile(config: Reader) -> bool:
    """From ``torch_compile``."""
    compiled = config.raw("torch_compile") not in (None, "auto") and config.get("torch_compile", BOOLEAN, False)
    config.find("torch_compile_backend", ANYTHING)
    backend = config.raw("torch_compile_backend") in (None, "inductor")
    sentence = "compile=True: blocks are compiled in place, before sharding." if compiled else "Nothing is compiled."
    config.note("torch_compile", "mapped", sentence)
    told = "torch's default." if backend else "Compile blocks yourself for a backend other than inductor."
    config.note("torch_compile_backend", "implied" if backend else "noted", told)
    config.note("torch_compile_mode", "noted", "shardkit compiles each block with torch.compile's defaults.")
    return bool(compiled) and backend


def _refuse_xla(section: Reader) -> None:
    for key in _XLA:
        value = section.raw(key)
        on = value not in (None, False, {}, "false")
        sentence = "shardkit shards with torch's FSDP2, which does not run on XLA devices." if on else "Off."
        section.note(key, "refused" if on else "implied", sentence)


def _elsewhere(config: Reader) -> None:
    checkpointing = config.raw("gradient_checkpointing") not in (None, False)
    sentence = "The model recomputes by itself. Under FSDP use fsdp_config.activation_checkpointing instead."
    config.note(
        "gradient_checkpointing", "noted" if checkpointing else "implied", sentence if checkpointing else "Off."
    )
    for key in config:
        if key.startswith(("fsdp", "xla", "deepspeed")) or key in _SHARDING:
            continue
        if key in _ARGUMENTS or key.startswith(_ARGUMENT_PREFIXES):
            config.settle({key: ("elsewhere", "It is for the training loop.")})
    deepspeed = config.raw("deepspeed")
    sentence = "Translate that DeepSpeed configuration instead; one model has one engine." if deepspeed else "None."
    config.note("deepspeed", "refused" if deepspeed else "implied", sentence)


_ANSWERED = """
bf16 bf16_full_eval float16 fp16 fp16_full_eval fp16_opt_level gradient_checkpointing half_precision_backend tf32
torch_compile torch_compile_backend torch_compile_mode
"""
_SHARDING = frozenset(_ANSWERED.split())
_ARGUMENT_PREFIXES = ("per_device_", "save_", "eval_", "logging_", "hub_", "push_to_", "lr_", "dataloader_", "ddp_")
_WORDS = """
accelerator_config adam_beta1 adam_beta2 adam_epsilon data_seed disable_tqdm do_eval do_predict do_train
evaluation_strategy gradient_accumulation_steps gradient_checkpointing_kwargs greater_is_better group_by_length
ignore_data_skip include_tokens_per_second label_names learning_rate length_column_name load_best_model_at_end
local_rank log_level max_grad_norm max_steps metric_for_best_model model_name_or_path neftune_noise_alpha no_cuda
num_train_epochs optim optim_args output_dir overwrite_output_dir remove_unused_columns report_to
resume_from_checkpoint run_name seed skip_memory_metrics torch_empty_cache_steps use_cpu use_liger_kernel
warmup_ratio warmup_steps weight_decay
"""
_ARGUMENTS = frozenset(_WORDS.split())
