"""state_dict_type and its kin: what kind of state dict a wrapped model gives, and how that is set."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    OptimStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)

from shardkit._fsdp import fsdp1 as _fsdp1
from shardkit.errors import ShardkitError, TranslationError, message
from shardkit.fsdp1.dropin.record import record_of, wrappers_of

# Of models and of optimizers.
_CONFIGS: dict[StateDictType, tuple[type[StateDictConfig], type[OptimStateDictConfig]]] = {
    StateDictType.FULL_STATE_DICT: (FullStateDictConfig, FullOptimStateDictConfig),
    StateDictType.SHARDED_STATE_DICT: (ShardedStateDictConfig, ShardedOptimStateDictConfig),
    StateDictType.LOCAL_STATE_DICT: (LocalStateDictConfig, LocalOptimStateDictConfig),
}


class WrongSettings(ShardkitError, RuntimeError):
    """What does not go together: a RuntimeError too, as FSDP1's."""


class Disagreement(ShardkitError, AssertionError):
    """Wrappers of one model that were set differently: an AssertionError too, as FSDP1's."""


class NoLocalState(TranslationError, RuntimeError):
    """LOCAL_STATE_DICT: a RuntimeError too, as FSDP1's for models on a DeviceMesh."""


def set_state_dict_type(
    module: nn.Module,
    state_dict_type: StateDictType,
    state_dict_config: StateDictConfig | None = None,
    optim_state_dict_config: OptimStateDictConfig | None = None,
) -> StateDictSettings | None:
    """Sets what ``state_dict()`` of all wrappers at and below ``module`` gives and ``load_state_dict()`` takes. Local.

    Args:
        module: a wrapper, or a module around some.
        state_dict_type: FULL_STATE_DICT, as it is from the start, or SHARDED_STATE_DICT.
        state_dict_config, optim_state_dict_config: of that type, for models and optimizers; None is torch's default.

    Returns:
        The settings before; None where there is no wrapper.

    Raises:
        RuntimeError: a config of another type than ``state_dict_type``.
        AssertionError: wrappers were set differently before, so that there is no one answer.
    """
    settings = _checked(state_dict_type, state_dict_config, optim_state_dict_config)
    wrappers = list(wrappers_of(module))
    before = [record_of(wrapper).state_dict_settings for wrapper in wrappers]
    if len({(s.state_dict_type, type(s.state_dict_config), type(s.optim_state_dict_config)) for s in before}) > 1:
        raise _disagreement("All FSDP modules should have the same state_dict_type", before)
    for wrapper in wrappers:
        record_of(wrapper).state_dict_settings = StateDictSettings(
            settings.state_dict_type, settings.state_dict_config, settings.optim_state_dict_config
        )
    return before[0] if before else None


def get_state_dict_type(module: nn.Module) -> StateDictSettings | None:
    """What ``set_state_dict_type`` set for all wrappers at and below ``module``; None where there is none. Local.

    Raises:
        AssertionError: they differ.
    """
    wrappers = list(wrappers_of(module))
    settings = [record_of(wrapper).state_dict_settings for wrapper in wrappers]
    if any(each != settings[0] for each in settings):
        raise _disagreement("All FSDP modules must have the same state dict settings", settings)
    for wrapper in wrappers:
        note_dtensors(wrapper)
    return settings[0] if settings else None


@contextmanager
def state_dict_type(
    module: nn.Module,
    state_dict_type: StateDictType,
    state_dict_config: StateDictConfig | None = None,
    optim_state_dict_config: OptimStateDictConfig | None = None,
) -> Iterator[None]:
    """``set_state_dict_type`` for this context; as before afterwards, also where the body raises, unlike FSDP1. Local.

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


def note_dtensors(wrapper: nn.Module) -> None:
    """Sets ``_use_dtensor`` of the configs where FSDP1 did: for a model that was given a DeviceMesh. Local."""
    record = record_of(wrapper)
    settings = record.state_dict_settings
    if record.given.device_mesh is not None and settings.state_dict_type is StateDictType.SHARDED_STATE_DICT:
        _fsdp1.use_dtensor(settings.state_dict_config)
        _fsdp1.use_dtensor(settings.optim_state_dict_config)


def no_local_state(call: str) -> NoLocalState:
    """Return the error for LOCAL_STATE_DICT, which is FSDP1's flat parameters as they lie on a rank."""
    problem = "LOCAL_STATE_DICT: DeviceMesh is not compatible with LOCAL_STATE_DICT"
    rule = "FSDP2 has no flat parameters, so there is nothing in that layout to save or to load into"
    fix = "Use StateDictType.SHARDED_STATE_DICT, whose files shardkit and torch.distributed.checkpoint read"
    return NoLocalState(message(call, problem, rule, fix))


def _checked(
    kind: StateDictType, config: StateDictConfig | None, optim_config: OptimStateDictConfig | None
) -> StateDictSettings:
    if kind not in _CONFIGS:
        rule = "It is a member of torch.distributed.fsdp.StateDictType"
        raise WrongSettings(message("state_dict_type", f"is {kind!r}", rule, "Pass StateDictType.FULL_STATE_DICT"))
    wanted, optim_wanted = _CONFIGS[kind]
    given = (wanted() if config is None else config, optim_wanted() if optim_config is None else optim_config)
    for name, found, kinds in zip(("state_dict_config", "optim_state_dict_config"), given, _CONFIGS[kind], strict=True):
        if type(found) is not kinds:
            problem = f"Expected {name} of type {kinds} but got {type(found)}"
            raise WrongSettings(message(name, problem, f"It goes with {kind}", f"Pass a {kinds.__name__}, or None"))
    return StateDictSettings(kind, *given)


def _disagreement(problem: str, settings: list[StateDictSettings]) -> Disagreement:
    different = [each for number, each in enumerate(settings) if each not in settings[:number]]
    rule = f"They have {', '.join(map(str, different))}"
    return Disagreement(message("state_dict_type", problem, rule, "Set the type on the whole model"))
