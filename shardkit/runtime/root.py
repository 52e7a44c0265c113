"""The class of the root of a sharded model, for the methods that programs call on any model.

``fully_shard`` gives each module a class of its own; the root of what ``shard_model`` shards gets one on top of it.
Some methods of nn.Module would do silent harm there, or fail with a text that names no fix.
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
from shardkit.runtime.replicated import unreduced_problem
from shardkit.runtime.statics import RefusedAttribute, callers, module_of

logger = logging.getLogger("shardkit")

_KNOW_SHARDS = ("torch.distributed.checkpoint", "shardkit.state", "shardkit.checkpoint")
_WRAPPER = "_orig_mod."
_said: set[str] = set()  # warnings that this process has logged

# By root whose to_empty() was called: the version that each boolean tensor had then, by name.
_allocated: WeakKeyDictionary[nn.Module, dict[str, int]] = WeakKeyDictionary()


def answer_as_root(root: nn.Module) -> None:
    """Give ``root``, the outermost FSDP module, the class of a root. Local, in place.

    Logs a warning, once, about parameters that train outside of all units.
    """
    kind: Any = type(root)
    root.__class__ = _class_of_root(kind)
    problem = unreduced_problem(root)
    if problem:
        _warn_on_first_rank(problem)


@functools.cache
def _class_of_root(kind: type[nn.Module]) -> type[nn.Module]:
    """Derive a class from ``kind``, with FSDP1's methods unless it has its own, and warnings in its initializers."""
    of_fsdp1: dict[str, Any] = {name: _of_shardkit(name) for name in ("clip_grad_norm_", "no_sync")}
    of_fsdp1 |= {name: RefusedAttribute(name) for name in FSDP1_READS}
    methods = {name: value for name, value in of_fsdp1.items() if not hasattr(kind, name)}
    initializers = [name for name in ("apply", "init_weights", "reset_parameters") if hasattr(kind, name)]
    methods |= {name: _initializer(name, getattr(kind, name)) for name in initializers}
    return type(kind.__name__, (ShardedRoot, kind), methods | {"__module__": kind.__module__})


if TYPE_CHECKING:
    _Module = nn.Module
else:
    _Module = object  # mixed into classes that are modules already


class ShardedRoot(_Module):
    """Mixed into the class of the root that ``fully_shard`` made."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make an unsharded module, such as a slice of a Sequential, as ``FSDPModule.__new__`` does."""
        return cls.__mro__[2](*args, **kwargs)

    def __deepcopy__(self, memo: object) -> NoReturn:
        """Raise: FSDP2 modules cannot be copied."""
        rule = "FSDP2 keeps state outside its modules, which a copy would share"
        fix = "For an average of its weights (EMA) use shardkit.sharded_average(model, decay). Else build another, "
        fix += "shard_model it with the same arguments, and other.load_state_dict(model.state_dict())"
        raise ShardkitError(message("copy.deepcopy(model)", "the model is sharded", rule, fix))

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Move or cast, as ``nn.Module.to``; raise before offloaded parameters would leave the CPU."""
        for given in (*args, *kwargs.values()):
            if isinstance(given, Tensor):
                _check_offloaded(self, given.device)
            elif isinstance(given, (str, int, torch.device)) and not isinstance(given, bool):
                _check_offloaded(self, torch.device(given))
        return super().to(*args, **kwargs)

    def cuda(self, device: int | torch.device | None = None) -> Any:
        """Move, as ``nn.Module.cuda``; raise before offloaded parameters would leave the CPU."""
        _check_offloaded(self, torch.device("cuda"))
        return super().cuda(device)

    def to_empty(self, *args: Any, **kwargs: Any) -> Any:
        """Allocate, as ``nn.Module.to_empty``, and fill with NaN or the largest int, which the first forward reports.

        A state dict has no non-persistent buffers, so a load leaves them as they were allocated.
        """
        super().to_empty(*args, **kwargs)
        tensors = dict(_tensors(self))
        for tensor in tensors.values():
            tensor.fill_(_unwritten_value(tensor.dtype))
        _allocated[self] = {name: version_of(each) for name, each in tensors.items() if each.dtype == torch.bool}
        return self

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Load shards, as ``nn.Module.load_state_dict``; raise for full tensors before anything is changed."""
        sharded = {name for name, param in named_sharded_parameters(self) if isinstance(param, DTensor)}
        given = state_dict if isinstance(state_dict, Mapping) else {}
        full = [n for n, value in given.items() if n in sharded and not isinstance(value, DTensor)]
        if full:
            problem = f"{len(full)} full tensors for sharded parameters: {listing(full, 6)}"
            rule = "model.load_state_dict takes shards, as model.state_dict() has them"
            fix = "Use shardkit.load_full_state_dict(model, state_dict), with src='all' if every rank has the tensors"
            raise ShardkitError(message("state_dict", problem, rule, fix))
        return super().load_state_dict(state_dict, *args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return shards, as ``nn.Module.state_dict``; the first time, log that they are not whole tensors."""
        state = super().state_dict(*args, **kwargs)
        if not any(module_of(frame).startswith(_KNOW_SHARDS) for frame in callers()):
            _warn_of_shards(state)
        return state


def _of_shardkit(name: str) -> Callable[..., Any]:
    """Make a method that calls the public function of that name, which the core may not import."""

    def method(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return getattr(importlib.import_module("shardkit"), name)(self, *args, **kwargs)

    method.__name__, method.__doc__ = name, f"As ``shardkit.{name}(model, ...)``."
    return method


def _initializer(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """Make the method log a warning if it draws random numbers for sharded parameters."""

    @functools.wraps(original)
    def method(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with _Draws() as draws:  # type: ignore[no-untyped-call]
            result = original(self, *args, **kwargs)
        if draws.drawn:
            problem = "draws random numbers for sharded parameters"
            rule = "Every rank draws for its own shards, so values differ from those of one process; on the CPU, equal "
            rule += "seeds make the shards of all ranks equal"
            fix = "Initialize before shard_model, or build under init_on_meta() and call materialize(model, init=...)"
            _warn_on_first_rank(message(f"model.{name}()", problem, rule, fix))
        return result

    return method


class _Draws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records whether anything random is written to a DTensor."""

    drawn = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.drawn |= has_tag(func, "nondeterministic_seeded") and isinstance(args[0], DTensor)
        return func(*args, **(kwargs or {}))


# Moving and allocating.


def _check_offloaded(root: nn.Module, device: torch.device) -> None:
    sharded = [module for module in root.modules() if isinstance(module, FSDPModule)]
    offloaded = {param for module in sharded for param in offloaded_parameters(module)}
    if offloaded and device.type not in ("cpu", "meta"):
        names = [fqn for fqn, param in root.named_parameters() if param in offloaded]
        problem = f"would move to {device}, and is offloaded by CPUOffloadPolicy"
        rule = "FSDP2 copies offloaded parameters to the device while their unit runs, and keeps them on the CPU"
        fix = f"Remove the call; to move a buffer, use buffer.data = buffer.to({str(device)!r})"
        raise ShardkitError(message(listing(names, 6), problem, rule, fix))


def _tensors(root: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the local parts of parameters and buffers that have a value to recognize unwritten memory by."""
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
    """Raise if what ``root.to_empty()`` allocated has no values yet. Local, pure; free if it was not called.

    Raises:
        ShardkitError: naming parameters and buffers.
    """
    versions = _allocated.pop(root, None)
    if versions is None:
        return
    found = [name for name, tensor in _tensors(root) if _is_unwritten(tensor, versions.get(name))]
    if found:
        problem = "has no value: model.to_empty() allocated it, and nothing has written to it since"
        rule = "to_empty gives no values, and a state dict has no non-persistent buffers"
        fix = "Build the model under init_on_meta() and call materialize(model) instead of model.to_empty(); then load"
        raise ShardkitError(message(listing(found, 6), problem, rule, fix))


def _is_unwritten(tensor: Tensor, version: int | None) -> bool:
    if tensor.dtype == torch.bool:
        return version_of(tensor) == version and bool(tensor.all())
    value = _unwritten_value(tensor.dtype)
    return bool((tensor.isnan() if value != value else tensor == value).all())


def _warn_of_shards(state: Mapping[str, Any]) -> None:
    if any(isinstance(value, DTensor) for value in state.values()):
        problem = "holds this rank's shards, as DTensors"
        rule = "DCP saves them; files that torch.save and safetensors make of them do not load into a plain model"
        fix = "Use shardkit.save_checkpoint(path, model), or shardkit.full_state_dict(model) for whole tensors"
        _warn_on_first_rank(message("model.state_dict()", problem, rule, fix))
    wrapped = [name for name in state if _WRAPPER in name]
    if wrapped:
        problem = f"has names with {_WRAPPER!r}, from torch.compile's wrapper: {listing(wrapped, 3)}"
        rule = "A model that is not compiled has other names"
        fix = "Compile in place, with shard_model(..., compile=True) or model.compile(), or use full_state_dict(model)"
        _warn_on_first_rank(message("model.state_dict()", problem, rule, fix))


def _warn_on_first_rank(text: str) -> None:
    if text not in _said and (not dist.is_initialized() or dist.get_rank() == 0):
        _said.add(text)
        logger.warning(text)
