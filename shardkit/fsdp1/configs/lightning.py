"""Lightning's ``FSDPStrategy`` and ``ModelParallelStrategy``: their arguments, or a LightningCLI file that names one.

Facts from Lightning 2.x (``fabric/strategies/fsdp.py``, ``pytorch/strategies/fsdp.py``, ``plugins/precision/fsdp.py``,
``strategies/model_parallel.py``).
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.distributed.fsdp import MixedPrecision

from shardkit.fsdp1.configs.keys import STRATEGY
from shardkit.fsdp1.configs.plain import precision_of, read_as_fsdp1, read_mixed_precision
from shardkit.fsdp1.configs.reader import BOOLEAN, NAMES, RANKS, Key, Kind, Reader, Table, choice, switch
from shardkit.fsdp1.configs.target import Ranks, Target, Wrap, note_on_ranks
from shardkit.plan import MeshSpec

_FILE: Table = {"seed_everything model data optimizer lr_scheduler ckpt_path fit": "elsewhere: Not for the strategy."}
_TRAINER: Table = {
    """
    accelerator accumulate_grad_batches callbacks default_root_dir enable_checkpointing gradient_clip_val
    log_every_n_steps logger max_epochs max_steps val_check_interval
    """: "elsewhere: For the training loop.",
}
_ARGUMENTS: Table = {  # of both strategies
    """
    accelerator checkpoint_io cluster_environment parallel_devices precision_plugin process_group_backend start_method
    timeout
    """: "elsewhere: For Lightning's launcher.",
}
_IS_GIVEN = Kind("", "", lambda value: True)
_OBJECT = "refused: An object of your program: pass it to translate_fsdp1."
_POLICY = "refused: Not names of classes. Write [my.module.Block], or pass a policy object to translate_fsdp1."
_FSDP: Table = {
    "ignored_states param_init_fn device_id process_group": switch(_OBJECT, "implied: None.", kind=_IS_GIVEN),
}
_PARALLEL: Table = {
    "parallelize_fn": switch(
        "refused: A function of your program: let it call apply_plan instead of fully_shard.",
        "implied: None.",
        kind=_IS_GIVEN,
    ),
    "save_distributed_checkpoint": Key(
        BOOLEAN, "noted: save_checkpoint writes shards; full_state_dict(model) gathers the state for one file.", True
    ),
}
_OFFLOAD = switch("mapped: CPUOffloadPolicy for every unit.", "mapped: Nothing is offloaded.")
_ALL = "mapped: MixedPrecision with torch.{0} for parameters, gradients and buffers."
_MIXED, _TRUE = f"{_ALL} Keep torch.autocast around the forward.", f"{_ALL} Build the model in torch.{{0}} too."
_PRECISIONS = {
    **dict.fromkeys(("bf16-mixed", "bf16"), _MIXED.format("bfloat16")),
    "bf16-true": _TRUE.format("bfloat16"),
    **dict.fromkeys(("16-mixed", "16"), _MIXED.format("float16")),
    "16-true": _TRUE.format("float16"),
    **dict.fromkeys(("32-true", "32"), "mapped: float32 throughout."),
}
_PRECISION = Key(choice(_PRECISIONS), {None: "implied: 32-true.", **_PRECISIONS})


def read(config: Reader, ranks: Ranks) -> Target:
    """Return the target of a LightningCLI file, its ``trainer``, a ``class_path``, or a strategy's arguments."""
    config.read(_FILE)
    trainer = config.section("trainer") if "trainer" in config else config
    mixed = _precision(trainer)
    if trainer is not config and "strategy" not in trainer:
        trainer.problem("strategy", "not given", "FSDP is the trainer's strategy", "Give the file that names it")
    if "strategy" in trainer:
        ranks = _ranks(trainer, ranks)
    if isinstance(trainer.raw("strategy"), str):
        return _named(trainer, ranks, mixed)
    strategy = trainer.section("strategy") if "strategy" in trainer else trainer
    name = str(strategy.raw("class_path") or "FSDPStrategy").rpartition(".")[2]
    fits = name in ("FSDPStrategy", "ModelParallelStrategy")
    strategy.note("class_path", f"mapped: {name}." if fits else f"refused: {name} is not FSDP.")
    arguments = strategy.section("init_args") if "init_args" in strategy else strategy
    parallel = any(key in arguments for key in ("data_parallel_size", "tensor_parallel_size", *_PARALLEL))
    arguments.read(_ARGUMENTS)
    of_strategy = _model_parallel if name == "ModelParallelStrategy" or parallel else _fsdp
    return of_strategy(arguments, ranks, mixed)


def _named(trainer: Reader, ranks: Ranks, mixed: MixedPrecision | None) -> Target:
    """Return the target of ``strategy="fsdp"`` or ``"fsdp_cpu_offload"``, which have default arguments."""
    name = str(trainer.raw("strategy"))
    fits = name in ("fsdp", "fsdp_cpu_offload")
    answer = "mapped: FSDPStrategy with its defaults." if fits else f"refused: {name} is not FSDP."
    trainer.note("strategy", answer)
    return read_as_fsdp1(Reader({}), ranks, mixed, Target(None, wrap=Wrap("root"), offload=name == "fsdp_cpu_offload"))


def _fsdp(arguments: Reader, ranks: Ranks, mixed: MixedPrecision | None) -> Target:
    is_section = isinstance(arguments.raw("cpu_offload"), dict)
    reader, key = (arguments.section("cpu_offload"), "offload_params") if is_section else (arguments, "cpu_offload")
    offload = reader.take(key, _OFFLOAD)
    given = arguments.section("mixed_precision")
    if "init_args" in given:
        given.note("class_path", "mapped: torch's MixedPrecision.")
        given = given.section("init_args")
    mixed = read_mixed_precision(given) or mixed
    wrap, recomputes = _wrap(arguments)
    target = Target(_device_mesh(arguments, ranks), wrap=wrap, offload=offload)
    arguments.read(_FSDP)
    return replace(read_as_fsdp1(arguments, ranks, mixed, target), checkpoint_activations=recomputes)


def _wrap(arguments: Reader) -> tuple[Wrap, bool]:
    """Return the units, and whether their activations are checkpointed."""
    key = "auto_wrap_policy"
    units = _classes(arguments.raw(key))
    answer = f"mapped: A unit of each {' and '.join(units)}." if units else _POLICY
    root_only = "noted: The root is the only unit, so the whole model is gathered at once."
    arguments.note(key, root_only if arguments.raw(key) is None else answer)
    recomputes = False
    for key in ("activation_checkpointing", "activation_checkpointing_policy"):
        if not arguments.raw(key):
            answer = "implied: Activations are kept."
        elif units and _classes(arguments.raw(key)) == units:
            answer, recomputes = "mapped: checkpoint_activations=True for the units.", True
        else:
            answer = (
                "refused: shardkit checkpoints activations of whole units only: name the classes of auto_wrap_policy, "
                "or wrap them yourself."
            )
        arguments.note(key, answer)
    return Wrap("classes" if units else "root", units), recomputes


def _classes(value: object) -> tuple[str, ...]:
    """Return the names of classes that are given by name or import path, and nothing for anything else."""
    if isinstance(value, dict) and str(value.get("class_path")).endswith("ModuleWrapPolicy"):  # as jsonargparse has it
        arguments = value.get("init_args")
        value = arguments.get("module_classes") if isinstance(arguments, dict) else None
    try:
        return tuple(sorted(name.rpartition(".")[2] for name in NAMES.parse(value)))
    except ValueError:
        return ()


def _device_mesh(arguments: Reader, ranks: Ranks) -> MeshSpec | None:
    """Return the mesh of ``(replicate, shard)`` sizes, which need a hybrid strategy."""
    value, world = arguments.raw("device_mesh"), ranks.world_size
    if value is None:
        arguments.note("device_mesh", "implied: All ranks.")
        return None
    sizes = value if isinstance(value, (list, tuple)) else ()
    whole = len(sizes) == 2 and all(isinstance(size, int) and size > 0 for size in sizes)
    strategy = arguments.get("sharding_strategy", STRATEGY)
    name = strategy.name if strategy else "FULL_SHARD"
    if not whole or (world is not None and sizes[0] * sizes[1] != world):
        rule = "It must be sizes (replicate, shard), whose product is the number of ranks"
        arguments.problem("device_mesh", f"{value!r} on {world} ranks", rule, "Use [2, 8] on 16 ranks")
        return None
    if "HYBRID" not in name:
        arguments.problem("device_mesh", f"with {name}", "Two axes are for a hybrid strategy", "Use HYBRID_SHARD")
        return None
    arguments.note("device_mesh", f"mapped: Replicates over {sizes[0]} ranks and shards over {sizes[1]}.")
    return MeshSpec.hybrid(sizes[0], sizes[1])


def _model_parallel(arguments: Reader, ranks: Ranks, mixed: MixedPrecision | None) -> Target:
    """Return the target of ModelParallelStrategy; "auto" is the number of nodes, and of ranks per node."""
    world, per_node = ranks.world_size, ranks.per_node
    data, tensor = (
        None if arguments.raw(key) == "auto" else arguments.get(key, RANKS)
        for key in ("data_parallel_size", "tensor_parallel_size")
    )
    if data is None and tensor is None and world and per_node:
        data = world // per_node
    tensor = tensor or per_node or (world // data if world and data else None)
    data = data or (world // tensor if world and tensor else None)
    if not data or not tensor or (world is not None and data * tensor != world):
        arguments.problem(
            "data_parallel_size",
            f"{data} and tensor_parallel_size {tensor} on {world} ranks",
            "Their product is the number of ranks; auto is the number of nodes, and of ranks per node",
            "Give both, or world_size and ranks_per_node",
        )
    arguments.note("data_parallel_size", f"mapped: One axis of {data} ranks.")
    answer = f"Apply tensor parallelism over {tensor} ranks yourself; pass mesh['data_parallel'] to shard_model."
    arguments.note("tensor_parallel_size", f"{'noted' if (tensor or 1) > 1 else 'implied'}: {answer}")
    values = arguments.read(_PARALLEL)
    return Target(
        mesh=MeshSpec.sharded(data or 1),
        precision=precision_of(mixed),
        state_dict_type="sharded" if values["save_distributed_checkpoint"] else "full",
        axes={"tensor_parallel": tensor} if tensor and tensor > 1 else {},
    )


def _precision(trainer: Reader) -> MixedPrecision | None:
    name = str(trainer.take("precision", _PRECISION)).partition("-")[0]
    dtype = {"bf16": torch.bfloat16, "16": torch.float16}.get(name)
    return MixedPrecision(param_dtype=dtype, reduce_dtype=dtype, buffer_dtype=dtype) if dtype else None


def _ranks(trainer: Reader, ranks: Ranks) -> Ranks:
    """Read ``devices``, a number or a list, and ``num_nodes``."""
    devices = trainer.raw("devices")
    per_node = len(devices) if isinstance(devices, (list, tuple)) else None
    if per_node is None and str(devices).isdecimal():
        per_node = int(devices)
    nodes: int = trainer.get("num_nodes", RANKS, 1)
    world = per_node * nodes if per_node else None
    trainer.note("devices", note_on_ranks("ranks of a node", per_node, ranks.per_node))
    trainer.note("num_nodes", note_on_ranks("ranks in all", world, ranks.world_size))
    trainer.read(_TRAINER)
    replaced = ranks.world_size is not None and ranks.world_size != world
    return Ranks(ranks.world_size or world, ranks.per_node or (None if replaced else per_node))
