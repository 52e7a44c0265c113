"""YAML of a training script: ``fsdp: True`` and FSDP1's arguments under their own names."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch.distributed.fsdp import MixedPrecision

from shardkit.fsdp1.configs.keys import BY_CLASS, BY_SIZE, ROOT_ONLY, read_fsdp
from shardkit.fsdp1.configs.reader import DTYPE, NAMES, NUMBER, RANKS, Key, Reader, Table, switch
from shardkit.fsdp1.configs.target import Precision, Ranks, Target, note_on_ranks

_NODE = ("ranks_per_node", "gpus_per_node", "nproc_per_node", "num_gpus_per_node", "local_world_size")
_KEYS: Table = {
    "fsdp": switch(
        "mapped: FSDP1, with the arguments beside it.", "refused: FSDP is off, so there is nothing to translate.", True
    ),
    """
    batch_size data dataset dropout epochs gradient_accumulation_steps learning_rate log_dir lr max_steps model
    model_name num_epochs num_workers optimizer output_dir save_dir scheduler seed weight_decay
    """: "elsewhere: For the training loop.",
}
_DEFAULT = "implied: FSDP1's default."
_CASTS = "mapped: MixedPrecisionPolicy(cast_forward_inputs=...), unit by unit."
_MIXED: Table = {
    "param_dtype": Key(DTYPE, "mapped: MixedPrecisionPolicy(param_dtype=...)."),
    "reduce_dtype": Key(DTYPE, "mapped: MixedPrecisionPolicy(reduce_dtype=...)."),
    "buffer_dtype": Key(DTYPE, "mapped: Buffers are cast once, after sharding."),
    "keep_low_precision_grads": switch("refused: In FSDP2 gradients have the parameters' dtype. Remove it.", _DEFAULT),
    "cast_forward_inputs": switch(_CASTS, _DEFAULT),
    "cast_root_forward_inputs": switch(_DEFAULT, _CASTS, True),
}


def read(config: Reader, ranks: Ranks) -> Target:
    """Return the target of a whole file."""
    config.read(_KEYS)
    mixed = _mixed_precision(config)
    by_size = BY_SIZE if config.get("min_num_params", NUMBER, 0) else ROOT_ONLY
    policy = BY_CLASS if config.get("transformer_layer_cls_to_wrap", NAMES) else by_size
    world: int | None = config.get("world_size", RANKS)
    config.note("world_size", note_on_ranks("ranks in all", world, ranks.world_size))
    per_node = ranks.per_node
    for key in _NODE:
        config.note(key, note_on_ranks("ranks of a node", config.get(key, RANKS), ranks.per_node))
        per_node = per_node or config.get(key, RANKS)
    return read_as_fsdp1(config, Ranks(ranks.world_size or world, per_node), mixed, Target(None), policy)


def read_as_fsdp1(
    config: Reader, ranks: Ranks, mixed: MixedPrecision | None, target: Target, policy: str | None = None
) -> Target:
    """Return ``read_fsdp`` with FSDP1's defaults, where accelerate's differ."""
    target = replace(target, precision=precision_of(mixed), mixed=mixed)
    target = read_fsdp(config, 1, ranks, target, policy=policy)
    sync = target.sync_module_states and "sync_module_states" in config
    casts = mixed is not None and mixed.cast_forward_inputs
    return replace(target, sync_module_states=sync, casts="all" if casts else "root")


def precision_of(mixed: MixedPrecision | None) -> Precision:
    """Return the dtypes of torch's object."""
    return Precision(mixed.param_dtype, mixed.reduce_dtype, None, mixed.buffer_dtype) if mixed else Precision()


def _mixed_precision(config: Reader) -> MixedPrecision | None:
    """Read ``mixed_precision``, a dtype or a section, and dtypes beside it."""
    value = config.raw("mixed_precision")
    if isinstance(value, dict):
        return read_mixed_precision(config.section("mixed_precision"))
    dtype = None if value in (False, "no", "none") else config.get("mixed_precision", DTYPE)
    answer = f"MixedPrecisionPolicy with {dtype} for parameters, gradients and buffers." if dtype else "None."
    config.note("mixed_precision", f"mapped: {answer}")
    return read_mixed_precision(config, dtype)


def read_mixed_precision(section: Reader, default: torch.dtype | None = None) -> MixedPrecision | None:
    """Return FSDP1's ``MixedPrecision`` from a section; ``default`` is used for dtypes that are not given."""
    values: dict[str, Any] = {key: default if value is None else value for key, value in section.read(_MIXED).items()}
    given = any(isinstance(value, torch.dtype) for value in values.values())
    return MixedPrecision(**{**values, "keep_low_precision_grads": False}) if given else None
