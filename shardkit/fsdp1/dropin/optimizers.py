"""Optimizers of drop-in models: given the sharded parameters if they were built before, and stepped on local shards.

FSDP1 with ``use_orig_params=True`` kept the parameter objects, so a program that built its optimizer first trained.
``fully_shard`` replaces them, and the optimizer would silently step tensors that no model has.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from typing import Any
from weakref import WeakSet

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.weak import WeakIdKeyDictionary

from shardkit.errors import ShardkitError, listing
from shardkit.fsdp1.dropin import tensors
from shardkit.optim import step_on_local_shards
from shardkit.optim.local import finish_step
from shardkit.shards import as_sharded, local_part

logger = logging.getLogger("shardkit")

_replaced: Any = WeakIdKeyDictionary()  # from a parameter that was sharded to its replacement and its FQN
_settled: WeakSet[Optimizer] = WeakSet()  # those that were checked since the last wrapping


def remember(before: Mapping[str, nn.Parameter], model: nn.Module) -> None:
    """Remember which parameters replaced those that ``model`` had ``before``, by FQN. Local."""
    after = dict(model.named_parameters(remove_duplicate=False))
    for fqn, param in before.items():
        if fqn in after and after[fqn] is not param:
            _replaced[param] = (after[fqn], fqn)
    _settled.clear()


def install_step_hooks() -> ExitStack:
    """Prepare each optimizer of the process before each of its steps, until the result is closed. Local."""
    hooks = ExitStack()
    hooks.callback(register_optimizer_step_pre_hook(_before_step).remove)
    hooks.callback(register_optimizer_step_post_hook(_after_step).remove)
    return hooks


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    settle(optimizer)
    for group in optimizer.param_groups:
        tensors.as_dtensors(group["params"], stepping=True)


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for group in optimizer.param_groups:
        tensors.as_gradients(group["params"])
    finish_step(optimizer)  # its first step began as torch's own, before it was settled


def settle(optimizer: Optimizer) -> None:
    """Make an optimizer fit the models that were wrapped since it was built. In place. Local.

    It is given the sharded parameters. If its update is element-wise, it steps on local shards, as under FSDP1: in a
    fifth of the CPU time, and also where it has plain parameters (``ignored_states``, parts that are not wrapped),
    which torch's fused and foreach steps refuse together with DTensors.
    """
    if optimizer in _settled:
        return
    _settled.add(optimizer)
    _repoint(optimizer)
    ours = any(isinstance(param, tensors.Sharded) for group in optimizer.param_groups for param in group["params"])
    if ours and type(optimizer).__module__.startswith("torch.optim."):  # others may not be element-wise
        with suppress(ShardkitError):  # those that are not step on DTensors
            step_on_local_shards(optimizer)


def _repoint(optimizer: Optimizer) -> None:
    """Replace the optimizer's parameters by the sharded ones, and shard their state; warns. In place. Local.

    Groups, their order and options stay, and LR schedulers keep working.
    """
    found = {p: _replaced[p] for group in optimizer.param_groups for p in group["params"] if p in _replaced}
    if not found:
        return
    for group in optimizer.param_groups:
        group["params"] = [found[param][0] if param in found else param for param in group["params"]]
    for old, (new, _) in found.items():
        if old in optimizer.state:
            optimizer.state[new] = {key: _sharded(value, old, new) for key, value in optimizer.state.pop(old).items()}
    logger.warning(
        "%s was built before FSDP(...): its %d parameters were replaced by the sharded ones (%s). "
        "Build it after wrapping, as FSDP2 requires.",
        type(optimizer).__name__,
        len(found),
        listing((fqn for _, fqn in found.values()), 3),
    )


def _sharded(value: Any, old: nn.Parameter, new: nn.Parameter) -> Any:
    """Return this rank's part of state that has the parameter's shape; any other as it is."""
    if isinstance(value, Tensor) and value.shape == old.shape and value.ndim and isinstance(new, DTensor):
        return as_sharded(local_part(value, new).to(new.to_local().device, copy=True), new)
    return value
