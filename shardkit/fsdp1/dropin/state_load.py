"""load_state_dict() of wrapped models: full tensors, DTensors and FSDP1's sharded ones, cut to this rank's part."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FullStateDictConfig
from torch.distributed.tensor import DTensor

from shardkit import _torch
from shardkit.errors import ShardkitError, listing, message
from shardkit.fsdp1.dropin import state
from shardkit.fsdp1.dropin.errors import DropinRuntimeError, DropinTypeError
from shardkit.fsdp1.dropin.record import WRAPPED, is_wrapper, record_of, sharded_of
from shardkit.ranks import Groups, any_true, gather_by_rank, groups_of, together
from shardkit.shards import device_of, local_part
from shardkit.state.load import load_full_state_dict
from shardkit.state.names import clean_name
from shardkit.state.routes import local_of
from shardkit.state.transfer import Move, cut, is_sharded, own_part, shape_of, whole_of

# What a load in progress copies at its end, when all is known to fit; None outside of one.
_deferred: ContextVar[list[Move] | None] = ContextVar("deferred", default=None)


def load_state_dict(wrapper: nn.Module, state_dict: Mapping[str, Any], strict: bool, assign: bool) -> Any:
    """Load a state dict into a wrapped model, all of it or nothing, and return what did not match. Collective.

    Tensors may be full on every rank, DTensors, or ShardedTensors of FSDP1, whatever ``state_dict_type`` was set to.
    With FULL and ``rank0_only``, other ranks may pass ``{}``: rank 0's dict is sent to them. FSDP1 raised there.

    Raises:
        TranslationError: LOCAL_STATE_DICT, and the model was given a DeviceMesh.
        RuntimeError: on every rank, with no parameter or buffer changed: as ``nn.Module.load_state_dict``, with clean
            names. Modules with ``set_extra_state`` have theirs by then.
        TypeError: it is not a dict; ranks that have one raise the RuntimeError.
    """
    if record_of(wrapper).summoned:  # the parameters are plain, perhaps on this rank alone
        return nn.Module.load_state_dict(wrapper, state_dict, strict, assign)
    groups = groups_of(wrapper)
    with together(groups, DropinRuntimeError, call="load_state_dict"):
        if not isinstance(state_dict, Mapping):
            problem = f"Expected state_dict to be dict-like, got {type(state_dict)}"
            raise DropinTypeError(message("state_dict", problem, "It maps names to tensors", "Pass a state dict"))
        _, config = state.kind_of(wrapper)
    if isinstance(config, FullStateDictConfig) and config.rank0_only and any_true(not state_dict, groups):
        try:
            return load_full_state_dict(wrapper, state_dict, strict=strict, assign=assign)
        except ShardkitError as problem:
            raise DropinRuntimeError(str(problem)) from None
    given = _gathered_where_sharded_otherwise(wrapper, _with_module_versions(wrapper, state_dict), groups)
    moves: list[Move] = []
    before = _deferred.set(moves)
    try:
        with together(groups, DropinRuntimeError):
            try:
                keys = nn.Module.load_state_dict(wrapper, given, strict, assign)
            except RuntimeError as problem:
                raise DropinRuntimeError(str(problem).replace(f"{WRAPPED}.", "")) from None
    finally:
        _deferred.reset(before)
    cut(moves)
    return keys


def _with_module_versions(wrapper: nn.Module, state_dict: Mapping[str, Any]) -> Any:
    """Return a copy of the dict with the modules' versions where ``nn.Module`` looks for them: by their names here."""
    given = OrderedDict(state_dict)
    if not (versions := {clean_name(name): each for name, each in _torch.state_dict_metadata(state_dict).items()}):
        return given
    names = [name for name in _paths(wrapper) if clean_name(name) in versions]
    return _torch.with_state_dict_metadata(given, {name: dict(versions[clean_name(name)]) for name in names})


def _paths(module: nn.Module, prefix: str = "") -> Iterator[str]:
    """Yield the FQN of each module, with wrappers, which ``named_modules`` of a wrapper leaves out."""
    yield prefix[:-1]
    for name, child in module._modules.items():
        if child is not None:
            yield from _paths(child, f"{prefix}{name}.")


def _gathered_where_sharded_otherwise(
    wrapper: nn.Module, given: OrderedDict[str, Any], groups: Groups
) -> OrderedDict[str, Any]:
    """Return the dict with full tensors for those that are not sharded as in the model. Collective.

    What follows is not: an error of one rank would leave the others waiting.
    """
    live = {clean_name(name): tensor for name, tensor in wrapper.named_parameters(remove_duplicate=False)}
    own = [
        name
        for name, value in given.items()
        if is_sharded(value) and clean_name(name) in live and own_part(live[clean_name(name)], value) is None
    ]
    odd = sorted({name for names in gather_by_rank(own, groups).values() for name in names})
    with together(groups if odd else [], DropinRuntimeError):
        if lost := [name for name in odd if name not in given]:
            rule = "Every rank passes its own shards of the same tensors"
            raise DropinRuntimeError(message("state_dict", f"lacks {listing(lost)}", rule, "Load this rank's own dict"))
    for name in odd:
        given[name] = whole_of(given[name])
    return given


# Hooks of nn.Module.load_state_dict, by which modules around a wrapper load too.


def attach(wrapper: nn.Module) -> None:
    """Put hooks on a new wrapper, so that state dicts of modules around it have clean names. Local."""
    wrapper.register_state_dict_post_hook(state.clean)  # type: ignore[no-untyped-call]
    wrapper.register_load_state_dict_pre_hook(_descend)  # type: ignore[no-untyped-call]
    wrapper.register_load_state_dict_post_hook(_clean_keys)  # type: ignore[no-untyped-call]


def prepare(module: nn.Module) -> None:
    """Put hooks on a module and those inside it, but for those in wrappers, so that they take full tensors. Local."""
    seen: set[nn.Module] = set()
    pending = [module]
    while pending:
        each = pending.pop()
        if each not in seen and not is_wrapper(each):
            seen.add(each)
            each.register_load_state_dict_pre_hook(_cut_values)  # type: ignore[no-untyped-call]
            pending += each.children()


def _descend(wrapper: nn.Module, state_dict: dict[str, Any], prefix: str, *others: object) -> None:
    """Rename what the wrapped module holds as ``nn.Module`` looks for it."""
    sharded = sharded_of(wrapper)
    if sharded is not None and not record_of(wrapper).summoned:
        sharded.reshard()  # otherwise values would go into full parameters, which resharding throws away
    own = wrapper._modules.keys() | wrapper._parameters.keys() | wrapper._buffers.keys()
    for name in [name for name in state_dict if name.startswith(prefix)]:
        if name.removeprefix(prefix).partition(".")[0] not in own:
            state_dict[f"{prefix}{WRAPPED}.{name.removeprefix(prefix)}"] = state_dict.pop(name)


def _clean_keys(wrapper: nn.Module, keys: Any) -> None:
    for names in (keys.missing_keys, keys.unexpected_keys):
        names[:] = [state.state_name(name) for name in names]


def _cut_values(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: dict[str, Any], *others: Any
) -> None:
    """Cut the values of the module's own tensors to this rank's part, in the dict; without communication.

    It comes after hooks that the model's author registered, which see what they saw in FSDP1: full tensors. Inside
    ``load_state_dict`` of a wrapper the values are written later, and each tensor is loaded into itself.
    """
    *_, errors = others  # after strict, missing and unexpected keys
    assigns = metadata.get("assign_to_params_buffers", False)
    moves = None if assigns else _deferred.get()
    for name, live in (*module._parameters.items(), *module._buffers.items()):
        value: Any = state_dict.get(prefix + name)
        if live is None or not isinstance(value, Tensor):
            continue
        there = shape_of(value)
        if not live.ndim and there == (1,):  # which torch takes for ()
            continue
        if there != live.shape:  # in torch's words, but for the name
            copying = f"copying a param with shape {there} from checkpoint, the shape in current model is {live.shape}"
            errors.append(f"size mismatch for {state.state_name(prefix + name)}: {copying}.")
            state_dict[prefix + name] = live
        elif moves is not None and not live.is_meta:
            moves.append(Move(live, live.dtype, _cut(value, live, assigns)))
            state_dict[prefix + name] = live
        else:
            state_dict[prefix + name] = _cut(value, live, assigns)


def _cut(value: Any, live: Tensor, assigns: bool) -> Tensor:
    """Return what a live tensor becomes, placed like it; a view where nothing is assigned."""
    if not isinstance(live, DTensor):
        return whole_of(value)
    local = own_part(live, value)
    local = local_part(whole_of(value), live) if local is None else local
    if assigns:
        local = local.to(device_of(live.device_mesh) if live.is_meta else local_of(live).device, copy=True)
    return _torch.with_local(live, local.detach())
