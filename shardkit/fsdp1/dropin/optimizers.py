"""Optimizers that a program builds before it wraps its model: they are given the sharded parameters.

FSDP1 with ``use_orig_params=True`` kept the parameter objects, so such a program trained. ``fully_shard`` replaces
them, and the optimizer would step tensors that no model has any more, without a word.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from shardkit._fsdp.fsdp1 import optimizers_in_backward
from shardkit.errors import ShardkitError, listing
from shardkit.fsdp1.dropin.tensors import as_before, as_dtensors, is_ours
from shardkit.optim import step_on_local_shards
from shardkit.optim.local import finish_step
from shardkit.shards import local_part
from shardkit.state.place import unwritten

logger = logging.getLogger("shardkit")

_replaced: Any = WeakIdKeyDictionary()  # from a parameter that was sharded to what took its place, and its FQN
_settled: WeakSet[Optimizer] = WeakSet()  # those that were looked at since the last wrapping
_marked: WeakKeyDictionary[Optimizer, list[tuple[Tensor, type]]] = WeakKeyDictionary()  # DTensors in a step only
_stepping: Any = WeakIdKeyDictionary()  # parameters that are stepped in backward


class _Replaced(nn.Parameter):
    """A parameter that was sharded: until the first step an optimizer has it, a scaler unscales it, and so on."""

    @property
    def grad(self) -> Tensor | None:
        """Return the gradient of what took its place."""
        return _replaced[self][0].grad  # type: ignore[no-any-return]

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        _replaced[self][0].grad = value


def remember(before: Mapping[str, nn.Parameter], model: nn.Module) -> None:
    """Notes which parameters took the places of those that ``model`` had ``before``, by FQN. Local."""
    after = dict(model.named_parameters(remove_duplicate=False))
    for fqn, param in before.items():
        if fqn in after and after[fqn] is not param:
            _replaced[param] = (after[fqn], fqn)
            if type(param) is nn.Parameter:
                param.__class__ = _Replaced
    _settled.clear()


def attend() -> ExitStack:
    """Looks at each optimizer of the process before each of its steps, until what it returns is closed. Local."""
    hooks = ExitStack()
    hooks.callback(register_optimizer_step_pre_hook(_before_step).remove)
    hooks.callback(register_optimizer_step_post_hook(_after_step).remove)
    return hooks


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
    settle(optimizer)
    _mark(optimizer)
    if callable(kwargs.get("closure")):
        return args, {**kwargs, "closure": _outside(optimizer, kwargs["closure"])}
    if len(args) > 1 and callable(args[1]):
        return (args[0], _outside(optimizer, args[1]), *args[2:]), kwargs
    return None


def _mark(optimizer: Optimizer) -> None:
    params = (param for group in optimizer.param_groups for param in group["params"])
    _marked.setdefault(optimizer, []).extend(as_dtensors(params))  # a step may call that of its base class


def _outside(optimizer: Optimizer, closure: Callable[..., Any]) -> Callable[..., Any]:
    """The closure of a step, which runs a forward and a backward with the parameters as they are outside of it."""

    @functools.wraps(closure)
    def called(*args: Any, **kwargs: Any) -> Any:
        as_before(_marked.pop(optimizer, ()))
        try:
            return closure(*args, **kwargs)
        finally:
            _mark(optimizer)

    return called


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    as_before(_marked.pop(optimizer, ()))
    finish_step(optimizer)


def settle(optimizer: Optimizer) -> None:
    """Makes an optimizer fit the models that were wrapped since it was built. In place. Local.

    One with parameters that were sharded is given the sharded ones. If it has parameters of a drop-in model and its
    update is element-wise, it steps on local shards, as under FSDP1: at a fifth of the CPU's time, and with plain
    parameters beside sharded ones (``ignored_states``, parts that are not wrapped), which torch refuses on DTensors
    where the step is fused or takes many tensors at once.
    """
    if optimizer in _settled:
        return
    _settled.add(optimizer)
    _repoint(optimizer)
    ours = any(is_ours(param) for group in optimizer.param_groups for param in group["params"])
    if ours and type(optimizer).__module__.startswith("torch.optim."):  # a program's own may ask more of its parameters
        with suppress(ShardkitError):  # one that is not element-wise steps on DTensors
            step_on_local_shards(optimizer)


def _repoint(optimizer: Optimizer) -> None:
    """Exchanges the optimizer's parameters that were sharded for the sharded ones, and shards their state. Local.

    In place: groups, their order and options stay, and LR schedulers keep working. A warning says so once.
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
        "%s was built before FSDP(...): its %d parameters were exchanged for the sharded ones (%s). "
        "Build it after wrapping, as FSDP2 needs it.",
        type(optimizer).__name__,
        len(found),
        listing((fqn for _, fqn in found.values()), 3),
    )


def _sharded(value: Any, old: nn.Parameter, new: nn.Parameter) -> Any:
    """Return the part on this rank of what was kept for each element of the parameter; anything else as it is."""
    if isinstance(value, Tensor) and value.shape == old.shape and value.ndim and isinstance(new, DTensor):
        shard = unwritten(new, value.dtype, new.to_local().device)
        shard.to_local().copy_(local_part(value, new))  # type: ignore[attr-defined]
        return shard
    return value


def step_in_backward(root: nn.Module) -> None:
    """Lets the optimizers that torch's ``_apply_optimizer_in_backward`` gave to parameters step in backward. Local.

    They step when the gradient of their parameter is reduced, and clear it, as under FSDP1; FSDP2 passes them over.
    """
    for param in root.parameters():
        if optimizers_in_backward(param) and param not in _stepping:
            _stepping[param] = True
            param.register_post_accumulate_grad_hook(_step)  # type: ignore[no-untyped-call]


def _step(param: Tensor) -> None:
    for optimizer in optimizers_in_backward(param):
        optimizer.step()
        optimizer.zero_grad()
