"""The disguise: meta tensors that pass for ordinary ones in the eyes of the model's code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from shardkit.meta.record import Recorder


class Disguise(TorchFunctionMode):
    """Lets meta tensors pass for ordinary ones in what is no aten call.

    transformers, torch.nn.init and others look for meta tensors and then skip their own initialisers; ordinary
    construction would run them. Methods that hand out values (``tolist``, ``numpy``) get them from the tape.
    """

    def __init__(self, recorder: Recorder, device: torch.device) -> None:
        super().__init__()
        self._recorder = recorder
        self._answers: dict[Any, Callable[[Tensor], Any]] = {
            _getter("device"): lambda tensor: device,
            _getter("is_meta"): lambda tensor: False,
            _getter("is_cpu"): lambda tensor: device.type == "cpu",
            _getter("is_cuda"): lambda tensor: device.type == "cuda",
        }
        self._device = device

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Answer as for an ordinary tensor; anything else runs unchanged."""
        kwargs = kwargs or {}
        if not (args and isinstance(args[0], Tensor) and args[0].is_meta):
            return func(*args, **kwargs)
        if func in self._answers:
            return self._answers[func](args[0])
        if func in _VALUES:
            return func(self._recorder.value(args[0]), *args[1:], **kwargs)
        if func is Tensor.cpu and self._device.type == "cpu":
            return args[0]
        if func is Tensor.to:
            return self._to(args, kwargs)
        return func(*args, **kwargs)

    def _to(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """``tensor.to(its own device)`` is the same tensor, or only a cast."""
        rest = tuple(arg for arg in args[1:] if not self._is_here(arg))
        kwargs = {k: v for k, v in kwargs.items() if not (k == "device" and (v is None or self._is_here(v)))}
        if not rest and not kwargs:
            return args[0]
        if len(rest) < len(args) - 1 and rest and isinstance(rest[0], bool):
            rest = (args[0].dtype, *rest)  # to(device, non_blocking): only to(dtype, ...) is left to say it with
        if not rest and "dtype" not in kwargs:
            kwargs["dtype"] = args[0].dtype
        return Tensor.to(args[0], *rest, **kwargs)

    def _is_here(self, arg: Any) -> bool:
        return isinstance(arg, (str, torch.device)) and torch.device(arg).type == self._device.type


_VALUES = {Tensor.numpy, Tensor.tolist, Tensor.__array__}


def _getter(name: str) -> Any:
    """What a function mode is given for reading an attribute of a tensor."""
    return getattr(Tensor, name).__get__
