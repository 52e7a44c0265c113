"""The arguments of FSDP1's constructor, and checks of them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.nn as nn
from torch.distributed import fsdp
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP  # before it is replaced

from shardkit.errors import TranslationError, listing
from shardkit.ranks import accelerator


@dataclass(frozen=True, eq=False)
class Arguments:
    """FSDP1's arguments with its defaults, then shardkit's two; ``translate_fsdp1`` says what each
    is.
    """

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
        for name in ("ignored_modules", "ignored_states"):  # module.parameters() is read once only
            if isinstance(getattr(self, name), Iterator):
                object.__setattr__(self, name, list(getattr(self, name)))

    @classmethod
    def of(cls, variables: dict[str, Any]) -> Arguments:
        """Collect them from the local variables of a function that has them as parameters."""
        names = [item.name for item in fields(cls) if item.name in variables]
        return cls(**{name: variables[name] for name in names})

    def changed(self) -> dict[str, Any]:
        """Return those that differ from their default, in the order of the signature."""
        changed = {}
        for item in fields(self):
            value = getattr(self, item.name)
            if value is not item.default and (item.default is None or value != item.default):
                changed[item.name] = value
        return changed

    def for_policies(self) -> dict[str, Any]:
        """Return those that FSDP1 passes to a policy object."""
        arguments = {item.name: getattr(self, item.name) for item in fields(self)}
        for name in ("auto_wrap_policy", "ignored_modules", "ranks_per_node", "world_size"):
            del arguments[name]
        return arguments


def check_precision(mixed_precision: fsdp.MixedPrecision | None) -> None:
    """Raise TranslationError if FSDP1 would evaluate without it, which FSDP2 cannot do."""
    if mixed_precision is not None and os.environ.get("FSDP_USE_FULL_PREC_IN_EVAL") == "1":
        raise TranslationError(
            "mixed_precision is set, and FSDP_USE_FULL_PREC_IN_EVAL=1. FSDP2 computes in "
            "param_dtype in eval mode too, so losses would differ. Unset the variable, or evaluate "
            "without mixed_precision."
        )


def check_unwrapped(model: nn.Module) -> None:
    """Raise TranslationError if FSDP1 has wrapped the model or part of it."""
    wrapped = []
    for fqn, module in model.named_modules():
        if isinstance(module, TorchFSDP):
            wrapped.append(fqn or "(root)")
    if wrapped:
        raise TranslationError(
            f"{listing(wrapped, 6)} is wrapped by FSDP1 already, which flattens parameters, and a "
            "translation needs the plain model. Remove FullyShardedDataParallel, wrap() and "
            "enable_wrap()."
        )


def device_of(device_id: Any) -> torch.device | None:
    """Return the device of ``device_id``; an int is an accelerator's index, CUDA's if there is
    none.
    """
    if isinstance(device_id, int):
        kind = accelerator()
        return torch.device("cuda" if kind == "cpu" else kind, device_id)
    return None if device_id is None else torch.device(device_id)
