"""ROLL's YAML: ``strategy_args`` of one role, or a pipeline of several roles.

Facts from ROLL (``distributed/strategy/fsdp2_strategy.py``, ``utils/fsdp_utils.py``, ``configs/model_args.py`` and the
FSDP2 guide of its docs), 2026-08.
"""

from __future__ import annotations

import re
from typing import Any

import torch

from shardkit.fsdp1.configs.accelerate import SPLIT, TILES
from shardkit.fsdp1.configs.reader import BOOLEAN, DTYPE, NAMES, NUMBER, RANKS, Key, Reader, Table, switch
from shardkit.fsdp1.configs.target import Precision, Ranks, Target, Wrap, note_on_ranks
from shardkit.plan import MeshSpec

_FSDP = ("fsdp2_train", "fsdp2_infer", "fsdp_train", "fsdp_infer")
_RANGE = re.compile(r"^\s*list\(\s*range\(\s*(?:(\d+)\s*,\s*)?(\d+)\s*\)\s*\)\s*$")

_FOR_TRAINING = "training_args data_args generating_args infer_batch_size use_remove_padding name worker_cls"
_ONE = "implied: An axis of size 1 changes nothing."
_MODEL: Table = {
    "lora_* attn_* model_* adapter* dtype flash_attn vision_dp disable_dropout additional_target num_labels "
    "compute_dtype": "elsewhere: For the model.",
    "ulysses_size": Key(RANKS, lambda size: f"mapped: {SPLIT.format('ulysses_size')}." if size > 1 else _ONE, 1),
    "disable_gradient_checkpointing": switch("mapped: Activations are kept.", "mapped: checkpoint_activations=True."),
    "freeze_module_prefix": Key(NAMES, "noted: Freeze {} before sharding with requires_grad_(False).", ()),
}
_EVERY = "mapped: For every unit and the root."
_STRATEGY: Table = {
    "reshard_after_forward": Key(BOOLEAN, {None: "mapped: True, but False for the root.", True: _EVERY, False: _EVERY}),
    "param_dtype": Key(DTYPE, "mapped: MixedPrecisionPolicy(param_dtype={}).", torch.bfloat16),
    "reduce_dtype": Key(DTYPE, "mapped: MixedPrecisionPolicy(reduce_dtype={}).", torch.float32),
    "offload_policy": switch("mapped: CPUOffloadPolicy for every unit.", "mapped: Nothing is offloaded."),
    "apply_expert_patch": switch("mapped: may_skip=True for the experts, so the patch may go."),
    "apply_tiled_mlp": switch(TILES),
    "model_type async_save_ckpt use_batched_model_update": "elsewhere: Not about sharding.",
}
_WRAP: Table = {
    "transformer_layer_cls_to_wrap": Key(
        NAMES, lambda names: f"mapped: A unit of each {' and '.join(names) or 'declared block'}.", ()
    ),
    "wrap_embeddings wrap_lm_output": switch("mapped: A unit of its own.", "mapped: In the root's unit."),
}


def read(config: Reader, ranks: Ranks) -> Target:
    """Return the target of a pipeline, a role, or a ``strategy_config``."""
    role = _role(config)
    role.read({_FOR_TRAINING: "elsewhere: For the training loop."})
    config.read({"*": "elsewhere: For the pipeline; its roles configure sharding."} if role is not config else {})
    arguments = role.section("strategy_args")
    strategy = arguments if "strategy_args" in role else role
    name = strategy.raw("strategy_name")
    strategy.note("strategy_name", "mapped: FSDP2." if name in (None, *_FSDP) else f"refused: {name} is not FSDP.")
    section = role.section("model_args")
    model = section.read(_MODEL)
    inside = strategy.section("strategy_config") if "strategy_config" in strategy else strategy
    values = inside.read(_STRATEGY)
    mesh = _with_experts(inside, _mesh(inside, _world(role, ranks), model["ulysses_size"]))
    tiles = inside.get("tiled_num_shards", NUMBER, 4)
    checkpoints = "disable_gradient_checkpointing" in section and not model["disable_gradient_checkpointing"]
    answer = "mapped: Tiles of each MLP." if values["apply_tiled_mlp"] else "implied: Only with apply_tiled_mlp."
    inside.note("tiled_num_shards", answer)
    return Target(
        mesh=mesh,
        reshard_after_forward=values["reshard_after_forward"] is not False,
        root_reshards=values["reshard_after_forward"] is True,  # None keeps the root gathered
        wrap=_wrap(inside.section("wrap_policy"), values["apply_expert_patch"]),
        precision=Precision(values["param_dtype"], values["reduce_dtype"]),
        vision_casts=False,
        offload=values["offload_policy"],
        checkpoint_activations=checkpoints,
        state_dict_type="sharded",
        tiles=tiles if values["apply_tiled_mlp"] else 1,
        axes={"sp": model["ulysses_size"]} if model["ulysses_size"] > 1 else {},
    )


def _role(config: Reader) -> Reader:
    """Return the role to translate: the one with FSDP2, or ``actor_train`` among several."""
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
            config.note(key, f"elsewhere: Another role, with {engine}: translate it separately.")
    return config.section(chosen)


def _world(role: Reader, ranks: Ranks) -> int | None:
    """Return the number of ranks of ``device_mapping``, a list or the text ``list(range(0,16))``."""
    value = role.raw("device_mapping")
    found = None
    if isinstance(value, (list, tuple)) and value:
        found = len(value)
    elif isinstance(value, str) and (match := _RANGE.match(value)):
        found = int(match[2]) - int(match[1] or 0)
    elif value is not None:
        problem = f"must be a list, or list(range(0,8)), got {value!r}"
        role.problem("device_mapping", problem, "Use list(range(0,8))")
    role.note("device_mapping", note_on_ranks("ranks in all", found, ranks.world_size))
    return ranks.world_size or found or None


def _mesh(section: Reader, world: int | None, sequence: int) -> MeshSpec | None:
    """Return the mesh: hybrid where ``fsdp_size`` is between 1 and the number of ranks."""
    size = -1 if section.raw("fsdp_size") == -1 else section.get("fsdp_size", NUMBER, 1)
    if size > 1 and (world is None or size < world):
        if world is None:
            section.problem("fsdp_size", "needs a known number of ranks", "Give device_mapping, or pass world_size=16")
        elif world % size:
            section.problem("fsdp_size", f"{size} does not divide {world} ranks", "Use a divisor")
        else:
            mesh = MeshSpec.hybrid(world // size, size)
            section.note("fsdp_size", f"mapped: A mesh of {mesh.shape}: replicates, and shards over {size} ranks.")
            return mesh
        return None
    if sequence > 1 and world is not None and world % sequence == 0 and world > sequence:
        mesh = MeshSpec.hybrid(sequence, world // sequence)
        answer = f"mapped: With ulysses_size {sequence} ROLL shards over {world // sequence} ranks: {mesh}."
        section.note("fsdp_size", answer)
        return mesh
    section.note("fsdp_size", "mapped: One axis of all ranks.")
    return None if world is None else MeshSpec.sharded(world)


def _with_experts(section: Reader, mesh: MeshSpec | None) -> MeshSpec | None:
    """Return the mesh with the axes efsdp and ep, if ``ep_size`` splits the ranks that shard."""
    size = section.get("ep_size", NUMBER, 1)
    if size <= 1:
        section.note("ep_size", "implied: No expert parallelism.")
        section.note("efsdp_size", "implied: Only with ep_size.")
        return mesh
    if mesh is None or mesh.shard_size % size:
        of = "an unknown number of" if mesh is None else mesh.shard_size
        section.problem("ep_size", f"{size} must divide the ranks that shard, {of} ranks", "Correct it")
        return mesh
    answer = "mapped: Split experts over the mesh's axis ep first; shard_model shards their modules on efsdp."
    section.note("ep_size", f"{answer} Each is in one parameter: a ModuleList of experts cannot be split.")
    section.note("efsdp_size", f"mapped: {mesh.shard_size // size} ranks with the same experts shard them.")
    shape, names = (mesh.shard_size // size, size), ("efsdp", "ep")
    return MeshSpec((*mesh.shape[:-1], *shape), (*mesh.axis_names[:-1], *names), len(shape))


def _wrap(policy: Reader, patched: bool) -> Wrap:
    answer = "mapped: Not units, as in ROLL without apply_expert_patch."
    experts = policy.take(
        "moe_experts", Key(NAMES, "mapped: A unit of each {}, with may_skip=True." if patched else answer, ())
    )
    values = policy.read(_WRAP)
    classes = values["transformer_layer_cls_to_wrap"]
    return Wrap(
        by="classes" if classes else "declared",
        classes=(*classes, *experts) if patched else classes,
        embeddings=values["wrap_embeddings"],
        head=values["wrap_lm_output"],
        skipped=tuple(experts) if patched else (),
    )
