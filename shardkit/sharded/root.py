"""What the root of a sharded model answers to the methods that programs call on any model.

``fully_shard`` gives each module a class of its own; the root of what ``shard_model`` shards gets one on top of it.
Some of nn.Module's methods would harm without a word there, or fail with a text that names no fix.
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NoReturn
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from shardkit._fsdp.params import FSDP1_READS
from shardkit._torch import (
    TorchDispatchMode,
    has_tag,
    local_tensor,
    named_sharded_parameters,
    offloaded_parameters,
    version_of,
)
from shardkit.errors import ShardkitError, listing, message
from shardkit.sharded.replicated import unreduced_problem
from shardkit.sharded.statics import RefusedAttribute, callers, module_of

logger = logging.getLogger("shardkit")

_KNOW_SHARDS = ("torch.distributed.checkpoint", "shardkit.state", "shardkit.checkpoint")
_WRAPPER = "_orig_mod."
_said: set[str] = set()  # warnings that this process has had

# Of each root whose to_empty() was called: the version that each boolean tensor had then, by name.
_allocated: WeakKeyDictionary[nn.Module, dict[str, int]] = WeakKeyDictionary()


def answer_as_root(root: nn.Module) -> None:
    """Give ``root``, the outermost FSDP module, the class of a root. Local, in place.

    Logs a warning, once, of parameters that train outside of all units.
    """
    kind: Any = type(root)  # hashable, whatever mypy says of nn.Module
    root.__class__ = _class_of_root(kind)
    problem = unreduced_problem(root)
    if problem:
        _warn_on_first_rank(problem)


@functools.cache
def _class_of_root(kind: type[nn.Module]) -> type[nn.Module]:
    """A class over ``kind``, with FSDP1's methods where it has none of that name, and its own initialisers watched."""
    of_fsdp1: dict[str, Any] = {name: _of_shardkit(name) for name in ("clip_grad_norm_", "no_sync")}
    of_fsdp1 |= {name: RefusedAttribute(name) for name in FSDP1_READS}
    methods = {name: value for name, value in of_fsdp1.items() if not hasattr(kind, name)}
    initialisers = [name for name in ("apply", "init_weights", "reset_parameters") if hasattr(kind, name)]
    methods |= {name: _watched(name, getattr(kind, name)) for name in initialisers}
    return type(kind.__name__, (ShardedRoot, kind), methods | {"__module__": kind.__module__})


if TYPE_CHECKING:
    _Module = nn.Module
else:
    _Module = object  # it is mixed into classes that are modules already


class ShardedRoot(_Module):
    """Over the class of the root that ``fully_shard`` made."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make one of the class below: slices of a Sequential are ordinary modules again, as FSDPModule has it."""
        return cls.__mro__[2](*args, **kwargs)

    def __deepcopy__(self, memo: object) -> NoReturn:
        """Raise: FSDP2 modules cannot be copied."""
        rule = "FSDP2 keeps state beside its modules, which a copy would share"
        fix = "Build another one, shard_model it with the same arguments, and other.load_state_dict(model.state_dict())"
        raise ShardkitError(message("copy.deepcopy(model)", "the model is sharded", rule, fix))

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Move or cast, as ``nn.Module.to``; raise before offloaded parameters would leave the CPU."""
        devices = [_device_of(each) for each in (*args, *kwargs.values())]
        _check_offloaded(self, [device for device in devices if device is not None])
        return super().to(*args, **kwargs)

    def cuda(self, device: int | torch.device | None = None) -> Any:
        """Move, as ``nn.Module.cuda``; raise before offloaded parameters would leave the CPU."""
        _check_offloaded(self, [torch.device("cuda")])
        return super().cuda(device)

    def to_empty(self, *args: Any, **kwargs: Any) -> Any:
        """Allocate, as ``nn.Module.to_empty``, what the first forward will tell from values: NaN, the largest int.

        A state dict has no non-persistent buffers, so a load leaves them as they were allocated.
        """
        super().to_empty(*args, **kwargs)
        tensors = dict(_tensors(self))
        for tensor in tensors.values():
            tensor.fill_(_unwritten_value(tensor.dtype))
        _allocated[self] = {name: version_of(each) for name, each in tensors.items() if each.dtype == torch.bool}
        return self

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Load shards, as ``nn.Module.load_state_dict``; raise for full tensors, before anything is changed."""
        sharded = {name for name, param in named_sharded_parameters(self) if isinstance(param, DTensor)}
        given = state_dict if isinstance(state_dict, Mapping) else {}
        full = [n for n, value in given.items() if n in sharded and not isinstance(value, DTensor)]
        if full:
            problem = f"{len(full)} full tensors for sharded parameters: {listing(full, 6)}"
            rule = "model.load_state_dict takes shards, as model.state_dict() has them"
            fix = (
                "Use shardkit.load_full_state_dict(model, state_dict), with src='all' where every rank has the tensors"
            )
            raise ShardkitError(message("state_dict", problem, rule, fix))
        return super().load_state_dict(state_dict, *args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return shards, as ``nn.Module.state_dict``; the first time, a warning says what they are not for."""
        state = super().state_dict(*args, **kwargs)
        if not any(module_of(frame).startswith(_KNOW_SHARDS) for frame in callers()):
            _say_what_shards_are(state)
        return state


# Names that FSDP1 and initialisation use.


def _of_shardkit(name: str) -> Callable[..., Any]:
    """A method that calls the public function of that name; by name, for the core imports nothing that builds on it."""

    def method(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return getattr(importlib.import_module("shardkit"), name)(self, *args, **kwargs)

    method.__name__, method.__doc__ = name, f"As ``shardkit.{name}(model, ...)``."
    return method


def _watched(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """The method, with a warning when it draws random numbers for sharded parameters."""

    @functools.wraps(original)
    def method(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with _Draws() as draws:  # type: ignore[no-untyped-call]
            result = original(self, *args, **kwargs)
        if draws.drawn:
            rule = (
                "Every rank draws for its own shards, so values are not those of one process; on the CPU, equal seeds "
            )
            fix = "Initialize before shard_model, or build under init_on_meta() and call materialize(model, init=...)"
            problem = "draws random numbers for sharded parameters"
            _warn_on_first_rank(message(f"model.{name}()", problem, rule + "make the shards of all ranks equal", fix))
        return result

    return method


class _Draws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Whether anything random is written to a DTensor."""

    drawn = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.drawn |= has_tag(func, "nondeterministic_seeded") and isinstance(args[0], DTensor)
        return func(*args, **(kwargs or {}))


# Moving and allocating.


def _device_of(given: object) -> torch.device | None:
    if isinstance(given, Tensor):
        return given.device
    return torch.device(given) if isinstance(given, (str, int, torch.device)) and not isinstance(given, bool) else None


def _check_offloaded(root: nn.Module, devices: list[torch.device]) -> None:
    if not any(device.type not in ("cpu", "meta") for device in devices):
        return
    offloaded = {
        param for module in root.modules() if isinstance(module, FSDPModule) for param in offloaded_parameters(module)
    }
    if offloaded:
        names = [fqn for fqn, param in root.named_parameters() if param in offloaded]
        problem = f"would move to {devices[0]}, and is offloaded by CPUOffloadPolicy"
        rule = "FSDP2 copies offloaded parameters to the device while their unit runs, and keeps them on the CPU"
        fix = f"Leave the call out; buffers alone are moved by buffer.data = buffer.to({str(devices[0])!r})"
        raise ShardkitError(message(listing(names, 6), problem, rule, fix))


def _tensors(root: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The local parts of parameters and buffers in which values that nobody wrote can be told."""
    for name, held in (*root.named_parameters(), *root.named_buffers()):
        tensor = held.detach()
        local = local_tensor(tensor) if isinstance(tensor, DTensor) else tensor
        if local.numel() and not local.is_meta and (local.dtype.itemsize > 1 or local.dtype == torch.bool):
            yield name, local


def _unwritten_value(dtype: torch.dtype) -> float | int | bool:
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return True if dtype == torch.bool else torch.iinfo(dtype).max


def check_written(root: nn.Module) -> None:
    """Raise if what ``root.to_empty()`` allocated has no values yet. Local, pure; free where it was not called.

    Raises:
        ShardkitError: naming parameters and buffers.
    """
    versions = _allocated.pop(root, None)
    if versions is None:
        return
    found = [name for name, tensor in _tensors(root) if _is_unwritten(tensor, versions.get(name))]
    if found:
        problem = "no value: model.to_empty() allocated it, and nothing has written to it since"
        rule = "to_empty leaves memory as it is, and a state dict has no non-persistent buffers"
        fix = "Build the model under init_on_meta() and call materialize(model) instead of model.to_empty(); then load"
        raise ShardkitError(message(listing(found, 6), problem, rule, fix))


def _is_unwritten(tensor: Tensor, version: int | None) -> bool:
    if tensor.dtype == torch.bool:
        return version_of(tensor) == version and bool(tensor.all())
    value = _unwritten_value(tensor.dtype)
    return bool((tensor.isnan() if value != value else tensor == value).all())


# State.


def _say_what_shards_are(state: Mapping[str, Any]) -> None:
    if any(isinstance(value, DTensor) for value in state.values()):
        problem = "holds this rank's shards, as DTensors"
        rule = "DCP saves them; torch.save and safetensors make no file of them that a plain model loads"
        fix = "Use shardkit.save_checkpoint(path, model), or shardkit.full_state_dict(model) for whole tensors"
        _warn_on_first_rank(message("model.state_dict()", problem, rule, fix))
    wrapped = [name for name in state if _WRAPPER in name]
    if wrapped:
        problem = f"has names with {_WRAPPER!r}, of torch.compile's wrapper: {listing(wrapped, 3)}"
        rule = "A model that is not compiled has none of these names"
        fix = "Compile in place, with shard_model(..., compile=True) or model.compile(), or use full_state_dict(model)"
        _warn_on_first_rank(message("model.state_dict()", problem, rule, fix))


def _warn_on_first_rank(text: str) -> None:
    if text not in _said and (not dist.is_initialized() or dist.get_rank() == 0):
        _said.add(text)
        logger.warning(text)
