"""What becomes of each argument of FSDP1, and a note for each that is not at its default."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, cast

import torch
import torch.nn as nn
from torch.distributed.fsdp import ShardingStrategy

from shardkit.errors import listing
from shardkit.fsdp1.translate.arguments import Arguments
from shardkit.fsdp1.translate.strategy import HYBRID, RESHARDING
from shardkit.plan import ShardingPlan

Support: TypeAlias = Literal["mapped", "implied", "noted", "refused", "elsewhere", "unknown"]

SUPPORT: dict[Support, str] = {
    "mapped": "FSDP2 does the same, and the plan or the translation says so",
    "implied": "FSDP2 always does the same",
    "noted": "FSDP2 differs in memory, time or format, not in what is trained",
    "refused": "FSDP2 does not support it",
    # Only for keys of a configuration:
    "elsewhere": "not about sharding",
    "unknown": "a key that shardkit does not know and ignores",
}
"""What each kind of support means; best first."""

# By argument of FSDP1, and by field of an argument: "support: sentence".
ROWS = {
    "module": "mapped: Sharded in place and returned, so FQNs do not change",
    "process_group": "mapped: The mesh's axis; the pair (shard, replicate): its two axes",
    "sharding_strategy": "mapped: The mesh and reshard_after_forward; the root is not resharded",
    "cpu_offload": "mapped: CPUOffloadPolicy for every unit; pinned if there is an accelerator",
    "auto_wrap_policy": "mapped: It is called as in FSDP1; each module that it chooses is a unit",
    "backward_prefetch": "noted: FSDP2 prefetches in backward, like BACKWARD_PRE",
    "mixed_precision": "mapped: MixedPrecisionPolicy, field by field",
    "ignored_modules": "mapped: Their parameters are ignored_params",
    "param_init_fn": "mapped: Called with each module of a unit on meta, before it is sharded",
    "device_id": "mapped: The mesh's device, selected before sharding",
    "sync_module_states": "mapped: Parameters and buffers are broadcast before sharding",
    "forward_prefetch": "mapped: prefetch=1: each unit all-gathers the next one early",
    "limit_all_gathers": "noted: FSDP2 always limits all-gathers, without blocking the CPU",
    "use_orig_params": "implied: Parameters keep their names and become DTensors: build the "
    "optimizer after sharding",
    "ignored_states": "mapped: As ignored_modules; parameters: ignored_params",
    "device_mesh": "mapped: The mesh itself, or a named mesh of its groups",
    "mixed_precision.param_dtype": "mapped: param_dtype of the policy; outputs stay in it",
    "mixed_precision.reduce_dtype": "mapped: reduce_dtype of the policy; if None, param_dtype",
    "mixed_precision.buffer_dtype": "mapped: Buffers are cast once, after sharding",
    "mixed_precision.keep_low_precision_grads": "noted: Gradients have the parameters' dtype",
    "mixed_precision.cast_forward_inputs": "mapped: cast_forward_inputs of every unit",
    "mixed_precision.cast_root_forward_inputs": "mapped: cast_forward_inputs of the root",
    "mixed_precision._module_classes_to_ignore": "mapped: With an auto_wrap_policy each module of "
    "these classes is a unit in float32, and casts its outputs back",
    "cpu_offload.offload_params": "mapped: CPUOffloadPolicy; gradients may accumulate anywhere",
    "ranks_per_node": "mapped: The ranks that shard together in a hybrid strategy",
    "world_size": "mapped: The number of ranks to plan for without a process group",
}


@dataclass(frozen=True)
class Note:
    """How one argument of FSDP1, or one key of a configuration, is translated.

    Attributes:
        argument: its name, with a dot for a field of it: ``"mixed_precision.buffer_dtype"``.
        value: its value as a short text.
        support: one of ``SUPPORT``.
        sentence: the translation, or why there is none.
    """

    argument: str
    value: str
    support: Support
    sentence: str

    @classmethod
    def of(cls, argument: str, value: Any, answer: str) -> Note:
        """Make a note of an answer, ``"support: sentence"``."""
        support, _, sentence = answer.partition(": ")
        return cls(argument, shown(value), cast(Support, support), sentence)

    def __str__(self) -> str:
        return f"{self.argument}={self.value}: {self.support}. {self.sentence}"


def notes_on(
    model: nn.Module,
    given: Arguments,
    strategy: ShardingStrategy,
    wrapped: Mapping[str, Mapping[str, Any]],
    plan: ShardingPlan,
) -> tuple[Note, ...]:
    """Return the notes, in the order of FSDP1's arguments; pure."""
    answers = dict(ROWS)
    answers["sharding_strategy"] = (
        f"mapped: mesh {plan.mesh}, reshard_after_forward={strategy.name in RESHARDING}; the root "
        "is not resharded after forward, as in FSDP1"
    )
    if given.auto_wrap_policy is None:
        answers["auto_wrap_policy"] = (
            "noted: the root is the only unit, so the whole model is unsharded at once"
        )
    else:
        classes = {type(model.get_submodule(fqn)).__name__: None for fqn in wrapped}
        units = f"{len(wrapped)} modules below the root ({listing(classes, 4) or 'none'})"
        answers["auto_wrap_policy"] = f"mapped: {units}"
        if plan.notes:
            answers["auto_wrap_policy"] = f"noted: {units}; the plan's notes list the differences"
    if not given.use_orig_params:
        answers["use_orig_params"] = "noted: Each parameter is a DTensor; FSDP1 had flat parameters"
    if strategy.name not in HYBRID:
        answers["ranks_per_node"] = f"implied: {strategy.name} does not ask for it"

    values = given.changed() | {
        "module": model,
        "sharding_strategy": strategy,
        "auto_wrap_policy": given.auto_wrap_policy,
        "use_orig_params": given.use_orig_params,
    }
    notes = []
    for name in ROWS:
        if name not in values:
            continue
        value = values[name]
        notes.append(Note.of(name, value, answers[name]))
        for item in dataclasses.fields(value) if dataclasses.is_dataclass(value) else ():
            field_value = getattr(value, item.name)
            # This default differs from FSDP2's.
            differs = item.name == "cast_forward_inputs" and value.param_dtype is not None
            if field_value != item.default or differs:
                field = f"{name}.{item.name}"
                notes.append(Note.of(field, field_value, answers[field]))
    return tuple(notes)


def shown(value: Any) -> str:
    """Return a short text for a value."""
    if isinstance(value, nn.Module) or dataclasses.is_dataclass(value):
        return type(value).__name__
    if isinstance(value, (str, torch.device)):
        return str(value)
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, (list, tuple, set, frozenset)):
        return listing(map(shown, value), 3)
    value_or_function = getattr(value, "func", value)  # of functools.partial
    name = getattr(value, "name", None) or getattr(value_or_function, "__name__", None)
    text = name if isinstance(name, str) else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
