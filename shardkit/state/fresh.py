"""The state that an optimizer will have, before it has stepped: for loads that fill tensors in place, as DCP's."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardkit.errors import ShardkitError, message


def initial_state(optimizer: Optimizer) -> dict[nn.Parameter, dict[str, Any]]:
    """For each parameter that trains and has no state, what a first step would give it. Local, pure.

    A copy of the optimizer without parameters, state and hooks steps a stand-in of each parameter in turn, so neither
    the optimizer nor weights and random generators change, and beyond the result one parameter is held.

    Raises:
        ShardkitError: it does not step on one parameter by itself, as LBFGS, which wants a closure.
    """
    devices = {
        param.device for group in optimizer.param_groups for param in group["params"] if param.device.type != "cpu"
    }
    with torch.random.fork_rng([device.index for device in devices], device_type=_type_of(devices)):
        return {
            param: _state_of(optimizer, group, param)
            for group in optimizer.param_groups
            for param in group["params"]
            if param.requires_grad and not optimizer.state.get(param)
        }


def _type_of(devices: set[torch.device]) -> str:
    return next((device.type for device in devices), "cuda")


def _state_of(optimizer: Optimizer, group: dict[str, Any], param: nn.Parameter) -> dict[str, Any]:
    stand_in = nn.Parameter(torch.zeros_like(param, requires_grad=False))
    stand_in.grad = torch.zeros_like(stand_in)
    copy: Any = object.__new__(type(optimizer))
    # An LR scheduler's or our own step is bound to the optimizer itself, and hooks are the user's.
    copy.__dict__.update({key: v for key, v in vars(optimizer).items() if key != "step" and "hook" not in key})
    options = {key: v.clone() if isinstance(v, Tensor) else v for key, v in group.items()}
    copy.param_groups, copy.state = [options | {"params": [stand_in]}], defaultdict(dict)
    copy.__setstate__({})
    try:
        type(optimizer).step(copy)
    except Exception as error:  # whatever its step needs besides gradients
        rule = "State is made by a step of zero gradients on each parameter by itself"
        problem = f"{type(optimizer).__name__} cannot take one ({type(error).__name__}: {error})"
        raise ShardkitError(
            message("optimizer", problem, rule, "Step it once, or load with load_checkpoint, which needs no state")
        ) from error
    return dict(copy.state[stand_in])
