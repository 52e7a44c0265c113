"""A simulated accelerator in Python, for tests: real devices and values, with the host's speed and
memory.
"""

import contextlib
import importlib
import warnings
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from pretend_ops import NAME, device, is_here, memory, register_operators
from pretend_streams import Event, Stream, arrive, current_stream, poison, synchronize, syncs

from shardkit._torch.dispatch import fake_store

_on = False


# ---- what torch expects of ``torch.<accelerator>`` -----------------------------------------------


def _memory_stats(*args):
    sizes = {"current": memory.allocated(), "peak": memory.peak}
    return {
        f"{kind}_bytes.all.{when}": size
        for kind in ("allocated", "reserved")
        for when, size in sizes.items()
    }


def _reset_peak(*args):
    memory.peak = memory.allocated()


class Module:
    """``torch.pretend``, as ``torch.cuda`` is for CUDA."""

    Stream, Event, current_stream, synchronize = (
        Stream,
        Event,
        staticmethod(current_stream),
        staticmethod(synchronize),
    )
    is_available = is_initialized = staticmethod(lambda: _on)
    device_count, current_device = staticmethod(lambda: 1), staticmethod(lambda: 0)
    set_device = empty_cache = _lazy_init = _is_in_bad_fork = staticmethod(lambda *args: None)
    memory_allocated = staticmethod(lambda *args: memory.allocated())
    max_memory_allocated = max_memory_reserved = staticmethod(lambda *args: memory.peak)
    reset_peak_memory_stats = staticmethod(_reset_peak)
    get_amp_supported_dtype = staticmethod(lambda: [torch.float16, torch.bfloat16])
    stream = staticmethod(lambda stream: stream)
    device = staticmethod(lambda index: contextlib.nullcontext())

    def __init__(self):
        generator = torch.Generator()  # of the CPU: Python backends have no generators (torch 2.13)
        self.default_generators = (generator,)
        self.manual_seed = self.manual_seed_all = generator.manual_seed
        self.get_rng_state = lambda *args: generator.get_state()
        self.set_rng_state = lambda state, *args: generator.set_state(state)


# ---- what a Python backend cannot register, patched while the device is there --------------------

_data = torch._C.TensorBase.data


def _set_data(tensor, value):
    """``tensor.data = value`` across devices, which real accelerators accept and PrivateUse1 does
    not (torch 2.13).
    """
    if is_here(tensor) == is_here(value):
        _data.__set__(tensor, value)
        return
    fresh = value.detach().requires_grad_(tensor.requires_grad)
    torch._C._swap_tensor_impl(tensor, fresh)


def _same_or_crossing(one, other):
    return _compatible(one, other) or {one.device.type, other.device.type} == {NAME, "cpu"}


_compatible = torch._has_compatible_shallow_copy_type
_storage = torch.UntypedStorage
_resize, _nbytes, _clone = _storage.resize_, _storage.nbytes, _storage.clone
_empty_function, _empty_like = torch.empty, torch.empty_like


def _resize_storage(storage, size):
    """Resize as FSDP2 does to free memory; here it is kept and poisoned, so that a use after it
    shows.
    """
    if storage.device.type != NAME:
        return _resize(storage, size)
    at = storage.data_ptr()
    if size == 0 and at in memory.host:
        memory.freed.add(at)
        poison(memory.host[at][1])
    elif at in memory.freed and size == _nbytes(storage):
        memory.freed.discard(at)
    elif size != _nbytes(storage):
        raise NotImplementedError(
            f"{NAME}: cannot resize a storage of {_nbytes(storage)} bytes to {size}, only to 0 and "
            "back"
        )
    return storage


def _storage_nbytes(storage):
    return (
        0
        if storage.device.type == NAME and storage.data_ptr() in memory.freed
        else _nbytes(storage)
    )


def _clone_storage(storage):
    if storage.device.type != NAME:
        return _clone(storage)
    made = torch.empty(storage.nbytes(), dtype=torch.uint8, device=device()).untyped_storage()
    return made.copy_(storage, non_blocking=False)


def _pin(tensor, *args):
    if tensor.device.type != "cpu":
        raise RuntimeError(f"cannot pin '{tensor.type()}' only dense CPU tensors can be pinned")
    return memory.pin(tensor.detach().clone())


def _empty_pinned(make, *args, pin_memory=False, **kwargs):
    made = make(*args, **kwargs)
    return memory.pin(made) if pin_memory else made


def _patches():
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
    yield torch.accelerator.memory, "memory_stats", _memory_stats
    yield torch.accelerator, "reset_peak_memory_stats", _reset_peak
    yield torch.accelerator, "synchronize", synchronize
    yield torch.accelerator, "current_stream", current_stream  # FSDP2 asks it in torch 2.11


_registered = []


def _register():
    """Give PrivateUse1 its name, operators and module, once for the process."""
    # on import it compares what is patched here with copies of its own
    importlib.import_module("torch._dynamo")
    from torch.utils.backend_registration import (
        _DummyPrivateUse1Hook,
        _setup_privateuseone_for_python_backend,
    )

    class Hook(_DummyPrivateUse1Hook):
        def is_available(self):
            return _on

    _setup_privateuseone_for_python_backend(rename=NAME, backend_module=Module(), hook=Hook())
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Warning only once for all operators")
        _registered.extend(register_operators())
    fake_store()  # registers the backend
    dist.Backend.backend_capability["fake"].append(NAME)


def _join_group():
    """Turn a process group of gloo into one of ``"cpu:gloo,pretend:gloo"``, from which further
    groups are made.
    """
    if dist.is_initialized() and dist.get_backend() == "gloo":
        world, known = dist.group.WORLD, dist.distributed_c10d._world
        gloo = world._get_backend(torch.device("cpu"))
        world._register_backend(torch.device(NAME), dist.ProcessGroup.BackendType.GLOO, gloo)
        both = f"cpu:gloo,{NAME}:gloo"
        known.pg_map[world] = (dist.Backend(both), known.pg_map[world][1])
        known.pg_backend_config[world] = str(dist.distributed_c10d.BackendConfig(both))


@contextlib.contextmanager
def _pretended():
    """Make the device available inside of the block."""
    global _on
    if not _registered:
        _register()
    _join_group()
    with contextlib.ExitStack() as stack:
        for owner, name, replacement in _patches():
            own = name in vars(owner)
            was = getattr(owner, name) if own else None
            setattr(owner, name, replacement)
            stack.callback(setattr, owner, name, was) if own else stack.callback(
                delattr, owner, name
            )
        _on = True
        arrive()
        syncs.clear()
        _reset_peak()
        try:
            yield
        finally:
            _on = False


@dataclass(frozen=True)
class PretendedAccelerator:
    """The result of :func:`pretend_accelerator`.

    Attributes:
        device: the only device, ``pretend:0``.
        syncs: what made the host wait for the device, in order: ``"item"``, ``"copy to the host"``,
            ``"copy to the device"``, ``"stream"``, ``"event"``, ``"device"``, and operators such as
            ``"aten::nonzero"``. A copy counts unless it is ``non_blocking`` and its CPU side is
            pinned. Clear the list to start counting.
    """

    device: torch.device
    syncs: list[str]


@contextlib.contextmanager
def pretend_accelerator():
    """Give this process, with its process group, an accelerator of type ``"pretend"`` inside the
    block. Local.

    Its tensors are plain tensors on that device in host memory, and operators compute as on the
    CPU. An operator on tensors of two devices raises, as on a GPU. Uninitialized memory, and memory
    that FSDP2 freed, reads as NaN; a copy to pinned memory reads as NaN until the host waits. All
    streams are one.

    torch registers the name and the operators of such a device for the rest of the process, and
    some functions of torch are replaced inside of the block: use it in tests, in a process without
    another accelerator.
    """
    with _pretended():
        yield PretendedAccelerator(device(), syncs)
