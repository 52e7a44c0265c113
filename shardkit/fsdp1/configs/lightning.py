"""Lightning's ``FSDPStrategy`` and ``ModelParallelStrategy``: their arguments, or a LightningCLI file that names one.

Facts from Lightning 2.x (``fabric/strategies/fsdp.py``, ``pytorch/strategies/fsdp.py``, ``plugins/precision/fsdp.py``,
``strategies/model_parallel.py``).
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.distributed.fsdp import CPUOffload, MixedPrecision

from shardkit.fsdp1.configs.accelerate import told_ranks
from shardkit.fsdp1.configs.keys import Given, read_fsdp
from shardkit.fsdp1.configs.lightning_wrap import read_policies
from shardkit.fsdp1.configs.mixed import precision_of, read_mixed_precision
from shardkit.fsdp1.configs.plain import with_fsdp1s_defaults
from shardkit.fsdp1.configs.reader import Reader
from shardkit.fsdp1.configs.target import Ranks, Target
from shardkit.fsdp1.configs.values import ANYTHING, BOOLEAN, RANKS
from shardkit.fsdp1.translate.strategy import parse_strategy
from shardkit.plan import MeshSpec

_PRECISION = {
    "bf16-mixed": torch.bfloat16,
    "bf16-true": torch.bfloat16,
    "bf16": torch.bfloat16,
    "16-mixed": torch.float16,
    "16-true": torch.float16,
    "16": torch.float16,
    "32-true": None,
    "32": None,
}
_WORDS = """
accelerator checkpoint_io cluster_environment parallel_devices precision_plugin process_group_backend start_method
timeout
"""
_RUN = _WORDS.split()
_TRAINING = """
accelerator accumulate_grad_batches callbacks default_root_dir enable_checkpointing gradient_clip_val log_every_n_steps
logger max_epochs max_steps val_check_interval
"""
_TRAINER = _TRAINING.split()
_FILE = ("seed_everything", "model", "data", "optimizer", "lr_scheduler", "ckpt_path", "fit")
_PARALLEL = ("data_parallel_size", "tensor_parallel_size", "save_distributed_checkpoint", "parallelize_fn")
_STRATEGIES = ("FSDPStrategy", "ModelParallelStrategy")


def read(config: Reader, ranks: Ranks) -> Target:
    """The target of a LightningCLI file, of its ``trainer``, of a ``class_path``, or of the arguments alone."""
    for key in _FILE:
        config.note(key, "elsewhere", "It is not the strategy.")
    trainer = config.section("trainer") if "trainer" in config else config
    precision = _precision(trainer)
    if trainer is not config and "strategy" not in trainer:
        trainer.problem("strategy", "not given", "FSDP is a strategy of the trainer's", "Give the file that names it")
    if isinstance(trainer.raw("strategy"), str):
        return _named(trainer, _ranks(trainer, ranks), precision)
    ranks = _ranks(trainer, ranks) if "strategy" in trainer else ranks
    strategy = trainer.section("strategy") if "strategy" in trainer else trainer
    path = str(strategy.raw("class_path") or "FSDPStrategy")
    name = path.rpartition(".")[2]
    fits = name in _STRATEGIES
    strategy.note("class_path", "mapped" if fits else "refused", f"{name}." if fits else f"{name} is another engine.")
    arguments = strategy.section("init_args") if "init_args" in strategy else strategy
    for key in _RUN:
        arguments.note(key, "elsewhere", "It is how Lightning starts, not how it shards.")
    if name == "ModelParallelStrategy" or any(key in arguments for key in _PARALLEL):
        return _model_parallel(arguments, ranks, precision)
    return _fsdp(arguments, ranks, precision)


def _named(trainer: Reader, ranks: Ranks, mixed: MixedPrecision | None) -> Target:
    """``strategy="fsdp"``, and with ``_cpu_offload``: all of its arguments at their defaults."""
    name = str(trainer.raw("strategy"))
    if name not in ("fsdp", "fsdp_cpu_offload"):
        trainer.note("strategy", "refused", f"{name} is another engine than FSDP.")
    trainer.note("strategy", "mapped", "FSDPStrategy with its defaults.") if name.startswith("fsdp") else None
    nothing = Reader({})
    target = read_fsdp(nothing, Given(1, ranks, precision_of(mixed), offload=name == "fsdp_cpu_offload"))
    return with_fsdp1s_defaults(nothing, target, mixed)


def _fsdp(arguments: Reader, ranks: Ranks, mixed: MixedPrecision | None) -> Target:
    mixed = _mixed_precision(arguments) or mixed
    offload = _offload(arguments)
    wrap, policy, recompute = read_policies(arguments)
    mesh = _device_mesh(arguments, ranks)
    for key in ("ignored_states", "param_init_fn", "device_id", "process_group"):
        given = arguments.find(key, ANYTHING) is not None
        told = "It is an object of your program: pass it to translate_fsdp1." if given else "None."
        arguments.note(key, "refused" if given else "implied", told)
    outside = Given(1, ranks, precision_of(mixed), offload=offload, mesh=mesh, wrap=wrap)
    target = with_fsdp1s_defaults(arguments, read_fsdp(arguments, outside), mixed)
    more = {} if policy is None else {"auto_wrap_policy": policy}
    return replace(target, checkpoint_activations=recompute, fsdp1={**(target.fsdp1 or {}), **more})


def _offload(arguments: Reader) -> bool:
    value = arguments.raw("cpu_offload")
    if isinstance(value, CPUOffload):
        arguments.note(
            "cpu_offload", "mapped", "CPUOffloadPolicy." if value.offload_params else "Nothing is offloaded."
        )
        return value.offload_params
    if isinstance(value, dict):
        inner = arguments.section("cpu_offload")
        on = inner.get("offload_params", BOOLEAN, False)
        inner.note("offload_params", "mapped", "CPUOffloadPolicy for every unit." if on else "Nothing is offloaded.")
        return on
    on = arguments.get("cpu_offload", BOOLEAN, False)
    arguments.note("cpu_offload", "mapped", "CPUOffloadPolicy for every unit." if on else "Nothing is offloaded.")
    return on


def _mixed_precision(arguments: Reader) -> MixedPrecision | None:
    value = arguments.raw("mixed_precision")
    if isinstance(value, MixedPrecision):
        arguments.note("mixed_precision", "mapped", "MixedPrecisionPolicy, unit by unit.")
        return value
    inner = arguments.section("mixed_precision")
    if "init_args" in inner:
        inner.note("class_path", "mapped", "torch's MixedPrecision.")
        inner = inner.section("init_args")
    return read_mixed_precision(inner)


def _device_mesh(arguments: Reader, ranks: Ranks) -> MeshSpec | None:
    """The ``(replicate, shard)`` sizes, which only a hybrid strategy takes."""
    value = arguments.raw("device_mesh")
    if value is None:
        arguments.note("device_mesh", "implied", "All ranks.")
        return None
    sizes = value if isinstance(value, (list, tuple)) else ()
    whole = len(sizes) == 2 and all(isinstance(size, int) and size > 0 for size in sizes)
    if not whole or (ranks.world_size is not None and sizes[0] * sizes[1] != ranks.world_size):
        rule = "It is the sizes (replicate, shard), whose product is the number of ranks"
        arguments.problem("device_mesh", f"{value!r} on {ranks.world_size} ranks", rule, "Use [2, 8] on 16 ranks")
        return None
    name = str(arguments.raw("sharding_strategy") or "FULL_SHARD")
    if "HYBRID" not in parse_strategy(name).name:
        arguments.problem("device_mesh", f"with {name}", "Two axes are for a hybrid strategy", "Use HYBRID_SHARD")
        return None
    arguments.note("device_mesh", "mapped", f"Replicates over {sizes[0]} ranks and shards over {sizes[1]}.")
    return MeshSpec.hybrid(sizes[0], sizes[1])


def _model_parallel(arguments: Reader, ranks: Ranks, mixed: MixedPrecision | None) -> Target:
    """FSDP2 and tensor parallelism by a function of the user's; "auto" is the nodes, and the ranks of a node."""
    world, per_node = ranks.world_size, ranks.per_node
    sizes: dict[str, int | None] = {}
    for key in ("data_parallel_size", "tensor_parallel_size"):
        auto = arguments.raw(key) in (None, "auto")
        sizes[key] = None if auto else arguments.find(key, RANKS)
    nodes = world // per_node if world and per_node else None
    data = sizes["data_parallel_size"] or (nodes if sizes["tensor_parallel_size"] is None else None)
    tensor = sizes["tensor_parallel_size"] or per_node
    if data is None and world and tensor:
        data = world // tensor
    if tensor is None and world and data:
        tensor = world // data
    if data is None or tensor is None or (world is not None and data * tensor != world):
        arguments.problem(
            "data_parallel_size",
            f"{data} and tensor_parallel_size {tensor} on {world} ranks",
            "Their product is the number of ranks; auto is the nodes, and the ranks of a node",
            "Give both, or world_size and ranks_per_node",
        )
    arguments.note("data_parallel_size", "mapped", f"One axis of {data} ranks.")
    told = f"Tensor parallelism over {tensor} ranks is yours; give shardkit mesh['data_parallel']."
    arguments.note("tensor_parallel_size", "noted" if (tensor or 1) > 1 else "implied", told)
    told = "It calls fully_shard itself: let it call apply_plan, or take its calls over into rules."
    arguments.note("parallelize_fn", "refused", told)
    save = arguments.get("save_distributed_checkpoint", BOOLEAN, True)
    told = "save_checkpoint writes shards, save of full_state_dict(model) one file."
    arguments.note("save_distributed_checkpoint", "noted", told)
    return Target(
        mesh=MeshSpec.sharded(data or 1),
        precision=precision_of(mixed),
        state_dict_type="sharded" if save else "full",
        axes={"tensor_parallel": tensor} if tensor and tensor > 1 else {},
    )


def _precision(trainer: Reader) -> MixedPrecision | None:
    name = trainer.raw("precision")
    if name is None:
        trainer.note("precision", "implied", "32-true.")
        return None
    if str(name) not in _PRECISION:
        trainer.problem("precision", repr(name), f"It is one of {', '.join(_PRECISION)}", "Use bf16-mixed")
        return None
    dtype = _PRECISION[str(name)]
    mixed = "mixed" in str(name) or str(name) in ("bf16", "16")
    told = f"MixedPrecision with {dtype} for parameters, gradients and buffers." if dtype else "float32 throughout."
    also = " Keep torch.autocast around the forward." if dtype and mixed else ""
    true = f" Build the model in {dtype} too." if dtype and not mixed else ""
    trainer.note("precision", "mapped", told + also + true)
    return MixedPrecision(param_dtype=dtype, reduce_dtype=dtype, buffer_dtype=dtype) if dtype else None


def _ranks(trainer: Reader, ranks: Ranks) -> Ranks:
    """From ``devices``, a number or a list, and ``num_nodes``."""
    devices = trainer.raw("devices")
    per_node = len(devices) if isinstance(devices, (list, tuple)) else None
    if per_node is None and str(devices).isdecimal():
        per_node = int(devices)
    nodes = trainer.get("num_nodes", RANKS, 1)
    world = per_node * nodes if per_node else None
    trainer.note("devices", *told_ranks("ranks of a node", per_node, ranks.per_node))
    trainer.note("num_nodes", *told_ranks("ranks in all", world, ranks.world_size))
    for key in _TRAINER:
        trainer.note(key, "elsewhere", "It is for the training loop.")
    replaced = ranks.world_size is not None and ranks.world_size != world
    return Ranks(ranks.world_size or world, ranks.per_node or (None if replaced else per_node))
