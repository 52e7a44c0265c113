"""The three formats: which keys they read, and what those come to together."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.fsdp import ShardingStrategy

from shardkit.errors import TranslationError, listing
from shardkit.fsdp1.configs import keys
from shardkit.fsdp1.configs.reader import Config
from shardkit.fsdp1.configs.target import Ranks, Target
from shardkit.fsdp1.translate.strategy import RESHARDING, mesh_of_strategy, parse_strategy
from shardkit.plan import MeshSpec

FULL_SHARD, SHARD_GRAD_OP = ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP
_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def read_accelerate(config: Config, ranks: Ranks) -> Target:
    """Return the target of ``accelerate config``'s file."""
    values = config.read(keys.ACCELERATE)
    world, machines = values["num_processes"], values["num_machines"]
    per_node = ranks.per_node
    is_of_file = world is not None and ranks.world_size in (None, world)
    if per_node is None and is_of_file and world % machines == 0:
        per_node = world // machines
    ranks = Ranks(ranks.world_size or world, per_node)
    version = _version_in(config)
    axes = config.read(keys.PARALLELISM, "parallelism_config", prefix="parallelism_config_")
    sizes = {}
    for axis, (key, _, _) in keys.AXES.items():
        if axes[key]:
            sizes[axis] = axes[key]
    target = Target(
        mesh=_mesh_of_axes(config, version, ranks, sizes),
        dtype=_DTYPES.get(values["mixed_precision"]),
    )
    return _read_fsdp(config, version, ranks, target)


def read_transformers(config: Config, ranks: Ranks) -> Target:
    """Return the target of ``TrainingArguments`` with ``fsdp`` and ``fsdp_config``."""
    values = config.read(keys.TRAINER)
    words = values["fsdp"]  # None for fsdp=True, which is version 2
    if words == ():
        config.answer("fsdp", "refused: FSDP is off, so there is nothing to translate.")
    version = _version_in(config, default=2 if words is None else 1)
    wraps = words is None or "auto_wrap" in words
    words = words or ()
    target = Target(mesh=None, dtype=_dtype_of(values), offload="offload" in words)
    strategy = _strategy_of(config, words, version)
    return _read_fsdp(config, version, ranks, target, strategy, wraps=wraps)


def read_axolotl(config: Config, ranks: Ranks) -> Target:
    """Return the target of axolotl's file, which passes its settings on to transformers."""
    values = config.read(keys.AXOLOTL)
    names = {str(key).removeprefix("fsdp_") for key in config.section("fsdp_config")}
    old_names = {"sharding_strategy", "use_orig_params"}
    is_first = values["fsdp"] or "reshard_after_forward" not in names or names & old_names
    version = _version_in(config, values["fsdp_version"], default=1 if is_first else 2)

    sizes = {}
    for axis, (_, key, _) in keys.AXES.items():
        if values[key]:
            sizes[axis] = values[key]
    if sizes and "dp_shard" not in sizes and ranks.world_size is not None:  # the rest shards
        sizes["dp_shard"] = max(1, ranks.world_size // math.prod(sizes.values()))
    mesh = _mesh_of_axes(config, version, ranks, sizes)
    if "dp_shard" not in sizes:
        mesh = None  # of an unknown number of ranks

    words = values["fsdp"] or ()
    target = Target(mesh=mesh, dtype=_dtype_of(values), offload="offload" in words)
    strategy = _strategy_of(config, words, version)
    if version == 1 and "sharding_strategy" in names:
        strategy = None  # the section takes precedence
    wraps = version == 2 or "auto_wrap" in words
    target = _read_fsdp(config, version, ranks, target, strategy, wraps=wraps)
    # axolotl passes reshard_after_forward to the root too.
    return replace(target, root_reshards=version == 2 and target.reshard_after_forward)


def _read_fsdp(
    config: Config,
    version: int,
    ranks: Ranks,
    target: Target,
    outside: ShardingStrategy | None = None,
    wraps: bool = False,
) -> Target:
    """Return ``target`` with what the section ``fsdp_config`` says, which all formats have.

    ``outside`` is a strategy named outside of it; ``wraps`` whether blocks are wrapped if the
    section names no policy.
    """
    table = keys.FSDP_1 if version == 1 else keys.FSDP_2
    values = config.read(table, "fsdp_config", prefix="fsdp_")

    if version == 1:
        inside = values["sharding_strategy"] or values["reshard_after_forward"]
        strategy = inside or outside or FULL_SHARD
        if outside not in (None, strategy):
            problem = f"is {strategy.name}, but elsewhere the strategy is {outside.name}"
            config.problem("fsdp_config.sharding_strategy", problem, "Remove one of them")
        reshards = strategy.name in RESHARDING
    else:
        reshards = values["reshard_after_forward"] and outside is not SHARD_GRAD_OP
        strategy = FULL_SHARD

    policy, classes = values["auto_wrap_policy"], values["transformer_layer_cls_to_wrap"]
    wraps = policy == "TRANSFORMER_BASED_WRAP" or (policy is None and wraps)
    if wraps and policy is None and version == 1 and values["min_num_params"]:
        _answer_in_section(config, "min_num_params", keys.POLICIES["SIZE_BASED_WRAP"])
    if not wraps:
        unused = "noted: Nothing says to wrap by class."
        _answer_in_section(config, "transformer_layer_cls_to_wrap", unused)

    return replace(
        target,
        mesh=target.mesh or _mesh_of_strategy(config, ranks, strategy),
        strategy=strategy if version == 1 else None,
        reshard_after_forward=reshards,
        wraps=wraps,
        classes=classes if wraps else (),
        offload=target.offload or values["offload_params"] or values["cpu_offload"],
        pin_memory=values["cpu_offload_pin_memory"] is not False,
        checkpoint_activations=values["activation_checkpointing"],
        forward_prefetch=version == 1 and values["forward_prefetch"],
        sync_module_states=version == 1 and values["sync_module_states"],
    )


def _answer_in_section(config: Config, key: str, answer: str) -> None:
    for written in (key, f"fsdp_{key}"):
        config.answer(f"fsdp_config.{written}", answer)


def _version_in(config: Config, outside: int | None = None, default: int = 1) -> int:
    section = config.section("fsdp_config")
    inside = section.get("version", section.get("fsdp_version"))
    if outside and inside and str(outside) != str(inside):
        problem = f"is {outside}, but fsdp_config says {inside}"
        config.problem("fsdp_version", problem, "Remove one of them")
    return {"1": 1, "2": 2}.get(str(outside or inside), default)


def _mesh_of_strategy(config: Config, ranks: Ranks, strategy: ShardingStrategy) -> MeshSpec | None:
    """Return the mesh of a strategy; None where nothing says how many ranks there are."""
    if ranks.world_size is None:
        if strategy not in (FULL_SHARD, SHARD_GRAD_OP):
            problem = f"needs a known number of ranks for {strategy.name.strip('_')}"
            config.problem("sharding_strategy", problem, "Pass world_size=16, or --world 16")
        return None
    try:
        return mesh_of_strategy(strategy, ranks.world_size, ranks.per_node)
    except TranslationError as error:
        config.problems.append(str(error))
        return None


def _mesh_of_axes(
    config: Config, version: int, ranks: Ranks, sizes: Mapping[str, int]
) -> MeshSpec | None:
    """Return the data-parallel mesh by the sizes of the axes; None if there are none.

    Context parallel ranks shard the parameters too: each sees a part of every sequence, so their
    gradients add up.
    """
    if not sizes:
        return None
    replicate = sizes.get("dp_replicate", 1)
    shard = sizes.get("dp_shard", 1) * sizes.get("cp", 1) * sizes.get("sp", 1)
    product = math.prod(sizes.values())
    if version == 1 and product > 1:
        config.problem("sizes of axes", "need FSDP version 2", "Set fsdp_version: 2")
    if ranks.world_size not in (None, product):
        shown = ", ".join(f"{axis}={size}" for axis, size in sizes.items())
        problem = f"{shown} make {product} ranks, but there are {ranks.world_size}"
        config.problem("sizes of axes", problem, "Change one of them, or the number of ranks")
    return MeshSpec.hybrid(replicate, shard) if replicate > 1 else MeshSpec.sharded(shard)


def _strategy_of(config: Config, words: tuple[str, ...], version: int) -> ShardingStrategy | None:
    """Return the strategy among the words of ``fsdp``, such as ``full_shard auto_wrap``."""
    known = [strategy.name.strip("_").lower() for strategy in ShardingStrategy]
    named = [word for word in words if word in known]
    if len(named) > 1 or not {*words} <= {*named, "offload", "auto_wrap"}:
        what = f"one of {', '.join(known)}, and offload and auto_wrap"
        config.problem("fsdp", f"must be {what}, got {' '.join(words)}", "Use full_shard auto_wrap")
        return None
    if version == 2 and named and named[0] not in ("full_shard", "shard_grad_op"):
        config.answer("fsdp", f"refused: Version 2 has no {named[0]}: set the version to 1.")
        return None
    return parse_strategy(named[0]) if named else None


def _dtype_of(values: Mapping[str, Any]) -> torch.dtype | None:
    if values["bf16"]:
        return torch.bfloat16
    return torch.float16 if values["fp16"] else None


FORMATS: dict[str, Callable[[Config, Ranks], Target]] = {
    "accelerate": read_accelerate,
    "axolotl": read_axolotl,
    "transformers": read_transformers,
}
_SIGNS = {  # keys that only one tool has; transformers' come last, since axolotl passes them on
    "accelerate": "distributed_type compute_environment main_training_function num_machines "
    "parallelism_config",
    "axolotl": "base_model datasets micro_batch_size sequence_len fsdp_version "
    "fsdp_final_state_dict_type dp_shard_size dp_replicate_size context_parallel_size adapter",
    "transformers": "per_device_train_batch_size num_train_epochs fsdp",
    "ROLL": "strategy_args strategy_config actor_train",  # only to refuse it by name
}


def format_of(config: Mapping[Any, Any]) -> str:
    """Return the format of a configuration, recognized by its keys."""
    present = {}
    for name, signs in _SIGNS.items():
        keys_of_tool = [sign for sign in signs.split() if sign in config]
        if keys_of_tool:
            present[name] = keys_of_tool
    if len(present) > 1:
        present.pop("transformers", None)
    if len(present) == 1:
        return next(iter(present))
    several = ", and of ".join(f"{name} ({listing(signs, 3)})" for name, signs in present.items())
    problem = f"has keys of {several}" if several else "has none of the keys of a known format"
    raise TranslationError(
        f"config {problem}. Formats are {listing(FORMATS)}; name it with format=, or --format."
    )
