"""The machine around a pretended accelerator: what torch asks of a backend's module, and what a Python one lacks."""

from __future__ import annotations

import contextlib
import importlib
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shardkit._torch import no_torch_function
from shardkit._torch.pretend_ops import NAME, POISON, is_here, register_operators
from shardkit._torch.pretend_ops import device as device
from shardkit._torch.pretend_ops import memory as memory
from shardkit._torch.pretend_ops import syncs as syncs

_on = False


# ---- what torch asks of ``torch.<accelerator>`` ------------------------------------------------------------------


class Event:
    """An event that has always happened: everything runs at once, in order."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def record(self, *args: Any) -> None:
        pass

    def wait(self, *args: Any) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Event) -> float:
        return 0.0

    def synchronize(self) -> None:
        syncs.append("event")


class Stream:
    """A stream on which everything runs at once."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def wait_stream(self, stream: Any) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass

    def record_event(self, event: Event | None = None) -> Event:
        return event or Event()

    def synchronize(self) -> None:
        syncs.append("stream")

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *args: object) -> None:
        pass


class Module:
    """``torch.pretend``, as ``torch.cuda`` is for CUDA."""

    Stream, Event = Stream, Event

    def __init__(self) -> None:
        self.default_generators = (torch.Generator(),)  # of the CPU: the hooks for Python have no generators (2.13)
        self._stream = Stream()

    def is_available(self) -> bool:
        return _on

    def is_initialized(self) -> bool:
        return _on

    def _lazy_init(self) -> None:
        pass

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        self.default_generators[0].manual_seed(seed)

    manual_seed = manual_seed_all

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 1

    def current_stream(self, *args: Any) -> Any:
        return self._stream

    def set_device(self, *args: Any) -> None:
        pass

    def synchronize(self, *args: Any) -> None:
        syncs.append("device")

    def get_rng_state(self, *args: Any) -> Tensor:
        return self.default_generators[0].get_state()

    def set_rng_state(self, state: Tensor, *args: Any) -> None:
        self.default_generators[0].set_state(state)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]

    def stream(self, stream: Any) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def device(self, index: Any) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


# ---- what a Python backend cannot register, replaced while the machine is on -------------------------------------

_data: Any = torch._C.TensorBase.data


def _set_data(tensor: Tensor, value: Tensor) -> None:
    """``tensor.data = value`` across devices, which real accelerators take and PrivateUse1 does not (torch 2.13)."""
    if is_here(tensor) == is_here(value):
        _data.__set__(tensor, value)
        return
    fresh = value.detach().requires_grad_(tensor.requires_grad)
    torch._C._swap_tensor_impl(tensor, fresh)


def _same_or_crossing(one: Tensor, other: Tensor) -> bool:
    return _compatible(one, other) or {one.device.type, other.device.type} == {NAME, "cpu"}


_compatible = torch._has_compatible_shallow_copy_type
_storage = torch.UntypedStorage
_resize, _nbytes, _clone = _storage.resize_, _storage.nbytes, _storage.clone
_empty_function, _empty_like = torch.empty, torch.empty_like


def _resize_storage(storage: torch.UntypedStorage, size: int) -> Any:
    """FSDP2 frees memory so. Ours is kept and poisoned, so that a use behind it shows."""
    if storage.device.type != NAME:
        return _resize(storage, size)
    at = storage.data_ptr()
    if size == 0 and at in memory.host:
        memory.freed.add(at)
        with no_torch_function():
            torch.empty(0, dtype=torch.uint8, device="cpu").set_(memory.host[at][1]).fill_(POISON)
    elif at in memory.freed and size == _nbytes(storage):
        memory.freed.discard(at)
    elif size != _nbytes(storage):
        raise NotImplementedError(
            f"{NAME}: a storage of {_nbytes(storage)} bytes resized to {size}; it goes to 0 and back"
        )
    return storage


def _storage_nbytes(storage: torch.UntypedStorage) -> int:
    return 0 if storage.device.type == NAME and storage.data_ptr() in memory.freed else _nbytes(storage)


def _clone_storage(storage: torch.UntypedStorage) -> Any:
    if storage.device.type != NAME:
        return _clone(storage)  # type: ignore[no-untyped-call]
    made = torch.empty(storage.nbytes(), dtype=torch.uint8, device=device()).untyped_storage()
    return made.copy_(storage, non_blocking=False)


def _pin(tensor: Tensor, *args: Any) -> Tensor:
    if tensor.device.type != "cpu":
        raise RuntimeError(f"cannot pin '{tensor.type()}' only dense CPU tensors can be pinned")
    return memory.pin(tensor.detach().clone())


def _empty_pinned(make: Callable[..., Tensor], *args: Any, pin_memory: bool = False, **kwargs: Any) -> Tensor:
    made = make(*args, **kwargs)
    return memory.pin(made) if pin_memory else made


def _memory_stats() -> dict[str, int]:
    sizes = {"current": memory.allocated(), "peak": memory.peak}
    return {f"{kind}_bytes.all.{when}": size for kind in ("allocated", "reserved") for when, size in sizes.items()}


def _reset_peak() -> None:
    memory.peak = memory.allocated()


def _patches() -> Iterator[tuple[Any, str, Any]]:
    yield torch.Tensor, "data", property(_data.__get__, _set_data)
    yield torch, "_has_compatible_shallow_copy_type", _same_or_crossing
    yield _storage, "resize_", _resize_storage
    yield _storage, "nbytes", _storage_nbytes
    yield _storage, "size", _storage_nbytes
    yield _storage, "clone", _clone_storage
    yield torch.Tensor, "pin_memory", _pin
    yield torch.Tensor, "is_pinned", lambda tensor, *args: memory.is_pinned(tensor)
    yield torch, "empty", partial(_empty_pinned, _empty_function)
    yield torch, "empty_like", partial(_empty_pinned, _empty_like)
    yield torch.accelerator.memory, "memory_stats", lambda *args: _memory_stats()
    yield torch.accelerator, "reset_peak_memory_stats", lambda *args: _reset_peak()
    yield torch.accelerator, "synchronize", lambda *args: syncs.append("device")


_registered: list[torch.library.Library] = []


def _register() -> None:
    """Once in a process: PrivateUse1 gets its name, its operators and its module for good."""
    importlib.import_module("torch._dynamo")  # compares what is replaced here with copies of its own when imported
    from torch.utils.backend_registration import _DummyPrivateUse1Hook, _setup_privateuseone_for_python_backend

    class Hook(_DummyPrivateUse1Hook):
        def is_available(self) -> bool:
            return _on

    _setup_privateuseone_for_python_backend(rename=NAME, backend_module=Module(), hook=Hook())
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Warning only once for all operators")
        _registered.extend(register_operators())


@contextlib.contextmanager
def pretended() -> Iterator[None]:
    """The device is there inside, and not behind."""
    global _on
    if not _registered:
        _register()
    with contextlib.ExitStack() as stack:
        for owner, name, replacement in _patches():
            own = name in vars(owner)
            was = getattr(owner, name) if own else None
            setattr(owner, name, replacement)
            stack.callback(setattr, owner, name, was) if own else stack.callback(delattr, owner, name)
        _on = True
        syncs.clear()
        _reset_peak()
        try:
            yield
        finally:
            _on = False
