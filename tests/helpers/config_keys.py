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
    "transformer_layer_cls_to_wrap": CLASSES,
    "min_num_params": st.sampled_from([0, 100, "1e2"]),
    "offload_params": BOOL,
    "cpu_offload": BOOL,
    "backward_prefetch": st.sampled_from(["BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH", 1, 3]),
    "forward_prefetch": BOOL,
    "limit_all_gathers": BOOL,
    "use_orig_params": BOOL,
    "sync_module_states": BOOL,
    "cpu_ram_efficient_loading": BOOL,
    "activation_checkpointing": BOOL,
    "state_dict_type": st.sampled_from(["FULL_STATE_DICT", "SHARDED_STATE_DICT", "LOCAL_STATE_DICT", 1]),
    "ignored_modules": st.sampled_from(["norm", None]),
    "cpu_offload_pin_memory": BOOL,
    "version": st.sampled_from([1, 2, "2"]),
}
PREFIXED = {f"fsdp_{key}": values for key, values in FSDP.items()}


def section(keys):
    """Random keys of a section."""
    return st.fixed_dictionaries({}, optional=keys)


ACCELERATE = {
    "compute_environment": st.just("LOCAL_MACHINE"),
    "num_processes": st.just(16),
    "num_machines": st.sampled_from([1, 2]),
    "mixed_precision": st.sampled_from(["no", "bf16", "fp16", "fp8", None]),
    "fsdp_config": section(PREFIXED) | section(FSDP),
    "parallelism_config": section(
        {
            f"parallelism_config_{axis}_size": st.sampled_from([1, 2, 8])
            for axis in ("dp_shard", "dp_replicate", "tp", "cp")
        }
    ),
    "dynamo_config": section(
        {"dynamo_backend": st.sampled_from(["NO", "INDUCTOR", "EAGER"]), "dynamo_mode": st.just("x")}
    ),
    "deepspeed_config": section(
        {"zero_stage": st.integers(0, 3), "offload_param_device": st.sampled_from(["none", "nvme"])}
    ),
    "downcast_bf16": st.just("no"),
    "debug": BOOL,
    "tpu_env": st.just([]),
}

TRANSFORMERS = {
    "fsdp": st.sampled_from(
        [
            "full_shard auto_wrap",
            "hybrid_shard",
            "hybrid_shard_zero2 auto_wrap offload",
            ["no_shard", "auto_wrap"],
            True,
            "",
        ]
    ),
    "fsdp_config": section({**FSDP, "xla": BOOL, "xla_fsdp_settings": st.just({})}) | section(PREFIXED),
    "fsdp_transformer_layer_cls_to_wrap": CLASSES,
    "fsdp_min_num_params": st.sampled_from([0, 100]),
    "bf16": BOOL,
    "fp16": BOOL,
    "torch_compile": BOOL,
    "gradient_checkpointing": BOOL,
    "deepspeed": st.sampled_from([None, "zero3.json"]),
    "output_dir": st.just("out"),
    "save_strategy": st.just("steps"),
}

AXOLOTL = {
    "base_model": st.just("x"),
    "fsdp": st.sampled_from([["full_shard", "auto_wrap"], ["hybrid_shard"], None, [], "shard_grad_op"]),
    "fsdp_version": st.sampled_from([1, 2, "2", None]),
    "fsdp_config": section(PREFIXED) | section({**FSDP, "final_state_dict_type": st.just("FULL_STATE_DICT")}),
    "dp_shard_size": RANKS,
    "dp_replicate_size": RANKS,
    "tensor_parallel_size": RANKS,
    "context_parallel_size": RANKS,
    "context_parallel": section({"size": st.sampled_from([1, 8]), "backend": st.just("auto")}),
    "load_in_8bit": BOOL,
    "load_in_4bit": BOOL,
    "rl": st.sampled_from(["dpo", "grpo", None]),
    "bf16": st.sampled_from(["auto", True, False]),
    "fp16": st.sampled_from([False, None]),
    "optimizer": st.sampled_from(["adamw_8bit", "adamw_torch"]),
    "fp32_norms": BOOL,
    "tiled_mlp": BOOL,
    "tiled_mlp_num_shards": st.sampled_from([2, 4, None]),
    "datasets": st.just([{"path": "x"}]),
    "lora_r": st.just(8),
    "deepspeed": st.sampled_from([None, "zero3.json"]),
    "torch_compile": BOOL,
}

STRATEGY_CONFIG = {
    "fsdp_size": st.sampled_from([-1, 0, 1, 2, 5, 8, 16, 64]),
    "param_dtype": DTYPE,
    "reduce_dtype": DTYPE,
    "reshard_after_forward": BOOL,
    "offload_policy": BOOL,
    "apply_expert_patch": BOOL,
    "apply_tiled_mlp": BOOL,
    "tiled_num_shards": st.just(4),
    "async_save_ckpt": BOOL,
    "ep_size": st.sampled_from([1, 2]),
    "wrap_policy": section(
        {
            "transformer_layer_cls_to_wrap": CLASSES,
            "wrap_embeddings": BOOL,
            "wrap_lm_output": BOOL,
            "moe_experts": st.sampled_from([["Linear"], "Linear"]),
        }
    ),
}
ROLE = {
    "strategy_args": section(
        {
            "strategy_name": st.sampled_from(["fsdp2_train", "megatron_train"]),
            "strategy_config": section(STRATEGY_CONFIG),
        }
    ),
    "model_args": section(
        {
            "ulysses_size": st.sampled_from([1, 2]),
            "dtype": st.just("bf16"),
            "disable_gradient_checkpointing": BOOL,
            "freeze_module_prefix": st.just("vision_model,head"),
        }
    ),
    "training_args": st.just({"learning_rate": 1e-6}),
    "device_mapping": st.sampled_from(["list(range(0,16))", list(range(8)), "all"]),
}
ROLL = ROLE | {"actor_train": section(ROLE), "critic": section(ROLE), "rollout_batch_size": st.just(8)}

LIGHTNING_ARGUMENTS = {
    "sharding_strategy": STRATEGY,
    "cpu_offload": st.sampled_from([True, None, {"offload_params": True}]),
    "auto_wrap_policy": st.sampled_from([["my.Block"], "Block", None, {"class_path": "x.Policy"}]),
    "activation_checkpointing_policy": st.sampled_from([["my.Block"], ["Linear"], None]),
    "mixed_precision": st.sampled_from([None, {"param_dtype": "bf16", "cast_forward_inputs": True}]),
    "state_dict_type": st.sampled_from(["full", "sharded"]),
    "device_mesh": st.sampled_from([None, [2, 8], [3, 3]]),
    "forward_prefetch": BOOL,
    "backward_prefetch": st.sampled_from(["BACKWARD_PRE", "BACKWARD_POST"]),
    "limit_all_gathers": BOOL,
    "process_group_backend": st.just("nccl"),
    "ignored_modules": st.just(None),
}
LIGHTNING_PARALLEL = {
    "data_parallel_size": st.sampled_from(["auto", 2]),
    "tensor_parallel_size": st.sampled_from(["auto", 8]),
    "save_distributed_checkpoint": BOOL,
    "parallelize_fn": st.just("my.fn"),
    "timeout": st.just(1800),
}
LIGHTNING_FILE = {
    "trainer": section(
        {
            "strategy": section({"class_path": st.just("x.FSDPStrategy"), "init_args": section(LIGHTNING_ARGUMENTS)})
            | st.sampled_from(["fsdp", "fsdp_cpu_offload", "ddp"]),
            "devices": st.sampled_from([8, [0, 1], "auto"]),
            "num_nodes": st.just(2),
            "precision": st.sampled_from(["bf16-mixed", 32, "16-true", "64"]),
            "max_epochs": st.just(1),
        }
    ),
    "seed_everything": st.just(1),
}

DEVICE = section({"device": st.sampled_from(["none", "cpu", "nvme"]), "pin_memory": BOOL, "ratio": st.just(0.5)})
DEEPSPEED = {
    "zero_optimization": section(
        {
            "stage": st.integers(0, 3),
            "offload_param": DEVICE,
            "offload_optimizer": DEVICE,
            "cpu_offload": BOOL,
            "zero_hpz_partition_size": st.sampled_from([1, 4, 16, 5]),
            "mics_shard_size": st.sampled_from([-1, 4, 16, 5]),
            "zero_quantized_weights": BOOL,
            "stage3_param_persistence_threshold": st.just("auto"),
            "stage3_max_live_parameters": st.just(1e9),
            "overlap_comm": BOOL,
        }
    )
    | st.booleans(),
    "bf16": section({"enabled": st.sampled_from([True, False, "auto"])}),
    "fp16": section({"enabled": st.sampled_from([False, "auto"]), "loss_scale": st.just(0)}),
    "communication_data_type": DTYPE,
    "train_batch_size": st.just("auto"),
    "activation_checkpointing": section({"partition_activations": BOOL, "profile": BOOL}),
    "tensor_parallel": section({"autotp_size": st.sampled_from([1, 2])}),
    "compile": section({"disable": BOOL, "backend": st.just("inductor")}),
    "sparse_gradients": BOOL,
}

PLAIN = {
    "fsdp": st.sampled_from([True, False]),
    "world_size": st.just(16),
    "gpus_per_node": st.just(8),
    "mixed_precision": st.sampled_from([None, "bf16", {"param_dtype": "bf16", "keep_low_precision_grads": True}]),
    "lr": st.just(0.1),
} | {key: values for key, values in FSDP.items() if key != "version"}

KEYS = {
    "accelerate": ACCELERATE,
    "transformers": TRANSFORMERS,
    "axolotl": AXOLOTL,
    "roll": ROLL,
    "lightning": LIGHTNING_ARGUMENTS,
    "lightning, parallel": LIGHTNING_PARALLEL,
    "lightning, file": LIGHTNING_FILE,
    "deepspeed": DEEPSPEED,
    "plain": PLAIN,
}
