"""load_state_dict() of wrapped models: full tensors, DTensors and FSDP1's sharded ones, cut to this rank's part."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullStateDictConfig, StateDictType
from torch.distributed.tensor import DTensor

from shardkit import _torch
from shardkit.errors import ShardkitError, listing, message
from shardkit.fsdp1.dropin import settings, state
from shardkit.fsdp1.dropin.record import WRAPPED, is_wrapper, record_of, sharded_of
from shardkit.ranks import Groups, any_true, gather_by_rank, groups_of, together
from shardkit.shards import device_of, local_part
from shardkit.state.load import load_full_state_dict
from shardkit.state.names import clean_name
from shardkit.state.routes import local_of
from shardkit.state.transfer import Move, cut, is_sharded, own_part, shape_of, whole_of

_KEPT_BACK: ContextVar[list[Move] | None] = ContextVar("kept_back", default=None)


class NotLoaded(ShardkitError, RuntimeError):
    """What does not fit: a RuntimeError too, as that of ``nn.Module.load_state_dict``."""


class NoStateDict(ShardkitError, TypeError):
    """Not a dict: a TypeError too, as that of ``nn.Module.load_state_dict``."""


def load_state_dict(wrapper: nn.Module, state_dict: Mapping[str, Any], strict: bool, assign: bool) -> Any:
    """Load a state dict into a wrapped model, all of it or nothing, and return what did not match. Collective.

    Tensors may be full on every rank, DTensors, or ShardedTensors of FSDP1, whatever ``state_dict_type`` was set to.
    Set to FULL with ``rank0_only``, ranks may have nothing: rank 0's is sent to all, where FSDP1 raised on the others.

    Raises:
        TranslationError: LOCAL_STATE_DICT.
        RuntimeError: on every rank, with no parameter or buffer changed: as ``nn.Module.load_state_dict``, with clean
            names. Modules with ``set_extra_state`` have theirs by then.
        TypeError: it is not a dict; ranks that have one raise the RuntimeError.
    """
    if record_of(wrapper).summoned:  # the parameters are plain, perhaps on this rank alone
        return nn.Module.load_state_dict(wrapper, state_dict, strict, assign)
    groups = groups_of(wrapper)
    with together(groups, NotLoaded, call="load_state_dict"):
        from_first = _checked(wrapper, state_dict)
    if from_first and any_true(not state_dict, groups):
        try:
            return load_full_state_dict(wrapper, state_dict, strict=strict, assign=assign)
        except ShardkitError as problem:
            raise NotLoaded(str(problem)) from None
    given = _as_here(wrapper, _with_module_versions(wrapper, state_dict), groups)
    with together(groups, NotLoaded), _kept_back() as moves:
        try:
            keys = nn.Module.load_state_dict(wrapper, given, strict, assign)
        except RuntimeError as problem:
            raise NotLoaded(str(problem).replace(f"{WRAPPED}.", "")) from None
    cut(moves)
    return keys


def attach(wrapper: nn.Module) -> None:
    """Put the hooks on a new wrapper by which state dicts of modules around it have clean names. Local."""
    wrapper.register_state_dict_post_hook(state.clean)  # type: ignore[no-untyped-call]
    wrapper.register_load_state_dict_pre_hook(_descend)  # type: ignore[no-untyped-call]
    wrapper.register_load_state_dict_post_hook(_clean_keys)  # type: ignore[no-untyped-call]


def prepare(module: nn.Module) -> None:
    """Put hooks on a module and those inside of it, but for those in wrappers, to take full tensors. Local.

    ``load_state_dict`` of a module around a wrapper goes past the wrapper's own, and through these.
    """
    seen: set[nn.Module] = set()
    pending = [module]
    while pending:
        each = pending.pop()
        if each not in seen and not is_wrapper(each):
            seen.add(each)
            each.register_load_state_dict_pre_hook(_fit)  # type: ignore[no-untyped-call]
            pending += each.children()


def _descend(wrapper: nn.Module, state_dict: dict[str, Any], prefix: str, *others: object) -> None:
    """The names of what the wrapped module holds become those by which ``nn.Module`` finds it."""
    sharded = sharded_of(wrapper)
    if sharded is not None and not record_of(wrapper).summoned:
        sharded.reshard()  # else values would go into stand-ins, which are thrown away
    own = wrapper._modules.keys() | wrapper._parameters.keys() | wrapper._buffers.keys()
    for name in [name for name in state_dict if name.startswith(prefix)]:
        if name.removeprefix(prefix).partition(".")[0] not in own:
            state_dict[f"{prefix}{WRAPPED}.{name.removeprefix(prefix)}"] = state_dict.pop(name)


def _clean_keys(wrapper: nn.Module, keys: Any) -> None:
    for names in (keys.missing_keys, keys.unexpected_keys):
        names[:] = [state.state_name(name) for name in names]


def _fit(
    module: nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    metadata: dict[str, Any],
    strict: bool,
    missing: list[str],
    unexpected: list[str],
    errors: list[str],
) -> None:
    """Cut each value that is for the module itself to this rank's part, in the dict; without communication.

    It comes after hooks that the model's author registered, which see what they saw in FSDP1: full tensors. With
    ``_kept_back`` the value is written later, and the tensor itself is loaded into itself.
    """
    assigns = metadata.get("assign_to_params_buffers", False)
    moves = None if assigns else _KEPT_BACK.get()
    for name, live in (*module._parameters.items(), *module._buffers.items()):
        value: Any = state_dict.get(prefix + name)
        if live is None or not isinstance(value, Tensor):
            continue
        shape, here = shape_of(value), live
        if not live.ndim and shape == (1,):  # which torch takes for ()
            continue
        if shape != live.shape:
            errors.append(_size_mismatch(state.state_name(prefix + name), shape, live.shape))
        elif moves is not None and not live.is_meta:
            moves.append(Move(live, live.dtype, _cut(value, live, assigns)))
        else:
            here = _cut(value, live, assigns)
        state_dict[prefix + name] = here


def _size_mismatch(name: str, there: torch.Size, here: torch.Size) -> str:
    """In torch's words, but for the name."""
    copying = f"copying a param with shape {there} from checkpoint, the shape in current model is {here}"
    return f"size mismatch for {name}: {copying}."


def _cut(value: Any, live: Tensor, assigns: bool) -> Tensor:
    """What a live tensor is to become, placed like it; a view where nothing is to be assigned."""
    if not isinstance(live, DTensor):
        return whole_of(value)
    local = own_part(live, value)
    local = local_part(whole_of(value), live) if local is None else local
    if assigns:
        local = local.to(device_of(live.device_mesh) if live.is_meta else local_of(live).device, copy=True)
    return _torch.with_local(live, local.detach())


@contextmanager
def _kept_back() -> Iterator[list[Move]]:
    moves: list[Move] = []
    before = _KEPT_BACK.set(moves)
    try:
        yield moves
    finally:
        _KEPT_BACK.reset(before)


def _checked(wrapper: nn.Module, state_dict: object) -> bool:
    """Raise for what cannot be loaded at all; whether the settings are such that only rank 0 may have it."""
    if not isinstance(state_dict, Mapping):
        problem = f"Expected state_dict to be dict-like, got {type(state_dict)}"
        raise NoStateDict(message("state_dict", problem, "It maps names to tensors", "Pass a state dict"))
    kind, config = state.kind_of(wrapper)
    if kind is StateDictType.LOCAL_STATE_DICT:
        raise settings.no_local_state("load_state_dict")
    return isinstance(config, FullStateDictConfig) and config.rank0_only


def _with_module_versions(wrapper: nn.Module, state_dict: Mapping[str, Any]) -> OrderedDict[str, Any]:
    """A dict of its own, with the versions of modules where ``nn.Module`` looks for them: by their names here."""
    versions = {clean_name(name): version for name, version in _torch.state_dict_metadata(state_dict).items()}
    names = _paths(wrapper) if versions else []
    metadata = {name: dict(versions[clean_name(name)]) for name in names if clean_name(name) in versions}
    given = OrderedDict(state_dict)
    return _torch.with_state_dict_metadata(given, metadata) if versions else given


def _paths(module: nn.Module, prefix: str = "") -> Iterator[str]:
    """The FQN of each module, with wrappers, which ``named_modules`` of a wrapper leaves out."""
    yield prefix[:-1]
    for name, child in module._modules.items():
        if child is not None:
            yield from _paths(child, f"{prefix}{name}.")


def _as_here(wrapper: nn.Module, given: OrderedDict[str, Any], groups: Groups) -> OrderedDict[str, Any]:
    """The dict, with values whole that are sharded otherwise than the model. Collective; else nothing may be, later."""
    live = {clean_name(name): tensor for name, tensor in wrapper.named_parameters(remove_duplicate=False)}
    own = [name for name, value in given.items() if _is_sharded_otherwise(value, live.get(clean_name(name)))]
    odd = sorted({name for names in gather_by_rank(own, groups).values() for name in names})
    with together(groups if odd else [], NotLoaded):
        if lost := [name for name in odd if name not in given]:
            rule = "Every rank passes its own shards of the same tensors"
            raise NotLoaded(message("state_dict", f"lacks {listing(lost)}", rule, "Load the dict of this rank"))
    for name in odd:
        given[name] = whole_of(given[name])
    return given


def _is_sharded_otherwise(value: object, live: Tensor | None) -> bool:
    return live is not None and is_sharded(value) and own_part(live, value) is None
