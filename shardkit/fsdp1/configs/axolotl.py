"""axolotl's YAML: FSDP of version 1 and 2, with the sizes of a mesh beside it.

Facts from axolotl 0.5 to 0.16 (``utils/schemas``, ``docs/multi-gpu.qmd``, ``docs/nd_parallelism.qmd``), which hands
its settings to accelerate and transformers.
"""

from __future__ import annotations

from dataclasses import replace

from shardkit.fsdp1.configs.accelerate import BY_CLASS, CONTEXT, ROOT_ONLY, SPLIT, TILES, VERSION, read_axes, read_fsdp
from shardkit.fsdp1.configs.reader import BOOLEAN, NAMES, NUMBER, RANKS, Key, Reader, Table, choice, given, switch
from shardkit.fsdp1.configs.target import Ranks, Target
from shardkit.fsdp1.configs.transformers import OTHERS, TRAINER, WORDS, read_precision, read_strategy

_FINAL = Key(
    choice(("FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT")),
    "noted: The last checkpoint: save full_state_dict(model), or shards with save_checkpoint.",
)
_KEYS: Table = {  # from its schemas (0.16) and its examples
    **TRAINER,
    **OTHERS,
    "load_in_8bit load_in_4bit": given("noted: Quantized weights are not floating-point: pass them as ignored_params."),
    "optimizer": "elsewhere: Built after sharding. bitsandbytes' optimizers do not support DTensors.",
    "ring_attn_func heads_k_stride": CONTEXT,
    "fp8_enable_fsdp_float8_all_gather": "noted: torchao's Float8 weights all-gather in fp8 on their own.",
    "fp32_norms": switch(
        "refused: Make norms units: pass by_class('RMSNorm', mp_policy=MixedPrecisionPolicy(torch.float32)) before "
        "the blocks."
    ),
    "fp32_norm_classes": Key(NAMES, lambda names: f"noted: Classes of fp32_norms: {', '.join(names)}.", ()),
    "fp8": given("refused: Convert layers with torchao before sharding.", "implied: Off."),
    "qat": given("noted: Prepare the model for QAT before sharding.", "implied: Off."),
    "tiled_mlp_use_original_mlp": switch(
        "implied: Tiles are of the model's own MLPs.",
        "noted: Tiles are of the model's own MLPs, not of the generic one.",
        default=True,
    ),
    "fsdp_version": VERSION,
    "fsdp_final_state_dict_type": _FINAL,
}
_SECTION: Table = {"version": VERSION, "final_state_dict_type": _FINAL}
_AXES = {
    "dp_shard": "dp_shard_size",
    "dp_replicate": "dp_replicate_size",
    "tp": "tensor_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_parallel_size",
}


def read(config: Reader, ranks: Ranks) -> Target:
    """Return the target of a whole file."""
    section = config.section("fsdp_config", prefix="fsdp_")
    values, inside = config.read(_KEYS), section.read(_SECTION)
    version = _version(config, section, values["fsdp_version"], inside["version"])
    words = config.get("fsdp", WORDS, ()) or ()
    beside = version == 1 and section.raw("sharding_strategy") is not None
    later = "noted: fsdp_config.sharding_strategy takes precedence." if beside else None
    fix = ": set dp_shard_size and dp_replicate_size."
    strategy = read_strategy(config, words, version, fix, "noted: Names no strategy.", later)
    mesh, others = read_axes(config, version, ranks.world_size, _AXES, rest_shards=True, known=_context(config))
    target = Target(
        mesh,
        precision=read_precision(config, version),
        offload="offload" in words,
        axes=others,
        tiles=_tiles(config),
    )
    policy = BY_CLASS if version == 2 or "auto_wrap" in words else ROOT_ONLY
    # axolotl hands reshard_after_forward to the root too.
    target = read_fsdp(section, version, ranks, target, strategy, policy, root=True)
    final = inside["final_state_dict_type"] or values["fsdp_final_state_dict_type"]
    kept = {"FULL_STATE_DICT": "full", "SHARDED_STATE_DICT": "sharded"}.get(final, target.state_dict_type)
    return replace(target, state_dict_type=kept)


def _version(config: Reader, section: Reader, outside: str | None, inside: str | None) -> int:
    """Return the version given beside ``fsdp_config`` or in it, else 1 if there are keys that only version 1 has."""
    if outside and inside and outside != inside:
        config.problem("fsdp_version", f"is {outside}, but fsdp_config says {inside}", "", "Remove one of them")
    if version := outside or inside:
        return int(version)
    old = config.raw("fsdp") or any(key in section for key in ("sharding_strategy", "use_orig_params"))
    return 1 if old or "reshard_after_forward" not in section else 2


def _context(config: Reader) -> dict[str, int]:
    """Read the size of the context axis, and answer for the keys that newer and older versions have for it."""
    context = config.section("context_parallel")
    size: int | None = context.get("size", RANKS)
    if size and (beside := config.get("context_parallel_size", RANKS, size)) != size:
        context.problem("size", f"is {size}, but context_parallel_size is {beside}", "", "Remove one of them")
    context.note("size", f"mapped: {SPLIT.format(size)}.")
    context.read({"*": CONTEXT})
    old = config.raw("sequence_parallel_degree") not in (None, 1)
    renamed = "refused: Renamed to context_parallel_size in axolotl 0.12."
    config.note("sequence_parallel_degree", renamed if old else "implied: None.")
    return {"cp": size} if size else {}


def _tiles(config: Reader) -> int:
    """Return the number of tiles of each MLP."""
    applies, number = config.get("tiled_mlp", BOOLEAN, False), config.get("tiled_mlp_num_shards", NUMBER) or 0
    unset = "refused: Without tiled_mlp_num_shards axolotl takes the sequence's length over the hidden size. Set it."
    config.note("tiled_mlp", (TILES if number else unset) if applies else "implied: Off.")
    config.note("tiled_mlp_num_shards", "mapped: Tiles of each MLP." if applies else "implied: Only with tiled_mlp.")
    return max(number, 1) if applies else 1
