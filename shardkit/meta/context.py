"""init_on_meta: the context in which constructions are recorded, and the record of each module."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.parameter import is_lazy

from shardkit import _torch
from shardkit.errors import ShardkitError, message
from shardkit.meta.record import FakeDeviceMode, Recorder
from shardkit.meta.tape import Tape, View, open_tape
from shardkit.shards import local_value


class Record(NamedTuple):
    """The parameters and buffers of a module when recording ended."""

    tape: Tape  # strong, so that it lives as long as a model waits for it
    views: dict[str, View]


_current: Recorder | None = None
_thread = 0  # that records
# By module and name, because fully_shard replaces the tensors and frees their storages.
records: weakref.WeakKeyDictionary[nn.Module, Record] = weakref.WeakKeyDictionary()


@contextmanager
def recording() -> Iterator[Recorder]:
    """Record in this context, or join the recording around it. One thread at a time."""
    global _current, _thread
    if _current is not None:
        if _thread != threading.get_ident():
            raise _second_thread("init_on_meta", "is entered")
        yield _current
        return
    device = torch.get_default_device()
    device = torch.device("cpu") if device.type == "meta" else device
    recorder = _current = Recorder(open_tape(), device)
    _thread = threading.get_ident()
    try:
        sampled = _torch.recorded_samplers(recorder.record_sampler)
        with _refused_elsewhere(), sampled, FakeDeviceMode(recorder, device), recorder:
            yield recorder
    except BaseException:
        recorder.close(failed=True)
        raise
    finally:
        _current = None
    recorder.close(failed=False)


@contextmanager
def _refused_elsewhere() -> Iterator[None]:
    """Raise for parameters and buffers that other threads make, which are neither on meta nor recorded."""
    refused: list[ShardkitError] = []

    def check(module: nn.Module, name: str, tensor: Tensor | None) -> None:
        if threading.get_ident() != _thread:
            refused.append(_second_thread(f"{type(module).__name__}.{name}", "is made"))
            raise refused[-1]

    # torch's public hooks for all modules; its modes, which record, are of one thread only.
    hooks = [register_module_parameter_registration_hook(check), register_module_buffer_registration_hook(check)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
    if refused:  # also where nobody saw the thread fail
        raise refused[0]


def _second_thread(subject: str, problem: str) -> ShardkitError:
    rule = "init_on_meta records one thread; tensors of others would be real and unrecorded"
    fix = "Build the whole model in the thread that entered init_on_meta, and other models before or after"
    return ShardkitError(message(subject, f"{problem} in a second thread", rule, fix))


@contextmanager
def init_on_meta() -> Iterator[None]:
    """Build models without memory, so that ``materialize`` can compute their ordinary values later.

    Inside the context every tensor that is made is a meta tensor, which holds no memory, and each operation on
    it is recorded. The code of the model sees ordinary tensors: it need not know about the meta device, and
    needs no ``reset_parameters``, ``init_weights`` or ``param_init_fn``. Local: no collective.

    Everything that computes initial values belongs inside: your initializers, ``load_state_dict``, ties, casts.
    Real tensors that are made outside stay real. What depends on values (``tensor.item()``) is computed immediately,
    which costs time and, briefly, memory. Python's and numpy's random numbers are drawn as usual. On exit torch's
    generators have a placeholder state, the same on all ranks that entered in the same state; ``materialize`` sets the
    state that ordinary construction leaves, unless they were seeded since.

    Raises:
        ShardkitError: another thread builds a module at the same time; raised there, and here on exit.

    Example::

        with init_on_meta():
            model = Transformer(config)
        shard_model(model)
        materialize(model)
    """
    with recording() as recorder:
        yield
    remember(recorder.tape)


def remember(tape: Tape) -> None:
    """Record, for every module alive, which of its tensors are on the tape."""
    # Through the garbage collector, because modules and parameters come about in too many ways to hook: deep
    # copies, unpickling, writes to module._parameters.
    for module in gc.get_objects():
        if issubclass(type(module), nn.Module) and "_parameters" in vars(module):
            for name, tensor in (*module._parameters.items(), *module._buffers.items()):
                tensor = local_value(tensor) if isinstance(tensor, Tensor) and _torch.is_wrapper(tensor) else tensor
                view = tape.find(tensor) if is_plain_meta(tensor) else None
                if view is not None:
                    records.setdefault(module, Record(tape, {})).views[name] = view


def is_plain_meta(tensor: Any) -> bool:
    """Return whether this is a meta tensor with its own storage: not a wrapper subclass such as DTensor, not lazy."""
    if not isinstance(tensor, Tensor) or is_lazy(tensor):
        return False
    return tensor.is_meta and not _torch.has_own_dispatch(type(tensor))


def is_recorded(model: nn.Module) -> bool:
    """Return whether ``materialize`` can replay how the model was constructed. Local, pure."""
    return any(module in records for module in model.modules())
