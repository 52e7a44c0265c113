"""state_dict() of wrapped models: full or sharded tensors by the names of the plain model; and state_dict_type."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    OptimStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)
from torch.distributed.tensor import DTensor

from shardkit import _torch
from shardkit._fsdp.fsdp1 import asked_by_checkpoint, use_dtensor
from shardkit.errors import message
from shardkit.fsdp1.dropin.errors import DropinAssertionError, DropinRuntimeError, Unavailable
from shardkit.fsdp1.dropin.record import WRAPPED, record_of, without_wrappers, wrappers_of
from shardkit.fsdp1.translate.strategy import HYBRID
from shardkit.state.full_params import full_params_from
from shardkit.state.names import is_extra, live_tensors, wants_live
from shardkit.state.routes import local_of, routes_of
from shardkit.state.transfer import Want

# Of models and of optimizers.
_CONFIGS: dict[StateDictType, tuple[type[StateDictConfig], type[OptimStateDictConfig]]] = {
    StateDictType.FULL_STATE_DICT: (FullStateDictConfig, FullOptimStateDictConfig),
    StateDictType.SHARDED_STATE_DICT: (ShardedStateDictConfig, ShardedOptimStateDictConfig),
    StateDictType.LOCAL_STATE_DICT: (LocalStateDictConfig, LocalOptimStateDictConfig),
}


def set_state_dict_type(
    module: nn.Module,
    state_dict_type: StateDictType,
    state_dict_config: StateDictConfig | None = None,
    optim_state_dict_config: OptimStateDictConfig | None = None,
) -> StateDictSettings | None:
    """Set what ``state_dict()`` and ``load_state_dict()`` of all wrappers at and below ``module`` handle. Local.

    Args:
        module: a wrapper, or a module around some.
        state_dict_type: FULL_STATE_DICT, the default, or SHARDED_STATE_DICT.
        state_dict_config, optim_state_dict_config: of that type, for models and optimizers; None is torch's default.

    Returns:
        The settings before; None where there is no wrapper.

    Raises:
        RuntimeError: a config of another type than ``state_dict_type``.
        AssertionError: wrappers had different types before, so there is no one answer.
    """
    settings = _checked(state_dict_type, state_dict_config, optim_state_dict_config)
    records = [record_of(wrapper) for wrapper in wrappers_of(module)]
    before = [record.state_dict_settings for record in records]
    if len({(s.state_dict_type, type(s.state_dict_config), type(s.optim_state_dict_config)) for s in before}) > 1:
        raise _disagreement("All FSDP modules should have the same state_dict_type", before)
    for record in records:
        record.state_dict_settings = replace(settings)
    return before[0] if before else None


def get_state_dict_type(module: nn.Module) -> StateDictSettings | None:
    """Return what ``set_state_dict_type`` set for the wrappers at and below ``module``; None without one. Local.

    Raises:
        AssertionError: they differ.
    """
    wrappers = wrappers_of(module)
    settings = [record_of(wrapper).state_dict_settings for wrapper in wrappers]
    if any(each != settings[0] for each in settings):
        raise _disagreement("All FSDP modules must have the same state dict settings", settings)
    for wrapper in wrappers:
        _note_dtensors(wrapper)
    return settings[0] if settings else None


@contextmanager
def state_dict_type(
    module: nn.Module,
    state_dict_type: StateDictType,
    state_dict_config: StateDictConfig | None = None,
    optim_state_dict_config: OptimStateDictConfig | None = None,
) -> Iterator[None]:
    """Call ``set_state_dict_type`` for this context; an error restores the settings too, unlike in FSDP1. Local.

    Example:
        >>> with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, FullStateDictConfig(True, True)):
        ...     state = model.state_dict()
    """
    records = [record_of(wrapper) for wrapper in wrappers_of(module)]
    before = [record.state_dict_settings for record in records]
    set_state_dict_type(module, state_dict_type, state_dict_config, optim_state_dict_config)
    try:
        yield
    finally:
        for record, settings in zip(records, before, strict=True):
            record.state_dict_settings = settings


def _note_dtensors(wrapper: nn.Module) -> None:
    """Set ``_use_dtensor`` of the configs where FSDP1 did: for a model that was given a DeviceMesh. Local."""
    record = record_of(wrapper)
    settings = record.state_dict_settings
    if record.given.device_mesh is not None and settings.state_dict_type is StateDictType.SHARDED_STATE_DICT:
        use_dtensor(settings.state_dict_config)
        use_dtensor(settings.optim_state_dict_config)


def no_local_state(call: str, problem: str) -> Unavailable:
    """Return the error for what LOCAL_STATE_DICT does not support."""
    rule = "It is the state of a model only, each rank's shards, as of FSDP1"
    fix = "Use StateDictType.SHARDED_STATE_DICT, whose files shardkit and torch.distributed.checkpoint read"
    return Unavailable(message(call, f"LOCAL_STATE_DICT: {problem}", rule, fix))


def _checked(
    kind: StateDictType, config: StateDictConfig | None, optim_config: OptimStateDictConfig | None
) -> StateDictSettings:
    if kind not in _CONFIGS:
        rule, fix = "It must be a member of torch.distributed.fsdp.StateDictType", "Pass StateDictType.FULL_STATE_DICT"
        raise DropinRuntimeError(message("state_dict_type", f"is {kind!r}", rule, fix))
    wanted, optim_wanted = _CONFIGS[kind]
    settings = StateDictSettings(kind, config or wanted(), optim_config or optim_wanted())
    for name, expected in (("state_dict_config", wanted), ("optim_state_dict_config", optim_wanted)):
        found = type(getattr(settings, name))
        if found is not expected:
            problem, fix = f"Expected {name} of type {expected} but got {found}", f"Pass {expected.__name__}(), or None"
            raise DropinRuntimeError(message(name, problem, f"Its type must be that of {kind}", fix))
    return settings


def _disagreement(problem: str, settings: list[StateDictSettings]) -> DropinAssertionError:
    different = [each for number, each in enumerate(settings) if each not in settings[:number]]
    rule = f"They have {', '.join(map(str, different))}"
    return DropinAssertionError(message("state_dict_type", problem, rule, "Set the type on the whole model"))


# state_dict()


def state_dict(wrapper: nn.Module, destination: Any, prefix: str, keep_vars: bool) -> Any:
    """Return the state of a wrapped model by its settings, in ``destination`` if given. Collective if FULL."""
    if wants_live():
        return nn.Module.state_dict(wrapper, destination=destination, prefix=prefix, keep_vars=keep_vars)
    found = _by_settings(wrapper, prefix, keep_vars)
    if destination is None:
        return found
    destination.update(found)
    if hasattr(destination, "_metadata"):
        metadata = {**_torch.state_dict_metadata(destination), **_torch.state_dict_metadata(found)}
        _torch.with_state_dict_metadata(destination, metadata)
    return destination


def _by_settings(wrapper: nn.Module, prefix: str, keep_vars: bool) -> Any:
    kind, config = kind_of(wrapper)
    own = _Names(wrapper, prefix)
    summoned = record_of(wrapper).summoned
    if summoned or kind is not StateDictType.FULL_STATE_DICT:  # summoned: perhaps on this rank alone
        is_local = kind is StateDictType.LOCAL_STATE_DICT
        return own.finish(_collected(wrapper, prefix, keep_vars), config, copy=summoned, copy_shards=not is_local)
    assert isinstance(config, FullStateDictConfig), "set_state_dict_type checks it"
    rank = first_rank(wrapper)
    want = Want(not config.rank0_only, torch.device("cpu") if config.offload_to_cpu else None)
    with full_params_from(wrapper, rank, want):
        if config.rank0_only and dist.get_rank() != rank:
            return _torch.with_state_dict_metadata(OrderedDict(), {})
        found = _collected(wrapper, prefix, keep_vars)
    return own.finish(found, config)


def _collected(wrapper: nn.Module, prefix: str, keep_vars: bool) -> dict[str, Any]:
    """Return the current state from the modules' own ``state_dict``, with their hooks."""
    with live_tensors():
        return nn.Module.state_dict(wrapper, prefix=prefix, keep_vars=keep_vars)


class _Names:
    """The names in a state dict of a wrapper's sharded or summoned parameters, and of buffers that were cast."""

    def __init__(self, wrapper: nn.Module, prefix: str) -> None:
        summoned = record_of(wrapper).summoned
        self.params = {
            prefix + state_name(name)
            for name, param in wrapper.named_parameters(remove_duplicate=False)
            if summoned or isinstance(param, DTensor)
        }
        cast = {place: dtype for each in wrappers_of(wrapper) for place, dtype in record_of(each).buffer_dtypes.items()}
        self.dtypes = {
            prefix + state_name(f"{fqn}.{name}".lstrip(".")): cast[module, name]
            for fqn, module in (wrapper.named_modules(remove_duplicate=False) if cast else ())
            for name in module._buffers
            if (module, name) in cast
        }

    def finish(
        self, found: dict[str, Any], config: StateDictConfig, copy: bool = False, copy_shards: bool = True
    ) -> dict[str, Any]:
        """Give each parameter memory of its own, and buffers their original dtype; all else is the model's own."""
        seen: set[int] = set()
        for name, value in found.items():
            if not isinstance(value, Tensor) or is_extra(name):
                continue
            device = torch.device("cpu") if config.offload_to_cpu else local_of(value).device
            if isinstance(value, DTensor):
                found[name] = _torch.with_local(value, local_of(value).to(device, copy=copy_shards))
            elif name in self.params:
                is_tied = value.data_ptr() in seen
                seen.add(value.data_ptr())
                found[name] = value.detach().to(device, copy=copy or is_tied)
            else:
                found[name] = value.to(device, self.dtypes.get(name, value.dtype))
        return found


def clean(wrapper: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: object) -> None:
    """Rename, in a hook on ``state_dict()``, what the wrapped module holds to the plain model's names, in place."""
    below = f"{prefix}{WRAPPED}."
    for name in [name for name in state_dict if name.startswith(below)]:
        state_dict[prefix + name.removeprefix(below)] = state_dict.pop(name)
    metadata = getattr(state_dict, "_metadata", None) or {}
    for name in [name for name in metadata if f"{name}.".startswith(below)]:
        metadata[(prefix + f"{name}.".removeprefix(below))[:-1]] = metadata.pop(name)


def kind_of(wrapper: nn.Module) -> tuple[StateDictType, StateDictConfig]:
    """Return what kind of state a wrapper gives now. Local.

    ``torch.distributed.checkpoint.state_dict`` gets sharded state whatever was set, as it does from FSDP1. NO_SHARD
    always gives full state, as in FSDP1.

    Raises:
        TranslationError: LOCAL_STATE_DICT of a model that was given a DeviceMesh, which FSDP1 refused too.
    """
    if asked_by_checkpoint():
        return StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig()
    _note_dtensors(wrapper)
    found = get_state_dict_type(wrapper)
    assert found is not None, "it is a wrapper"
    full = found.state_dict_type is StateDictType.FULL_STATE_DICT
    if record_of(wrapper).strategy is ShardingStrategy.NO_SHARD and not full:
        problem = "When using ``NO_SHARD`` for ``ShardingStrategy``, full_state_dict will be returned."
        warnings.warn(problem, stacklevel=4)
        return StateDictType.FULL_STATE_DICT, FullStateDictConfig(found.state_dict_config.offload_to_cpu)
    if found.state_dict_type is StateDictType.LOCAL_STATE_DICT and record_of(wrapper).given.device_mesh is not None:
        raise no_local_state("state_dict", "DeviceMesh is not compatible with LOCAL_STATE_DICT")
    return found.state_dict_type, found.state_dict_config


def first_rank(wrapper: nn.Module) -> int:
    """Return the rank that ``rank0_only`` means: rank 0 of the group that shards, so one on each node of a hybrid."""
    record = record_of(wrapper)
    sharded = [param for param in wrapper.parameters() if isinstance(param, DTensor)]
    if record.strategy.name in HYBRID or not sharded:
        return dist.get_global_rank(record.process_group, 0)
    return routes_of(sharded).root  # on a mesh with more axes, of all of it


def state_name(fqn: str) -> str:
    """Return the name in a state dict, without ``checkpoint_wrapper``'s part and with ``torch.compile``'s."""
    return without_wrappers(".".join(part for part in fqn.split(".") if part != "_checkpoint_wrapped_module"))
