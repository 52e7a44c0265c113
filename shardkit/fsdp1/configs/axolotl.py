"""axolotl's YAML: FSDP of version 1 and 2, with the sizes of a mesh beside it.

Facts from axolotl 0.5 to 0.16 (``utils/schemas``, ``docs/multi-gpu.qmd``, ``docs/nd_parallelism.qmd``), which hands
its settings to accelerate and transformers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from torch.distributed.fsdp import ShardingStrategy

from shardkit.fsdp1.configs.axes import Axes, read_axes
from shardkit.fsdp1.configs.axolotl_keys import is_elsewhere
from shardkit.fsdp1.configs.keys import POLICIES, STATE_DICTS, STRATEGIES, VERSION, VERSION_ANSWER, Given, read_fsdp
from shardkit.fsdp1.configs.reader import Reader
from shardkit.fsdp1.configs.target import Ranks, Target
from shardkit.fsdp1.configs.transformers import options, read_compile, read_precision
from shardkit.fsdp1.configs.values import ANYTHING, BOOLEAN, NAMES, choice
from shardkit.fsdp1.translate.strategy import parse_strategy

AXES = {
    "dp_shard": "dp_shard_size",
    "dp_replicate": "dp_replicate_size",
    "tp": "tensor_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_parallel_size",
}
_PREFERENCE = ("dpo", "kto", "orpo", "ipo")


def read(config: Reader, ranks: Ranks) -> Target:
    """The target of a whole file."""
    section = config.section("fsdp_config", prefix="fsdp_")
    version = _version(config, section)
    words = options(config, "fsdp")
    strategy = _strategy(config, words, section, version)
    axes = _axes(config, ranks, version)
    _refusals(config, version)
    given = Given(
        version,
        ranks,
        read_precision(config, version),
        strategy,
        offload="offload" in (words or ()),
        mesh=axes.mesh,
        axes=axes.others,
        root=True,  # axolotl hands reshard_after_forward to the root too
        policy=POLICIES[0] if version == 2 or "auto_wrap" in (words or ()) else POLICIES[2],
        compile=read_compile(config),
    )
    target = read_fsdp(section, given)
    target = replace(target, state_dict_type=_final_state_dict(config, section) or target.state_dict_type)
    for key in config:
        if is_elsewhere(key):
            config.note(key, "elsewhere", "It is about the model, the data or the training loop.")
    return target


def _version(config: Reader, section: Reader) -> Literal[1, 2]:
    """Beside ``fsdp_config``, or in it; without one, of keys that only version 1 has."""
    outside, inside = config.find("fsdp_version", VERSION), section.find("version", VERSION)
    if outside and inside and outside != inside:
        config.problem("fsdp_version", outside, f"fsdp_config says {inside}", "Leave one of them out")
    config.note("fsdp_version", *VERSION_ANSWER)
    section.note("version", *VERSION_ANSWER)
    if outside or inside:
        return 1 if (outside or inside) == "1" else 2
    old = config.raw("fsdp") or any(key in section for key in ("sharding_strategy", "use_orig_params"))
    return 1 if old or "reshard_after_forward" not in section else 2


def _strategy(config: Reader, words: tuple[str, ...] | None, section: Reader, version: int) -> ShardingStrategy | None:
    named = [word for word in words or () if word.upper() in STRATEGIES]
    odd = [word for word in words or () if word not in (*named, "offload", "auto_wrap")]
    if odd or len(named) > 1:
        rule = f"It lists one of {', '.join(name.lower() for name in STRATEGIES)}, and offload and auto_wrap"
        config.problem("fsdp", ", ".join(words or ()), rule, "Use full_shard and auto_wrap")
        return None
    strategy = parse_strategy(named[0]) if named else None
    hybrid = strategy is not None and strategy.name not in ("FULL_SHARD", "SHARD_GRAD_OP")
    if version == 2 and hybrid:
        config.note("fsdp", "refused", f"Version 2 has no {named[0]}: give dp_shard_size and dp_replicate_size.")
        return None
    if section.raw("sharding_strategy") is not None and strategy is not None and version == 1:
        config.note("fsdp", "noted", "fsdp_config.sharding_strategy goes before it.")
        return None
    sentence = STRATEGIES[strategy.name.lstrip("_")] if strategy else "It names no strategy."
    config.note("fsdp", "mapped" if strategy else "noted", sentence)
    return strategy


def _axes(config: Reader, ranks: Ranks, version: int) -> Axes:
    axes = read_axes(config, ranks, AXES, "all", _context(config))
    old = config.raw("sequence_parallel_degree")
    if old not in (None, 1):
        config.note("sequence_parallel_degree", "refused", "It is context_parallel_size since axolotl 0.12: say so.")
    config.note("sequence_parallel_degree", "implied", "None.") if old in (None, 1) else None
    config.note("ring_attn_func", "elsewhere", "It is for context parallelism, which is yours.")
    config.note("heads_k_stride", "elsewhere", "It is for context parallelism, which is yours.")
    if version == 1 and axes.given:
        key = next((key for key in AXES.values() if config.raw(key) not in (None, 1)), "context_parallel")
        config.problem(key, "with fsdp_version 1", "Meshes of several axes are for version 2", "Say fsdp_version: 2")
    return axes


def _context(config: Reader) -> Reader:
    """``context_parallel: {size: 8}``, which newer versions have beside ``context_parallel_size``."""
    section = config.section("context_parallel")
    for key in section:
        if key != "size":
            section.note(key, "elsewhere", "It is for context parallelism, which is yours.")
    return section


def _refusals(config: Reader, version: int) -> None:
    """What axolotl itself refuses, and other engines."""
    quantized = [key for key in ("load_in_8bit", "load_in_4bit") if config.get(key, BOOLEAN, False)]
    preference = str(config.raw("rl") or "").lower()
    for key in ("load_in_8bit", "load_in_4bit"):
        if key not in quantized:
            config.note(key, "implied", "Off.")
        elif version == 2 and preference in _PREFERENCE:
            sentence = (
                f"Version 2 cannot train quantized weights with rl: {preference}, which also needs a frozen copy."
            )
            config.note(key, "refused", sentence)
        else:
            sentence = "Quantized weights are not floating-point: pass them as ignored_params, or they are refused."
            config.note(key, "noted", sentence)
    config.note("rl", "elsewhere", "It is for the training loop.")
    optimizer = str(config.raw("optimizer") or "")
    broken = version == 2 and optimizer in ("adamw_8bit", "adamw_bnb_8bit")
    sentence = "bitsandbytes' kernels do not take DTensors. Use adamw_torch_8bit."
    config.note("optimizer", "refused" if broken else "elsewhere", sentence if broken else "Built after sharding.")
    _norms(config)
    deepspeed = config.raw("deepspeed")
    told = "Translate that DeepSpeed configuration instead; one model has one engine."
    config.note("deepspeed", "refused" if deepspeed else "implied", told if deepspeed else "None.")
    for key, what in (("fp8", "Convert layers with torchao before sharding."), ("qat", "Prepare it before sharding.")):
        on = config.raw(key) not in (None, False)
        config.note(key, "refused" if on and key == "fp8" else "noted" if on else "implied", what if on else "Off.")
    config.note("fp8_enable_fsdp_float8_all_gather", "noted", "torchao's Float8 weights gather in fp8 by themselves.")
    checkpointing = config.raw("gradient_checkpointing") not in (None, False)
    told = "The model recomputes by itself. Under FSDP use fsdp_config.activation_checkpointing instead."
    config.note("gradient_checkpointing", "noted" if checkpointing else "implied", told if checkpointing else "Off.")


def _norms(config: Reader) -> None:
    wanted = config.get("fp32_norms", BOOLEAN, False)
    classes = config.find("fp32_norm_classes", NAMES)
    sentence = (
        "Give shardkit by_class('RMSNorm', mp_policy=MixedPrecisionPolicy(...float32...)) before the blocks, so that "
        "norms are units of their own."
    )
    config.note("fp32_norms", "refused" if wanted else "implied", sentence if wanted else "Off.")
    config.note("fp32_norm_classes", "noted", f"The classes of fp32_norms: {', '.join(classes or ())}.")


def _final_state_dict(config: Reader, section: Reader) -> str | None:
    found = None
    for reader, key in ((section, "final_state_dict_type"), (config, "fsdp_final_state_dict_type")):
        kind = reader.find(key, choice(*STATE_DICTS))
        reader.note(key, "noted", "What is saved at the end: full_state_dict(model), or save_checkpoint for shards.")
        found = found or {"FULL_STATE_DICT": "full", "SHARDED_STATE_DICT": "sharded"}.get(kind or "")
    config.find("fsdp_final_state_dict_type", ANYTHING)
    return found
