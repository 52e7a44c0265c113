"""Configuration files of Hugging Face accelerate, ``accelerate config``: FSDP of version 1 and 2.

Facts from accelerate 0.12 to 1.15: ``commands/launch.py``, ``commands/config``, ``utils/dataclasses.py`` and the
files in ``examples/config_yaml_templates`` and ``examples/torch_native_parallelism``.
"""

from __future__ import annotations

from shardkit.fsdp1.configs.keys import COMPILE, VERSION, read_axes, read_fsdp
from shardkit.fsdp1.configs.reader import DTYPE, RANKS, Key, Reader, Table, choice
from shardkit.fsdp1.configs.target import Precision, Ranks, Target, note_on_ranks

_OTHER = "noted: With {} accelerate ignores fsdp_config. It is translated here as for FSDP."
_TYPES = {"FSDP": "mapped: As fsdp_config says."}
_TYPES |= dict.fromkeys(["NO", "MULTI_GPU", "MULTI_CPU", "MULTI_XPU", "MULTI_NPU", "MULTI_MLU", "MULTI_MUSA"], _OTHER)
_TYPES |= dict.fromkeys(["DEEPSPEED", "TP", "XLA", "TPU", "MEGATRON_LM"], "refused: {} is not FSDP.")
_KEYS: Table = {
    "distributed_type": Key(choice(_TYPES), _TYPES, "FSDP"),
    """
    compute_environment machine_rank main_process_ip main_process_port main_training_function rdzv_backend rdzv_conf
    rdzv_timeout same_network gpu_ids command_file commands mpirun_config ipex_config use_cpu use_xpu
    num_cpu_threads_per_process enable_cpu_affinity max_restarts monitor_interval tee log_dir
    """: "elsewhere: For the launcher; torchrun has its own options.",
    "tpu_* downcast_bf16": "elsewhere: For TPUs.",
    "debug": "elsewhere: For accelerate's own collectives.",
    "fp8_config": "elsewhere: Only used with mixed_precision: fp8, which is refused.",
    "gradient_accumulation_steps": "elsewhere: The training loop accumulates.",
    "dynamo_config dynamo_backend": COMPILE,
    "deepspeed_config": "elsewhere: For DeepSpeed, which is not translated.",
}
_PRECISION = (
    "mapped: MixedPrecisionPolicy with {{}} for parameters, gradients and {}. accelerate also casts trainable "
    "parameters to float32: do so before sharding."
)
_FP8 = "refused: Convert layers to fp8 with torchao or TransformerEngine before sharding, and use bf16 here."
_AXES = {axis: f"{axis}_size" for axis in ("dp_shard", "dp_replicate", "tp", "cp", "sp")}


def read(config: Reader, ranks: Ranks) -> Target:
    """Return the target of a whole file."""
    config.read(_KEYS)
    ranks = _ranks(config, ranks)
    config.section("megatron_lm_config")  # its keys are unknown, and noted as such
    config.section("tp_config")
    section = config.section("fsdp_config", prefix="fsdp_")
    version = 2 if section.take("version", VERSION) == "2" else 1
    section_of_axes = config.section("parallelism_config", prefix="parallelism_config_")
    mesh, others = read_axes(section_of_axes, version, ranks.world_size, _AXES, rest_shards=False)
    target = Target(mesh, precision=_precision(config, version), axes=others)
    return read_fsdp(section, version, ranks, target)


def _precision(config: Reader, version: int) -> Precision:
    answer = _PRECISION.format("buffers" if version == 1 else "outputs")
    off = "mapped: Computes and reduces in the parameters' dtypes."
    answers = {"no": off, "fp16": f"{answer} fp16 needs torch.amp.GradScaler.", "bf16": answer, "fp8": _FP8}
    name = config.take("mixed_precision", Key(choice(answers), answers, "no"))
    return Precision.of(DTYPE.parse(name) if name in ("fp16", "bf16") else None, version)


def _ranks(config: Reader, ranks: Ranks) -> Ranks:
    """Return the ranks of the arguments, else of the file."""
    world: int | None = config.get("num_processes", RANKS)
    machines: int = config.get("num_machines", RANKS, 1)
    config.note("num_processes", note_on_ranks("ranks in all", world, ranks.world_size))
    per_node = world // machines if world is not None and world % machines == 0 else None
    answer = f"{per_node} ranks per node, for hybrid strategies." if per_node else "Ranks per node unknown."
    config.note("num_machines", f"{'mapped' if per_node and not ranks.per_node else 'noted'}: {answer}")
    if ranks.world_size is not None and world != ranks.world_size:
        per_node = None
    return Ranks(ranks.world_size or world, ranks.per_node or per_node)
