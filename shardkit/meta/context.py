"""init_on_meta: the context in which constructions are recorded; and recording of initializers afterwards."""

from __future__ import annotations

import gc
import inspect
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from shardkit._torch import dispatch, has_own_dispatch, is_wrapper
from shardkit.errors import ShardkitError, listing, message
from shardkit.meta.record import FakeDeviceMode, Recorder
from shardkit.meta.tape import Tape, View, open_tape
from shardkit.shards import local_value


class Record(NamedTuple):
    tape: Tape  # strong, so that it lives as long as a model waits for it
    views: dict[str, View]  # of the module's parameters and buffers when recording ended


_current: Recorder | None = None
# By module and name, because fully_shard replaces the tensors and frees their storages.
records: weakref.WeakKeyDictionary[nn.Module, Record] = weakref.WeakKeyDictionary()


@contextmanager
def recording() -> Iterator[Recorder]:
    """Record in this context, or join the recording around it."""
    global _current
    if _current is not None:
        yield _current
        return
    device = torch.get_default_device()
    device = torch.device("cpu") if device.type == "meta" else device
    recorder = _current = Recorder(open_tape(), device)
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

    Inside the context every tensor that is made is a meta tensor, which holds no memory, and each operation on it is
    recorded. The code of the model sees ordinary tensors: it need not know about the meta device, and needs no
    ``reset_parameters``, ``init_weights`` or ``param_init_fn``.

    Everything that computes initial values belongs inside: your initializers, ``load_state_dict``, ties, casts. Real
    tensors that are made outside stay real. What depends on values (``tensor.item()``) is computed immediately, which
    costs time and, briefly, memory. Python's and numpy's random numbers are drawn as usual. On exit torch's generators
    have a placeholder state; ``materialize`` sets the state that ordinary construction leaves, unless they were seeded
    since. Enter it in one thread at a time.

    Raises:
        ShardkitError: the code uses a DTensor.

    Examples:
        >>> with init_on_meta():
        ...     model = Transformer(config)
        >>> shard_model(model)
        >>> materialize(model)
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


# ---- initializers, the user's or the modules' own, on meta stand-ins of full size ---------------------------------

Initializer = Callable[[nn.Module], Any]


def record_initializers(
    model: nn.Module, known: dict[int, View], missing: set[int], init: Initializer | None
) -> dict[int, View]:
    """Record the initialization of the missing tensors, and with ``init`` also of the known ones, by their ``id``.

    ``known`` is what was recorded: ``init`` starts from these values, as ``model.apply(init)`` after construction.
    """
    registries: Any = [tensors for each in model.modules() for tensors in (each._parameters, each._buffers)]
    before = [(tensors, dict(tensors)) for tensors in registries]
    slots = [(tensors, name, tensor) for tensors, old in before for name, tensor in old.items() if tensor is not None]
    with recording() as recorder, torch.no_grad():
        storages = recorder.tape.storages
        stand_ins = {id(tensor): _like(tensor, torch.empty(tensor.shape, dtype=tensor.dtype)) for _, _, tensor in slots}
        for tensor in (each for _, _, each in slots if init is not None and id(each) in known):
            view = known[id(tensor)]
            stand_ins[id(tensor)] = _like(tensor, view.of(storages[view.storage]).to(tensor.dtype))
        try:
            for tensors, name, tensor in slots:
                tensors[name] = stand_ins[id(tensor)]
            if init is not None:
                model.apply(init)
            else:
                _run_native(model, {id(tensors) for tensors, _, tensor in slots if id(tensor) in missing})
            # By place, not by stand-in: an initializer may assign a new tensor.
            wanted = missing | known.keys() if init is not None else missing
            places = [(id(tensor), tensors[name]) for tensors, name, tensor in reversed(slots) if id(tensor) in wanted]
            return {key: recorder.view(tensor) for key, tensor in places}
        finally:
            for tensors, old in before:
                tensors.clear()
                tensors.update(old)


def _like(tensor: Tensor, stand_in: Tensor) -> Tensor:
    if isinstance(tensor, nn.Parameter):
        stand_in = nn.Parameter(stand_in, requires_grad=tensor.requires_grad)
    stand_in.__dict__.update(tensor.__dict__)  # marks that initializers look for
    return stand_in


def _run_native(model: nn.Module, registries: set[int]) -> None:
    """Call ``reset_parameters`` of modules that own these dicts of tensors, then initializers of whole models."""
    owners = {each for each in model.modules() if {id(each._parameters), id(each._buffers)} & registries}
    _check_resets(model, owners)

    def reset(module: nn.Module) -> None:
        method = _method(module, ("reset_parameters", "_reset_parameters"))
        if module in owners and method is not None and _num_required(method) == 0:
            method()

    model.apply(reset)
    _initialize_whole(model)


def _check_resets(model: nn.Module, owners: set[nn.Module]) -> None:
    """Raise for missing tensors below a module whose initializer takes arguments that only its constructor knew."""
    unknown = {}
    for name, module in model.named_modules():
        methods = [each for each in dir(type(module)) if each.startswith("reset_") and each.endswith("_parameters")]
        method = next((each for each in methods if _num_required(getattr(module, each))), None)
        if method is not None and not owners.isdisjoint(module.modules()):
            unknown[name or "(root)"] = method
    if unknown:
        problem = f"is initialized by {listing(dict.fromkeys(unknown.values()))}, which takes arguments, as in PEFT"
        rule = "Its values under torch.device('meta') are lost, and materialize does not guess values"
        fix = "Build model and adapters inside init_on_meta(), or pass materialize(model, init=...)"
        raise ShardkitError(message(listing(unknown), problem, rule, fix))


def _initialize_whole(module: nn.Module) -> None:
    """Call the outermost ``init_weights()``, or ``_init_weights(module)`` on all modules below it."""
    method = _method(module, ("init_weights", "initialize_weights", "_init_weights"))
    if method is None or _num_required(method) > 1:
        for child in module.children():
            _initialize_whole(child)
    elif _num_required(method) == 0:
        method()
    else:
        module.apply(method)


def _method(module: nn.Module, names: tuple[str, ...]) -> Callable[..., Any] | None:
    return next((method for name in names if callable(method := getattr(module, name, None))), None)


def _num_required(method: Callable[..., Any]) -> int:
    parameters = inspect.signature(method).parameters.values()
    return sum(p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)
