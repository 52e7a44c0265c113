"""DeepSpeed's JSON: ZeRO stages, hpZ (ZeRO++) and MiCS, by FSDP2.

Facts from DeepSpeed 0.18 (``runtime/zero/config.py``, ``runtime/zero/offload_config.py``, ``runtime/config.py``).
"""

from __future__ import annotations

import torch

from shardkit.fsdp1.configs.reader import (
    BOOLEAN,
    DTYPE,
    NUMBER,
    RANKS,
    SWITCH,
    Key,
    Reader,
    Table,
    given,
    one_of,
    several,
    switch,
)
from shardkit.fsdp1.configs.target import Precision, Ranks, Target
from shardkit.plan import MeshSpec

_BUCKETS = "noted: FSDP2 gathers and reduces unit by unit, without buckets."
_WHOLE = "noted: full_state_dict(model) gives the whole weights to save."
_KEYS: Table = {
    "sparse_gradients": switch(
        "refused: FSDP2 reduces dense gradients only. Remove it, and embeddings have dense gradients.", kind=SWITCH
    ),
    "train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps optimizer scheduler": (
        "elsewhere: For the training loop."
    ),
    """
    steps_per_print wall_clock_breakdown memory_breakdown dump_state comms_logger flops_profiler tensorboard wandb comet
    csv_monitor monitor_config timers
    """: "elsewhere: For logging.",
    """
    elasticity autotuning data_efficiency curriculum_learning progressive_layer_drop eigenvalue quantize_training
    compression_training sparse_attention hybrid_engine aio nebula dataloader_drop_last seed
    """: "elsewhere: Another feature of DeepSpeed.",
    "gradient_clipping": "elsewhere: The training loop clips: clip_grad_norm_.",
    "zero_allow_untested_optimizer zero_force_ds_cpu_optimizer": "elsewhere: For DeepSpeed's own optimizers.",
    "checkpoint": "elsewhere: Use save_checkpoint and load_checkpoint.",
    "prescale_gradients gradient_predivide_factor": (
        "noted: FSDP2 divides before the reduction where the dtype would overflow."
    ),
    "disable_allgather": _BUCKETS,
}
_SCALING: Table = {  # of fp16 and bf16
    """
    loss_scale initial_scale_power loss_scale_window hysteresis consecutive_hysteresis min_loss_scale
    check_grad_overflow
    """: "elsewhere: Scale the loss in the training loop with torch.amp.GradScaler.",
    "auto_cast": "noted: FSDP2 casts floating-point inputs at every unit (cast_forward_inputs).",
    "fp16_master_weights_and_grads bf16_master_weights_and_grads bf16_optimizer_states": (
        "noted: Build the model in the dtype of these weights."
    ),
    "immediate_grad_update": "implied: FSDP2 reduces the gradients of each unit during backward.",
}
_QUANTIZED = "refused: FSDP2 communicates in the dtypes of its MixedPrecisionPolicy."
_ZERO: Table = {  # of zero_optimization
    """
    reduce_bucket_size allgather_bucket_size sub_group_size use_multi_rank_bucket_allreduce max_live_parameters
    max_reuse_distance module_granularity_threshold use_all_reduce_for_fetch_params allgather_sequential
    partition_stream_chunk_size
    """: _BUCKETS,
    "overlap_comm contiguous_gradients reduce_scatter allgather_partitions round_robin_gradients": (
        "implied: FSDP2 reduce-scatters whole units during backward."
    ),
    "prefetch_bucket_size": "noted: FSDP2 prefetches one unit; pass prefetch=2 for two.",
    "param_persistence_threshold model_persistence_threshold": (
        "noted: FSDP2 gathers small parameters together with their unit."
    ),
    "gather_16bit_weights_on_model_save gather_fp16_weights_on_model_save": _WHOLE,
    "ignore_unused_parameters": "noted: Parameters without a gradient have none in FSDP2 either.",
    "leaf_module": "noted: Make these modules units with by_class.",
    """
    load_from_fp32_weights elastic_checkpoint pipeline_loading_checkpoint legacy_stage1 memory_efficient_linear
    override_module_apply log_trace_cache_warnings enable_sanity_checks save_muon_momentum_buffer_in_memory
    """: "noted: DeepSpeed's own; it does not change what is trained.",
    "zero_quantized_weights zero_quantized_gradients zero_quantized_nontrainable_weights zenflow": (
        switch(_QUANTIZED, kind=SWITCH)
    ),
    "zeropp_loco_param": switch("refused: FSDP2 does not quantize its collectives.", kind=SWITCH),
    "mics_hierarchical_params_gather": switch("noted: FSDP2 all-gathers within a group in one step.", kind=SWITCH),
    "cpu_offload": switch("mapped: CPUOffloadPolicy for the optimizer, and so for all shards.", "mapped: Off."),
    "cpu_offload_param": switch("mapped: CPUOffloadPolicy for parameters, and so for all shards.", "mapped: Off."),
    "cpu_offload_use_pin_memory": Key(BOOLEAN, "mapped: CPUOffloadPolicy(pin_memory=...)."),
}
_OFFLOAD: Table = {  # of offload_param and offload_optimizer
    "pin_memory": Key(BOOLEAN, "mapped: CPUOffloadPolicy(pin_memory=...) where shards are offloaded."),
    "nvme_path buffer_count buffer_size max_in_cpu": "noted: For NVMe.",
    "pipeline_read pipeline_write pipeline fast_init super_offload cpuadam_cores_perc": (
        "noted: For DeepSpeed's CPU optimizer."
    ),
}
_ON_CPU = {
    "offload_param": "mapped: CPUOffloadPolicy, which offloads gradients and optimizer state together with it.",
    "offload_optimizer": "noted: CPUOffloadPolicy, which offloads parameters and gradients together with it.",
}
_NVME = "refused: FSDP2 offloads to the CPU only. Use cpu."
_DEVICES = {
    key: one_of({"none": "mapped: Nothing is offloaded.", "cpu": on_cpu, "nvme": _NVME}, "none")
    for key, on_cpu in _ON_CPU.items()
}
_TUNES = "noted: For deepspeed.checkpointing, which the model calls; shardkit has checkpoint_activations=True."
_RECOMPUTES: Table = {  # of activation_checkpointing
    "partition_activations cpu_checkpointing": given(
        "refused: FSDP2 does not partition or offload activations; pass checkpoint_activations=True.", _TUNES
    ),
    "*": _TUNES,
}
_PARALLEL: Table = {  # of tensor_parallel
    "autotp_size": several(
        "noted: Apply tensor parallelism first; pass the data-parallel submesh to shard_model.", kind=NUMBER
    ),
    "tp_grain_size tp_overlap_comm dtype injection_policy_tuple tp": (
        "noted: For tensor parallelism, which you apply yourself."
    ),
}
_COMPILE: Table = {
    "deepcompile": switch("refused: DeepSpeed's own compiler; pass compile=True."),
    "kwargs enabled": "noted: shardkit compiles with the defaults of torch.compile.",
}
_ACCELERATE: Table = {  # of accelerate's deepspeed_config
    "zero3_save_16bit_model": _WHOLE,
    "zero3_init_flag": "noted: Build the model under init_on_meta, and materialize it after sharding.",
    "gradient_clipping": "elsewhere: The training loop clips: clip_grad_norm_.",
    "gradient_accumulation_steps": "elsewhere: The training loop accumulates.",
    "deepspeed_multinode_launcher deepspeed_hostfile deepspeed_exclusion_filter deepspeed_inclusion_filter": (
        "elsewhere: For the launcher; torchrun has its own options."
    ),
    "deepspeed_config_file": "refused: Translate that file instead.",
    "offload_param_nvme_path offload_optimizer_nvme_path": "noted: Only used with nvme, which is refused.",
    "deepspeed_moe_layer_cls_names": "noted: Experts are all-gathered with their block.",
}
_STAGES = {
    "0": "mapped: A mesh of (ranks, 1): gradients are all-reduced and nothing is sharded.",
    "1": "noted: reshard_after_forward=False. FSDP2 shards gradients and parameters too: less memory, same numbers.",
    "2": "noted: reshard_after_forward=False. Between steps FSDP2 shards parameters too: less memory, same numbers.",
    "3": "mapped: reshard_after_forward=True, by units: the model's blocks, as shardkit's default rule finds them.",
}


def read(config: Reader, ranks: Ranks) -> Target:
    """Return the target of a whole file."""
    config.read(_KEYS)
    config.section("activation_checkpointing").read(_RECOMPUTES)
    if config.raw("zero_optimization") in (True, False):
        config.note("zero_optimization", "mapped: True is stage 1, and False none.")
        section, stage = Reader({}), int(config.raw("zero_optimization"))
    else:
        section = config.section("zero_optimization", prefix="stage3_")
        stage = _stage(section, "stage", "0")
    tensor, data = _parallel(config, ranks)
    offload, pin = _offload(section)
    return Target(
        mesh=_mesh(section, stage, data),
        reshard_after_forward=_reshard(section, stage, data),
        precision=_precision(config),
        offload=offload,
        pin_memory=pin if offload else None,
        compile=_compile(config),
        axes={"tp": tensor} if tensor > 1 else {},
    )


def read_accelerate(section: Reader, ranks: Ranks, precision: Precision, compiled: bool) -> Target:
    """Return the target of the ``deepspeed_config`` of an accelerate file."""
    section.read(_ACCELERATE)
    stage = _stage(section, "zero_stage", "2")
    return Target(
        mesh=_plain_mesh(stage, ranks.world_size),
        reshard_after_forward=stage == 3,
        precision=precision,
        offload="cpu" in [section.take(f"{key}_device", row) for key, row in _DEVICES.items()],
        compile=compiled,
    )


def _stage(section: Reader, key: str, default: str) -> int:
    return int(section.take(key, one_of(_STAGES, default)))


def _plain_mesh(stage: int, world: int | None) -> MeshSpec | None:
    if world is None:
        return None
    return MeshSpec.hybrid(world, 1) if stage == 0 and world > 1 else MeshSpec.sharded(world)


def _mesh(section: Reader, stage: int, world: int | None) -> MeshSpec | None:
    """Return the mesh; MiCS shards within groups of ``mics_shard_size`` ranks, which is HSDP."""
    shard = None if section.raw("mics_shard_size") == -1 else section.get("mics_shard_size", RANKS)
    if shard is not None and stage == 3:
        return hybrid_mesh(section, "mics_shard_size", shard, world, "Pass world_size")
    section.note("mics_shard_size", "implied: No MiCS." if shard is None else "noted: Only stage 3 uses it.")
    return _plain_mesh(stage, world)


def hybrid_mesh(section: Reader, key: str, shard: int, world: int | None, fix: str) -> MeshSpec | None:
    """Answer for a key that is the number of ranks to shard over, and return the hybrid mesh."""
    if world is None or world % shard:
        unknown, odd = f"{shard} of an unknown number of ranks", f"{shard} does not divide {world} ranks"
        rule = "It shards over this many ranks and replicates over the others"
        section.problem(key, odd if world else unknown, rule, "Use a divisor" if world else fix)
        return None
    if shard == world:
        section.note(key, "mapped: One axis of all ranks.")
        return MeshSpec.sharded(world)
    section.note(key, f"mapped: A mesh of ({world // shard}, {shard}): replicates, and shards over {shard} ranks.")
    return MeshSpec.hybrid(world // shard, shard)


def _reshard(section: Reader, stage: int, world: int | None) -> bool | int:
    """Return ``reshard_after_forward``: hpZ reshards to fewer ranks, which is an int."""
    key = "zero_hpz_partition_size"
    kept: int = section.get(key, NUMBER, 1)
    if kept <= 1:
        section.note(key, "implied: Off.")
    elif stage != 3:
        section.note(key, "noted: Only stage 3 uses it.")
    elif world is not None and world % kept:
        rule = "Parameters are kept sharded over this many ranks for backward"
        section.problem(key, f"{kept} does not divide {world} ranks", rule, "Use the number of ranks of a node")
    elif kept == world:
        section.note(key, "implied: All ranks: reshard_after_forward=True.")
    else:
        section.note(key, f"mapped: reshard_after_forward={kept}: reshards to {kept} ranks until backward.")
        return kept
    return stage == 3


def _offload(section: Reader) -> tuple[bool, bool | None]:
    """Return whether anything is offloaded, and whether it is pinned."""
    found, pinned = [], []
    for key, row in _DEVICES.items():
        inner = section.section(key)
        found.append(inner.take("device", row) == "cpu")
        pinned.append(inner.read(_OFFLOAD)["pin_memory"])
        whole = "implied" if inner.raw("ratio") in (None, 1) else "noted"
        inner.note("ratio", f"{whole}: FSDP2 offloads all of the optimizer's state.")
    values = section.read(_ZERO)
    found += [values["cpu_offload"], values["cpu_offload_param"]]
    pinned += [values["cpu_offload_use_pin_memory"]]
    return any(found), next((pin for pin in pinned if pin is not None), None)


def _precision(config: Reader) -> Precision:
    """Return the dtypes: DeepSpeed computes and reduces in the one enabled, and keeps float32 parameters."""
    half, *brain = [_enabled(config, key) for key in ("fp16", "bf16", "bfloat16")]
    if half and any(brain):
        config.problem("fp16", "enabled, and bf16 too", "A model computes in one dtype", "Enable one of them")
    param = torch.bfloat16 if any(brain) else torch.float16 if half else None
    reduce = config.get("communication_data_type", DTYPE, param)
    config.note("communication_data_type", f"mapped: MixedPrecisionPolicy(reduce_dtype={reduce}).")
    single = switch("mapped: MixedPrecisionPolicy(reduce_dtype=torch.float32).", kind=SWITCH)
    reduce = torch.float32 if config.take("fp32_allreduce", single) else reduce
    accumulates = "noted: FSDP2 accumulates sharded gradients in the parameters' dtype."
    config.section("data_types").read({"grad_accum_dtype": accumulates})
    config.section("torch_autocast").read({"*": "noted: Keep torch.autocast around the forward."})
    config.section("amp").read({"*": "refused: apex's amp does not know FSDP2's parameters. Use bf16."})
    return Precision(param, reduce, buffer=param)


def _enabled(config: Reader, key: str) -> bool:
    section = config.section(key)
    section.read(_SCALING)
    if section.raw("enabled") == "auto":
        told = "noted: The Trainer sets it; taken as off here."
        section.note("enabled", told)
        return False
    dtype, also = ("fp16", " Scale the loss with torch.amp.GradScaler.") if key == "fp16" else ("bf16", "")
    keep = f"keep the parameters in float32, as DeepSpeed does.{also}"
    return bool(section.take("enabled", switch(f"mapped: MixedPrecisionPolicy with {dtype}; {keep}", "mapped: Off.")))


def _compile(config: Reader) -> bool:
    section = config.section("compile")
    section.read(_COMPILE)
    inductor = section.raw("backend") in (None, "inductor")
    compiled = [*section] != [] and not section.get("disable", BOOLEAN, False) and inductor
    told = "compile=True: blocks are compiled in place." if compiled else "Not compiled."
    section.note("disable", f"mapped: {told}")
    other = "noted: Compile blocks yourself for a backend other than inductor."
    section.note("backend", "mapped: torch's default backend." if inductor else other)
    return compiled


def _parallel(config: Reader, ranks: Ranks) -> tuple[int, int | None]:
    """Return the tensor-parallel and the data-parallel size."""
    told = "noted: Split the sequence yourself; these ranks shard the parameters too."
    config.take("sequence_parallel_size", several(told))
    section, world = config.section("tensor_parallel"), ranks.world_size
    tensor = max(1, section.read(_PARALLEL)["autotp_size"])
    if world is not None and world % tensor:
        rule = "The ranks are those of data parallelism times those of tensor parallelism"
        section.problem("autotp_size", f"{tensor} does not divide {world} ranks", rule, "Use a divisor")
    return tensor, world and max(1, world // tensor)
