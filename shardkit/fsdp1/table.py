"""What becomes of every argument of FSDP1: one table, which the notes and the docs page are written from.

``python -m shardkit.fsdp1.table`` prints the tables of ``docs/migrating-from-fsdp1.md``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from shardkit.fsdp1.translate.types import Fate


class Row(NamedTuple):
    """An argument's fate, and one sentence on it."""

    fate: Fate
    sentence: str


# In the order of FullyShardedDataParallel.__init__; test_fsdp1_translate.py pins the names to its signature.
ARGUMENTS: dict[str, Row] = {
    "module": Row(
        "mapped",
        "Sharded in place and returned, not wrapped, so every name stays; parameters that a rank does not use are "
        "reduced as zeros, as FSDP1 did (torch >= 2.13)",
    ),
    "process_group": Row(
        "mapped", "One group is the mesh's only axis; the pair (shard, replicate) is its two axes, replicate first"
    ),
    "sharding_strategy": Row(
        "mapped", "The mesh and reshard_after_forward; the root stays gathered after forward, as FSDP1's did"
    ),
    "cpu_offload": Row("mapped", "CPUOffloadPolicy for every unit; memory is pinned where there is an accelerator"),
    "auto_wrap_policy": Row(
        "mapped", "The policy is asked as FSDP1 asks it, and each module it chooses is a unit; the root is one too"
    ),
    "backward_prefetch": Row(
        "implied",
        "FSDP2 always gathers the next unit before a unit's backward, which is BACKWARD_PRE; BACKWARD_POST and None, "
        "which gather later and hold less, are noted",
    ),
    "mixed_precision": Row("mapped", "MixedPrecisionPolicy for every unit, field by field as below"),
    "ignored_modules": Row(
        "mapped",
        "Their parameters are ignored_params, and none of them is a unit; FSDP2 moves their buffers to the device",
    ),
    "param_init_fn": Row(
        "mapped",
        "Called with each module of a unit that is on meta, right before the unit is sharded, as FSDP1 called it",
    ),
    "device_id": Row("mapped", "The mesh's device, selected before sharding; FSDP2 moves each unit to it"),
    "sync_module_states": Row(
        "mapped", "Parameters and buffers are broadcast from the first rank, unit by unit, before a unit is sharded"
    ),
    "forward_prefetch": Row("mapped", "prefetch=1 in the plan: each unit gathers the next one before its forward"),
    "limit_all_gathers": Row(
        "implied", "FSDP2 bounds what is gathered at a time without holding up the CPU; False is noted"
    ),
    "use_orig_params": Row(
        "implied",
        "True is the only way of FSDP2; with False, FSDP1's default, it is noted that parameters are DTensors, one for "
        "each of the module's own, where FSDP1 had a FlatParameter for each unit",
    ),
    "ignored_states": Row("mapped", "As ignored_modules where they are modules, and ignored_params where parameters"),
    "device_mesh": Row(
        "mapped", "The mesh, as it is where it has one axis, or two with names; else its groups in a mesh with names"
    ),
}

# The fields of MixedPrecision and CPUOffload, in their order.
FIELDS: dict[str, Row] = {
    "mixed_precision.param_dtype": Row("mapped", "param_dtype of the policy; outputs stay in it, in both"),
    "mixed_precision.reduce_dtype": Row("mapped", "reduce_dtype of the policy; where it is None, param_dtype"),
    "mixed_precision.buffer_dtype": Row(
        "mapped",
        "Floating-point buffers are cast once, after sharding, where FSDP1 cast them at the first forward; it cast "
        "persistent ones back in state_dict(), where they now stay as they are",
    ),
    "mixed_precision.keep_low_precision_grads": Row(
        "noted", "FSDP2 always hands gradients to the optimizer in the parameters' dtype: same values, more memory"
    ),
    "mixed_precision.cast_forward_inputs": Row(
        "mapped", "cast_forward_inputs of every unit that has parameters; False is FSDP1's default, and True is FSDP2's"
    ),
    "mixed_precision.cast_root_forward_inputs": Row("mapped", "cast_forward_inputs of the root"),
    "mixed_precision._module_classes_to_ignore": Row(
        "mapped",
        "With an auto_wrap_policy each module of these classes is a unit that computes in float32, and returns what is "
        "around it computes in",
    ),
    "cpu_offload.offload_params": Row(
        "mapped", "CPUOffloadPolicy; gradients may accumulate without no_sync, which FSDP1 forbade"
    ),
}

# What shardkit asks for besides, because FSDP1 took it from the machine it ran on.
OURS: dict[str, Row] = {
    "ranks_per_node": Row(
        "mapped",
        "The ranks that shard together in a hybrid strategy; None is torchrun's LOCAL_WORLD_SIZE. FSDP1 counted the "
        "node's devices",
    ),
    "world_size": Row("mapped", "The ranks to plan for, so that a plan for a cluster can be made on a laptop"),
}

STRATEGIES: dict[str, Row] = {
    "FULL_SHARD": Row("mapped", "mesh (world,), reshard_after_forward=True"),
    "SHARD_GRAD_OP": Row("mapped", "mesh (world,), reshard_after_forward=False"),
    "NO_SHARD": Row("mapped", "mesh (world, 1), which replicates: only all-reduces, and each rank holds all"),
    "HYBRID_SHARD": Row("mapped", "mesh (nodes, ranks_per_node), reshard_after_forward=True"),
    "_HYBRID_SHARD_ZERO2": Row("mapped", "mesh (nodes, ranks_per_node), reshard_after_forward=False"),
}

ROWS = {**ARGUMENTS, **FIELDS, **OURS}


def render(rows: dict[str, Row], title: str) -> str:
    """A table in Markdown, one line for each row."""
    lines = [f"| {title} | Fate | In FSDP2 |", "| --- | --- | --- |"]
    return "\n".join([*lines, *(f"| `{name}` | {row.fate} | {row.sentence} |" for name, row in rows.items())])


def tables() -> Iterable[str]:
    """The tables of the docs page, in order."""
    for rows, title in ((ARGUMENTS, "Argument"), (STRATEGIES, "Strategy"), (FIELDS, "Field"), (OURS, "New argument")):
        yield render(rows, title)


if __name__ == "__main__":
    print("\n\n".join(tables()))
