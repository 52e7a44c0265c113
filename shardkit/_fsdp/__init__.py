"""FSDP2's private state: flags that its API can set but not read, and the forward or backward under way.

Private torch names are used here and in ``_torch`` only. When gradient accumulation or recovery from errors breaks with
a new torch, look here first. The classes are ``FSDPState`` and ``FSDPParamGroup`` in torch.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY
from torch.distributed.fsdp import FSDPModule

from shardkit._torch import missing_name, torch_version, units_of

# fsdp1: torch.compiler.disable imports the whole compiler where it decorates, which takes seconds and an optional
# package (hypothesis); this one, made for torch's own modules, does so at the first call (torch 2.11 to 2.13).
not_compiled = torch._compile._disable_dynamo
TOTAL_NORM = "_get_total_norm"  # fsdp1: torch.nn.utils.get_total_norm to clip_grad_norm_ beside it (torch 2.11 to 2.15)


class FSDPUnit(Protocol):
    """torch's ``FSDPParamGroup``: the parameters of one all-gather and one reduce-scatter, and how both run.

    ``FSDPModule`` has setters for these and no getters, so they are read and restored here. The names are those of
    torch 2.11 to 2.15; if one is missing, :func:`fsdp_units` raises.
    """

    modules: tuple[nn.Module, ...]
    fsdp_params: list[Any]
    device: torch.device
    is_sharded: bool  # neither gathered nor sharded over fewer ranks after forward
    mesh_info: Any  # has shard_process_group, replicate_process_group, or both
    post_forward_mesh_info: Any  # None: the parameters stay gathered from forward to backward
    reshard_after_backward: bool
    reduce_grads: bool
    all_reduce_grads: bool
    gradient_divide_factor: float | None  # None: the number of ranks
    reduce_scatter_unused_params: bool  # since 2.13
    post_backward: Callable[..., None]
    finalize_backward: Callable[[], None]  # called for each unit below the root when a backward ends
    wait_for_unshard: Callable[[], None]


def fsdp_units(model: nn.Module) -> list[FSDPUnit]:
    """The units of every FSDP module of the model, each once, parents first. Local, pure.

    Raises:
        ShardkitError: this torch does not have what shardkit reads and sets of a unit.
    """
    units = [unit for state in fsdp_states(model) for unit in units_of(state)]
    optional = {"reduce_scatter_unused_params"} if torch_version() < (2, 13) else set()
    for name in FSDPUnit.__annotations__.keys() - optional if units else ():
        if not hasattr(units[0], name):  # setting an attribute that torch has renamed would silently do nothing
            raise missing_name(f"FSDPParamGroup.{name}")
    return units


def engine_objects(module: nn.Module) -> dict[str, object]:
    """Return one of each class of torch's objects behind an FSDP module, by class name. Local, pure."""
    state = states_of([module])[0]
    unit = units_of(state)[0]
    return {"FSDPModule": module, "FSDPState": state, "FSDPParamGroup": unit, "FSDPParam": unit.fsdp_params[0]}


def fsdp_states(model: nn.Module) -> list[Any]:
    return states_of(model.modules())


def states_of(modules: Iterable[nn.Module]) -> list[Any]:
    sharded = [module for module in modules if isinstance(module, FSDPModule)]
    return list(dict.fromkeys(module._get_fsdp_state() for module in sharded))  # fully_shard([a, b]): one for both


def initialize(root: FSDPModule) -> None:
    """Make ``root`` the root of the FSDP modules below it, as its first forward would. Local.

    fsdp1: FSDP1 did so wherever it needed the root; torch 2.11 to 2.13 have no public way before a forward.
    """
    root._get_fsdp_state()._lazy_init()


def is_in_use(module: FSDPModule) -> bool:
    """Whether FSDP2's hooks have gathered this module for a forward that has not ended, or in backward. Local, pure."""
    return module._get_fsdp_state()._training_state.name != "IDLE"


def not_ready(units: Iterable[Any], held: Collection[int]) -> tuple[list[str], list[str]]:
    """Return which of the parameters with an ``id`` in ``held`` have a gradient that is not reduced. Local, pure.

    It is on the unsharded parameter, or in ``reduce_dtype`` beside it (before torch 2.15); on an HSDP mesh the
    reduce-scattered gradients of a unit wait for the all-reduce. And which in ``held`` are unsharded ones themselves.
    """
    waiting, copies = [], []  # in one function without calls, because this runs in every step
    for unit in units:
        for param in unit.fsdp_params:
            state = vars(param)
            unsharded = state.get("_unsharded_param")
            if unsharded is not None:  # gathered at least once
                if id(unsharded) in held:
                    copies.append(str(param._param_fqn))
                waits = unsharded.grad is not None or unit._partial_reduce_output is not None
                if (waits or state.get("unsharded_accumulated_grad") is not None) and id(param.sharded_param) in held:
                    waiting.append(str(param._param_fqn))
    return waiting, copies


def units_gathered_until_backward(model: nn.Module) -> list[FSDPUnit]:
    """Return the units with ``reshard_after_forward=False``, and those of roots with torch's default, None."""
    states = fsdp_states(model)
    outermost: set[nn.Module] = set()  # the roots to be, unless the model itself is inside another FSDP module
    if any(state._is_root is None for state in states):
        sharded: list[nn.Module] = [module for module in model.modules() if isinstance(module, FSDPModule)]
        outermost = set(sharded).difference(*(set(module.modules()) - {module} for module in sharded))
    kept = []
    for state in states:
        root = state._is_root or (state._is_root is None and state._modules[0] in outermost)
        by_default = root and state._auto_reshard_after_forward
        kept += [unit for unit in units_of(state) if by_default or unit.post_forward_mesh_info is None]
    return kept


@contextmanager
def gathered_until_backward(model: nn.Module) -> Iterator[None]:
    """In this context no unit reshards after forward. ``set_reshard_after_forward`` could not restore an int."""
    before = [(state, unit, unit.post_forward_mesh_info) for state in fsdp_states(model) for unit in units_of(state)]
    for _, unit, _ in before:
        unit.post_forward_mesh_info = None
    try:
        yield
    finally:
        for state, unit, mesh_info in before:
            # The first forward, which may have run meanwhile, decides for a root with torch's default.
            decided = state._is_root and state._auto_reshard_after_forward
            unit.post_forward_mesh_info = None if decided else mesh_info


def reduce_dtype(unit: FSDPUnit) -> torch.dtype | None:
    """Return the dtype that a unit's gradients are reduced in; None if none of its parameters trains. Local, pure."""
    trained = [param for param in unit.fsdp_params if param.sharded_param.requires_grad]
    if not trained:
        return None
    stored: torch.dtype = trained[0].sharded_param.dtype
    policy = getattr(unit, "mp_policy", None)
    if policy is not None:  # torch 2.11 to 2.14
        return policy.reduce_dtype or policy.param_dtype or stored
    # Since torch 2.15 there is a policy for each parameter, and param_dtype does not matter.
    return trained[0].mp_policy.reduce_dtype or stored


def compute_dtypes(model: nn.Module) -> set[torch.dtype]:
    """Return the dtypes that floating-point parameters of the model's units are gathered in. Local, pure."""
    pairs = [(getattr(unit, "mp_policy", None), param) for unit in fsdp_units(model) for param in unit.fsdp_params]
    floating = [(policy, param) for policy, param in pairs if param.sharded_param.is_floating_point()]
    # Since torch 2.15 there is a policy for each parameter.
    return {(policy or param.mp_policy).param_dtype or param.sharded_param.dtype for policy, param in floating}


def all_reduce_hook(unit: FSDPUnit) -> object:
    """Return what ``set_all_reduce_hook`` set, None without one: it has no getter (torch 2.11 to 2.15). Local, pure."""
    if not hasattr(unit, "_all_reduce_hook"):
        raise missing_name("FSDPParamGroup._all_reduce_hook")
    return unit._all_reduce_hook


def fsdp_roots(model: nn.Module) -> list[FSDPModule]:
    """Return the FSDP modules that a first forward has made roots. Local, pure."""
    states = fsdp_states(model)
    return [each._modules[0] for each in states if each._is_root and hasattr(each._comm_ctx, "all_gather_stream")]


def modules_of_other_roots(model: nn.Module) -> list[nn.Module]:
    """Return the FSDP modules of the model that belong to a root outside of it. Local, pure."""
    states = fsdp_states(model)
    own = {each for state in states if state._is_root for each in state._state_ctx.all_states}
    return [module for state in states if state._is_root is False and state not in own for module in state._modules]


def reset_iteration(root: FSDPModule) -> None:
    """Abandon the forward or backward under way below a root: wait for its collectives, and reshard.

    torch >= 2.13 has ``reset_iter_state`` for it; before, this does the same by hand.
    """
    state = root._get_fsdp_state()
    for param in (p for each in state._state_ctx.all_states for unit in units_of(each) for p in unit.fsdp_params):
        if param.grad_offload_event is not None:
            param.grad_offload_event.synchronize()
            param.grad_offload_event = None
    if hasattr(root, "reset_iter_state"):
        root.reset_iter_state()
        return
    communication: Any = state._comm_ctx
    stream = state._device_handle.current_stream()
    if hasattr(communication, "reduce_scatter_states"):  # torch 2.12; one state in 2.11
        _wait_for(stream, *communication.reduce_scatter_states)
        communication.reduce_scatter_states.clear()
    else:
        _wait_for(stream, communication.reduce_scatter_state)
        communication.reduce_scatter_state = None
    _wait_for(stream, communication.all_gather_state)
    communication.all_gather_state = None
    communication.post_forward_order.clear()
    for each in state._state_ctx.all_states:
        each._modules_to_run_forward.clear()
        each._training_state = type(each._training_state).IDLE
        for unit in units_of(each):
            _reset_unit(unit, stream)
    state._state_ctx.iter_forward_root = None
    state._state_ctx.post_backward_final_callback_queued = False


def _reset_unit(unit: Any, stream: Any) -> None:
    gathered = unit._all_gather_result
    if gathered is not None:
        if gathered.all_gather_event is not None:
            stream.wait_event(gathered.all_gather_event)
        if gathered.all_gather_work is not None:
            gathered.all_gather_work.wait()
    if unit._post_reduce_event is not None:
        stream.wait_event(unit._post_reduce_event)
    _wait_for(stream, unit._all_reduce_state)
    unit._all_gather_result = unit._post_reduce_event = unit._all_reduce_state = None
    unit._reshard_after_forward_event = None
    unit._post_forward_indices.clear()
    unit._training_state = type(unit._training_state).IDLE
    unit._to_sharded()


def _wait_for(stream: Any, *pending: Any) -> None:
    for each in pending:
        if each is not None and each.event is not None:
            stream.wait_event(each.event)


def is_under_way(model: nn.Module) -> bool:
    """Whether a forward or backward of a unit of the model has begun and not ended. Local, pure."""
    states = fsdp_states(model)
    return any(each._training_state.name != "IDLE" for s in states for each in (s, *units_of(s)))


@contextmanager
def without_hooks(modules: Iterable[nn.Module]) -> Iterator[None]:
    """In this context FSDP2's hooks do nothing: forwards of these modules neither gather nor reshard nor cast.

    A hook is recognized by the state that it, or what it wraps (``fully_shard([a, b])``), is bound to, and keeps its
    place. Methods registered by ``register_fsdp_forward_method`` call the state itself. After
    ``load_state_dict`` torch 2.11 to 2.15 take what a module holds for its shard (``reset_sharded_param``).
    """
    states = states_of(modules)
    found = [
        (hooks, number, hook)
        for state in states
        for module in state._modules
        for hooks in (module._forward_pre_hooks, module._forward_hooks)
        for number, hook in hooks.items()
        if _is_bound_to(hook, state)
    ]
    before = [(state, dict(vars(state))) for state in states]
    for hooks, number, _ in found:
        hooks[number] = lambda *args, **kwargs: None
    for state in states:
        state._pre_forward = lambda module, args, kwargs: (args, kwargs)
        state._post_forward = lambda module, args, output: output
    params = [param for state in states for unit in units_of(state) for param in unit.fsdp_params]
    for param in params:
        vars(param)["reset_sharded_param"] = lambda: None
    try:
        yield
    finally:
        for param in params:
            vars(param).pop("reset_sharded_param", None)  # the root lists those of inner units too
        for state, attributes in before:
            for name in ("_pre_forward", "_post_forward"):
                vars(state).pop(name)
                vars(state).update({name: attributes[name]} if name in attributes else {})
        for hooks, number, hook in found:
            hooks[number] = hook


def _is_bound_to(hook: Any, state: Any) -> bool:
    while hook is not None and getattr(hook, "__self__", None) is not state:
        hook = getattr(hook, "__wrapped__", None)
    return hook is not None


def as_it_was(module: nn.Module) -> tuple[type[nn.Module], dict[str, Any]]:
    """Return the class and the attributes that an FSDP module would have without ``fully_shard``. Local, pure.

    fsdp1: to copy a model, which FSDP2 refuses. ``fully_shard`` derives a class from ``FSDPModule`` and the module's
    own, and adds hooks, methods that gather, and two keys of ``torch.distributed._composable`` to the attributes (torch
    2.11 to 2.13). shardkit adds hooks of its own.
    """
    attributes = dict(vars(module))
    is_sharded = isinstance(module, FSDPModule)
    kind = type(module).__bases__[1] if is_sharded else type(module)
    state: Any = module._get_fsdp_state() if isinstance(module, FSDPModule) else None
    for key in (STATE_KEY, REGISTRY_KEY) if is_sharded else ():
        attributes.pop(key, None)
    for name, value in vars(module).items() if is_sharded else ():
        if isinstance(value, MethodType) and value.__self__ is module:
            original: Any = value  # below the methods that FSDP2 and shardkit put in its place to gather
            while _defined_in(getattr(original, "__func__", None), "shardkit.", "torch.distributed.fsdp."):
                original = original.__wrapped__
            attributes[name] = original
            if getattr(original, "__func__", None) is getattr(kind, name, None):
                del attributes[name]
    for name in ("_forward_pre_hooks", "_forward_hooks"):
        attributes[name] = OrderedDict(
            (k, hook)
            for k, hook in attributes[name].items()
            if not _is_bound_to(hook, state) and not _defined_in(_unwrapped(hook), "shardkit.")
        )
    kept = attributes["_forward_pre_hooks"].keys() | attributes["_forward_hooks"].keys()
    for name in ("_forward_pre_hooks_with_kwargs", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"):
        attributes[name] = OrderedDict((k, flag) for k, flag in attributes[name].items() if k in kept)
    return kind, attributes


def _unwrapped(hook: Any) -> Any:
    return getattr(hook, "func", None) or getattr(hook, "__wrapped__", hook)


def _defined_in(function: Any, *packages: str) -> bool:
    return str(getattr(function, "__globals__", {}).get("__name__")).startswith(packages)


def own_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Return the sharded parameters of the units of one module, none if it is not an FSDP module. Local, pure."""
    return [param.sharded_param for s in states_of([module]) for unit in units_of(s) for param in unit.fsdp_params]


def gathered_tensors(model: nn.Module) -> list[torch.Tensor]:
    """Return the flat buffers that parameters are gathered into, with empty storages where resharded. Local, pure.

    memory: those resharded over fewer ranks too. Between two all-gathers torch 2.11 to 2.13 have no public way to them.
    """
    params = [param for unit in fsdp_units(model) for param in unit.fsdp_params]
    kept = [getattr(param, "_sharded_post_forward_param_data", None) for param in params]  # set by the first forward
    return [tensor for param in params for tensor in param.all_gather_outputs] + [t for t in kept if t is not None]
