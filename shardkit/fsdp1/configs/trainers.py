"""``TrainingArguments`` of Hugging Face transformers, and axolotl's YAML, which passes its settings on to them.

Facts from transformers 4.x and 5.23 (``training_args.py``): a string is read for FSDP1 where ``fsdp_config`` has no
version, as transformers 4 did; ``fsdp=True`` for FSDP2, as transformers 5 does. And from axolotl 0.5 to 0.16
(``utils/schemas``, ``docs/multi-gpu.qmd``, ``docs/nd_parallelism.qmd``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.fsdp import ShardingStrategy

from shardkit.fsdp1.configs import accelerate
from shardkit.fsdp1.configs.reader import BOOLEAN, NUMBER, RANKS, Key, Kind, Reader, Table, choice, given, switch
from shardkit.fsdp1.configs.target import Precision, Ranks, Target
from shardkit.fsdp1.translate.strategy import parse_strategy

_TRAINER: Table = {  # axolotl passes these to transformers
    "gradient_checkpointing": given(
        "noted: The model's own. Under FSDP use fsdp_config.activation_checkpointing instead."
    ),
    "deepspeed": given("refused: DeepSpeed is not translated."),
    "torch_compile torch_compile_backend torch_compile_mode": accelerate.COMPILE,
    "fsdp_transformer_layer_cls_to_wrap fsdp_min_num_params": "refused: Move it into fsdp_config.",
    "fsdp*": "unknown: shardkit does not know this key and ignores it.",
    "*": "elsewhere: Not about sharding, as far as shardkit knows.",
}
_XLA: Table = {  # of fsdp_config
    "xla xla_fsdp_v2 xla_fsdp_settings xla_fsdp_grad_ckpt": given("refused: FSDP2 does not run on XLA devices."),
}


def read_transformers(config: Reader, ranks: Ranks) -> Target:
    """Return the target of training arguments with ``fsdp`` and ``fsdp_config``."""
    config.read(_TRAINER)
    section = config.section("fsdp_config", prefix="fsdp_")
    section.read(_XLA)
    written = section.take("version", accelerate.VERSION)
    words = config.get("fsdp", _WORDS, ())
    version = int(written or ("2" if words is None else "1"))
    off = "refused: FSDP is off, so there is nothing to translate."
    strategy = _strategy(config, words or (), version, off)
    target = Target(None, precision=_precision(config, version), offload="offload" in (words or ()))
    # What auto_wrap means where no policy is named: by size where a size is given, else by class.
    policy = accelerate.BY_SIZE if words and section.get("min_num_params", NUMBER) else accelerate.BY_CLASS
    wraps = words is None or "auto_wrap" in words
    return accelerate.read_fsdp(section, version, ranks, target, strategy, policy if wraps else accelerate.ROOT_ONLY)


def _words(value: Any) -> tuple[str, ...] | None:
    if isinstance(value, bool) or str(value).lower() in ("true", "1"):
        return None
    words = value.split() if isinstance(value, str) else value
    if not isinstance(words, (list, tuple)) or not all(isinstance(word, str) for word in words):
        raise ValueError
    return tuple(word.lower().replace(",", "") for word in words)


# Of fsdp="full_shard auto_wrap" or a list; None where it only switches FSDP on or off.
_WORDS = Kind("true, words such as full_shard auto_wrap, or a list of them", "true", _words)


def _strategy(config: Reader, words: Sequence[str], version: int, off: str, later: str = "") -> ShardingStrategy | None:
    """Answer for ``fsdp``, with ``off`` if it is off and ``later`` if another key takes precedence."""
    named = [word for word in words if word.upper() in accelerate.STRATEGIES]
    if len(named) > 1 or not {*words} <= {*named, "offload", "auto_wrap"}:
        known = f"one of {', '.join(accelerate.STRATEGIES).lower()}, and offload and auto_wrap"
        config.problem("fsdp", f"must be {known}, got {' '.join(words)}", "Use full_shard auto_wrap")
        return None
    if version == 2 and named and named[0] not in ("full_shard", "shard_grad_op"):
        config.note("fsdp", f"refused: Version 2 has no {named[0]}: set the version to 1.")
        return None
    if named and later:
        config.note("fsdp", later)
        return None
    answer = accelerate.STRATEGIES[named[0].upper()] if named else "mapped: FSDP is on; fsdp_config says how."
    also = " offload: CPUOffloadPolicy." if "offload" in words else ""
    wraps = " auto_wrap: units as fsdp_config says." if "auto_wrap" in words else ""
    config.note("fsdp", off if config.raw("fsdp") in (False, None, "", []) else answer + also + wraps)
    return parse_strategy(named[0]) if named else None


def _precision(config: Reader, version: int) -> Precision:
    """Read ``bf16`` and ``fp16``, which the Trainer passes to accelerate as mixed precision."""
    dtype: torch.dtype | None = None
    also = "buffers" if version == 1 else "outputs"
    for key, found in (("fp16", torch.float16), ("bf16", torch.bfloat16)):
        depends = config.raw(key) in ("auto", "full")
        on = key == "bf16" if depends else config.get(key, BOOLEAN, False)
        scaler = " Scale the loss with torch.amp.GradScaler." if key == "fp16" else ""
        answer = f"mapped: MixedPrecisionPolicy with {key} for parameters, gradients and {also}.{scaler}"
        assumed = "noted: auto and full depend on the GPU; bf16 is assumed."
        config.note(key, assumed if depends else answer if on else "mapped: Off.")
        dtype = found if on else dtype
    return Precision.of(dtype, version)


# --- axolotl ----------------------------------------------------------------------------------------------------------

_FINAL = Key(
    choice(("FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT")),
    "noted: The last checkpoint: save full_state_dict(model), or shards with save_checkpoint.",
)
_AXOLOTL: Table = {  # from its schemas (0.16) and its examples
    **_TRAINER,
    "load_in_8bit load_in_4bit": given("noted: Quantized weights are not floating-point: pass them as ignored_params."),
    "optimizer": "elsewhere: Built after sharding. bitsandbytes' optimizers do not support DTensors.",
    "ring_attn_func heads_k_stride": accelerate.CONTEXT,
    "fp8_enable_fsdp_float8_all_gather": "noted: torchao's Float8 weights all-gather in fp8 on their own.",
    "fp32_norms": given(
        "refused: Make norms units first: by_class('RMSNorm', mp_policy=MixedPrecisionPolicy(torch.float32))."
    ),
    "fp32_norm_classes": "noted: Classes of fp32_norms.",
    "fp8": given("refused: Convert layers with torchao before sharding."),
    "qat": given("noted: Prepare the model for QAT before sharding."),
    "tiled_mlp_use_original_mlp": switch(
        "implied: Tiles are of the model's own MLPs.",
        "noted: Tiles are of the model's own MLPs, not of the generic one.",
        default=True,
    ),
    "sequence_parallel_degree": Key(
        RANKS,
        lambda size: "refused: Renamed to context_parallel_size in axolotl 0.12." if size > 1 else "implied: None.",
        1,
    ),
    "fsdp_version": accelerate.VERSION,
    "fsdp_final_state_dict_type": _FINAL,
}
_SECTION: Table = {"version": accelerate.VERSION, "final_state_dict_type": _FINAL}
_AXES = {
    "dp_shard": "dp_shard_size",
    "dp_replicate": "dp_replicate_size",
    "tp": "tensor_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_parallel_size",
}


def read_axolotl(config: Reader, ranks: Ranks) -> Target:
    """Return the target of axolotl's whole file."""
    section = config.section("fsdp_config", prefix="fsdp_")
    values, inside = config.read(_AXOLOTL), section.read(_SECTION)
    version = _version(config, section, values["fsdp_version"], inside["version"])
    words = config.get("fsdp", _WORDS, ()) or ()
    beside = version == 1 and section.raw("sharding_strategy") is not None
    later = "noted: fsdp_config.sharding_strategy takes precedence." if beside else ""
    strategy = _strategy(config, words, version, "noted: Names no strategy.", later)
    world, known = ranks.world_size, _context(config)
    mesh, others = accelerate.read_axes(config, version, world, _AXES, rest_shards=True, known=known)
    precision, tiles = _precision(config, version), _tiles(config)
    target = Target(mesh, precision=precision, offload="offload" in words, axes=others, tiles=tiles)
    policy = accelerate.BY_CLASS if version == 2 or "auto_wrap" in words else accelerate.ROOT_ONLY
    # axolotl hands reshard_after_forward to the root too.
    target = accelerate.read_fsdp(section, version, ranks, target, strategy, policy, root=True)
    final = inside["final_state_dict_type"] or values["fsdp_final_state_dict_type"]
    kept = {"FULL_STATE_DICT": "full", "SHARDED_STATE_DICT": "sharded"}.get(final, target.state_dict_type)
    return replace(target, state_dict_type=kept)


def _version(config: Reader, section: Reader, outside: str | None, inside: str | None) -> int:
    """Return the version given beside ``fsdp_config`` or in it, else 1 if there are keys that only version 1 has."""
    if outside and inside and outside != inside:
        config.problem("fsdp_version", f"is {outside}, but fsdp_config says {inside}", "Remove one of them")
    if version := outside or inside:
        return int(version)
    old = config.raw("fsdp") or any(key in section for key in ("sharding_strategy", "use_orig_params"))
    return 1 if old or "reshard_after_forward" not in section else 2


def _context(config: Reader) -> dict[str, int]:
    """Read the section that newer versions have for the size of the context axis."""
    context = config.section("context_parallel")
    size: int | None = context.get("size", RANKS)
    if size and (beside := config.get("context_parallel_size", RANKS, size)) != size:
        context.problem("size", f"is {size}, but context_parallel_size is {beside}", "Remove one of them")
    context.note("size", f"mapped: {accelerate.SPLIT.format(size)}.")
    context.read({"*": accelerate.CONTEXT})
    return {"cp": size} if size else {}


def _tiles(config: Reader) -> int:
    """Return the number of tiles of each MLP."""
    applies, number = config.get("tiled_mlp", BOOLEAN, False), config.get("tiled_mlp_num_shards", NUMBER) or 0
    unset = "refused: Without tiled_mlp_num_shards axolotl takes the sequence's length over the hidden size. Set it."
    config.note("tiled_mlp", (accelerate.TILES if number else unset) if applies else "implied: Off.")
    config.note("tiled_mlp_num_shards", "mapped: Tiles of each MLP." if applies else "implied: Only with tiled_mlp.")
    return max(number, 1) if applies else 1
