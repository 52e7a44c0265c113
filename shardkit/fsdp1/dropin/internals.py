"""FSDP1's attributes and methods that FSDP2 has no counterpart for: an answer, or an error that says what to use."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from torch import nn
from torch.distributed.fsdp import CPUOffload, MixedPrecision
from torch.distributed.tensor import DTensor

from shardkit._fsdp import is_under_way, own_parameters
from shardkit._fsdp.fsdp1 import TrainingState
from shardkit.errors import ShardkitError, TranslationError, message
from shardkit.fsdp1.dropin.record import in_full_precision, inner_of, record_of, sharded_of
from shardkit.fsdp1.instead import ATTRIBUTES, INTERNALS, MEMBERS
from shardkit.fsdp1.translate.strategy import HYBRID, parse_strategy
from shardkit.shards import device_of


class MissingInternal(TranslationError, AttributeError):
    """An AttributeError too, so that ``hasattr`` and ``getattr`` with a default keep working."""


class NotOnInner(ShardkitError, RuntimeError):
    """A RuntimeError too, as FSDP1's."""


class WrongState(ShardkitError, ValueError):
    """A ValueError too, as FSDP1's."""


def attribute(wrapper: nn.Module, module: object, name: str) -> Any:
    """Return what a wrapper answers to an attribute that it has not itself: its own answer, or the wrapped module's.

    Raises:
        AttributeError: there is none; also a TranslationError where FSDP1's wrapper had one.
    """
    if name in _ANSWERS:
        return _ANSWERS[name](wrapper)
    try:
        if name not in INTERNALS:
            return getattr(module, name)
    except AttributeError:
        if name != "params":  # an attribute of FSDP1's that a model may have itself
            raise
    rule = "FSDP2 has no flat parameters and no handles: each parameter is a DTensor of its own"
    raise MissingInternal(message(name, "is an internal of FSDP1", rule, ATTRIBUTES[name].fix()))


def not_on_an_inner_one(method: str) -> NotOnInner:
    """Return the error for a method of the root that was called on a wrapper inside of another one."""
    rule = f"`{method}` should only be called on the root FSDP instance"
    return NotOnInner(message(method, "on inner FSDP instances is not supported", rule, "Call it on the whole model"))


def comm_hook() -> TranslationError:
    """Return the error for FSDP1's communication hooks."""
    rule, fix = "FSDP2 has no hook that takes a flat gradient", MEMBERS["register_comm_hook"].fix()
    return TranslationError(message("register_comm_hook", "has no counterpart", rule, fix))


def training_state(wrapper: nn.Module) -> TrainingState:
    """IDLE; or in a forward, in a backward, or in ``summon_full_params``. Local."""
    if record_of(wrapper).summoned:
        return TrainingState.SUMMON_FULL_PARAMS
    return TrainingState.FORWARD_BACKWARD if is_under_way(wrapper) else TrainingState.IDLE


def assert_state(wrapper: nn.Module, state: TrainingState | Iterable[TrainingState]) -> None:
    """Raise where the wrapper is in none of the states.

    Raises:
        ValueError: as FSDP1; it is a ShardkitError.
    """
    expected, found = [state] if isinstance(state, TrainingState) else list(state), training_state(wrapper)
    if found not in expected:
        problem = f"expected to be in states {expected} but current state is {found}"
        rule = "Parameters are exchanged while nothing else uses them"
        raise WrongState(message("FullyShardedDataParallel", problem, rule, "Call it before or after"))


def _inter_node_pg(wrapper: nn.Module) -> Any:
    """Return the group that replicates, under a hybrid strategy only, as in FSDP1."""
    record = record_of(wrapper)
    if parse_strategy(record.given.sharding_strategy).name not in HYBRID:
        raise AttributeError("_inter_node_pg: only hybrid strategies have one")
    return record.mesh.get_group(0)


_ANSWERS: dict[str, Callable[[nn.Module], Any]] = {
    # Public in FSDP1. The group that shards, or for NO_SHARD the one that replicates; settings are never None, and of
    # what keeps full precision, such as BatchNorm, are those of full precision.
    "process_group": lambda wrapper: record_of(wrapper).process_group,
    "rank": lambda wrapper: record_of(wrapper).process_group.rank(),
    "world_size": lambda wrapper: record_of(wrapper).process_group.size(),
    "sharding_strategy": lambda wrapper: record_of(wrapper).strategy,
    "mixed_precision": lambda wrapper: (
        MixedPrecision() if in_full_precision(wrapper) else record_of(wrapper).mixed_precision
    ),
    "cpu_offload": lambda wrapper: record_of(wrapper).given.cpu_offload or CPUOffload(),
    "backward_prefetch": lambda wrapper: record_of(wrapper).given.backward_prefetch,
    "forward_prefetch": lambda wrapper: bool(record_of(wrapper).given.forward_prefetch),
    "limit_all_gathers": lambda wrapper: bool(record_of(wrapper).given.limit_all_gathers),
    "compute_device": lambda wrapper: device_of(record_of(wrapper).mesh),
    # Internal, or nearly.
    "training_state": training_state,
    "_assert_state": lambda wrapper: partial(assert_state, wrapper),
    "_is_root": lambda wrapper: record_of(wrapper).root,
    "_has_params": lambda wrapper: bool(own_parameters(sharded_of(wrapper) or nn.Module())),  # type: ignore[arg-type]
    "_use_orig_params": lambda wrapper: bool(record_of(wrapper).given.use_orig_params),
    "_ignored_modules": lambda wrapper: record_of(wrapper).ignored_in(inner_of(wrapper)),
    "_ignored_params": lambda wrapper: {param for param in wrapper.parameters() if not isinstance(param, DTensor)},
    "_device_mesh": lambda wrapper: record_of(wrapper).given.device_mesh,
    "_inter_node_pg": _inter_node_pg,
    "_state_dict_type": lambda wrapper: record_of(wrapper).state_dict_settings.state_dict_type,
    "_state_dict_config": lambda wrapper: record_of(wrapper).state_dict_settings.state_dict_config,
    "_optim_state_dict_config": lambda wrapper: record_of(wrapper).state_dict_settings.optim_state_dict_config,
}
