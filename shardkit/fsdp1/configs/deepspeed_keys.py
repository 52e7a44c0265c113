"""DeepSpeed's keys whose answer does not depend on what they are set to."""

from __future__ import annotations

from shardkit.fsdp1.configs.reader import Answers, Reader
from shardkit.fsdp1.configs.values import BOOLEAN
from shardkit.fsdp1.instead import Fate

_LOOP = "The training loop does so."
_CPU = "It is about DeepSpeed's own optimizers."
_BUCKETS = "FSDP2 gathers and reduces unit by unit, without buckets."

ELSEWHERE: Answers = {
    **dict.fromkeys(
        ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "optimizer", "scheduler"),
        ("elsewhere", _LOOP),
    ),
    **dict.fromkeys(
        (
            "steps_per_print",
            "wall_clock_breakdown",
            "memory_breakdown",
            "dump_state",
            "comms_logger",
            "flops_profiler",
            "tensorboard",
            "wandb",
            "comet",
            "csv_monitor",
            "monitor_config",
            "timers",
        ),
        ("elsewhere", "It is about what is logged."),
    ),
    **dict.fromkeys(
        (
            "elasticity",
            "autotuning",
            "data_efficiency",
            "curriculum_learning",
            "progressive_layer_drop",
            "eigenvalue",
            "quantize_training",
            "compression_training",
            "sparse_attention",
            "hybrid_engine",
            "aio",
            "nebula",
            "dataloader_drop_last",
            "seed",
        ),
        ("elsewhere", "It is another feature of DeepSpeed's."),
    ),
    "gradient_clipping": ("elsewhere", "The training loop clips: clip_grad_norm_."),
    "zero_allow_untested_optimizer": ("elsewhere", _CPU),
    "zero_force_ds_cpu_optimizer": ("elsewhere", _CPU),
    "checkpoint": ("elsewhere", "save_checkpoint and load_checkpoint."),
    "prescale_gradients": ("noted", "FSDP2 divides before it reduces where the dtype would overflow."),
    "gradient_predivide_factor": ("noted", "FSDP2 divides before it reduces where the dtype would overflow."),
    "disable_allgather": ("noted", _BUCKETS),
}

SCALING: Answers = {
    **dict.fromkeys(
        (
            "loss_scale",
            "initial_scale_power",
            "loss_scale_window",
            "hysteresis",
            "consecutive_hysteresis",
            "min_loss_scale",
            "check_grad_overflow",
        ),
        ("elsewhere", "The loss is scaled in the training loop: torch.amp.GradScaler."),
    ),
    "auto_cast": ("noted", "FSDP2 casts floating-point inputs at every unit (cast_forward_inputs)."),
    "fp16_master_weights_and_grads": ("noted", "The dtype that the model is built in decides it."),
    "bf16_master_weights_and_grads": ("noted", "The dtype that the model is built in decides it."),
    "bf16_optimizer_states": ("noted", "The dtype that the model is built in decides it."),
    "immediate_grad_update": ("implied", "FSDP2 reduces each unit's gradients at once."),
}

ZERO: Answers = {
    **dict.fromkeys(
        (
            "reduce_bucket_size",
            "allgather_bucket_size",
            "sub_group_size",
            "use_multi_rank_bucket_allreduce",
            "max_live_parameters",
            "max_reuse_distance",
            "module_granularity_threshold",
            "use_all_reduce_for_fetch_params",
            "allgather_sequential",
            "partition_stream_chunk_size",
        ),
        ("noted", _BUCKETS),
    ),
    **dict.fromkeys(
        ("overlap_comm", "contiguous_gradients", "reduce_scatter", "allgather_partitions", "round_robin_gradients"),
        ("implied", "FSDP2 reduce-scatters whole units beside backward."),
    ),
    "prefetch_bucket_size": ("noted", "FSDP2 gathers one unit ahead; prefetch=2 gathers two."),
    "param_persistence_threshold": ("noted", "FSDP2 gathers small parameters together with their unit."),
    "model_persistence_threshold": ("noted", "FSDP2 gathers small parameters together with their unit."),
    "gather_16bit_weights_on_model_save": ("noted", "full_state_dict(model) gives the whole weights to save."),
    "gather_fp16_weights_on_model_save": ("noted", "full_state_dict(model) gives the whole weights to save."),
    "ignore_unused_parameters": ("noted", "Parameters without a gradient have none after FSDP2's backward too."),
    "leaf_module": ("noted", "Name these modules as units of their own: by_class."),
    **dict.fromkeys(
        (
            "load_from_fp32_weights",
            "elastic_checkpoint",
            "pipeline_loading_checkpoint",
            "legacy_stage1",
            "memory_efficient_linear",
            "override_module_apply",
            "log_trace_cache_warnings",
            "enable_sanity_checks",
            "save_muon_momentum_buffer_in_memory",
        ),
        ("noted", "It is about how DeepSpeed does it, not about what is trained."),
    ),
}


def settle_if_on(section: Reader, key: str, fate: Fate, sentence: str) -> None:
    """Answer for a switch, or a section, that matters only where it is on."""
    value = section.raw(key)
    on = section.get(key, BOOLEAN, False) if not isinstance(value, dict) else bool(value)
    section.note(key, fate if on else "implied", sentence if on else "Off.")
