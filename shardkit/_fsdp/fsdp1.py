"""Private names of FSDP1 and FSDP2 that only the translation of FSDP1 and the drop-in need."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

# What torch.distributed.checkpoint.state_dict asks for each of FSDP1's modules: None where it is
# none (torch 2.13).
STATE_OF = "_get_module_fsdp_state_if_fully_sharded_module"

# The base class of FSDP1's policies that are objects (ModuleWrapPolicy, CustomPolicy, a user's own)
# and its method have no public names (torch 2.11 to 2.13). A callable policy is called as
# documented.
FSDP1Policy = torch.distributed.fsdp.wrap._Policy


def run_fsdp1_policy(
    policy: Any, model: nn.Module, ignored_modules: set[nn.Module], kwargs: dict[str, Any]
) -> dict[nn.Module, dict[str, Any]]:
    """Return the modules that a policy object would wrap, each with the arguments of FSDP1 for it;
    pure.
    """
    return cast(
        "dict[nn.Module, dict[str, Any]]", policy._run_policy(model, ignored_modules, kwargs)
    )


def run_callable(
    policy: Callable[..., bool],
    model: nn.Module,
    ignored_modules: set[nn.Module],
    ignored_params: set[nn.Parameter],
) -> dict[nn.Module, dict[str, Any]]:
    """Return the modules below ``model`` that a callable policy would wrap, without arguments;
    pure.

    torch's own walk, with a wrapper that only takes note and returns the module (torch 2.11 to
    2.13).
    """
    wrapped: dict[nn.Module, dict[str, Any]] = {}

    def take_note(module: nn.Module) -> nn.Module:
        wrapped[module] = {}
        return module

    torch.distributed.fsdp.wrap._recursive_wrap(
        model, policy, take_note, ignored_modules, ignored_params, only_wrap_children=True
    )
    return wrapped


def full_precision_classes(mixed_precision: Any) -> tuple[type[nn.Module], ...]:
    """Return the module classes that FSDP1 leaves in float32 under a policy: BatchNorm, as a rule.

    The field is documented, and its name starts with an underscore (torch 2.11 to 2.13).
    """
    return tuple(mixed_precision._module_classes_to_ignore) if mixed_precision else ()


def set_cast_forward_inputs(module: FSDPModule, casts: bool) -> None:
    """Set whether one FSDP module casts its inputs to ``param_dtype``; torch takes it at
    construction only. Local.

    FSDP1 casts the inputs of its root only, and the first forward decides which module that is.
    """
    state: Any = module._get_fsdp_state()
    state._mp_policy = dataclasses.replace(state._mp_policy, cast_forward_inputs=casts)


def asked_by_checkpoint() -> bool:
    """Return whether ``torch.distributed.checkpoint.state_dict`` is anywhere among the callers.

    Its ``get_model_state_dict`` returns sharded state whatever FSDP1's ``state_dict_type`` is, by
    setting that for models of torch's own class only (torch 2.11 to 2.13).
    """
    frame = inspect.currentframe()
    while (
        frame is not None
        and frame.f_globals.get("__name__") != "torch.distributed.checkpoint.state_dict"
    ):
        frame = frame.f_back
    return frame is not None


def is_sharded_tensor(tensor: object) -> bool:
    """Return whether it is a ShardedTensor, as in FSDP1's SHARDED state; the class has no public
    name. Local, pure.
    """
    return type(tensor).__name__ == "ShardedTensor"


def gathered_sharded_tensor(tensor: Any) -> Tensor:
    """Return the full tensor of a ShardedTensor split along dim 0, on every rank of its group.
    Collective.

    Its public ``gather`` returns it on one rank only (torch 2.11 to 2.13).
    """
    if not tensor.shape.numel():
        return torch.empty(tensor.shape, dtype=tensor.dtype)
    from torch.distributed._state_dict_utils import _all_gather_sharded_tensor

    return _all_gather_sharded_tensor(tensor, tensor._process_group)


def optimizers_in_backward(param: torch.Tensor) -> list[torch.optim.Optimizer]:
    """Return those that ``torch.distributed.optim._apply_optimizer_in_backward`` gave the
    parameter. Local, pure.

    FSDP1 stepped them, FSDP2 does not (torch 2.11 to 2.13).
    """
    return getattr(param, "_in_backward_optimizers", [])
