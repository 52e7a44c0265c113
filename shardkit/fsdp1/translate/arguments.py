"""The arguments of FSDP1's constructor, and the checks of each."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.fsdp import BackwardPrefetch, CPUOffload, FullyShardedDataParallel, MixedPrecision

from shardkit.errors import TranslationError, listing, message
from shardkit.fsdp1.translate.strategy import check_ranks
from shardkit.planning.tree import ModelTree
from shardkit.ranks import accelerator


@dataclass(frozen=True, eq=False)
class Arguments:
    """FSDP1's arguments with its defaults, then shardkit's own two; ``translate_fsdp1`` says what each is."""

    process_group: Any = None
    sharding_strategy: Any = None
    cpu_offload: Any = None
    auto_wrap_policy: Any = None
    backward_prefetch: Any = BackwardPrefetch.BACKWARD_PRE
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


def check_arguments(given: Arguments) -> None:
    """Raise TranslationError for arguments that FSDP1 would not take either, or that FSDP2 cannot do."""
    for name, kind in (("cpu_offload", CPUOffload), ("mixed_precision", MixedPrecision)):
        value = getattr(given, name)
        if not isinstance(value, (kind, type(None))):
            raise TranslationError(message(name, f"must be None or a {kind.__name__}, got {shown(value)}", "", ""))
    if given.world_size is not None:
        check_ranks("world_size", given.world_size)
    if given.ranks_per_node is not None:
        check_ranks("ranks_per_node", given.ranks_per_node)
    if os.environ.get("FSDP_USE_FULL_PREC_IN_EVAL") == "1" and given.mixed_precision is not None:
        problem = "is set, and FSDP_USE_FULL_PREC_IN_EVAL=1"
        rule = "FSDP2 computes in param_dtype in eval mode too, so losses would differ"
        fix = "Unset the variable, or evaluate without mixed_precision"
        raise TranslationError(message("mixed_precision", problem, rule, fix))


def check_unwrapped(tree: ModelTree) -> None:
    """Raise TranslationError if FSDP1 has wrapped the model or part of it."""
    pairs = zip(tree.fqns, tree.modules, strict=True)
    wrapped = [fqn or "(root)" for fqn, module in pairs if isinstance(module, FullyShardedDataParallel)]
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
        kinds = dict.fromkeys(type(each).__name__ for each in value)
        return f"{len(value)} of {listing(kinds, 3)}" if value else "none"
    if isinstance(value, (torch.distributed.ProcessGroup, torch.distributed.device_mesh.DeviceMesh)):
        return f"{type(value).__name__} of {value.size()} ranks"
    name = getattr(value, "name", None) or getattr(value, "__name__", None)
    name = name or getattr(getattr(value, "func", None), "__name__", None)
    text = name if isinstance(name, str) else repr(value)
    return text if len(text) <= 60 else f"a {type(value).__name__}"
