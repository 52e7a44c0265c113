"""Optimizers that a program builds before it wraps its model: they are given the sharded parameters.

FSDP1 with ``use_orig_params=True`` kept the parameter objects, so such a program trained. ``fully_shard`` replaces
them, and the optimizer would step tensors that no model has any more, without a word.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Mapping
from contextlib import suppress
from typing import Any
from weakref import WeakSet

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from shardkit._fsdp import optimizers_in_backward
from shardkit.errors import ShardkitError, listing
from shardkit.optim import step_on_local_shards
from shardkit.shards import local_part
from shardkit.state_dict.place import unwritten

logger = logging.getLogger("shardkit")

_replaced: Any = WeakIdKeyDictionary()  # from a parameter that was sharded to what took its place, and its FQN
_settled: WeakSet[Optimizer] = WeakSet()  # those that were looked at since the last wrapping
_stepping: Any = WeakIdKeyDictionary()  # parameters that are stepped in backward
_hooked = False


def remember(before: Mapping[str, nn.Parameter], model: nn.Module) -> None:
    """Notes which parameters took the places of those that ``model`` had ``before``, by FQN. Local."""
    after = dict(model.named_parameters(remove_duplicate=False))
    for fqn, param in before.items():
        if fqn in after and after[fqn] is not param:
            _replaced[param] = (after[fqn], fqn)
    _settled.clear()
    _hook()


def repoint(optimizer: Optimizer) -> None:
    """Exchanges the optimizer's parameters that were sharded for the sharded ones, and shards their state. Local.

    In place: groups, their order and options stay, and LR schedulers keep working. A warning says so once.
    """
    if optimizer in _settled:
        return
    _settled.add(optimizer)
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


def settle_all(root: nn.Module) -> None:
    """Makes every optimizer of the process fit what is below ``root``, which is about to run first. Local.

    Those with parameters that were sharded are given the sharded ones. Those with plain parameters beside sharded ones
    (``ignored_states``, parts that are not wrapped) step on local shards: torch refuses the mixture where the step is
    fused or takes many tensors at once, as it does on GPUs unasked, and FSDP1 had plain tensors only.
    """
    plain = [param for param in root.parameters() if param.requires_grad and not isinstance(param, DTensor)]
    if not len(_replaced) and not plain:
        return
    for found in [each for each in gc.get_objects() if isinstance(each, Optimizer)]:
        repoint(found)
        if _is_mixed(found):
            with suppress(ShardkitError):  # an optimizer that is not torch's, and may well take the mixture
                step_on_local_shards(found)


def _is_mixed(optimizer: Optimizer) -> bool:
    return len({isinstance(param, DTensor) for group in optimizer.param_groups for param in group["params"]}) > 1


def _sharded(value: Any, old: nn.Parameter, new: nn.Parameter) -> Any:
    """The part on this rank of what was kept for each element of the parameter; anything else as it is."""
    if isinstance(value, Tensor) and value.shape == old.shape and value.ndim and isinstance(new, DTensor):
        shard = unwritten(new, value.dtype, new.to_local().device)
        shard.to_local().copy_(local_part(value, new))  # type: ignore[attr-defined]
        return shard
    return value


def _hook() -> None:
    """Look at each optimizer before its first step too: the collector's lists lack what ``gc.freeze`` put aside."""
    global _hooked
    if not _hooked:
        register_optimizer_step_pre_hook(lambda optimizer, args, kwargs: repoint(optimizer))
        _hooked = True


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
