"""Configuration files of Hugging Face accelerate, ``accelerate config``: FSDP of version 1 and 2.

Its section ``fsdp_config`` is one of transformers and axolotl too. Facts from accelerate 0.12 to 1.15 (``commands``,
``FullyShardedDataParallelPlugin``, ``examples``), transformers 4 and 5 (``TrainingArguments.fsdp_config``) and axolotl
0.x (``utils/schemas/fsdp.py``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.fsdp import ShardingStrategy

from shardkit.errors import TranslationError, message
from shardkit.fsdp1.configs.reader import BOOLEAN, NAMES, NUMBER, RANKS, Key, Kind, Reader, Table, choice, given, switch
from shardkit.fsdp1.configs.target import Precision, Ranks, Target, Wrap, note_on_ranks
from shardkit.fsdp1.translate.strategy import parse_strategy, resolve_strategy
from shardkit.plan import MeshSpec

BY_CLASS, BY_SIZE, ROOT_ONLY = POLICIES = ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP")
VERSION = Key(choice("12"), "mapped: The FSDP version by which the other keys are read.")
COMPILE = "noted: Not part of the plan: pass compile=True to shard_model, which compiles each block."
FULL_SHARD, SHARD_GRAD_OP = ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP
STRATEGIES = {  # by torch's names without the underscore
    "FULL_SHARD": "mapped: One axis of all ranks, and reshard_after_forward=True.",
    "SHARD_GRAD_OP": "mapped: One axis of all ranks, and reshard_after_forward=False.",
    "NO_SHARD": "mapped: A mesh of (ranks, 1): gradients are all-reduced and nothing is sharded, as in FSDP1.",
    "HYBRID_SHARD": "mapped: Replicates across nodes and shards inside, and reshard_after_forward=True.",
    "HYBRID_SHARD_ZERO2": "mapped: Replicates across nodes and shards inside, and reshard_after_forward=False.",
}
_WHOLE = "noted: model.state_dict() is sharded in FSDP2; full_state_dict(model) gathers it."
_STATE_DICTS = {
    "FULL_STATE_DICT": _WHOLE,
    "LOCAL_STATE_DICT": "refused: FSDP2 has no local state dict. Use SHARDED_STATE_DICT, which any world size loads.",
    "SHARDED_STATE_DICT": "noted: model.state_dict() is sharded: save it with save_checkpoint or "
    "torch.distributed.checkpoint.",
}
_BOTH: Table = {
    "offload_params cpu_offload": switch("mapped: CPUOffloadPolicy for every unit."),
    "activation_checkpointing": switch(
        "mapped: checkpoint_activations=True for blocks. Turn the model's own gradient_checkpointing off."
    ),
    "cpu_ram_efficient_loading": switch(
        "noted: Only rank 0 read the weights. Build under init_on_meta, shard, then load_pretrained reads shards."
    ),
    "state_dict_type": Key(choice(_STATE_DICTS, numbered=True), {None: _WHOLE, **_STATE_DICTS}),
    "ignored_modules": given("refused: Pass the parameters as ignored_params to plan_model."),
    "mixed_precision_policy": "noted: Taken from mixed_precision, as accelerate does.",
}
_PINNED = "implied: Offloaded shards are pinned where there is an accelerator."
_UNPINNED_1 = "refused: FSDP1 always pins offloaded parameters. Set fsdp_version: 2 to turn it off."
_APART = "Parameters keep their names and become DTensors."
_VERSION_1: Table = {
    "cpu_offload_pin_memory": switch(_PINNED, _UNPINNED_1, default=True),
    "sync_module_states": switch("mapped: Rank 0's values are broadcast before sharding.", default=True),
    "forward_prefetch": switch("mapped: prefetch=1: each unit all-gathers the next one explicitly."),
    "limit_all_gathers": switch(
        "implied: FSDP2 gathers at most two units at a time.", "noted: FSDP2 always limits all-gathers.", default=True
    ),
    "use_orig_params": switch(f"implied: {_APART}", f"noted: {_APART}", default=True),
    # The second until accelerate 0.30.
    "backward_prefetch backward_prefetch_policy": Key(
        choice(("BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH"), numbered=True),
        lambda name: f"{'implied' if name == 'BACKWARD_PRE' else 'noted'}: FSDP2 always prefetches like BACKWARD_PRE.",
        "BACKWARD_PRE",
    ),
}
_VERSION_2: Table = {
    "cpu_offload_pin_memory": switch(_PINNED, "mapped: Offloaded shards are not pinned.", default=True),
    "forward_prefetch": switch("refused: Version 2 has no such key. Remove it, or pass prefetch=1 to shard_model."),
    "backward_prefetch backward_prefetch_policy limit_all_gathers use_orig_params": "noted: Version 2 has no such key.",
    "sync_module_states": "noted: Version 2 ignores it: nothing is broadcast.",
}


def read_fsdp(
    section: Reader,
    version: int,
    ranks: Ranks,
    target: Target,
    strategy: ShardingStrategy | None = None,
    policy: str = ROOT_ONLY,
    root: bool = False,
) -> Target:
    """Return ``target`` with what an ``fsdp_config`` section says, for all whose keys it answers.

    ``strategy`` is one named elsewhere, ``policy`` the wrap policy if the section names none; ``root`` reshards the
    root too, in version 2.
    """
    strategy = _strategy_1(section, strategy) if version == 1 else _strategy_2(section, strategy)
    values = section.read({**_BOTH, **(_VERSION_1 if version == 1 else _VERSION_2)})
    offload = target.offload or values["offload_params"] or values["cpu_offload"]
    kept = (values["state_dict_type"] or "").partition("_")[0].lower()
    return replace(
        target,
        mesh=target.mesh or _mesh(section, ranks, strategy),
        reshard_after_forward=strategy.name in ("FULL_SHARD", "HYBRID_SHARD"),
        root_reshards=root and version == 2 and strategy is FULL_SHARD,
        wrap=_wrap(section, policy),
        offload=offload,
        pin_memory=values["cpu_offload_pin_memory"],
        checkpoint_activations=values["activation_checkpointing"],
        prefetch=int(version == 1 and values["forward_prefetch"]),
        sync_module_states=values.get("sync_module_states", False),
        rank0_loads=values["cpu_ram_efficient_loading"],
        state_dict_type=kept if kept in ("full", "sharded") else None,
        strategy=strategy if version == 1 else None,
    )


def _strategy(value: Any) -> ShardingStrategy:
    if str(value).lower() in ("true", "false"):  # accelerate's default is the text "true"
        return FULL_SHARD if str(value).lower() == "true" else SHARD_GRAD_OP
    return parse_strategy(value)


STRATEGY = Kind(f"one of {', '.join(STRATEGIES)}, or their number from 1", "FULL_SHARD", _strategy)


def _strategy_1(section: Reader, elsewhere: ShardingStrategy | None) -> ShardingStrategy:
    """Read ``sharding_strategy``, or ``reshard_after_forward``, which takes the same names in version 1."""
    first, second = (section.get(key, STRATEGY) for key in ("sharding_strategy", "reshard_after_forward"))
    found: ShardingStrategy = first or second or elsewhere or FULL_SHARD
    if elsewhere not in (None, found):
        key = "sharding_strategy" if first else "reshard_after_forward"
        problem = f"is {found.name}, but elsewhere the strategy is {elsewhere.name}"
        section.problem(key, problem, "Remove one of them")
    answer = STRATEGIES[found.name.lstrip("_")]
    later = "noted: In version 1 sharding_strategy takes precedence."
    section.note("sharding_strategy", answer)
    section.note("reshard_after_forward", answer if second in (None, found) else later)
    return found


def _strategy_2(section: Reader, elsewhere: ShardingStrategy | None) -> ShardingStrategy:
    reshard = section.get("reshard_after_forward", BOOLEAN, elsewhere is not SHARD_GRAD_OP)
    where = "Parameters are resharded after forward" if reshard else "Parameters stay gathered until backward"
    section.note("reshard_after_forward", f"mapped: {where}, in all units but the root.")
    strategy = FULL_SHARD if reshard else SHARD_GRAD_OP
    same = section.get("sharding_strategy", STRATEGY) in (None, strategy)
    other = "Version 2 ignores it, and reshard_after_forward says otherwise. Set fsdp_version: 1, or remove it."
    section.note("sharding_strategy", "implied: Version 2 ignores it." if same else f"refused: {other}")
    return strategy


def _mesh(section: Reader, ranks: Ranks, strategy: ShardingStrategy) -> MeshSpec | None:
    try:
        if ranks.world_size is not None:
            return resolve_strategy(strategy, ranks.world_size, ranks.per_node).mesh
        if strategy not in (FULL_SHARD, SHARD_GRAD_OP):
            problem = f"needs a known number of ranks for {strategy.name.lstrip('_')}"
            raise TranslationError(message("sharding_strategy", problem, "", "Pass world_size=16"))
    except TranslationError as error:
        section.problems.append(str(error))
    return None


def _wrap(section: Reader, policy: str) -> Wrap:
    policy = section.get("auto_wrap_policy", choice(POLICIES, numbered=True), policy)
    named: tuple[str, ...] = section.get("transformer_layer_cls_to_wrap", NAMES, ())
    least = section.get("min_num_params", NUMBER, 0)
    classes = named if policy == BY_CLASS else ()
    ignored, alone = f"noted: auto_wrap_policy {policy} ignores it.", "mapped: The root is the only unit."
    by_class = f"mapped: A unit of each {' and '.join(classes) or 'block that the model lists in _no_split_modules'}."
    by_size = "refused: Only code wraps by size: shard_model(model, units=[by_size(...)])." if least else alone
    section.note("auto_wrap_policy", {BY_CLASS: by_class, BY_SIZE: by_size}.get(policy, alone))
    section.note("transformer_layer_cls_to_wrap", by_class if policy == BY_CLASS else ignored)
    section.note("min_num_params", by_size if policy == BY_SIZE else ignored)
    return Wrap("classes" if classes else "declared" if policy == BY_CLASS else "root", classes)


# --- Sizes of the axes of ranks ---------------------------------------------------------------------------------------

SPLIT = 'These ranks shard too. After shard_model: split_sequence(model, training_mesh(sp={})["sp"])'
_OTHERS = {
    "tp": "Apply tensor parallelism before sharding, on a mesh with a tp axis",
    "cp": SPLIT,
    "sp": SPLIT,
    "ep": "Apply expert parallelism yourself, on a mesh with an ep axis",
}
TILES = "mapped: MLPs, by the names of their classes, compute in tiles; leave the patch out."
CONTEXT = "elsewhere: For other kinds of context parallelism; split_sequence exchanges heads for tokens."


def read_axes(
    config: Reader,
    version: int,
    world: int | None,
    names: Mapping[str, str],
    rest_shards: bool,
    known: Mapping[str, int] = {},
) -> tuple[MeshSpec | None, dict[str, int]]:
    """Return the data-parallel mesh by the sizes of its axes, None if no size is given; and the sizes of other axes.

    Context parallel ranks shard the parameters too: each sees a part of every sequence, so their gradients add up.
    ``names`` are the keys of the axes, ``known`` sizes that are not in ``config``; with ``rest_shards`` the default of
    ``dp_shard`` is all remaining ranks.
    """
    sizes = {**known} | {axis: size for axis, key in names.items() if (size := config.get(key, RANKS)) is not None}
    mesh = _mesh_of(config, world, sizes, rest_shards) if sizes else None
    for axis, key in names.items():
        if version == 1 and sizes.get(axis, 1) > 1:
            config.problem(key, "needs FSDP version 2", "Set fsdp_version: 2")
        config.note(key, _answer(axis, sizes.get(axis, 1), mesh))
    config.read({"cp_comm_strategy cp_handler cp_backend sp_handler sp_backend": CONTEXT})
    return mesh, {axis: size for axis, size in sizes.items() if axis in _OTHERS and size > 1}


def _mesh_of(config: Reader, world: int | None, sizes: Mapping[str, int], rest_shards: bool) -> MeshSpec | None:
    replicate, context = sizes.get("dp_replicate", 1), sizes.get("cp", 1) * sizes.get("sp", 1)
    beside = sizes.get("tp", 1) * sizes.get("ep", 1)
    shard = sizes.get("dp_shard", 1)
    if rest_shards and "dp_shard" not in sizes:
        if world is None:
            return None
        shard = max(1, world // (replicate * context * beside))
    product = replicate * shard * context * beside
    if world is not None and product != world:
        shown = ", ".join(f"{axis}={size}" for axis, size in {**sizes, "dp_shard": shard}.items())
        problem = f"and the other sizes of axes, {shown}, make {product} ranks, but there are {world}"
        config.problem(next(iter(config), "sizes"), problem, "Change one of them, or the number of ranks")
    return MeshSpec.hybrid(replicate, shard * context) if replicate > 1 else MeshSpec.sharded(shard * context)


def _answer(axis: str, size: int, mesh: MeshSpec | None) -> str:
    if axis not in _OTHERS:
        return f"mapped: Mesh axis {axis} of size {size}."
    if size == 1:
        return "implied: An axis of size 1 changes nothing."
    if axis in ("cp", "sp"):
        return f"mapped: {SPLIT.format(size)}."
    of = f" ({mesh})" if mesh is not None else ""
    return f"noted: {_OTHERS[axis]}. Pass the data-parallel submesh{of} to shard_model."


# --- A whole file -----------------------------------------------------------------------------------------------------

_TYPES = {"FSDP": "mapped: As fsdp_config says."}
_TYPES |= dict.fromkeys(("TP", "XLA", "TPU", "MEGATRON_LM"), "refused: {} is not FSDP.")
_TYPES["DEEPSPEED"] = "refused: It is not FSDP. ZeRO stage 3 is shard_model's default, 2 reshard_after_forward=False."
_TYPES |= dict.fromkeys(
    ("NO", "MULTI_GPU", "MULTI_CPU", "MULTI_XPU", "MULTI_NPU", "MULTI_MLU", "MULTI_MUSA"),
    "noted: With {} accelerate ignores fsdp_config. It is translated here as for FSDP.",
)
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
    "deepspeed_config megatron_lm_config tp_config": "elsewhere: Not for FSDP.",
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
    return Precision.of({"fp16": torch.float16, "bf16": torch.bfloat16}.get(name), version)


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
