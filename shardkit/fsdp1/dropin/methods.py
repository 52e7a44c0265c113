"""Methods of the wrapped model other than forward, called through the wrapper."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from shardkit._torch import tree_leaves, tree_map, with_local
from shardkit.errors import ShardkitError, TranslationError, message
from shardkit.fsdp1.dropin.record import record_of
from shardkit.fsdp1.dropin.tensors import MIXED, Mixed


class NotGathered(TranslationError, RuntimeError):
    """A RuntimeError too, as torch's."""


def guarded(wrapper: nn.Module, name: str, found: Any) -> Any:
    """``found``, the attribute of that name; a method of the user's model answers for parameters that are sharded.

    Under NO_SHARD FSDP1 kept parameters whole, so that methods ran: there this rank's part, which is the whole, takes
    their places. Elsewhere what to do is said.
    """
    if not inspect.ismethod(found) or hasattr(nn.Module, name):
        return found

    @functools.wraps(found)
    def method(*args: Any, **kwargs: Any) -> Any:
        whole = record_of(wrapper).strategy is ShardingStrategy.NO_SHARD
        try:
            with _Whole() if whole else nullcontext():
                return found(*args, **kwargs)
        except RuntimeError as error:
            is_torchs = MIXED in str(error) and not isinstance(error, ShardkitError)
            if is_torchs or isinstance(error, (NotGathered, Mixed)):
                raise not_gathered(name, is_method=True) from error
            raise

    return method


def not_gathered(name: str, is_method: bool = False) -> NotGathered:
    """The error for a module, by FQN, or a method that is called on its own and meets this rank's shards."""
    rule = "Parameters are gathered for the wrapped module's forward, and anything besides it sees this rank's shards"
    before = f'call register_fsdp_forward_method(model.module, "{name}") after wrapping, on all ranks'
    fix = f"Call it in FSDP.summon_full_params(model), or {before if is_method else 'wrap it by FSDP(...) too'}"
    return NotGathered(message(name, "uses parameters that are sharded", rule, fix))


class _Whole(TorchFunctionMode):
    """Parameters that every rank has whole are plain tensors where they are used beside such."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """The function on them as plain tensors."""
        kwargs = kwargs or {}
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        if len({isinstance(each, DTensor) for each in tensors}) > 1:
            args, kwargs = tree_map(_plain, (args, kwargs))
        return func(*args, **kwargs)


def _plain(value: Any) -> Any:
    return _Plain.apply(value) if isinstance(value, DTensor) else value  # type: ignore[no-untyped-call]


class _Plain(Function):
    """A tensor that every rank has whole as a plain one; its gradient is averaged over the ranks. Collective there."""

    @staticmethod
    def forward(ctx: Any, tensor: DTensor) -> Tensor:
        """A view of it."""
        ctx.tensor = tensor
        local: Tensor = tensor.to_local()
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> DTensor:
        """The mean, placed like the tensor."""
        grad = grad.contiguous()
        for group in ctx.tensor.device_mesh.get_all_groups():
            dist.all_reduce(grad, group=group)
        return with_local(ctx.tensor, grad / ctx.tensor.device_mesh.size())
