"""Attributes of FSDP1's instances that are internal, or nearly, and that FSDP2 has an answer for."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from shardkit._fsdp import is_under_way, own_parameters
from shardkit._fsdp.fsdp1 import TrainingState
from shardkit.errors import ShardkitError, message
from shardkit.fsdp1.dropin.record import inner_of, record_of, sharded_of
from shardkit.fsdp1.translate.strategy import HYBRID, parse_strategy


class WrongState(ShardkitError, ValueError):
    """A ValueError too, as FSDP1's."""


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
    """The group that replicates, under a hybrid strategy only, as in FSDP1."""
    record = record_of(wrapper)
    if parse_strategy(record.given.sharding_strategy).name not in HYBRID:
        raise AttributeError("_inter_node_pg: only hybrid strategies have one")
    return record.mesh.get_group(0)


ANSWERS: dict[str, Callable[[nn.Module], Any]] = {
    "training_state": training_state,
    "_assert_state": lambda wrapper: partial(assert_state, wrapper),
    "_is_root": lambda wrapper: record_of(wrapper).root,
    "_has_params": lambda wrapper: bool(own_parameters(sharded_of(wrapper) or nn.Module())),  # type: ignore[arg-type]
    "_use_orig_params": lambda wrapper: bool(record_of(wrapper).given.use_orig_params),
    "_ignored_modules": lambda wrapper: {
        inner_of(wrapper).get_submodule(fqn) for fqn in record_of(wrapper).ignored_modules if record_of(wrapper).top
    },
    "_ignored_params": lambda wrapper: {param for param in wrapper.parameters() if not isinstance(param, DTensor)},
    "_device_mesh": lambda wrapper: record_of(wrapper).given.device_mesh,
    "_inter_node_pg": _inter_node_pg,
    "_state_dict_type": lambda wrapper: record_of(wrapper).state_dict_settings.state_dict_type,
    "_state_dict_config": lambda wrapper: record_of(wrapper).state_dict_settings.state_dict_config,
    "_optim_state_dict_config": lambda wrapper: record_of(wrapper).state_dict_settings.optim_state_dict_config,
}
