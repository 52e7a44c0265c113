"""The keys of each configuration format with values that people give them, for random configurations."""

from hypothesis import strategies as st

BOOL = st.sampled_from([True, False, "true", "no", None])
RANKS = st.sampled_from([1, 2, 8, 16, "8"])
STRATEGY = st.sampled_from(
    ["FULL_SHARD", "shard_grad_op", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2", 1, 2, 3, 4, 5, "4", None]
)
CLASSES = st.sampled_from(["Block", "Block,Linear", ["Block"], ["Linear", "Block"], None])
DTYPE = st.sampled_from(["bf16", "fp16", "float32", "torch.bfloat16"])
WRONG = st.sampled_from(["nonsense", 7.5, [], {"a": 1}, -3])

FSDP = {
    "sharding_strategy": STRATEGY,
    "reshard_after_forward": st.sampled_from([True, False, "true", "FULL_SHARD"]),
    "auto_wrap_policy": st.sampled_from(["TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP", "size_based_wrap"]),
    "transformer_layer_cls_to_wrap": CLASSES, "min_num_params": st.sampled_from([0, 100, "1e2"]),
    "offload_params": BOOL, "cpu_offload": BOOL,
    "backward_prefetch": st.sampled_from(["BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH", 1, 3]),
    "forward_prefetch": BOOL, "limit_all_gathers": BOOL, "use_orig_params": BOOL, "sync_module_states": BOOL,
    "cpu_ram_efficient_loading": BOOL, "activation_checkpointing": BOOL,
    "state_dict_type": st.sampled_from(["FULL_STATE_DICT", "SHARDED_STATE_DICT", "LOCAL_STATE_DICT", 1]),
    "ignored_modules": st.sampled_from(["norm", None]), "cpu_offload_pin_memory": BOOL,
    "version": st.sampled_from([1, 2, "2"]),
}  # fmt: skip
PREFIXED = {f"fsdp_{key}": values for key, values in FSDP.items()}


def section(keys):
    """Random keys of a section."""
    return st.fixed_dictionaries({}, optional=keys)


ACCELERATE = {
    "compute_environment": st.just("LOCAL_MACHINE"), "num_processes": st.just(16),
    "num_machines": st.sampled_from([1, 2]),
    "mixed_precision": st.sampled_from(["no", "bf16", "fp16", "fp8", None]),
    "fsdp_config": section(PREFIXED) | section(FSDP),
    "parallelism_config": section({f"parallelism_config_{axis}_size": st.sampled_from([1, 2, 8]) for axis in
        ("dp_shard", "dp_replicate", "tp", "cp")}),
    "dynamo_config": section({"dynamo_backend": st.sampled_from(["NO", "INDUCTOR", "EAGER"]), "dynamo_mode":
        st.just("x")}),
    "deepspeed_config": st.just({"zero_stage": 3}), "downcast_bf16": st.just("no"), "debug": BOOL,
    "tpu_env": st.just([]),
}  # fmt: skip

TRANSFORMERS = {
    "fsdp": st.sampled_from(["full_shard auto_wrap", "hybrid_shard", "hybrid_shard_zero2 auto_wrap offload",
        ["no_shard", "auto_wrap"], True, ""]),
    "fsdp_config": section({**FSDP, "xla": BOOL, "xla_fsdp_settings": st.just({})}) | section(PREFIXED),
    "bf16": BOOL, "fp16": BOOL, "torch_compile": BOOL, "gradient_checkpointing": BOOL,
    "deepspeed": st.sampled_from([None, "zero3.json"]), "output_dir": st.just("out"),
    "save_strategy": st.just("steps"),
}  # fmt: skip

AXOLOTL = {
    "base_model": st.just("x"),
    "fsdp": st.sampled_from([["full_shard", "auto_wrap"], ["hybrid_shard"], None, [], "shard_grad_op"]),
    "fsdp_version": st.sampled_from([1, 2, "2", None]),
    "fsdp_config": section(PREFIXED) | section({**FSDP, "final_state_dict_type": st.just("FULL_STATE_DICT")}),
    "dp_shard_size": RANKS, "dp_replicate_size": RANKS, "tensor_parallel_size": RANKS,
    "context_parallel_size": RANKS,
    "context_parallel": section({"size": st.sampled_from([1, 8]), "backend": st.just("auto")}),
    "load_in_8bit": BOOL, "load_in_4bit": BOOL, "rl": st.sampled_from(["dpo", "grpo", None]),
    "bf16": st.sampled_from(["auto", True, False]), "fp16": st.sampled_from([False, None]),
    "optimizer": st.sampled_from(["adamw_8bit", "adamw_torch"]), "fp32_norms": BOOL, "tiled_mlp": BOOL,
    "tiled_mlp_num_shards": st.sampled_from([2, 4, None]), "datasets": st.just([{"path": "x"}]),
    "lora_r": st.just(8), "deepspeed": st.sampled_from([None, "zero3.json"]), "torch_compile": BOOL,
}  # fmt: skip

STRATEGY_CONFIG = {
    "fsdp_size": st.sampled_from([-1, 0, 1, 2, 5, 8, 16, 64]), "param_dtype": DTYPE, "reduce_dtype": DTYPE,
    "reshard_after_forward": BOOL, "offload_policy": BOOL, "apply_expert_patch": BOOL, "apply_tiled_mlp": BOOL,
    "tiled_num_shards": st.just(4), "async_save_ckpt": BOOL, "ep_size": st.sampled_from([1, 2]),
    "wrap_policy": section({"transformer_layer_cls_to_wrap": CLASSES, "wrap_embeddings": BOOL, "wrap_lm_output":
        BOOL, "moe_experts": st.sampled_from([["Linear"], "Linear"])}),
}  # fmt: skip
ROLE = {
    "strategy_args": section({"strategy_name": st.sampled_from(["fsdp2_train", "megatron_train"]),
        "strategy_config": section(STRATEGY_CONFIG)}),
    "model_args": section({"ulysses_size": st.sampled_from([1, 2]), "dtype": st.just("bf16"),
        "disable_gradient_checkpointing": BOOL, "freeze_module_prefix": st.just("vision_model,head")}),
    "training_args": st.just({"learning_rate": 1e-06}),
    "device_mapping": st.sampled_from(["list(range(0,16))", list(range(8)), "all"]),
}  # fmt: skip
ROLL = ROLE | {"actor_train": section(ROLE), "critic": section(ROLE), "rollout_batch_size": st.just(8)}

KEYS = {
    "accelerate": ACCELERATE,
    "transformers": TRANSFORMERS,
    "axolotl": AXOLOTL,
    "roll": ROLL,
}
