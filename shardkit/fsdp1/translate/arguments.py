"""The arguments of FSDP1's constructor, the checks of each, and a note for each that is not at its default.

Notes are written for defaults too that FSDP2 does not share.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.nn as nn
from torch.distributed import fsdp

from shardkit.errors import TranslationError, listing, message
from shardkit.fsdp1.translate.policy import Ignored, Wrapped
from shardkit.fsdp1.translate.strategy import HYBRID, RESHARDING
from shardkit.plan import ShardingPlan
from shardkit.planning.tree import ModelTree
from shardkit.ranks import accelerator
from shardkit.replacements import ROWS, Support


@dataclass(frozen=True, eq=False)
class Arguments:
    """FSDP1's arguments with its defaults, then shardkit's own two; ``translate_fsdp1`` says what each is."""

    process_group: Any = None
    sharding_strategy: Any = None
    cpu_offload: Any = None
    auto_wrap_policy: Any = None
    backward_prefetch: Any = fsdp.BackwardPrefetch.BACKWARD_PRE
    mixed_precision: Any = None
    ignored_modules: Any = None
    param_init_fn: Any = None
    device_id: Any = None
    sync_module_states: Any = False
    forward_prefetch: Any = False
    limit_all_gathers: Any = True
    use_orig_params: Any = False
    ignored_states: Any = None
    device_mesh: Any = None
    ranks_per_node: Any = None
    world_size: Any = None

    def __post_init__(self) -> None:
        for name in ("ignored_modules", "ignored_states"):  # module.parameters() can be read once only
            if isinstance(getattr(self, name), Iterator):
                object.__setattr__(self, name, list(getattr(self, name)))

    @classmethod
    def of(cls, given: dict[str, Any]) -> Arguments:
        """Collect them from the local variables of a function that has them as parameters."""
        return cls(**{item.name: given[item.name] for item in fields(cls) if item.name in given})

    def changed(self) -> dict[str, Any]:
        """Return those that differ from their default, in the order of the signature."""
        values = ((item.name, item.default, getattr(self, item.name)) for item in fields(self))
        return {name: v for name, default, v in values if v is not default and (default is None or v != default)}

    def for_policies(self) -> dict[str, Any]:
        """Return those that FSDP1 passes to a policy object."""
        ours = ("ignored_modules", "ranks_per_node", "world_size")
        given = {item.name: getattr(self, item.name) for item in fields(self) if item.name not in ours}
        return given | {"auto_wrap_policy": None}


def check_precision(mixed_precision: Any) -> None:
    """Raise TranslationError if FSDP1 would evaluate without it, which FSDP2 cannot do."""
    if mixed_precision is not None and os.environ.get("FSDP_USE_FULL_PREC_IN_EVAL") == "1":
        problem = "is set, and FSDP_USE_FULL_PREC_IN_EVAL=1"
        rule = "FSDP2 computes in param_dtype in eval mode too, so losses would differ"
        fix = "Unset the variable, or evaluate without mixed_precision"
        raise TranslationError(message("mixed_precision", problem, rule, fix))


def check_unwrapped(tree: ModelTree) -> None:
    """Raise TranslationError if FSDP1 has wrapped the model or part of it."""
    wrapped = [each.name for each in tree.nodes if isinstance(each.module, fsdp.FullyShardedDataParallel)]
    if wrapped:
        rule = "A translation needs the plain model, since FSDP1 flattens parameters"
        fix = "Remove FullyShardedDataParallel, wrap() and enable_wrap(), and pass the model itself"
        raise TranslationError(message(listing(wrapped, 6), "is wrapped by FSDP1 already", rule, fix))


def device_of(device_id: Any) -> torch.device | None:
    """Return the device of ``device_id``; an int is an accelerator's index, CUDA's if there is none here."""
    if isinstance(device_id, int):
        kind = accelerator()
        return torch.device("cuda" if kind == "cpu" else kind, device_id)
    return None if device_id is None else torch.device(device_id)


def shown(value: Any) -> str:
    """Return a short text for an argument's value."""
    if isinstance(value, torch.device):
        return str(value)
    if isinstance(value, nn.Module):
        return type(value).__name__
    if isinstance(value, (list, tuple, set, frozenset)):
        return f"{len(value)} of {listing({type(each).__name__: None for each in value}, 3) or 'them'}"
    name = getattr(value, "name", None) or getattr(value, "__name__", None)
    name = name or getattr(getattr(value, "func", None), "__name__", None)
    text = name if isinstance(name, str) else repr(value)
    return text if len(text) <= 60 else f"a {type(value).__name__}"


# --- Notes ------------------------------------------------------------------------------------------------------------


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
    strategy: fsdp.ShardingStrategy
    wrapped: Sequence[Wrapped]
    ignored: Ignored
    plan: ShardingPlan


def notes_on(decided: Decided) -> tuple[Note, ...]:
    """Return the notes, in the order of FSDP1's arguments; pure."""
    changed = decided.given.changed() | {
        "module": decided.tree.root.module,
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


def _strategy(decided: Decided, value: fsdp.ShardingStrategy) -> tuple[Support, str]:
    alone = ". On one rank FSDP1 uses NO_SHARD, which is the same" if decided.plan.mesh.size == 1 else ""
    return "mapped", (
        f"mesh {decided.plan.mesh}, reshard_after_forward={value.name in RESHARDING}; the root is not resharded "
        f"after forward, as in FSDP1{alone}"
    )


def _policy(decided: Decided, value: Any) -> tuple[Support, str]:
    if value is None:
        return "noted", "the root is the only unit, so the whole model is gathered at once, which is rarely intended"
    classes = dict.fromkeys(type(each.node.module).__name__ for each in decided.wrapped)
    own = dict.fromkeys(name for each in decided.wrapped for name in each.arguments)
    units = f"{len(decided.wrapped)} modules below the root ({listing(classes, 4) or 'none'})"
    units += f", some with their own {listing(own)}" if own else ""
    return ("noted", f"{units}; the plan's notes list the differences") if decided.plan.notes else ("mapped", units)


def _orig_params(decided: Decided, value: bool) -> tuple[Support, str]:
    if value:
        return "implied", "Parameters keep their names and become DTensors: build the optimizer after sharding"
    return (
        "noted",
        "Each parameter is a DTensor, where FSDP1 had a FlatParameter for each unit: states have other shapes",
    )


def _ignored(decided: Decided, value: Any) -> tuple[Support, str]:
    here = [param for param in decided.tree.params.values() if param in decided.ignored.params]
    trained = "; neither FSDP reduces their gradients" if any(param.requires_grad for param in here) else ""
    return "mapped", f"{len(here)} parameters are ignored_params{trained}"


# Where the value of an argument decides; only values other than the default get here.
_BY_VALUE: dict[str, Callable[[Decided, Any], tuple[Support, str]]] = {
    "sharding_strategy": _strategy,
    "auto_wrap_policy": _policy,
    "backward_prefetch": lambda decided, value: ("noted", "FSDP2 prefetches in backward, like BACKWARD_PRE"),
    "limit_all_gathers": lambda decided, value: ("noted", "FSDP2 always limits all-gathers, without blocking the CPU"),
    "use_orig_params": _orig_params,
    "ignored_modules": _ignored,
    "ignored_states": _ignored,
    "ranks_per_node": lambda decided, value: (
        "mapped" if decided.strategy.name in HYBRID else "implied",
        f"mesh {decided.plan.mesh} of {decided.strategy.name}",
    ),
}
