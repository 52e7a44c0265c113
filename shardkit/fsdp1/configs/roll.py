"""ROLL's YAML: ``strategy_args`` of one role, or a pipeline of several, that train or infer with FSDP2.

Facts from ROLL (``distributed/strategy/fsdp2_strategy.py``, ``utils/fsdp_utils.py``, ``configs/model_args.py`` and the
FSDP2 guide of its docs), 2026-08.
"""

from __future__ import annotations

import re
from typing import Any

import torch

from shardkit.fsdp1.configs.deepspeed import hybrid_mesh
from shardkit.fsdp1.configs.reader import BOOLEAN, DTYPE, NAMES, NUMBER, Key, Reader, Table, several, switch
from shardkit.fsdp1.configs.target import Precision, Ranks, Target, Wrap, note_on_ranks
from shardkit.plan import MeshSpec

_FSDP = ("fsdp2_train", "fsdp2_infer", "fsdp_train", "fsdp_infer")
_RANGE = re.compile(r"^\s*list\(\s*range\(\s*(?:(\d+)\s*,\s*)?(\d+)\s*\)\s*\)\s*$")

_PIPELINE: Table = {"*": "elsewhere: It is about the pipeline; sharding is said in its roles."}
_ROLE: Table = {
    "training_args data_args generating_args infer_batch_size use_remove_padding name worker_cls": (
        "elsewhere: It is for the training loop."
    ),
}
_MODEL: Table = {
    "lora_* attn_* model_* adapter* dtype flash_attn vision_dp disable_dropout additional_target num_labels "
    "compute_dtype": "elsewhere: It is about the model.",
    "ulysses_size": several(
        "noted: Split the sequence yourself, on an axis of adjacent ranks; they shard the parameters too.",
        "implied: An axis of one rank changes nothing.",
    ),
    "disable_gradient_checkpointing": switch(
        "mapped: Activations are kept.",
        "mapped: checkpoint_activations=True; ROLL lets transformers checkpoint activations. Use one of them.",
    ),
    "freeze_module_prefix": Key(
        NAMES, "noted: Freeze {} before sharding (requires_grad_(False)); a plan reads it off the model.", ()
    ),
}
_EVERY = "mapped: For every unit, the root too."
_STRATEGY: Table = {
    "reshard_after_forward": Key(BOOLEAN, {None: "mapped: True, but False for the root.", True: _EVERY, False: _EVERY}),
    "param_dtype": Key(DTYPE, "mapped: MixedPrecisionPolicy(param_dtype={}).", torch.bfloat16),
    "reduce_dtype": Key(DTYPE, "mapped: MixedPrecisionPolicy(reduce_dtype={}).", torch.float32),
    "offload_policy": switch("mapped: CPUOffloadPolicy for every unit.", "mapped: Nothing is offloaded."),
    "apply_expert_patch": switch("noted: Calling every expert on every rank is for the model's code: keep that patch."),
    "ep_size": several("noted: Apply expert parallelism first; give shardkit the data-parallel sub-mesh.", kind=NUMBER),
    "apply_tiled_mlp": switch("noted: It is the model's code."),
    "tiled_num_shards model_type": "elsewhere: It is for apply_tiled_mlp.",
    "async_save_ckpt": "elsewhere: It is how ROLL saves: save_checkpoint.",
    "use_batched_model_update": "elsewhere: It is how ROLL sends weights to the engine that generates.",
}
_WRAP: Table = {
    "transformer_layer_cls_to_wrap": Key(
        NAMES, lambda names: f"mapped: A unit of each {' and '.join(names) or 'declared block'}.", ()
    ),
    "wrap_embeddings": switch("mapped: The input embedding is a unit.", "mapped: In the root's unit."),
    "wrap_lm_output": switch("mapped: The output head is a unit.", "mapped: In the root's unit."),
}


def read(config: Reader, ranks: Ranks) -> Target:
    """The target of a pipeline, of a role of one, or of a ``strategy_config`` alone."""
    role = _role(config)
    role.read(_ROLE)
    config.read(_PIPELINE if role is not config else {})
    arguments = role.section("strategy_args")
    strategy = arguments if "strategy_args" in role else role
    name = strategy.raw("strategy_name")
    answer = "mapped: FSDP2, which is what shardkit shards with."
    strategy.note("strategy_name", answer if name in (None, *_FSDP) else f"refused: {name} is another engine.")
    section = role.section("model_args")
    model = section.read(_MODEL)
    inside = strategy.section("strategy_config") if "strategy_config" in strategy else strategy
    values = inside.read(_STRATEGY)
    reshard = values["reshard_after_forward"]
    return Target(
        mesh=_mesh(inside, _world(role, ranks), model["ulysses_size"]),
        reshard_after_forward=reshard is not False,
        root_reshards=reshard is True,  # ROLL hands it to the root too; without a value torch keeps the root
        wrap=_wrap(inside.section("wrap_policy"), values["apply_expert_patch"]),
        precision=Precision(values["param_dtype"], values["reduce_dtype"]),
        casts="text",
        offload=values["offload_policy"],
        checkpoint_activations="disable_gradient_checkpointing" in section
        and not model["disable_gradient_checkpointing"],
        state_dict_type="sharded",
        axes={"ulysses": model["ulysses_size"]} if model["ulysses_size"] > 1 else {},
    )


def _role(config: Reader) -> Reader:
    """The role that is translated: the only one with FSDP2, or the one that trains the actor."""
    engines: dict[str, Any] = {}
    for key in config:
        value = config.raw(key)
        if isinstance(value, dict) and "strategy_args" in value:
            arguments = value["strategy_args"]
            engines[key] = arguments.get("strategy_name") if isinstance(arguments, dict) else None
    if not engines:
        return config
    candidates = [key for key, engine in engines.items() if engine in _FSDP] or [*engines]
    chosen = "actor_train" if "actor_train" in candidates else candidates[0]
    for key, engine in engines.items():
        if key != chosen:
            config.note(key, f"elsewhere: Another role, with {engine}: translate it by itself.")
    return config.section(chosen)


def _world(role: Reader, ranks: Ranks) -> int | None:
    """From ``device_mapping``, a list or the text ``list(range(0,16))``."""
    value = role.raw("device_mapping")
    found = None
    if isinstance(value, (list, tuple)) and value:
        found = len(value)
    elif isinstance(value, str) and (match := _RANGE.match(value)):
        found = int(match[2]) - int(match[1] or 0)
    elif value is not None:
        role.problem("device_mapping", repr(value), "It is a list, or list(range(0,8))", "Use list(range(0,8))")
    role.note("device_mapping", note_on_ranks("ranks in all", found, ranks.world_size))
    return ranks.world_size or found or None


def _mesh(section: Reader, world: int | None, sequence: int) -> MeshSpec | None:
    """``fsdp_size`` of all ranks or more, or of 1 or less, is one axis; what lies between replicates too."""
    size = -1 if section.raw("fsdp_size") == -1 else section.get("fsdp_size", NUMBER, 1)
    if size > 1 and (world is None or size < world):
        return hybrid_mesh(section, "fsdp_size", size, world, "Give device_mapping, or world_size")
    if sequence > 1 and world is not None and world % sequence == 0 and world > sequence:
        mesh = MeshSpec.hybrid(sequence, world // sequence)
        answer = f"mapped: With ulysses_size {sequence} ROLL shards over {world // sequence} ranks: {mesh}."
        section.note("fsdp_size", answer)
        return mesh
    section.note("fsdp_size", "mapped: One axis of all ranks.")
    return None if world is None else MeshSpec.sharded(world)


def _wrap(policy: Reader, patched: bool) -> Wrap:
    answer = "noted: Not units, as in ROLL without apply_expert_patch: an expert that only some ranks call would hang."
    if patched:
        answer = "mapped: A unit of each {}, since apply_expert_patch calls each on every rank."
    experts = policy.take("moe_experts", Key(NAMES, answer, ()))
    values = policy.read(_WRAP)
    classes = values["transformer_layer_cls_to_wrap"]
    units = (*classes, *experts) if patched else classes
    return Wrap("classes" if classes else "declared", units, 0, values["wrap_embeddings"], values["wrap_lm_output"])
