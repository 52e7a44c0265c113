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
        if func is Tensor.to and any(isinstance(arg, Tensor) and arg.is_meta for arg in (*args, *kwargs.values())):
            return self._to(args[0], args[1:], kwargs)
        if not (args and isinstance(args[0], Tensor) and args[0].is_meta):
            return func(*args, **kwargs)
        if func in self._answers:
            return self._answers[func](args[0])
        if func in _VALUES:
            return func(self._recorder.value(args[0]), *args[1:], **kwargs)
        if func is Tensor.cpu and self._device.type == "cpu":
            return args[0]
        return func(*args, **kwargs)

    def _to(self, tensor: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """``tensor.to(...)`` in any of its forms; to the device where tensors pretend to be, it is only a cast."""
        names: tuple[str, ...] = ("device", "dtype", "non_blocking", "copy")
        if args and isinstance(args[0], (torch.dtype, Tensor)):
            names = ("dtype" if isinstance(args[0], torch.dtype) else "tensor", "non_blocking", "copy")
        given = dict(zip(names, args, strict=False)) | kwargs
        other = given.pop("tensor", None)
        if other is not None:
            given |= {"device": self._device if other.is_meta else other.device, "dtype": other.dtype}
        device, dtype = given.pop("device", None), given.pop("dtype", None) or tensor.dtype
        if device is None or torch.device(device).type == self._device.type:
            return Tensor.to(tensor, dtype, **given)
        return Tensor.to(tensor, device, dtype, **given)


_VALUES = {Tensor.numpy, Tensor.tolist, Tensor.__array__}


def _getter(name: str) -> Any:
    """What a function mode is given for reading an attribute of a tensor."""
    return getattr(Tensor, name).__get__
