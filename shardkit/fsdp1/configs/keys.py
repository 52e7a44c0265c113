"""What the keys of three tools' configurations mean for FSDP2: data only.

Perishable facts, each with its source and the versions it was read from.
"""

from __future__ import annotations

from shardkit.fsdp1.configs.reader import (
    BOOLEAN,
    NAMES,
    RANKS,
    SECTION,
    Key,
    Kind,
    Table,
    choice,
    if_set,
    switch,
)
from shardkit.fsdp1.translate.strategy import parse_strategy

# --- fsdp_config: accelerate 0.12 to 1.15, FullyShardedDataParallelPlugin; transformers; axolotl --

VERSION = Key(choice(("1", "2")), "mapped: The FSDP version by which the other keys are read.")
STRATEGY = Kind(  # as accelerate, which refuses a switch in version 1
    "a sharding strategy or its number (true and false need fsdp_version: 2)",
    "FULL_SHARD",
    parse_strategy,
)
POLICIES = {
    "TRANSFORMER_BASED_WRAP": "mapped: A unit of each module of the classes that are named, or "
    "that the model lists in _no_split_modules.",
    "SIZE_BASED_WRAP": "refused: Only code wraps by size: shard_model(units=[by_size(...)]).",
    "NO_WRAP": "mapped: The root is the only unit.",
}
STATE_DICTS = {
    "FULL_STATE_DICT": "noted: model.state_dict() is sharded; full_state_dict(model) gathers it.",
    "LOCAL_STATE_DICT": "refused: FSDP2 has no local state dict. Use SHARDED_STATE_DICT.",
    "SHARDED_STATE_DICT": "noted: Save with save_checkpoint or torch.distributed.checkpoint.",
}
COMPILE = "noted: Not part of the plan: pass compile=True to shard_model."
CONTEXT = "elsewhere: For other kinds of context parallelism; see split_sequence."
NAMED = "mapped: With TRANSFORMER_BASED_WRAP a unit of each {}."
SPLIT = (
    "mapped: These {0} ranks shard too. If more than 1, call "
    'split_sequence(model, training_mesh(sp={0})["sp"]).'
)
_PINNED = "implied: Offloaded shards are pinned where there is an accelerator."

FSDP: Table = {
    "version": VERSION,
    "offload_params cpu_offload": switch("mapped: CPUOffloadPolicy for every unit."),
    "activation_checkpointing": switch(
        "mapped: checkpoint_activations=True for blocks; turn gradient_checkpointing off."
    ),
    "cpu_ram_efficient_loading": switch(
        "noted: Only rank 0 read the weights. Build under init_on_meta, then load_pretrained."
    ),
    "state_dict_type final_state_dict_type": Key(
        choice(STATE_DICTS, numbered=True), STATE_DICTS, "SHARDED_STATE_DICT"
    ),
    "auto_wrap_policy": Key(choice(POLICIES, numbered=True), POLICIES),
    "transformer_layer_cls_to_wrap": Key(NAMES, NAMED, ()),
    "min_num_params": if_set("noted: Only SIZE_BASED_WRAP uses it."),
    "ignored_modules": if_set("refused: Pass the parameters as ignored_params to plan_model."),
    "mixed_precision_policy": "noted: Taken from mixed_precision, as accelerate does.",
    "xla xla_fsdp_v2 xla_fsdp_settings xla_fsdp_grad_ckpt": if_set("refused: XLA has no FSDP2."),
}
FSDP_1: Table = {
    **FSDP,
    "sharding_strategy reshard_after_forward": Key(
        STRATEGY, "mapped: The mesh and reshard_after_forward; the first key takes precedence."
    ),
    "cpu_offload_pin_memory": switch(
        _PINNED,
        "refused: FSDP1 always pins offloaded parameters. Set fsdp_version: 2 to turn it off.",
        default=True,
    ),
    "sync_module_states": switch("mapped: Rank 0's values are broadcast.", default=True),
    "forward_prefetch": switch("mapped: prefetch=1: each unit all-gathers the next one."),
    "limit_all_gathers use_orig_params": switch(
        "implied: Always so in FSDP2.", "noted: FSDP2 has no other way.", default=True
    ),
    "backward_prefetch backward_prefetch_policy": "noted: FSDP2 prefetches like BACKWARD_PRE.",
}
_READS = "noted: Version 2 reads reshard_after_forward."
_IGNORES = "refused: Version 2 ignores it. Set fsdp_version: 1, or the sizes of a mesh."
_STRATEGIES_2 = {
    "FULL_SHARD": _READS,
    "SHARD_GRAD_OP": _READS,
    "NO_SHARD": _IGNORES,
    "HYBRID_SHARD": _IGNORES,
    "HYBRID_SHARD_ZERO2": _IGNORES,
}
FSDP_2: Table = {
    **FSDP,
    "reshard_after_forward": Key(
        BOOLEAN, "mapped: reshard_after_forward={}, in all units but the root.", True
    ),
    "sharding_strategy": Key(choice(_STRATEGIES_2, numbered=True), _STRATEGIES_2),
    "cpu_offload_pin_memory": switch(_PINNED, "mapped: Shards are not pinned.", default=True),
    "forward_prefetch": switch("refused: Version 2 has no such key: pass prefetch=1 yourself."),
    "backward_prefetch backward_prefetch_policy limit_all_gathers use_orig_params "
    "sync_module_states": "noted: Version 2 has no such key.",
}

# --- Sizes of the axes of a mesh -----------------------------------------------------------------

_SIZE = "mapped: A mesh axis of {} ranks."
_BESIDE = "noted: {} ranks: if more than 1, split before sharding, and pass the other axes' mesh."
# By the axis: its key in accelerate's parallelism_config, its key in axolotl's file, and the answer
# to both.
AXES = {
    "dp_replicate": ("dp_replicate_size", "dp_replicate_size", _SIZE),
    "dp_shard": ("dp_shard_size", "dp_shard_size", _SIZE),
    "cp": ("cp_size", "context_parallel_size", SPLIT),
    "sp": ("sp_size", "sequence_parallel_size", SPLIT),
    "tp": ("tp_size", "tensor_parallel_size", _BESIDE),
    "ep": ("ep_size", "expert_parallel_size", _BESIDE),
}
PARALLELISM: Table = {key: Key(RANKS, answer) for key, _, answer in AXES.values()} | {
    "cp_comm_strategy cp_handler cp_backend sp_handler sp_backend": CONTEXT
}

# --- accelerate's file ---------------------------------------------------------------------------

_TYPES = {"FSDP": "mapped: As fsdp_config says."}
_TYPES |= dict.fromkeys(("TP", "XLA", "TPU", "MEGATRON_LM"), "refused: {} is not FSDP.")
_TYPES["DEEPSPEED"] = "refused: ZeRO 3 is shard_model's default, 2 reshard_after_forward=False."
_TYPES |= dict.fromkeys(
    ("NO", "MULTI_GPU", "MULTI_CPU", "MULTI_XPU", "MULTI_NPU", "MULTI_MLU", "MULTI_MUSA"),
    "noted: With {} accelerate ignores fsdp_config. It is translated here as for FSDP.",
)
_CAST = "mapped: MixedPrecisionPolicy with {}; accelerate casts trainable parameters to float32."
ACCELERATE: Table = {
    "fsdp_config parallelism_config": SECTION,
    "distributed_type": Key(choice(_TYPES), _TYPES, "FSDP"),
    "num_processes": Key(RANKS, "mapped: {} ranks, unless the command or torchrun says otherwise."),
    "num_machines": Key(RANKS, "mapped: {} nodes, by which hybrid strategies shard.", 1),
    "mixed_precision": Key(
        choice(("no", "fp16", "bf16", "fp8")),
        {
            "no": "mapped: Computes and reduces in the parameters' dtypes.",
            "bf16": _CAST,
            "fp16": _CAST + " Scale the loss with GradScaler.",
            "fp8": "refused: Convert layers with torchao before sharding, and use bf16 here.",
        },
        "no",
    ),
    "dynamo_config dynamo_backend": COMPILE,
    "*": "elsewhere: Not about sharding, as far as shardkit knows.",
}

# --- transformers 4 and 5.23, TrainingArguments; axolotl 0.5 to 0.16 ------------------------------


def _words(value: object) -> tuple[str, ...] | None:
    if isinstance(value, bool) or str(value).lower() in ("true", "1"):
        return None if value else ()
    words = value.split() if isinstance(value, str) else value
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise ValueError
    return tuple(word.lower().replace(",", "") for word in words)


WORDS = Kind("true, or words such as full_shard auto_wrap", "true", _words)
_DEPENDS = "noted: auto and full depend on the GPU; bf16 is assumed."
_AMP = {
    True: "mapped: MixedPrecisionPolicy with this dtype.",
    False: "mapped: Off.",
    "full": _DEPENDS,
    "auto": _DEPENDS,
}


def _amp(value: object) -> bool | str:
    return str(value) if value in ("auto", "full") else BOOLEAN.parse(value)


TRAINER: Table = {
    "fsdp_config": SECTION,
    "fsdp": Key(WORDS, "mapped: Words are FSDP1's; true is FSDP2.", ()),
    "bf16 fp16": Key(Kind("true, false, auto or full", "true", _amp), _AMP, False),
    "gradient_checkpointing": if_set("noted: The model's own; see activation_checkpointing."),
    "deepspeed": if_set("refused: DeepSpeed is not translated."),
    "torch_compile torch_compile_backend torch_compile_mode": COMPILE,
    "fsdp_transformer_layer_cls_to_wrap fsdp_min_num_params": "refused: Move it into fsdp_config.",
    "*": "elsewhere: Not about sharding, as far as shardkit knows.",
}
AXOLOTL: Table = {
    "fsdp_version": VERSION,
    "fsdp_final_state_dict_type": FSDP["state_dict_type final_state_dict_type"],
    "context_parallel": if_set("refused: Write its size as context_parallel_size."),
    **{key: Key(RANKS, answer) for _, key, answer in AXES.values()},
    "load_in_8bit load_in_4bit": if_set("noted: Pass quantized weights as ignored_params."),
    "optimizer": "elsewhere: Built after sharding; bitsandbytes' do not support DTensors.",
    "ring_attn_func heads_k_stride": CONTEXT,
    "fp8_enable_fsdp_float8_all_gather": "noted: torchao's weights all-gather in fp8 anyway.",
    "fp32_norms": if_set(
        "refused: Make norms units: by_class('RMSNorm', mp_policy=MixedPrecisionPolicy(float32))."
    ),
    "fp32_norm_classes": "noted: Classes of fp32_norms.",
    "fp8": if_set("refused: Convert layers with torchao before sharding."),
    "qat": if_set("noted: Prepare the model for QAT before sharding."),
    "tiled_mlp": if_set(
        "refused: Leave it out, and pass the names of MLPs as tiles= to plan_model."
    ),
    "tiled_mlp_num_shards tiled_mlp_use_original_mlp": "noted: Of tiled_mlp.",
    "sequence_parallel_degree": "refused: Renamed to context_parallel_size in axolotl 0.12.",
    **TRAINER,
}
