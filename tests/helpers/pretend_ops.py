"""The operators and memory of the pretended accelerator: torch's PrivateUse1 device in Python, over
host memory.

A tensor on it is a plain ``torch.Tensor`` whose storage is on that device; each operator runs on
CPU tensors over the same memory. Operators on tensors of two devices raise, as on a GPU, and
operators that make the host wait are counted. torch documents the Python backend only in its tests
(``_setup_privateuseone_for_python_backend``, torch 2.13).
"""

# mypy: disable-error-code="no-untyped-call"
import contextlib
from functools import partial

import torch
from pretend_streams import arrive, copy_to_pinned, host_waits, poison
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from shardkit._torch.dispatch import no_torch_function

NAME = "pretend"

# CUDA accepts indices on the CPU.
_CROSSES = {"aten::index.Tensor", "aten::index_put_", "aten::index_put", "aten::_index_put_impl_"}
# The host waits for these, since a shape or a Python value depends on the result.
_WAITS = {
    "aten::nonzero",
    "aten::equal",
    "aten::masked_select",
    "aten::_unique2",
    "aten::is_nonzero",
}

_set = torch.ops.aten.set_.source_Storage_storage_offset


class _Memory:
    """The host memory under each of the device's storages, kept while the storage lives."""

    def __init__(self):
        self.host = {}
        self.freed = set()  # addresses whose storage was resized to 0
        self.pinned = {}
        self.peak = 0
        self._at_most = 0  # bytes, before subtracting what was freed since the last count

    def allocated(self):
        """Return the bytes of the device's storages that are alive and not freed."""
        gone = [at for at, (storage, _) in self.host.items() if storage.expired()]
        for at in gone:
            self.freed.discard(at)
            del self.host[at]
        self._at_most = sum(
            host.nbytes() for at, (_, host) in self.host.items() if at not in self.freed
        )
        return self._at_most

    def on_device(self, host):
        """Return a storage of the device over host memory."""
        at, size = host.data_ptr(), host.nbytes()
        storage = torch._C._construct_storage_from_data_pointer(at, device(), size)
        if size:
            self.host[at] = StorageWeakRef(storage), host
            self._at_most += size
            if self._at_most > self.peak:
                self.peak = max(self.peak, self.allocated())
        return storage

    def below(self, tensor):
        """Return a CPU tensor over the same memory."""
        at = address(tensor)
        if at not in self.host:
            return torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu"
            )
        plain = torch.empty(0, dtype=tensor.dtype, device="cpu")
        return plain.set_(self.host[at][1], tensor.storage_offset(), tensor.shape, tensor.stride())

    def is_pinned(self, tensor):
        """Return whether the memory of a CPU tensor is marked as pinned."""
        known = self.pinned.get(address(tensor))
        return known is not None and not known.expired()

    def pin(self, tensor):
        """Mark a CPU tensor's memory as pinned."""
        self.pinned = {at: storage for at, storage in self.pinned.items() if not storage.expired()}
        if tensor.untyped_storage().nbytes():
            self.pinned[address(tensor)] = StorageWeakRef(tensor.untyped_storage())
        return tensor


memory = _Memory()


def device():
    return torch.device(NAME, 0)


def is_here(value):
    return isinstance(value, Tensor) and value.device.type == NAME


def address(tensor):
    return tensor.untyped_storage().data_ptr()


# ---- operators -----------------------------------------------------------------------------------


def _run(op, *args, **kwargs):
    """Run an operator on the host memory, and return tensors of the device."""
    with no_torch_function():
        _check_devices(op, (*args, *kwargs.values()))
        if op.name().partition(".")[0] in _WAITS:
            host_waits(op.name())
        below = {}
        above = {}

        def go_below(tensor):
            if tensor.device.type != NAME:
                return tensor
            if id(tensor) not in below:
                below[id(tensor)] = memory.below(tensor)
                above[id(below[id(tensor)])] = tensor
            return below[id(tensor)]

        args, kwargs = (
            _mapped(go_below, args),
            {name: _mapped(go_below, each) for name, each in kwargs.items()},
        )
        if "device" in kwargs:
            kwargs |= {"device": "cpu", "pin_memory": False}
        before = {at: (address(plain), plain.shape) for at, plain in below.items()}
        with _own_random_numbers(op):
            result = op(*args, **kwargs)
        for at, plain in below.items():
            if before[at] != (address(plain), plain.shape):  # resize_, set_, out= of another size
                _become(above[id(plain)], plain, above.values())
        return _mapped(lambda plain: _go_above(plain, above), result)


# Arguments and results of operators are tensors, sequences of them, and values without tensors.
# torch's pytree serves them as well, and took most of an operator's time here.


def _mapped(change, value):
    if isinstance(value, Tensor):
        return change(value)
    return (
        type(value)([_mapped(change, each) for each in value])
        if type(value) in (list, tuple)
        else value
    )


def _tensors(value):
    if isinstance(value, Tensor):
        return [value]
    return (
        [leaf for each in value for leaf in _tensors(each)] if type(value) in (list, tuple) else []
    )


def _check_devices(op, direct):
    """Raise as CUDA does: a CPU tensor may take part only as a scalar, and not in a list."""
    tensors = _tensors(direct)
    odd = [each for each in tensors if each.device.type != NAME]
    if not odd or len(odd) == len(tensors) or op.name() in _CROSSES or op.namespace == "c10d":
        return
    scalars = {id(each) for each in direct if isinstance(each, Tensor) and each.dim() == 0}
    for each in odd:
        if id(each) not in scalars:
            raise RuntimeError(
                "Expected all tensors to be on the same device, but found at least two devices, "
                f"{device()} and {each.device}! (when running {op.name()})"
            )


def _go_above(plain, above):
    if id(plain) in above:
        return above[id(plain)]
    base = _sharing(plain, above.values())
    # A view under inference_mode is an inference tensor only if its base is one; autograd marks the
    # others.
    with contextlib.nullcontext() if base is None else torch.inference_mode(base.is_inference()):
        fresh = torch._C._acc.create_empty_tensor((0,), plain.dtype)
        return _become(fresh, plain, above.values())


def _sharing(plain, known):
    """Return the known tensor of the device that has the same memory, if any."""
    at = address(plain)
    return next((each for each in known if at and address(each) == at), None)


def _become(tensor, plain, known):
    """Put a tensor of the device over the memory of ``plain``, sharing the storage of a known
    tensor over it.
    """
    base = _sharing(plain, known)
    storage = memory.on_device(plain.untyped_storage()) if base is None else base.untyped_storage()
    return _set_storage(tensor, storage, plain.storage_offset(), plain.shape, plain.stride())


def _set_storage(tensor, storage, offset, size, stride=()):
    # The CPU's kernel works for any dense tensor; the meta kernel refuses a storage that cannot
    # grow.
    cpu = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
    return _set.redispatch(cpu, tensor, storage, offset, size, stride)


@contextlib.contextmanager
def _own_random_numbers(op):
    """Use the device's generator in place of the CPU's while a random operator runs."""
    if torch.Tag.nondeterministic_seeded not in op.tags:
        yield
        return
    outside = torch.get_rng_state()
    own = torch.get_device_module(NAME).default_generators[0]
    torch.set_rng_state(own.get_state())
    try:
        yield
    finally:
        own.set_state(torch.get_rng_state())
        torch.set_rng_state(outside)


def _empty(op, *args, **kwargs):
    made = _run(op, *args, **kwargs)
    with no_torch_function():
        poison(memory.below(made).untyped_storage())
    return made


def _copy_from(source, target, non_blocking=False):
    """Copy to, from or on the device. The host waits if the copy blocks or the host memory is
    pageable.
    """
    with no_torch_function():
        outside = next((each for each in (source, target) if not is_here(each)), None)
        waits = outside is not None and not (non_blocking and memory.is_pinned(outside))
        if waits:
            host_waits("copy to the device" if is_here(target) else "copy to the host")
        elif outside is source:
            arrive()
        value, place = (memory.below(each) if is_here(each) else each for each in (source, target))
        if outside is target and not waits:
            copy_to_pinned(place, value)
        else:
            place.copy_(value)
    return target


def _to_copy(
    tensor,
    *,
    dtype=None,
    device=None,
    non_blocking=False,
    memory_format=None,
    **_,
):
    """``tensor.to(...)``: as in torch, a non-blocking copy to the host goes to pinned memory."""
    with no_torch_function():
        kind, where = dtype or tensor.dtype, device or tensor.device
        made = torch.empty_like(
            tensor, dtype=kind, device=where, memory_format=memory_format or torch.preserve_format
        )
        if non_blocking and where.type == "cpu":
            memory.pin(made)
    return made.copy_(tensor, non_blocking)


def _item(tensor):
    with no_torch_function():
        host_waits("item")
        return memory.below(tensor).item()


def _set_source_storage(tensor, storage):
    return _set_storage(tensor, storage, 0, [storage.nbytes() // tensor.element_size()], [1])


def register_operators():
    everything, aten = (
        torch.library.Library("_", "IMPL"),
        torch.library.Library("aten", "IMPL", "PrivateUse1"),
    )
    everything.fallback(_run, "PrivateUse1")
    for name in ("empty.memory_format", "empty_strided"):
        aten.impl(name, partial(_empty, _overload("aten", name)))
    aten.impl("_copy_from", _copy_from)
    aten.impl("_to_copy", _to_copy)
    aten.impl("_local_scalar_dense", _item)
    aten.impl("set_.source_Storage_storage_offset", _set_storage)
    aten.impl("set_.source_Storage", _set_source_storage)
    c10d = torch.library.Library("c10d", "IMPL", "PrivateUse1")
    for name in torch._C._dispatch_get_registrations_for_dispatch_key("PrivateUse1"):
        # the collectives on tensors, which torch registers for every device
        if name.startswith("c10d::"):
            name = name.removeprefix("c10d::")
            c10d.impl(name, partial(_run, _overload("c10d", name)), allow_override=True)
    return [everything, aten, c10d]


def _overload(namespace, name):
    base, _, overload = name.partition(".")
    return getattr(getattr(getattr(torch.ops, namespace), base), overload or "default")
