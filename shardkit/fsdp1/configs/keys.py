"""The keys that formats share: an ``fsdp_config`` section, of accelerate, transformers and axolotl, and sizes of axes.

Facts from accelerate 1.x (``FullyShardedDataParallelPlugin``, ``commands/launch.py``), transformers 4 and 5
(``TrainingArguments.fsdp_config``) and axolotl 0.x (``utils/schemas/fsdp.py``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch.distributed.fsdp import ShardingStrategy

from shardkit.errors import TranslationError, message
from shardkit.fsdp1.configs.reader import (
    BOOLEAN,
    NAMES,
    NUMBER,
    RANKS,
    Key,
    Kind,
    Reader,
    Table,
    choice,
    given,
    one_of,
    switch,
)
from shardkit.fsdp1.configs.target import Ranks, Target, Wrap
from shardkit.fsdp1.translate.strategy import parse_strategy, resolve_strategy
from shardkit.plan import MeshSpec

BY_CLASS, BY_SIZE, ROOT_ONLY = POLICIES = ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP")
VERSION = Key(choice("12"), "mapped: The version of FSDP that the other keys are read for.")
FULL_SHARD, SHARD_GRAD_OP = ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP
STRATEGIES = {  # by torch's names without the underscore
    "FULL_SHARD": "mapped: One axis of all ranks, and reshard_after_forward=True.",
    "SHARD_GRAD_OP": "mapped: One axis of all ranks, and reshard_after_forward=False.",
    "NO_SHARD": "mapped: A mesh of (ranks, 1): gradients are all-reduced and nothing is sharded, as FSDP1 does.",
    "HYBRID_SHARD": "mapped: Replicates across nodes and shards inside, and reshard_after_forward=True.",
    "HYBRID_SHARD_ZERO2": "mapped: Replicates across nodes and shards inside, and reshard_after_forward=False.",
}

_UNITS: Table = {  # for formats that have no other way to say which modules are units
    # accelerate's and axolotl's, and transformers' since 5.
    "offload_params cpu_offload": switch(
        "mapped: CPUOffloadPolicy for every unit.", "mapped: Shards stay on the device, which is the default."
    ),
    "activation_checkpointing": switch(
        "mapped: checkpoint_activations=True for the units that are blocks; do not turn on the model's own "
        "gradient_checkpointing too.",
        "mapped: Activations are kept, which is the default.",
    ),
}
_WHOLE = "noted: model.state_dict() is sharded in FSDP2; full_state_dict(model) gives the whole one."
_SHARDED = "noted: model.state_dict() is sharded: save it with save_checkpoint or torch.distributed.checkpoint."
_LOCAL = "refused: FSDP2 has no local state dict. Use SHARDED_STATE_DICT, which any number of ranks can load."
_STATE_DICTS = {"FULL_STATE_DICT": _WHOLE, "LOCAL_STATE_DICT": _LOCAL, "SHARDED_STATE_DICT": _SHARDED}
_STATE_DICTS |= {"full": _WHOLE, "sharded": _SHARDED}  # Lightning's
_BOTH: Table = {
    "cpu_ram_efficient_loading": switch(
        "noted: Only rank 0 was to read the weights. Build the model on meta, shard it, and load each rank's rows: "
        "init_on_meta, then load_checkpoint or load_full_state_dict.",
        "implied: Every rank loads the weights.",
    ),
    "state_dict_type": Key(choice(_STATE_DICTS, numbered=True), {None: _WHOLE, **_STATE_DICTS}),
    "ignored_modules": given("refused: The plan needs their names: pass ignored_params to plan_model."),
    "mixed_precision_policy": "noted: accelerate takes it from mixed_precision, and so was it here.",
}
_PREFETCHES = {
    "BACKWARD_PRE": "implied: FSDP2 gathers the next unit of backward before the current one's gradients.",
    **dict.fromkeys(
        ("BACKWARD_POST", "NO_PREFETCH"),
        "noted: FSDP2 prefetches as BACKWARD_PRE does: more overlap, one more gathered unit in memory.",
    ),
}
_APART = "FSDP2 keeps each parameter, under its own name."
_VERSION_1: Table = {
    "sync_module_states": switch(
        "mapped: Rank 0's values are broadcast before sharding.", "mapped: Not broadcast.", default=True
    ),
    "forward_prefetch": switch(
        "mapped: prefetch=1: each unit gathers the next one explicitly.", "implied: torch gathers one unit ahead."
    ),
    "limit_all_gathers": switch(
        "implied: FSDP2 never gathers more than two units at once.", "noted: FSDP2 always limits them.", default=True
    ),
    "use_orig_params": switch(f"implied: {_APART}", f"noted: {_APART}", default=True),
    # The second until accelerate 0.30.
    "backward_prefetch backward_prefetch_policy": one_of(_PREFETCHES, "BACKWARD_PRE", numbered=True),
}
_VERSION_2: Table = {
    "forward_prefetch": switch(
        "refused: Version 2 refuses it. Leave it out, or give shardkit prefetch=1.", "implied: It is off."
    ),
    "backward_prefetch backward_prefetch_policy limit_all_gathers use_orig_params": (
        "noted: Version 2 has no such key and does not read it."
    ),
    "sync_module_states": "noted: Version 2 does not read it; rank 0's values are not broadcast.",
}


def read_fsdp(
    section: Reader,
    version: int,
    ranks: Ranks,
    target: Target,
    strategy: ShardingStrategy | None = None,
    policy: str | None = ROOT_ONLY,
    root: bool = False,
) -> Target:
    """The target of an ``fsdp_config`` section of a version of FSDP; every key that it knows is answered for.

    Outside of it a format may say a ``strategy``, as in transformers' ``fsdp="full_shard"``; the wrap ``policy`` where
    none is named, None where ``target`` says which modules are units, and whether they offload and recompute; and
    whether the ``root`` reshards when blocks do, in version 2.
    """
    strategy = _strategy_1(section, strategy) if version == 1 else _strategy_2(section, strategy)
    values = section.read({**_BOTH, **(_VERSION_1 if version == 1 else _VERSION_2), **(_UNITS if policy else {})})
    offload = target.offload or any(values.get(key) for key in ("offload_params", "cpu_offload"))
    kept = (values["state_dict_type"] or "").partition("_")[0].lower()
    return replace(
        target,
        mesh=target.mesh or _mesh(section, ranks, strategy),
        reshard_after_forward=strategy.name in ("FULL_SHARD", "HYBRID_SHARD"),
        root_reshards=root and version == 2 and strategy is FULL_SHARD,
        wrap=_wrap(section, policy) if policy else target.wrap,
        casts="all" if version == 2 else "root",
        offload=offload,
        pin_memory=_pin_memory(section, version, offload),
        checkpoint_activations=values.get("activation_checkpointing", False),
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


STRATEGY = Kind(f"It is one of {', '.join(STRATEGIES)}, or their number from 1", "Use FULL_SHARD", _strategy)


def _strategy_1(section: Reader, elsewhere: ShardingStrategy | None) -> ShardingStrategy:
    """From ``sharding_strategy``, or from ``reshard_after_forward``, which in version 1 takes its names too."""
    found: list[ShardingStrategy] = []
    for key in ("sharding_strategy", "reshard_after_forward"):
        strategy = section.get(key, STRATEGY)
        if strategy is None:
            section.note(key, "implied: null is the default.")
        elif found:
            same = "implied: It says the same" if strategy is found[0] else "noted: It says otherwise"
            section.note(key, f"{same}, and in version 1 sharding_strategy takes precedence.")
        else:
            if elsewhere not in (None, strategy):
                problem = f"{strategy.name}, and elsewhere {elsewhere.name}"
                section.problem(key, problem, "A configuration has one sharding strategy", "Leave one of them out")
            section.note(key, STRATEGIES[strategy.name.lstrip("_")])
            found.append(strategy)
    return found[0] if found else elsewhere or FULL_SHARD


def _strategy_2(section: Reader, elsewhere: ShardingStrategy | None) -> ShardingStrategy:
    reshard = section.get("reshard_after_forward", BOOLEAN, elsewhere is not SHARD_GRAD_OP)
    where = "True frees gathered parameters after forward" if reshard else "False keeps them until backward"
    section.note("reshard_after_forward", f"mapped: {where}, in all units but the root.")
    strategy = FULL_SHARD if reshard else SHARD_GRAD_OP
    written = section.get("sharding_strategy", STRATEGY)
    if written is None:
        answer = "implied: null is the default."
    elif written is strategy:
        answer = "implied: Version 2 does not read it; reshard_after_forward says the same."
    else:
        answer = (
            "refused: Version 2 does not read it, and reshard_after_forward says otherwise. Say fsdp_version: 1, or "
            "leave it out and give a hybrid one the sizes of a mesh."
        )
    section.note("sharding_strategy", answer)
    return strategy


def _mesh(section: Reader, ranks: Ranks, strategy: ShardingStrategy) -> MeshSpec | None:
    try:
        if ranks.world_size is not None:
            return resolve_strategy(strategy, ranks.world_size, ranks.per_node).mesh
        if strategy not in (FULL_SHARD, SHARD_GRAD_OP):
            problem = f"{strategy.name.lstrip('_')}, and nothing says how many ranks there are"
            rule = "Its mesh has two axes, whose sizes multiply to the ranks"
            raise TranslationError(message("world_size", problem, rule, "Pass world_size=16, or --world 16"))
    except TranslationError as error:
        section.problems.append(str(error))
    return None


def _wrap(section: Reader, policy: str) -> Wrap:
    policy = section.get("auto_wrap_policy", choice(POLICIES, numbered=True), policy)
    classes: Sequence[str] = section.get("transformer_layer_cls_to_wrap", NAMES, ())
    least: int = section.get("min_num_params", NUMBER, 0)
    by_class = by_size = f"noted: auto_wrap_policy {policy} does not read it."
    if policy == BY_CLASS:
        by_class = f"mapped: A unit of each {' and '.join(classes) or 'block that the model declares'}."
        which = ", ".join(classes) if classes else "that the model declares in _no_split_modules"
        answer = f"mapped: Units by class: {which}."
        wrap = Wrap("classes", tuple(classes)) if classes else Wrap("declared")
    elif policy == BY_SIZE and least > 0:
        by_size = f"mapped: A unit of each module that holds {least} elements beside those of inner units."
        answer = f"mapped: Units by size, from {least} elements."
        wrap = Wrap("size", min_num_params=least)
    else:
        if policy == BY_SIZE:
            by_size = "mapped: With 0 the root is the only unit, as SIZE_BASED_WRAP has it."
        answer = "noted: The root is the only unit, so the whole model is gathered at once, which is rarely meant."
        wrap = Wrap("root")
    section.note("transformer_layer_cls_to_wrap", by_class)
    section.note("min_num_params", by_size)
    section.note("auto_wrap_policy", answer)
    return wrap


def _pin_memory(section: Reader, version: int, offload: bool) -> bool | None:
    pin: bool | None = section.get("cpu_offload_pin_memory", BOOLEAN)
    if pin is not False:
        answer = "implied: Offloaded shards are pinned where there is an accelerator."
    elif version == 1:
        answer = "refused: FSDP1 always pins offloaded parameters. Say fsdp_version: 2 to turn it off."
    elif not offload:
        answer = "refused: There is nothing to pin without offload_params: true."
    else:
        answer = "mapped: CPUOffloadPolicy(pin_memory=False)."
    section.note("cpu_offload_pin_memory", answer)
    return pin if offload else None


# --- Sizes of the axes of ranks ----------------------------------------------------------------------------------

_OTHERS = {
    "tp": "Apply tensor parallelism first, on a mesh with a tp axis",
    "cp": "Split the sequence yourself, on a mesh with a cp axis",
    "sp": "Split the sequence yourself, on a mesh with an sp axis",
    "ep": "Apply expert parallelism yourself, on a mesh with an ep axis",
}
CONTEXT = "elsewhere: It configures context parallelism, which you apply yourself."


def read_axes(
    config: Reader,
    version: int,
    world: int | None,
    names: Mapping[str, str],
    rest_shards: bool,
    context: Reader | None = None,
) -> tuple[MeshSpec | None, dict[str, int]]:
    """The data-parallel mesh that sizes of axes make, None where none is given; and other axes of more ranks than one.

    ``names`` has the key of each axis. Without ``dp_shard`` all remaining ranks shard, if ``rest_shards``, else one.
    ``context`` is a section whose ``size`` may be that of the context axis. Context parallel ranks shard the parameters
    too: each sees a part of every sequence, so their gradients add up.
    """
    places = [(config, key, axis) for axis, key in names.items()] + ([(context, "size", "cp")] if context else [])
    sizes = {axis: config.get(key, RANKS) for axis, key in names.items() if config.get(key, RANKS) is not None}
    inner = context.get("size", RANKS) if context else None
    if context and inner and sizes.setdefault("cp", inner) != inner:
        context.problem("size", f"{inner}, and {names['cp']} {sizes['cp']}", "They are the same", "Leave one out")
    mesh = _mesh_of(config, world, sizes, rest_shards) if sizes else None
    for reader, key, axis in places:
        if version == 1 and sizes.get(axis, 1) > 1 and key in reader:
            reader.problem(key, "with fsdp_version 1", "Axes of ranks are for version 2", "Say fsdp_version: 2")
        reader.note(key, _answer(axis, sizes.get(axis, 1), mesh))
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
        told = ", ".join(f"{axis}={size}" for axis, size in {**sizes, "dp_shard": shard}.items())
        problem = f"{told} make {product} ranks, and there are {world}"
        rule, fix = (
            "The sizes of the axes multiply to the number of ranks",
            "Change one of them, or the number of ranks",
        )
        config.problem(next(iter(config), "sizes"), problem, rule, fix)
    return MeshSpec.hybrid(replicate, shard * context) if replicate > 1 else MeshSpec.sharded(shard * context)


def _answer(axis: str, size: int, mesh: MeshSpec | None) -> str:
    if axis not in _OTHERS:
        return f"mapped: {size} on axis {axis}."
    if size == 1:
        return "implied: An axis of one rank changes nothing."
    if axis in ("cp", "sp"):
        return f"noted: {_OTHERS[axis]}; its ranks also shard the parameters. Give shardkit the data-parallel sub-mesh."
    of = f" ({mesh})" if mesh is not None else ""
    return f"noted: {_OTHERS[axis]}. Give shardkit the data-parallel sub-mesh{of}."
