"""Find what FSDP1 would wrap, by its own functions, and what it would ignore; pure and local."""

from __future__ import annotations

from typing import Any

import torch.nn as nn
from torch.distributed.fsdp import MixedPrecision
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from shardkit._fsdp.fsdp1 import FSDP1Policy, full_precision_classes, run_callable, run_fsdp1_policy
from shardkit.errors import TranslationError


def wrapped_by(
    model: nn.Module,
    policy: Any,
    mixed_precision: MixedPrecision | None,
    ignored_modules: set[nn.Module],
    ignored_params: set[nn.Parameter],
    arguments: dict[str, Any],
) -> dict[str, dict[str, Any]]:
    """Return the FQNs of the modules that FSDP1 would wrap below the root, in the model's order.

    Each with the arguments that a CustomPolicy gave for it alone. ``arguments`` are those of FSDP1,
    which it passes to policies. Under mixed precision it wraps BatchNorm too, whatever the policy.
    """
    if policy is None:
        return {}
    batch_norms = full_precision_classes(mixed_precision)
    try:
        if isinstance(policy, type):
            policy = {policy}
        if isinstance(policy, (set, frozenset, list, tuple)):
            policy = ModuleWrapPolicy(set(policy))
        if isinstance(policy, FSDP1Policy):
            chosen = run_fsdp1_policy(policy, model, ignored_modules, arguments)
        else:
            if mixed_precision:
                policy = _or_batch_norm(policy, batch_norms)
            chosen = run_callable(policy, model, ignored_modules, ignored_params)
    except Exception as error:  # whatever a user's policy raises
        raise TranslationError(
            f"auto_wrap_policy {policy!r} raised {type(error).__name__}: {error}. It is called as "
            "FSDP1 calls it: policy(module=, recurse=, nonwrapped_numel=). Bind its other "
            "arguments with functools.partial."
        ) from error

    wrapped: dict[str, dict[str, Any]] = {}
    for fqn, module in model.named_modules():
        if not fqn:
            continue
        if module in chosen:
            wrapped[fqn] = {}
            for name, value in chosen[module].items():
                if name not in arguments or value is not arguments[name]:
                    wrapped[fqn][name] = value
        elif isinstance(module, batch_norms) and module not in ignored_modules:
            wrapped[fqn] = {}
    return wrapped


def _or_batch_norm(policy: Any, batch_norms: tuple[type[nn.Module], ...]) -> Any:
    """Return the policy that FSDP1 makes of a callable one under mixed precision."""

    def either(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
        wraps = policy(module=module, recurse=recurse, nonwrapped_numel=nonwrapped_numel)
        return wraps or recurse or isinstance(module, batch_norms)

    return either


def ignored_by(
    ignored_modules: Any, ignored_states: Any
) -> tuple[set[nn.Module], set[nn.Parameter]]:
    """Return the modules that FSDP1 would ignore, with all below them, and the parameters."""
    modules: set[nn.Module] = set()
    params: set[nn.Parameter] = set()
    for state in [*(ignored_modules or ()), *(ignored_states or ())]:
        if isinstance(state, nn.Parameter):
            params.add(state)
        else:
            modules.update(state.modules())
            params.update(state.parameters())
    return modules, params
