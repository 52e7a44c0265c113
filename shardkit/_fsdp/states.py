"""FSDP2's private state for accumulation, recovery from errors, dtypes, and full parameters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from shardkit._fsdp import FSDPUnit, fsdp_units, states_of
from shardkit._torch import units_of


def units_gathered_until_backward(model: nn.Module) -> list[FSDPUnit]:
    """Return the units with ``reshard_after_forward=False``, and those of roots with torch's
    default, None.
    """
    states = states_of(model.modules())
    # the roots to be, unless the model itself is inside another FSDP module
    outermost: set[nn.Module] = set()
    if any(state._is_root is None for state in states):
        sharded: list[nn.Module] = [
            module for module in model.modules() if isinstance(module, FSDPModule)
        ]
        outermost = set(sharded).difference(
            *(set(module.modules()) - {module} for module in sharded)
        )
    kept = []
    for state in states:
        root = state._is_root or (state._is_root is None and state._modules[0] in outermost)
        by_default = root and state._auto_reshard_after_forward
        kept += [
            unit for unit in units_of(state) if by_default or unit.post_forward_mesh_info is None
        ]
    return kept


@contextmanager
def gathered_until_backward(model: nn.Module, frozen: bool = False) -> Iterator[None]:
    """In this context no unit, or no ``frozen`` one, reshards after forward.

    ``set_reshard_after_forward`` could not restore an int.
    """
    found = ((state, unit) for state in states_of(model.modules()) for unit in units_of(state))
    before = [
        (state, unit, unit.post_forward_mesh_info)
        for state, unit in found
        if not (frozen and any(param.sharded_param.requires_grad for param in unit.fsdp_params))
    ]
    for _, unit, _ in before:
        unit.post_forward_mesh_info = None
    try:
        yield
    finally:
        for state, unit, mesh_info in before:
            # The first forward, which may have run meanwhile, decides for a root with torch's
            # default.
            decided = state._is_root and state._auto_reshard_after_forward
            unit.post_forward_mesh_info = None if decided else mesh_info


def fsdp_roots(model: nn.Module) -> list[FSDPModule]:
    """Return the FSDP modules that a first forward has made roots. Local, pure."""
    return [state._modules[0] for state in states_of(model.modules()) if state._is_root]


def modules_of_other_roots(model: nn.Module) -> list[nn.Module]:
    """Return the FSDP modules of the model that belong to a root outside of it. Local, pure."""
    states = states_of(model.modules())
    own = {each for state in states if state._is_root for each in state._state_ctx.all_states}
    return [
        module
        for state in states
        if state._is_root is False and state not in own
        for module in state._modules
    ]


def reset_iteration(root: FSDPModule) -> None:
    """Abandon the forward or backward under way below a root: wait for its collectives, and
    reshard.

    torch's ``reset_iter_state`` does not wait for gradients that are on their way to the CPU (2.13
    to 2.15).
    """
    states = root._get_fsdp_state()._state_ctx.all_states
    for param in (
        param for state in states for unit in units_of(state) for param in unit.fsdp_params
    ):
        if param.grad_offload_event is not None:
            param.grad_offload_event.synchronize()
            param.grad_offload_event = None
    if hasattr(root, "reset_iter_state"):  # since torch 2.13
        root.reset_iter_state()
    else:
        from shardkit._fsdp.before_2_13 import reset_iter_state

        reset_iter_state(root)


def drop_unreduced_gradients(unit: FSDPUnit, params: Iterable[Any] | None = None) -> None:
    """Drop the gradients of a unit, or of some of its ``fsdp_params``, that backward kept to be
    reduced later.

    They are on the unsharded parameter, or in ``reduce_dtype`` beside it (before torch 2.15); on an
    HSDP mesh what was reduce-scattered for the whole unit before the all-reduce, with its layout
    (since 2.15).
    """
    for param in unit.fsdp_params if params is None else params:
        unit._partial_reduce_output = None
        getattr(unit, "_partial_reduce_output_layout", {}).clear()
        if "unsharded_accumulated_grad" in vars(param):
            param.unsharded_accumulated_grad = None
        if hasattr(param, "_unsharded_param"):
            param._unsharded_param.grad = None


def compute_dtypes(model: nn.Module) -> set[torch.dtype]:
    """Return the dtypes that floating-point parameters of the model's units are gathered in. Local,
    pure.
    """
    pairs = [
        (getattr(unit, "mp_policy", None), param)
        for unit in fsdp_units(model)
        for param in unit.fsdp_params
    ]
    floating = [
        (policy, param) for policy, param in pairs if param.sharded_param.is_floating_point()
    ]
    # Since torch 2.15 there is a policy for each parameter.
    return {
        (policy or param.mp_policy).param_dtype or param.sharded_param.dtype
        for policy, param in floating
    }


@contextmanager
def without_hooks(modules: Iterable[nn.Module]) -> Iterator[None]:
    """In this context FSDP2's hooks do nothing: forwards of these modules neither gather nor
    reshard nor cast.

    A hook is recognized by the state that it, or what it wraps (``fully_shard([a, b])``), is bound
    to, and keeps its place. Methods registered by ``register_fsdp_forward_method`` call the state
    itself. After ``load_state_dict`` torch 2.13 to 2.15 take what a module holds for its shard
    (``reset_sharded_param``).
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
