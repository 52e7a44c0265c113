"""Gradients as FSDP1's programs know them: this rank's shard, whose norm or sum is this rank's part.

Programs on FSDP1 compute a norm by hand as ``param.grad.norm() ** 2``, add those up, and all-reduce the result. On
DTensors ``norm`` is that of the whole gradient, a DTensor, which plain tensors and all-reduces do not take.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

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
    ``torch.nn.utils.clip_grad_norm_`` and optimizers, gets what it gets of DTensors.
    """

    __slots__ = ()

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """The function on the shard, or on the DTensor."""
        kwargs = kwargs or {}
        if _is_torchs_call():
            return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        if args and isinstance(args[0], ShardGrad) and _reduces_all(func, args, kwargs):
            return func(args[0].to_local(), *args[1:], **kwargs)
        return _mark(super().__torch_function__(func, types, args, kwargs))  # type: ignore[no-untyped-call]


def _reduces_all(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    others = REDUCTIONS.get(getattr(func, "__name__", ""), -1)
    return len(args) <= others + 1 and kwargs.get("dim") is None and kwargs.get("axis") is None


def _mark(value: Any) -> Any:
    if type(value) is DTensor and any(isinstance(each, Shard) for each in value.placements):
        value.__class__ = ShardGrad
    return value


def _is_torchs_call() -> bool:
    """Whether the function was called by torch, and not by the program or a library."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_globals.get("__name__") in _BETWEEN:
        frame = frame.f_back
    return frame is not None and str(frame.f_globals.get("__name__", "")).partition(".")[0] == "torch"
