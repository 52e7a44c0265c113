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
from torch.nn.parameter import is_lazy

from shardkit._torch import dispatch, has_own_dispatch
from shardkit._torch.states import is_wrapper
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
            rule, fix = "It records one thread at a time", "Build the models one after another"
            raise ShardkitError(message("init_on_meta", "is entered by a second thread", rule, fix))
        yield _current
        return
    device = torch.get_default_device()
    device = torch.device("cpu") if device.type == "meta" else device
    recorder = _current = Recorder(open_tape(), device)
    _thread = threading.get_ident()
    try:
        with dispatch.recorded_samplers(recorder.record_sampler), FakeDeviceMode(recorder, device), recorder:
            yield recorder
    except BaseException:
        recorder.close(failed=True)
        raise
    else:
        recorder.close(failed=False)
    finally:
        _current = None


@contextmanager
def init_on_meta() -> Iterator[None]:
    """Build models without memory, so that ``materialize`` can compute their ordinary values later. Local.

    Inside the context every tensor that is made is a meta tensor, which holds no memory, and each operation on
    it is recorded. The code of the model sees ordinary tensors: it need not know about the meta device, and
    needs no ``reset_parameters``, ``init_weights`` or ``param_init_fn``.

    Everything that computes initial values belongs inside: your initializers, ``load_state_dict``, ties, casts.
    Real tensors that are made outside stay real. What depends on values (``tensor.item()``) is computed immediately,
    which costs time and, briefly, memory. Python's and numpy's random numbers are drawn as usual. On exit torch's
    generators have a placeholder state, the same on all ranks that entered in the same state; ``materialize`` sets the
    state that ordinary construction leaves, unless they were seeded since.

    Raises:
        ShardkitError: another thread is inside, or the code uses a DTensor.

    Example::

        with init_on_meta():
            model = Transformer(config)
        shard_model(model)
        materialize(model)
    """
    with recording() as recorder:
        yield
    # Which tensors of each module alive are on the tape. Through the garbage collector, because modules and parameters
    # come about in too many ways to hook: deep copies, unpickling, writes to module._parameters.
    tape = recorder.tape
    for module in gc.get_objects():
        if issubclass(type(module), nn.Module) and "_parameters" in vars(module):
            for name, tensor in (*module._parameters.items(), *module._buffers.items()):
                tensor = local_value(tensor) if isinstance(tensor, Tensor) and is_wrapper(tensor) else tensor
                view = tape.find(tensor) if is_plain_meta(tensor) else None
                if view is not None:
                    records.setdefault(module, Record(tape, {})).views[name] = view


def is_plain_meta(tensor: Any) -> bool:
    """Return whether this is a meta tensor with its own storage: not a wrapper subclass such as DTensor, not lazy."""
    plain = isinstance(tensor, Tensor) and not is_lazy(tensor)
    return plain and tensor.is_meta and not has_own_dispatch(type(tensor))


def is_recorded(model: nn.Module) -> bool:
    """Return whether ``materialize`` can replay how the model was constructed. Local, pure."""
    return any(module in records for module in model.modules())
