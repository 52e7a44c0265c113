"""Gradients as FSDP1's programs know them: this rank's shard, whose norm or sum is this rank's part.

Programs on FSDP1 compute a norm by hand as ``param.grad.norm() ** 2``, add those up, and all-reduce the result. On
DTensors ``norm`` is that of the whole gradient, a DTensor, which plain tensors and all-reduces do not take.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from shardkit._torch import with_local
from shardkit.state_dict.routes import local_of

# Functions that make a number of a tensor, by name, with the count of arguments besides it that are no dimensions.
REDUCTIONS = {
    "norm": 1, "vector_norm": 1, "linalg_vector_norm": 1, "linalg_norm": 1,
    "sum": 0, "mean": 0, "max": 0, "min": 0, "amax": 0, "amin": 0, "any": 0, "all": 0, "count_nonzero": 0,
}  # fmt: skip

# Python's side of some of them, between the caller and the reduction.
_BETWEEN = {__name__, "torch.overrides", "torch._tensor", "torch.functional"}


def show_shard(param: Tensor) -> None:
    """Make the gradient of a parameter, if it is a DTensor with a sharded dimension, a ``ShardGrad``; in place."""
    if param.grad is not None:
        _mark(param.grad)


class ShardGrad(DTensor):
    """A DTensor that reduces to a plain number of this rank's shard, where a program asks for one of all its elements.

    All else is as for a DTensor; what is computed from one element by element is one again. torch's own code, such as
    optimizers, gets what it gets of DTensors; but ``torch.nn.utils.clip_grad_norm_`` the norms of whole gradients as
    plain tensors, so that it returns one, which can be formatted, and takes gradients that are not sharded too.
    """

    __slots__ = ()

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """The function on the shard, or on the DTensor."""
        kwargs, caller = kwargs or {}, _caller()
        if caller == "torch.nn.utils.clip_grad" and getattr(func, "__name__", "") == "_foreach_norm":
            return [torch.linalg.vector_norm(grad, *args[1:]) for grad in args[0]]
        if caller == "torch.nn.utils.clip_grad" and getattr(func, "__name__", "") == "linalg_vector_norm":
            norm = super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
            return norm.full_tensor()
        if caller.partition(".")[0] == "torch":
            return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        if _is_dot(func, args, kwargs):
            return func(args[0].to_local(), args[1].to_local(), *args[2:], **kwargs)
        if args and isinstance(args[0], ShardGrad) and _reduces_all(func, args, kwargs):
            return func(args[0].to_local(), *args[1:], **kwargs)
        return _mark(super().__torch_function__(func, types, args, kwargs))  # type: ignore[no-untyped-call]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Saved as a DTensor, which ``torch.load`` knows: state of an optimizer may begin as a gradient."""
        return with_local(self, local_of(self)).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: dict[int, Any]) -> DTensor:
        """A copy with memory of its own; torch's own copies no subclass of DTensor."""
        copied: DTensor = _mark(with_local(self, local_of(self).clone()))
        memo[id(self)] = copied
        return copied


def _reduces_all(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    others = REDUCTIONS.get(getattr(func, "__name__", ""), -1)
    return len(args) <= others + 1 and kwargs.get("dim") is None and kwargs.get("axis") is None


def _is_dot(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether it is the sum of products of two gradients' elements, as optimizers log the cosine of two updates."""
    if getattr(func, "__name__", "") != "tensordot" or not all(isinstance(each, ShardGrad) for each in args[:2]):
        return False
    return len(args) >= 2 and kwargs.get("dims", args[2] if len(args) > 2 else 2) == args[0].ndim


def _mark(value: Any) -> Any:
    if type(value) is DTensor and any(isinstance(each, Shard) for each in value.placements):
        value.__class__ = ShardGrad
    return value


def _caller() -> str:
    """The name of the module that called the function."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_globals.get("__name__") in _BETWEEN:
        frame = frame.f_back
    return "" if frame is None else str(frame.f_globals.get("__name__", ""))
