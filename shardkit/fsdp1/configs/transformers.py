"""``TrainingArguments`` of Hugging Face transformers: ``fsdp``, as text, list or switch, and ``fsdp_config``.

Facts from transformers 4.x and 5.23 (``training_args.py``): a string is read for FSDP1 where ``fsdp_config`` has no
version, as transformers 4 did; ``fsdp=True`` for FSDP2, as transformers 5 does.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.fsdp import ShardingStrategy

from shardkit.fsdp1.configs.accelerate import BY_CLASS, BY_SIZE, COMPILE, ROOT_ONLY, STRATEGIES, VERSION, read_fsdp
from shardkit.fsdp1.configs.reader import BOOLEAN, NUMBER, Answer, Kind, Reader, Table, given
from shardkit.fsdp1.configs.target import Precision, Ranks, Target
from shardkit.fsdp1.translate.strategy import parse_strategy

OTHERS: Table = {
    "fsdp*": "unknown: shardkit does not know this key and ignores it.",
    "*": "elsewhere: Not about sharding, as far as shardkit knows.",
}
# axolotl passes these to transformers too.
TRAINER: Table = {
    "gradient_checkpointing": given(
        "noted: The model's own. Under FSDP use fsdp_config.activation_checkpointing instead.",
        "implied: Off.",
    ),
    "deepspeed": given("refused: DeepSpeed is not translated."),
    "bf16_full_eval float16 fp16_full_eval fp16_opt_level half_precision_backend tf32": (
        "elsewhere: For the training loop."
    ),
    "torch_compile torch_compile_backend torch_compile_mode": COMPILE,
}
_KEYS: Table = {
    **TRAINER,
    "fsdp_transformer_layer_cls_to_wrap fsdp_min_num_params": "refused: Move it into fsdp_config.",
    **OTHERS,
}
_XLA: Table = {  # of fsdp_config
    "xla xla_fsdp_v2 xla_fsdp_settings xla_fsdp_grad_ckpt": given(
        "refused: FSDP2 does not run on XLA devices.", "implied: Off."
    ),
}


def read(config: Reader, ranks: Ranks) -> Target:
    """Return the target of training arguments with ``fsdp`` and ``fsdp_config``."""
    config.read(_KEYS)
    section = config.section("fsdp_config", prefix="fsdp_")
    section.read(_XLA)
    written = section.take("version", VERSION)
    words = config.get("fsdp", WORDS, ())
    version = int(written or ("2" if words is None else "1"))
    off = "refused: FSDP is off, so there is nothing to translate."
    strategy = read_strategy(config, words or (), version, ". Set version: 1 in fsdp_config.", off)
    target = Target(
        None,
        precision=read_precision(config, version),
        offload="offload" in (words or ()),
    )
    # What auto_wrap means where no policy is named: by size where a size is given, else by class.
    by_size = words and section.get("min_num_params", NUMBER)
    policy = ROOT_ONLY if words is not None and "auto_wrap" not in words else BY_SIZE if by_size else BY_CLASS
    return read_fsdp(section, version, ranks, target, strategy, policy)


def _words(value: Any) -> tuple[str, ...] | None:
    if isinstance(value, bool) or str(value).lower() in ("true", "1"):
        return None
    words = value.split() if isinstance(value, str) else value
    if not isinstance(words, (list, tuple)) or not all(isinstance(word, str) for word in words):
        raise ValueError
    return tuple(word.lower().replace(",", "") for word in words)


# Of fsdp="full_shard auto_wrap" or a list; None where it only switches FSDP on or off.
WORDS = Kind("true, words such as full_shard auto_wrap, or a list of them", "true", _words)


def read_strategy(
    config: Reader, words: tuple[str, ...], version: int, fix: str, off: Answer, later: Answer | None = None
) -> ShardingStrategy | None:
    """Return the strategy among the words of ``fsdp``, and answer for that key.

    The answer is ``off`` if FSDP is off, ``later`` if another key takes precedence; ``fix`` ends the answer for a
    strategy that version 2 does not have.
    """
    named = [word for word in words if word.upper() in STRATEGIES]
    if len(named) > 1 or not {*words} <= {*named, "offload", "auto_wrap"}:
        known = f"one of {', '.join(STRATEGIES).lower()}, and offload and auto_wrap"
        config.problem("fsdp", f"must be {known}, got {' '.join(words)}", "", "Use full_shard auto_wrap")
        return None
    if version == 2 and named and named[0] not in ("full_shard", "shard_grad_op"):
        config.note("fsdp", f"refused: Version 2 has no {named[0]}{fix}")
        return None
    if named and later:
        config.note("fsdp", later)
        return None
    answer = STRATEGIES[named[0].upper()] if named else "mapped: FSDP is on; fsdp_config says how."
    also = " offload: CPUOffloadPolicy." if "offload" in words else ""
    wraps = " auto_wrap: units as fsdp_config says." if "auto_wrap" in words else ""
    config.note("fsdp", off if config.raw("fsdp") in (False, None, "", []) else answer + also + wraps)
    return parse_strategy(named[0]) if named else None


def read_precision(config: Reader, version: int) -> Precision:
    """Read ``bf16`` and ``fp16``, which the Trainer passes to accelerate as mixed precision."""
    dtype: torch.dtype | None = None
    also = "buffers" if version == 1 else "outputs"
    for key, found in (("fp16", torch.float16), ("bf16", torch.bfloat16)):
        if config.raw(key) in ("auto", "full"):
            on = key == "bf16"
            answer = "noted: auto and full depend on the GPU; bf16 is assumed."
        else:
            on = config.get(key, BOOLEAN, False)
            scaler = " Scale the loss with torch.amp.GradScaler." if key == "fp16" else ""
            answer = f"mapped: MixedPrecisionPolicy with {key} for parameters, gradients and {also}.{scaler}"
            answer = answer if on else "mapped: Off."
        config.note(key, answer)
        dtype = found if on else dtype
    return Precision.of(dtype, version)
