"""A note for every argument of FSDP1 that is not at its default, and for the defaults that FSDP2 does not share."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.fsdp import ShardingStrategy

from shardkit.errors import listing
from shardkit.fsdp1.translate.arguments import Arguments, shown
from shardkit.fsdp1.translate.policy import Ignored, Wrapped
from shardkit.fsdp1.translate.strategy import HYBRID, RESHARDING
from shardkit.plan import ShardingPlan
from shardkit.planning.tree import ModelTree
from shardkit.replacements import ROWS, Support


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

    def __str__(self) -> str:
        return f"{self.argument}={self.value}: {self.support}. {self.sentence}"


@dataclass(frozen=True)
class Decided:
    """What notes are written from."""

    tree: ModelTree
    given: Arguments
    strategy: ShardingStrategy
    wrapped: Sequence[Wrapped]
    ignored: Ignored
    plan: ShardingPlan


def notes_on(decided: Decided) -> tuple[Note, ...]:
    """Return the notes, in the order of FSDP1's arguments; pure."""
    changed = decided.given.changed() | {
        "module": decided.tree.modules[0],
        "sharding_strategy": decided.strategy,
        "auto_wrap_policy": decided.given.auto_wrap_policy,
        "use_orig_params": decided.given.use_orig_params,
    }
    return tuple(note for name in ROWS if name in changed for note in _notes(decided, name, changed[name]))


def _notes(decided: Decided, name: str, value: Any) -> Iterator[Note]:
    support, sentence = _BY_VALUE[name](decided, value) if name in _BY_VALUE else ROWS[name][:2]
    is_dataclass = dataclasses.is_dataclass(value)
    yield Note(name, type(value).__name__ if is_dataclass else shown(value), support, sentence)
    for item in dataclasses.fields(value) if is_dataclass else ():
        given = getattr(value, item.name)
        differs = item.name == "cast_forward_inputs" and value.param_dtype is not None  # FSDP2 has another default
        if given != item.default or differs:
            field = f"{name}.{item.name}"
            yield Note(field, _shown_field(given), *ROWS[field][:2])


def _shown_field(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        return listing(getattr(each, "__name__", repr(each)) for each in value) or "()"
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else repr(value)


def _strategy(decided: Decided, value: ShardingStrategy) -> tuple[Support, str]:
    alone = ". On one rank FSDP1 uses NO_SHARD, which is the same" if decided.plan.mesh.size == 1 else ""
    return "mapped", (
        f"mesh {decided.plan.mesh}, reshard_after_forward={value.name in RESHARDING}; the root is not resharded "
        f"after forward, as in FSDP1{alone}"
    )


def _policy(decided: Decided, value: Any) -> tuple[Support, str]:
    if value is None:
        return "noted", "the root is the only unit, so the whole model is gathered at once, which is rarely intended"
    classes = dict.fromkeys(type(decided.tree.modules[each.entry]).__name__ for each in decided.wrapped)
    own = dict.fromkeys(name for each in decided.wrapped for name in each.arguments)
    units = f"{len(decided.wrapped)} modules below the root ({listing(classes, 4) or 'none'})"
    units += f", some with their own {listing(own)}" if own else ""
    return ("noted", f"{units}; the plan's notes list the differences") if decided.plan.notes else ("mapped", units)


def _orig_params(decided: Decided, value: bool) -> tuple[Support, str]:
    if value:
        return "implied", "Parameters keep their names and become DTensors: build the optimizer after sharding"
    return "noted", (
        "Each parameter is a DTensor, where FSDP1 had a FlatParameter for each unit: optimizers may have "
        "parameter groups, and their states have other shapes"
    )


def _ignored(decided: Decided, value: Any) -> tuple[Support, str]:
    here = [param for param in decided.tree.params.values() if param in decided.ignored.params]
    elsewhere = len(decided.ignored.params) - len(here)
    others = f"; {elsewhere} more are not in the model" if elsewhere else ""
    trained = "; neither FSDP reduces their gradients" if any(param.requires_grad for param in here) else ""
    return "mapped", f"{len(here)} parameters are ignored_params{others}{trained}"


def _per_node(decided: Decided, value: int) -> tuple[Support, str]:
    if decided.strategy.name in HYBRID:
        return "mapped", f"mesh {decided.plan.mesh}"
    return "implied", f"{decided.strategy.name} does not depend on nodes"


# Where the value of an argument decides; only values other than the default get here.
_BY_VALUE = {
    "sharding_strategy": _strategy,
    "auto_wrap_policy": _policy,
    "backward_prefetch": lambda decided, value: (
        "noted",
        "FSDP2 all-gathers the next unit before a unit's backward, like BACKWARD_PRE; one more unit may be gathered "
        "at a time than in FSDP1",
    ),
    "limit_all_gathers": lambda decided, value: ("noted", "FSDP2 always limits all-gathers, without blocking the CPU"),
    "use_orig_params": _orig_params,
    "ignored_modules": _ignored,
    "ignored_states": _ignored,
    "ranks_per_node": _per_node,
}
