"""The four formats: which keys they read, and what those come to together."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.fsdp import ShardingStrategy

from shardkit.errors import TranslationError, listing, message
from shardkit.fsdp1.configs import keys
from shardkit.fsdp1.configs.reader import SECTION, Config, Table
from shardkit.fsdp1.configs.target import Precision, Ranks, Target, Wrap
from shardkit.fsdp1.translate.strategy import RESHARDING, parse_strategy, resolve_strategy
from shardkit.plan import MeshSpec

FULL_SHARD, SHARD_GRAD_OP = ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP
_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def read_accelerate(config: Config, ranks: Ranks) -> Target:
    """Return the target of ``accelerate config``'s file."""
    values = config.read(keys.ACCELERATE)
    world, machines = values["num_processes"], values["num_machines"]
    per_node = None
    if world is not None and ranks.world_size in (None, world) and world % machines == 0:
        per_node = world // machines
    ranks = Ranks(ranks.world_size or world, ranks.per_node or per_node)
    version = _version_in(config)
    prefix = "parallelism_config_"
    sizes = config.read(keys.PARALLELISM, "parallelism_config", prefix)
    sizes = {axis: size for axis, (key, _, _) in keys.AXES.items() if (size := sizes[key])}
    target = replace(
        _on_axes(config, version, ranks, sizes),
        precision=Precision.of(_DTYPES.get(values["mixed_precision"]), version),
    )
    return _read_fsdp(config, version, ranks, target)


def read_transformers(config: Config, ranks: Ranks) -> Target:
    """Return the target of ``TrainingArguments`` with ``fsdp`` and ``fsdp_config``."""
    values = config.read(keys.TRAINER)
    words = values["fsdp"]
    if words == ():
        config.answer("fsdp", "refused: FSDP is off, so there is nothing to translate.")
    version = _version_in(config, default=2 if words is None else 1)
    wraps = words is None or "auto_wrap" in words
    target = Target(
        None,
        precision=_amp(values, version),
        offload="offload" in (words or ()),
    )
    strategy = _strategy_of(config, words or (), version)
    return _read_fsdp(config, version, ranks, target, strategy, wraps=wraps)


def read_axolotl(config: Config, ranks: Ranks) -> Target:
    """Return the target of axolotl's file, which passes its settings on to transformers."""
    values = config.read(keys.AXOLOTL)
    section = config.section("fsdp_config")
    names = {str(key).removeprefix("fsdp_") for key in section}
    old_names = {"sharding_strategy", "use_orig_params"}
    is_first = values["fsdp"] or "reshard_after_forward" not in names or names & old_names
    version = _version_in(config, values["fsdp_version"], default=1 if is_first else 2)
    sizes = {axis: size for axis, (_, key, _) in keys.AXES.items() if (size := values.get(key))}
    context = config.read(keys.CONTEXT_PARALLEL, "context_parallel")["size"]
    if context and sizes.setdefault("cp", context) != context:
        problem = f"is {context}, but context_parallel_size is {sizes['cp']}"
        config.problem("context_parallel.size", problem, "Remove one of them")
    words = values["fsdp"] or ()
    tiles = values["tiled_mlp_num_shards"]
    if values["tiled_mlp"] and not tiles:
        why = "Without tiled_mlp_num_shards it depends on the sequence. Set it."
        config.answer("tiled_mlp", f"refused: {why}")
    rest_shards = "dp_shard" not in sizes
    if rest_shards and sizes and ranks.world_size is not None:
        sizes["dp_shard"] = max(1, ranks.world_size // math.prod(sizes.values()))
    target = _on_axes(config, version, ranks, sizes)
    target = replace(
        target,
        mesh=None if rest_shards and ranks.world_size is None else target.mesh,
        precision=_amp(values, version),
        offload="offload" in words,
        tiles=max(1, tiles) if values["tiled_mlp"] else 1,
    )
    strategy = _strategy_of(config, words, version)
    if version == 1 and "sharding_strategy" in names:
        strategy = None  # the section takes precedence
    wraps = version == 2 or "auto_wrap" in words
    target = _read_fsdp(config, version, ranks, target, strategy, wraps=wraps)
    # axolotl hands reshard_after_forward to the root too.
    return replace(target, root_reshards=version == 2 and target.reshard_after_forward)


# --- fsdp_config, of all three -------------------------------------------------------------------


def _read_fsdp(
    config: Config,
    version: int,
    ranks: Ranks,
    target: Target,
    elsewhere: ShardingStrategy | None = None,
    wraps: bool = False,
) -> Target:
    """Return ``target`` with what the section ``fsdp_config`` says.

    ``elsewhere`` is a strategy named outside of it; ``wraps`` whether blocks are wrapped if the
    section names no policy.
    """
    table: Table = keys.FSDP_1 if version == 1 else keys.FSDP_2
    values = config.read(table, "fsdp_config", prefix="fsdp_")
    if version == 1:
        inside = values["sharding_strategy"] or values["reshard_after_forward"]
        strategy = inside or elsewhere or FULL_SHARD
        if elsewhere not in (None, strategy):
            problem = f"is {strategy.name}, but elsewhere the strategy is {elsewhere.name}"
            config.problem("fsdp_config.sharding_strategy", problem, "Remove one of them")
        reshards = strategy.name in RESHARDING
    else:
        reshards = values["reshard_after_forward"] and elsewhere is not SHARD_GRAD_OP
        strategy = FULL_SHARD if reshards else SHARD_GRAD_OP
    return replace(
        target,
        mesh=target.mesh or _mesh(config, ranks, strategy),
        strategy=strategy if version == 1 else None,
        reshard_after_forward=reshards,
        wrap=_wrap(config, version, values, wraps),
        offload=target.offload or values["offload_params"] or values["cpu_offload"],
        pin_memory=values["cpu_offload_pin_memory"] is not False,
        checkpoint_activations=values["activation_checkpointing"],
        prefetch=int(version == 1 and values["forward_prefetch"]),
        sync_module_states=values.get("sync_module_states", False),
    )


def _version_in(config: Config, outside: str | None = None, default: int = 1) -> int:
    section = config.section("fsdp_config")
    inside = section.get("version", section.get("fsdp_version"))
    if outside and inside and str(outside) != str(inside):
        problem = f"is {outside}, but fsdp_config says {inside}"
        config.problem("fsdp_version", problem, "Remove one of them")
    return {"1": 1, "2": 2}.get(str(outside or inside), default)


def _wrap(config: Config, version: int, values: Mapping[str, Any], wraps: bool) -> Wrap:
    policy, classes = values["auto_wrap_policy"], values["transformer_layer_cls_to_wrap"]
    if policy is None and wraps and version == 1 and values["min_num_params"]:
        _answer_in_section(config, "min_num_params", keys.POLICIES["SIZE_BASED_WRAP"])
    if policy == "TRANSFORMER_BASED_WRAP" or (policy is None and wraps):
        return Wrap("classes", classes) if classes else Wrap("declared")
    unused = "noted: Nothing says to wrap by class."
    _answer_in_section(config, "transformer_layer_cls_to_wrap", unused)
    return Wrap("root")


def _answer_in_section(config: Config, key: str, answer: str) -> None:
    for written in (key, f"fsdp_{key}"):
        config.answer(f"fsdp_config.{written}", answer)


def _mesh(config: Config, ranks: Ranks, strategy: ShardingStrategy) -> MeshSpec | None:
    """Return the mesh of a strategy; None where nothing says how many ranks there are."""
    if ranks.world_size is None and strategy in (FULL_SHARD, SHARD_GRAD_OP):
        return None
    if ranks.world_size is None:
        problem = f"needs a known number of ranks for {strategy.name.strip('_')}"
        config.problem("sharding_strategy", problem, "Pass world_size=16")
        return None
    try:
        return resolve_strategy(strategy, ranks.world_size, ranks.per_node).mesh
    except TranslationError as error:
        config.problems.append(str(error))
        return None


def _on_axes(config: Config, version: int, ranks: Ranks, sizes: Mapping[str, int]) -> Target:
    """Return a target on the data-parallel mesh by the sizes of the axes; None if there are none.

    Context parallel ranks shard the parameters too: each sees a part of every sequence, so their
    gradients add up.
    """
    if not sizes:
        return Target(None)
    replicate = sizes.get("dp_replicate", 1)
    shard = sizes.get("dp_shard", 1) * sizes.get("cp", 1) * sizes.get("sp", 1)
    product = replicate * shard * sizes.get("tp", 1) * sizes.get("ep", 1)
    if version == 1 and product > 1:
        config.problem("sizes of axes", "need FSDP version 2", "Set fsdp_version: 2")
    if ranks.world_size not in (None, product):
        shown = ", ".join(f"{axis}={size}" for axis, size in sizes.items())
        problem = f"{shown} make {product} ranks, but there are {ranks.world_size}"
        config.problem("sizes of axes", problem, "Change one of them, or the number of ranks")
    mesh = MeshSpec.hybrid(replicate, shard) if replicate > 1 else MeshSpec.sharded(shard)
    others = {a: size for a, size in sizes.items() if a in ("tp", "cp", "sp", "ep") and size > 1}
    return Target(mesh, axes=others)


def _strategy_of(config: Config, words: tuple[str, ...], version: int) -> ShardingStrategy | None:
    """Return the strategy among the words of ``fsdp``, such as ``full_shard auto_wrap``."""
    known = {strategy.name.strip("_").lower(): strategy for strategy in ShardingStrategy}
    named = [word for word in words if word in known]
    if len(named) > 1 or not {*words} <= {*named, "offload", "auto_wrap"}:
        what = f"one of {', '.join(known)}, and offload and auto_wrap"
        config.problem("fsdp", f"must be {what}, got {' '.join(words)}", "Use full_shard auto_wrap")
        return None
    if version == 2 and named and named[0] not in ("full_shard", "shard_grad_op"):
        config.answer("fsdp", f"refused: Version 2 has no {named[0]}: set the version to 1.")
        return None
    return parse_strategy(named[0]) if named else None


def _amp(values: Mapping[str, Any], version: int) -> Precision:
    dtype = next((_DTYPES[key] for key in ("bf16", "fp16") if values[key]), None)
    return Precision.of(dtype, version)


# --- ROLL ----------------------------------------------------------------------------------------

_RANGE = re.compile(r"^\s*list\(\s*range\(\s*(?:(\d+)\s*,\s*)?(\d+)\s*\)\s*\)\s*$")


def read_roll(config: Config, ranks: Ranks) -> Target:
    """Return the target of a pipeline, of one role, or of a ``strategy_config``."""
    role = _role(config)
    inside = role
    for section in ("strategy_args", "strategy_config"):  # either may be the file itself
        if section in config.section(inside):
            config.read(keys.ROLE, inside)
            inside = f"{inside}.{section}".lstrip(".")
    model_args = f"{role}.model_args".lstrip(".")
    model = config.read(keys.MODEL, model_args) if config.section(model_args) else {}
    values = config.read({**keys.ROLE, **keys.STRATEGY_CONFIG}, inside)
    wrap = config.read(keys.WRAP_POLICY, f"{inside}.wrap_policy".lstrip("."))
    sequence = model.get("ulysses_size", 1)
    patched = values["apply_expert_patch"]
    classes = wrap["transformer_layer_cls_to_wrap"]
    mapped = _mapped_devices(config, role)
    world = ranks.world_size or mapped
    mesh = _roll_mesh(config, values["fsdp_size"], world, sequence)
    mesh = _with_experts(config, mesh, values["ep_size"])
    reshards = values["reshard_after_forward"]
    return Target(
        mesh=mesh,
        reshard_after_forward=reshards is not False,
        root_reshards=reshards is True,  # None keeps the root gathered
        wrap=Wrap(
            by="classes" if classes else "declared",
            classes=(*classes, *wrap["moe_experts"]) if patched else classes,
            embeddings=wrap["wrap_embeddings"],
            head=wrap["wrap_lm_output"],
            skipped=wrap["moe_experts"] if patched else (),
        ),
        precision=Precision(values["param_dtype"], values["reduce_dtype"]),
        vision_casts=False,
        offload=values["offload_policy"],
        checkpoint_activations=model.get("disable_gradient_checkpointing") is False,
        tiles=values["tiled_num_shards"] if values["apply_tiled_mlp"] else 1,
        axes={"sp": sequence} if sequence > 1 else {},
    )


def _role(config: Config) -> str:
    """Return the role to translate, empty if the file is of one; others get a note."""
    engines = {}
    for key, value in config.values.items():
        if isinstance(value, Mapping) and isinstance(value.get("strategy_args"), Mapping):
            engines[str(key)] = str(value["strategy_args"].get("strategy_name"))
    if not engines:
        return ""
    ours = [key for key, engine in engines.items() if "fsdp" in engine] or list(engines)
    chosen = "actor_train" if "actor_train" in ours else ours[0]
    pipeline = dict.fromkeys(map(str, config.values), "elsewhere: For the pipeline.")
    pipeline |= dict.fromkeys(engines, "elsewhere: Another role: translate it separately.")
    config.read({**pipeline, chosen: SECTION})
    return chosen


def _mapped_devices(config: Config, role: str) -> int | None:
    value = config.section(role).get("device_mapping")
    if isinstance(value, list) and value:
        return len(value)
    if isinstance(value, str) and (match := _RANGE.match(value)):
        return int(match[2]) - int(match[1] or 0)
    if value is not None:
        problem = f"must be a list, or list(range(0,8)), got {value!r}"
        config.problem("device_mapping", problem, "Use list(range(0,8))")
    return None


def _roll_mesh(config: Config, size: int, world: int | None, sequence: int) -> MeshSpec | None:
    """Return the mesh: hybrid where ``fsdp_size`` is between 1 and the number of ranks."""
    if world is None:
        if size > 1:
            fix = "Give device_mapping, or pass world_size=16"
            config.problem("fsdp_size", "needs a known number of ranks", fix)
        return None
    if not 1 < size < world and 1 < sequence < world and world % sequence == 0:
        size = world // sequence  # as ROLL does with ulysses_size
    if size <= 1 or size >= world:
        return MeshSpec.sharded(world)
    if world % size:
        config.problem("fsdp_size", f"{size} does not divide {world} ranks", "Use a divisor")
        return None
    return MeshSpec.hybrid(world // size, size)


def _with_experts(config: Config, mesh: MeshSpec | None, size: int) -> MeshSpec | None:
    """Return the mesh with the axes efsdp and ep, if ``ep_size`` splits the ranks that shard."""
    if size == 1:
        return mesh
    if mesh is None or mesh.shard_size % size:
        of = "an unknown number of" if mesh is None else mesh.shard_size
        config.problem(
            "ep_size", f"{size} must divide the ranks that shard, {of} ranks", "Correct it"
        )
        return mesh
    shape = (*mesh.shape[:-1], mesh.shard_size // size, size)
    return MeshSpec(shape, (*mesh.axis_names[:-1], "efsdp", "ep"), 2)


FORMATS: dict[str, Callable[[Config, Ranks], Target]] = {
    "accelerate": read_accelerate,
    "axolotl": read_axolotl,
    "transformers": read_transformers,
    "roll": read_roll,
}
_SIGNS = {  # keys that only one tool has; transformers' come last, since axolotl passes them on
    "accelerate": "distributed_type compute_environment main_training_function num_machines "
    "parallelism_config",
    "axolotl": "base_model datasets micro_batch_size sequence_len fsdp_version "
    "fsdp_final_state_dict_type dp_shard_size dp_replicate_size context_parallel_size adapter",
    "roll": "strategy_args strategy_config strategy_name fsdp_size wrap_policy",
    "transformers": "per_device_train_batch_size num_train_epochs fsdp",
}


def format_of(config: Mapping[Any, Any]) -> str:
    """Return the format of a configuration, recognized by its keys."""
    found = {}
    for name, signs in _SIGNS.items():
        there = [sign for sign in signs.split() if sign in config]
        if there:
            found[name] = there
    for key, value in config.items():
        if isinstance(value, Mapping) and "strategy_args" in value:
            found.setdefault("roll", []).append(f"{key}.strategy_args")
    if len(found) > 1:
        found.pop("transformers", None)
    if len(found) == 1:
        return next(iter(found))
    several = ", and of ".join(f"{name} ({listing(signs, 3)})" for name, signs in found.items())
    problem = f"has keys of {several}" if several else "has none of the keys of a known format"
    known = "; ".join(f"{name} ({listing(signs.split(), 3)})" for name, signs in _SIGNS.items())
    rule = f"Formats and some of their keys are {known}"
    raise TranslationError(message("config", problem, rule, "Name it with format=, or --format"))
