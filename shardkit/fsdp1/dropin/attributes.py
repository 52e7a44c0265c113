"""What a wrapper answers to names that it does not define: FSDP1's own, internal or not, and those of the model."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn
from torch.distributed.fsdp import CPUOffload, MixedPrecision
from torch.distributed.tensor import DTensor

from shardkit._fsdp import is_under_way, own_parameters
from shardkit._fsdp.fsdp1 import TrainingState, stream_of
from shardkit.errors import ShardkitError, message
from shardkit.fsdp1.dropin.errors import DropinValueError, ShardedUse, UnavailableAttribute
from shardkit.fsdp1.dropin.flat import flat_params, handles, unit_handle
from shardkit.fsdp1.dropin.record import Record, in_full_precision, inner_of, record_of, sharded_of
from shardkit.fsdp1.dropin.tensors import MIXED
from shardkit.fsdp1.translate.strategy import HYBRID, parse_strategy
from shardkit.replacements import ATTRIBUTES, INTERNALS
from shardkit.shards import device_of


def attribute(wrapper: nn.Module, module: object, name: str) -> Any:
    """Return FSDP1's attribute of that name, or the wrapped module's.

    Raises:
        AttributeError: there is none; also a TranslationError where FSDP1's wrapper had one.
    """
    if name in _OF_RECORD:
        return _OF_RECORD[name](record_of(wrapper))
    if name in _OF_WRAPPER:
        return _OF_WRAPPER[name](wrapper)
    try:
        if name not in INTERNALS:
            found = getattr(module, name)
            return _method(name, found) if inspect.ismethod(found) and not hasattr(nn.Module, name) else found
    except AttributeError:
        if name != "params":  # an attribute of FSDP1's that a model may have itself
            raise
        return flat_params(wrapper)
    rule = "FSDP2 has no flat parameters and no handles: each parameter is a DTensor of its own"
    raise UnavailableAttribute(message(name, "is an internal of FSDP1", rule, ATTRIBUTES[name].fix()))


def _method(name: str, found: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method of the user's model that says what to do where it computes with sharded parameters."""

    @functools.wraps(found)
    def method(*args: Any, **kwargs: Any) -> Any:
        try:
            return found(*args, **kwargs)
        except RuntimeError as error:
            is_torchs = MIXED in str(error) and not isinstance(error, ShardkitError)
            if is_torchs or isinstance(error, ShardedUse):
                raise not_gathered(name, is_method=True) from error
            raise

    return method


def not_gathered(name: str, is_method: bool = False) -> ShardedUse:
    """Return the error for a module, by FQN, or a method that runs outside of forward on sharded parameters."""
    rule = "Parameters are gathered for the wrapped module's forward; code outside of it sees this rank's shards"
    before = f'call register_fsdp_forward_method(model.module, "{name}") after wrapping, on all ranks'
    fix = f"Call it in FSDP.summon_full_params(model), or {before if is_method else 'wrap it by FSDP(...) too'}"
    return ShardedUse(message(name, "uses parameters that are sharded", rule, fix))


def training_state(wrapper: nn.Module) -> TrainingState:
    """Return FSDP1's state: idle, in a forward or backward, or in ``summon_full_params``. Local."""
    if record_of(wrapper).summoned:
        return TrainingState.SUMMON_FULL_PARAMS
    return TrainingState.FORWARD_BACKWARD if is_under_way(wrapper) else TrainingState.IDLE


def assert_state(wrapper: nn.Module, state: TrainingState | Iterable[TrainingState]) -> None:
    """Raise a ValueError, as FSDP1 did, unless the wrapper is in one of the states."""
    expected, found = [state] if isinstance(state, TrainingState) else list(state), training_state(wrapper)
    if found not in expected:
        problem = f"expected to be in states {expected} but current state is {found}"
        rule = "Parameters cannot be exchanged while they are in use"
        raise DropinValueError(
            message("FullyShardedDataParallel", problem, rule, "Call it outside of forward and backward")
        )


def _inter_node_pg(record: Record) -> Any:
    if parse_strategy(record.given.sharding_strategy).name not in HYBRID:
        raise AttributeError("_inter_node_pg: only hybrid strategies have one")
    return record.mesh.get_group(0)


# FSDP1's streams, each with FSDP2's for the same work; one is the device's current stream.
_STREAMS = {
    "_default_stream": "",
    "_pre_unshard_stream": "all_gather_copy_in_stream",
    "_unshard_stream": "all_gather_stream",
    "_post_backward_stream": "reduce_scatter_stream",
    "_all_reduce_stream": "all_reduce_stream",
}


def _stream(name: str, wrapper: nn.Module) -> Any:
    if (sharded := sharded_of(wrapper)) is None:
        raise AttributeError(f"{name}: the wrapper shards no parameters")
    return stream_of(sharded, name)


_OF_RECORD: dict[str, Callable[[Record], Any]] = {
    # Public in FSDP1. Settings are never None.
    "process_group": lambda record: record.process_group,
    "rank": lambda record: record.process_group.rank(),
    "world_size": lambda record: record.process_group.size(),
    "sharding_strategy": lambda record: record.strategy,
    "cpu_offload": lambda record: record.given.cpu_offload or CPUOffload(),
    "backward_prefetch": lambda record: record.given.backward_prefetch,
    "forward_prefetch": lambda record: bool(record.given.forward_prefetch),
    "limit_all_gathers": lambda record: bool(record.given.limit_all_gathers),
    "compute_device": lambda record: device_of(record.mesh),
    # Internal, or nearly.
    "_is_root": lambda record: record.root,
    "_use_orig_params": lambda record: bool(record.given.use_orig_params),
    "_device_mesh": lambda record: record.given.device_mesh,
    "_inter_node_pg": _inter_node_pg,
    "_state_dict_type": lambda record: record.state_dict_settings.state_dict_type,
    "_state_dict_config": lambda record: record.state_dict_settings.state_dict_config,
    "_optim_state_dict_config": lambda record: record.state_dict_settings.optim_state_dict_config,
}
_OF_WRAPPER: dict[str, Callable[[nn.Module], Any]] = {
    "mixed_precision": lambda wrapper: (
        MixedPrecision() if in_full_precision(wrapper) else record_of(wrapper).mixed_precision
    ),
    "training_state": training_state,
    "_handle": unit_handle,
    "_all_handles": handles,
    **{name: functools.partial(_stream, own) for name, own in _STREAMS.items()},
    "_assert_state": lambda wrapper: functools.partial(assert_state, wrapper),
    "_has_params": lambda wrapper: bool(own_parameters(sharded_of(wrapper) or nn.Module())),  # type: ignore[arg-type]
    "_ignored_modules": lambda wrapper: record_of(wrapper).ignored_in(inner_of(wrapper)),
    "_ignored_params": lambda wrapper: {param for param in wrapper.parameters() if not isinstance(param, DTensor)},
}
