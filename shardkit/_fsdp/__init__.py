"""What torch's FSDP2 keeps to itself: the flags that it only lets set, and the state of a forward under way.

Together with ``_torch``, the only place of private torch names. When gradient accumulation or recovery from errors
breaks with a new torch, look here first: in torch it is ``FSDPState`` and ``FSDPParamGroup``.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY
from torch.distributed.fsdp import FSDPModule

from shardkit._torch import missing_name, torch_version, units_of

# fsdp1: torch.compiler.disable imports all of the compiler where it decorates, seconds of import and an optional
# package (hypothesis); this one, made for torch's own modules, does so at the first call (torch 2.11 to 2.13).
not_compiled = torch._compile._disable_dynamo
TOTAL_NORM = "_get_total_norm"  # fsdp1: torch.nn.utils.get_total_norm to clip_grad_norm_ beside it (torch 2.11 to 2.15)


class FSDPUnit(Protocol):
    """torch's ``FSDPParamGroup``: the parameters of one all-gather and one reduce-scatter, and how both run.

    ``FSDPModule`` sets each of these and shows none of them, so that what was set before can only be read and
    restored here. The names are those of torch 2.11 to 2.15; where one is missing, :func:`fsdp_units` raises.
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
    for kind in {type(unit): unit for unit in units}.values():
        _check_names(kind)
    return units


def _check_names(unit: FSDPUnit) -> None:
    """Setting an attribute that torch has renamed would do nothing, without a word."""
    optional = {"reduce_scatter_unused_params"} if torch_version() < (2, 13) else set()
    for name in FSDPUnit.__annotations__.keys() - optional:
        if not hasattr(unit, name):
            raise missing_name(f"FSDPParamGroup.{name}")


def engine_objects(module: nn.Module) -> dict[str, object]:
    """One of each kind of torch's objects behind an FSDP module, by the name of its class. Local, pure."""
    state = states_of([module])[0]
    unit = units_of(state)[0]
    return {"FSDPModule": module, "FSDPState": state, "FSDPParamGroup": unit, "FSDPParam": unit.fsdp_params[0]}


def fsdp_states(model: nn.Module) -> list[Any]:
    return states_of(model.modules())


def states_of(modules: Iterable[nn.Module]) -> list[Any]:
    sharded = [module for module in modules if isinstance(module, FSDPModule)]
    return list(dict.fromkeys(module._get_fsdp_state() for module in sharded))  # fully_shard([a, b]): one for both


def initialize(root: FSDPModule) -> None:
    """What the first forward of ``root`` would do first: it becomes the root of the FSDP modules below it. Local.

    fsdp1: FSDP1 did so wherever it needed the root; torch 2.11 to 2.13 have no public way before a forward.
    """
    root._get_fsdp_state()._lazy_init()


def units_gathered_until_backward(model: nn.Module) -> list[FSDPUnit]:
    """The units with ``reshard_after_forward=False``, and those of roots that were left to torch (None)."""
    states = fsdp_states(model)
    outermost = _outermost(model) if any(state._is_root is None for state in states) else set()
    kept = []
    for state in states:
        root = state._is_root or (state._is_root is None and state._modules[0] in outermost)
        left_to_torch = root and state._auto_reshard_after_forward
        kept += [unit for unit in units_of(state) if left_to_torch or unit.post_forward_mesh_info is None]
    return kept


def _outermost(model: nn.Module) -> set[nn.Module]:
    """FSDP modules that are inside of no other one: roots, unless the model itself is inside of one."""
    sharded: list[nn.Module] = [module for module in model.modules() if isinstance(module, FSDPModule)]
    return set(sharded).difference(*(set(module.modules()) - {module} for module in sharded))


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
            # The first forward, which may have run meanwhile, decides for a root that was left to torch.
            decided = state._is_root and state._auto_reshard_after_forward
            unit.post_forward_mesh_info = None if decided else mesh_info


def reduce_dtype(unit: FSDPUnit) -> torch.dtype | None:
    """What a unit's gradients are reduced in; None if none of its parameters trains. Local, pure."""
    trained = [param for param in unit.fsdp_params if param.sharded_param.requires_grad]
    if not trained:
        return None
    stored: torch.dtype = trained[0].sharded_param.dtype
    policy = getattr(unit, "mp_policy", None)
    if policy is not None:  # torch 2.11 to 2.14
        return policy.reduce_dtype or policy.param_dtype or stored
    return (
        trained[0].mp_policy.reduce_dtype or stored
    )  # since 2.15 a policy for each parameter, and param_dtype is not asked


def fsdp_roots(model: nn.Module) -> list[FSDPModule]:
    """The FSDP modules whose forward has begun an iteration, and so hold the state of one. Local, pure."""
    return [state._modules[0] for state in fsdp_states(model) if _is_initialized_root(state)]


def _is_initialized_root(state: Any) -> bool:
    return bool(state._is_root) and hasattr(state._comm_ctx, "all_gather_stream")


def modules_of_other_roots(model: nn.Module) -> list[nn.Module]:
    """FSDP modules of the model that belong to a root outside of it."""
    states = fsdp_states(model)
    own = {each for state in states if state._is_root for each in state._state_ctx.all_states}
    return [module for state in states if state._is_root is False and state not in own for module in state._modules]


def reset_iteration(root: FSDPModule) -> None:
    """Leave the forward or backward that was under way below a root: wait for its collectives, reshard, begin anew.

    torch >= 2.13 has ``reset_iter_state`` for it; before, this does the same by hand.
    """
    state = root._get_fsdp_state()
    for each in state._state_ctx.all_states:
        for unit in units_of(each):
            _wait_for_offloaded_gradients(unit)
    if hasattr(root, "reset_iter_state"):
        root.reset_iter_state()
        return
    communication: Any = state._comm_ctx  # as of torch 2.11
    stream = state._device_handle.current_stream()
    _wait_for(stream, communication.all_gather_state, communication.reduce_scatter_state)
    communication.all_gather_state = communication.reduce_scatter_state = None
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


def _wait_for_offloaded_gradients(unit: Any) -> None:
    for param in unit.fsdp_params:
        if param.grad_offload_event is not None:
            param.grad_offload_event.synchronize()
            param.grad_offload_event = None


def is_under_way(model: nn.Module) -> bool:
    """Whether a forward or backward of a unit of the model has begun and not ended. Local, pure."""
    states = fsdp_states(model)
    return any(each._training_state.name != "IDLE" for s in states for each in (s, *units_of(s)))


@contextmanager
def without_hooks(modules: Iterable[nn.Module]) -> Iterator[None]:
    """In this context forwards of these modules neither gather nor reshard nor cast: FSDP2's hooks do nothing.

    Those on modules are found by the state that they are bound to, or that what they wrap is (``fully_shard([a, b])``),
    and keep their places. Methods registered by ``register_fsdp_forward_method`` ask the state itself.
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
        hooks[number] = _nothing
    for state in states:
        state._pre_forward = lambda module, args, kwargs: (args, kwargs)
        state._post_forward = lambda module, args, output: output
    try:
        yield
    finally:
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


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


def as_it_was(module: nn.Module) -> tuple[type[nn.Module], dict[str, Any]]:
    """The class and the attributes that an FSDP module would have had without ``fully_shard``. Local, pure.

    fsdp1: to copy a model, which FSDP2 refuses. Its class is made of ``FSDPModule`` and the module's own; its hooks,
    methods that gather, and two keys of ``torch.distributed._composable`` are what it adds to the attributes (torch
    2.11 to 2.13), and shardkit its own hooks.
    """
    attributes = dict(vars(module))
    is_sharded = isinstance(module, FSDPModule)
    kind = type(module).__bases__[1] if is_sharded else type(module)
    state: Any = module._get_fsdp_state() if isinstance(module, FSDPModule) else None
    for key in (STATE_KEY, REGISTRY_KEY) if is_sharded else ():
        attributes.pop(key, None)
    for name, value in vars(module).items() if is_sharded else ():
        if isinstance(value, MethodType) and value.__self__ is module:
            attributes[name] = original = _without_gathering(value)
            if getattr(original, "__func__", None) is getattr(kind, name, None):
                del attributes[name]
    for name in ("_forward_pre_hooks", "_forward_hooks"):
        attributes[name] = OrderedDict(
            (k, hook)
            for k, hook in attributes[name].items()
            if not _is_bound_to(hook, state) and not _defined_in(getattr(hook, "func", None), "shardkit.")
        )
    kept = attributes["_forward_pre_hooks"].keys() | attributes["_forward_hooks"].keys()
    for name in ("_forward_pre_hooks_with_kwargs", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"):
        attributes[name] = OrderedDict((k, flag) for k, flag in attributes[name].items() if k in kept)
    return kind, attributes


def _without_gathering(method: Any) -> Any:
    """The method below those that FSDP2 and shardkit put in its place to gather."""
    while _defined_in(getattr(method, "__func__", None), "shardkit.", "torch.distributed.fsdp."):
        method = method.__wrapped__
    return method


def _defined_in(function: Any, *packages: str) -> bool:
    return str(getattr(function, "__globals__", {}).get("__name__")).startswith(packages)


def own_parameters(module: nn.Module) -> list[nn.Parameter]:
    """The sharded parameters of the unit of one module, none if it is not an FSDP module. Local, pure."""
    return [param.sharded_param for s in states_of([module]) for unit in units_of(s) for param in unit.fsdp_params]


def gathered_tensors(model: nn.Module) -> list[torch.Tensor]:
    """Flat buffers of the model's gathered parameters, whole or kept on fewer ranks; empty storages where resharded.

    memory: between two gathers torch 2.11 to 2.13 show them nowhere else.
    """
    params = [param for unit in fsdp_units(model) for param in unit.fsdp_params]
    kept = [getattr(param, "_sharded_post_forward_param_data", None) for param in params]  # set by the first forward
    return [tensor for param in params for tensor in param.all_gather_outputs] + [t for t in kept if t is not None]
